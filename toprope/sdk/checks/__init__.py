"""Check that an environment is fit for training: probe answers, observations of its worker, and rules about them.

Defects show in a trial: right, empty, junk and nearly right answers are scored, tasks are generated in two processes
and compared, and splits are compared. `probing` makes the observations; rules are pure functions from observations to a
finding or None. `critical`: training would teach nothing, or the wrong thing. `warning`: part of the training is
wasted, or its figures cannot be trusted. `note`: worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable

from toprope.sdk.checks.conduct import CONDUCT
from toprope.sdk.checks.observed import Finding, Observed
from toprope.sdk.checks.scoring import SCORING
from toprope.sdk.checks.tasks import TASKS

__all__ = ["RULES", "Finding", "judge"]

RULES: tuple[Callable[[Observed], Finding | None], ...] = (*TASKS, *SCORING, *CONDUCT)


def judge(seen: Observed) -> list[Finding]:
    """Return all findings, most severe first."""
    findings = [finding for rule in RULES if (finding := rule(seen)) is not None]
    order = {"critical": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda finding: order[finding.level])
