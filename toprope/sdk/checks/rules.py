"""What an environment's trial says about it: rules over what was seen, each with its threshold and what to do.

A rule is a function from what was seen to a finding or None. `critical`: training would teach nothing, or the wrong
thing. `warning`: part of the training is wasted or its figures cannot be trusted. `note`: worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable

from toprope.sdk.checks.conduct import CONDUCT
from toprope.sdk.checks.finding import Finding
from toprope.sdk.checks.observed import Observed
from toprope.sdk.checks.scoring import SCORING
from toprope.sdk.checks.tasks import TASKS

__all__ = ["RULES", "Finding", "judge"]

RULES: tuple[Callable[[Observed], Finding | None], ...] = (*TASKS, *SCORING, *CONDUCT)


def judge(seen: Observed) -> list[Finding]:
    """All findings, the most severe first."""
    found = [finding for rule in RULES if (finding := rule(seen)) is not None]
    order = {"critical": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])
