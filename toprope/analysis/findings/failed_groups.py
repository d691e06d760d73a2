"""Groups that failed during sampling, by reason; trainer metrics do not show them.

The driver counts them (`making` in a run's status). Shares are over the newest groups, so they reflect the present.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from toprope.analysis.findings.rules import MEASURED
from toprope.records.run.status import DRIVER_ENDED, Finding

SKIPPED = ("skipped: always solved", "skipped: never solved")
"""Reasons of rollout.difficulty_filter."""
HARMLESS = frozenset({"training had ended", "inference was started again", DRIVER_ENDED, *SKIPPED})
"""Reasons that are not the environment's fault."""

_WINDOW, _FEWEST, _LEAST = 200, 20, 3
"""Most groups in a share; fewest groups and fewest failures for a finding."""
_WARNING, _CRITICAL = 0.05, 0.25
_NEXT = {
    "the prompt left no room": "raise policy.max_context, lower rollout.max_new_tokens, or shorten prompts with the "
    "environment's knobs",
    "nothing was sampled": 'read_logs(component="inference") shows why no token came',
    "the judge failed": 'read_logs(component="environment") shows its answers; choose another in environment.rewards',
}
_LOOK = 'read_logs(component="environment") shows the error, and check_environment tries the environment; fix it, then '
_LOOK += "start_training again"


@dataclass
class _Report:
    begun: int = 0
    given_up: Counter[str] = field(default_factory=Counter)


class FailedGroups:
    """The failed groups of one run as its driver reports them; a restarted driver counts from zero."""

    def __init__(self) -> None:
        self._reports: deque[_Report] = deque([_Report()])
        self._reported = False

    def take(self, begun: int, given_up: Mapping[str, int]) -> Finding | None:
        """Add the driver's next report.

        Args:
            begun: Groups begun so far.
            given_up: Groups that failed so far, by reason.

        Returns:
            A finding about the newest groups; None if few fail.
        """
        report = _Report(begun, Counter({why: count for why, count in given_up.items() if why not in HARMLESS}))
        if begun < self._reports[-1].begun:
            self._reports = deque([_Report()])
        if begun - self._reports[-1].begun >= _WINDOW // 20 or report.given_up != self._reports[-1].given_up:
            self._reports.append(report)
        while len(self._reports) > 1 and begun - self._reports[1].begun >= _WINDOW:
            self._reports.popleft()
        oldest = self._reports[0]
        groups, lost = begun - oldest.begun, report.given_up - oldest.given_up
        total = lost.total()
        limit = _WARNING / 2 if self._reported else _WARNING  # A reported finding is over once it is clearly better.
        self._reported = groups >= _FEWEST and total >= _LEAST and total / groups >= limit
        if not self._reported:
            return None
        share, (why, most) = total / groups, lost.most_common(1)[0]
        level: Literal["warning", "critical"] = "critical" if share >= _CRITICAL else "warning"
        return Finding(
            rule="groups_given_up",
            level=level,
            what=f"{share:.0%} of the last {groups} groups failed: "
            + ", ".join(f"{reason} ({count})" for reason, count in lost.most_common(3))
            + ".",
            observed={"share": round(share, 3), "groups": groups, **dict(lost.most_common(4))},
            threshold="5 % of the groups: warning, 25 %: critical; of the last 200, 3 at least",
            source=MEASURED,
            confidence="high",
            next=_NEXT.get(why, _LOOK) if most * 2 > total else _LOOK,
        )
