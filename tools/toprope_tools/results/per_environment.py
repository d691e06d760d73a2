"""How a report says what each of a run's environments reached, and how far their curricula came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toprope_tools.answers.base import clip, percent, value

if TYPE_CHECKING:
    from toprope.analysis.reports.results import Accuracy, Evaluation

__all__ = ["curricula_lines", "each_lines"]

_MOST = 12


def each_lines(label: str, evaluation: Evaluation, rose_each: Mapping[str, bool]) -> list[str]:
    """A line for each environment of an evaluation; after training it says whether its accuracy rose."""
    lines = []
    for name, one in list(evaluation.environments.items())[:_MOST]:
        if one.sampled is None:
            continue
        line = f"  {clip(name, 80)}: {_accuracy(one.sampled)} on {one.sampled.tasks}"
        if one.greedy is not None:
            line += f"; greedy {_accuracy(one.greedy)}"
        if one.sampled.errors:
            line += f"; {one.sampled.errors} errors"
        if label == "after" and name in rose_each:
            line += "; rose by more than the intervals" if rose_each[name] else "; no difference shown"
        lines.append(f"{line}.")
    return lines


def curricula_lines(curricula: Mapping[str, Any]) -> list[str]:
    """A line for each curriculum: where it stands, and what opened its levels."""
    lines = []
    for label, one in list(curricula.items())[:_MOST]:
        levels, level = one["levels"], one["level"]
        line = f"Curriculum of {clip(label, 80)}: {clip(one['knob'], 60)} {value(levels[level])}, level {level + 1} of "
        line += f"{len(levels)} since step {one['since']}."
        opened = [f"step {m['step']} ({m['successes']}/{m['tasks']} solved)" for m in one["opened"][-_MOST:]]
        if opened:
            line += f" Opened at {', '.join(opened)}."
        if (last := one.get("last")) is not None and last not in one["opened"]:
            line += f" Last measured {last['successes']}/{last['tasks']} at step {last['step']}."
        lines.append(line)
    return lines


def _accuracy(measured: Accuracy) -> str:
    return f"{percent(measured.accuracy)} [{percent(measured.low)}, {percent(measured.high)}]"
