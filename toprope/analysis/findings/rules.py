"""What all rules share: how one is written down, and what it says when it sees something.

A rule is a function from a trail (what is known of the run so far) to a sign or None, with the words that stay the
same: id, threshold, source. It keeps no state and judges the newest row only; that a sign has to last before it is
told, and has to be gone for a while before it is over, is the diagnosis' affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from toprope.analysis.findings.trail import Trail

__all__ = ["MEASURED", "Grade", "Rule", "Sign", "edit", "share"]

Grade = Literal["note", "warning", "critical"]

MEASURED = "measured on recorded CPU runs of Toprope (make bench-findings)"
"""The source of thresholds that no publication gives."""


@dataclass(frozen=True)
class Sign:
    """What a rule sees at one row."""

    level: Grade
    what: str
    observed: dict[str, float | int | str] = field(default_factory=dict)
    next: str = ""
    confidence: Literal["low", "medium", "high"] = "medium"


@dataclass(frozen=True)
class Rule:
    """One rule."""

    id: str
    look: Callable[[Trail], Sign | None]
    threshold: str
    source: str
    patience: int = 5
    """Rows in a row that a level has to hold before it is told; of a short run fewer."""


def share(value: float | None) -> str:
    """A share as `43 %`."""
    return "n/a" if value is None else f"{100 * value:.0f} %"


def edit(changes: str) -> str:
    """The next action of most rules: change fields, start anew."""
    return f"stop_training, then edit_config {changes}, and start_training again"
