"""Compare a run with a repetition of the same specification, and name the inputs that differ.

Timing metrics are left out by name. All others must be equal to the last digit in deterministic mode. Other runs sample
anew each time, so only their held-out accuracy can be compared, within noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from toprope.analysis.statistics.intervals import Proportion

_TIMING = frozenset({"time", "step_time", "eta_s", "groups/waiting"})
_MOST_NAMED = 12


class Reproduction(BaseModel, extra="forbid"):
    """The comparison of a run with the run that it repeats."""

    of: str
    deterministic: bool
    steps: int
    """Number of steps that both runs have."""
    steps_first: int
    steps_second: int
    compared: int
    """Number of metrics that both runs have, without timing."""
    differing: list[str]
    """Metrics that differ at any step."""
    first_difference: int | None = None
    """The first step at which any metric differs."""
    inputs: dict[str, list[Any]]
    """Differing inputs by name: value of the first run, value of the second."""
    heldout: str = ""
    """A sentence on the accuracies after training (or of a test); empty if they were not measured."""

    @property
    def same(self) -> bool:
        """True if both runs have the same number of steps and every metric is equal at each."""
        return self.steps > 0 and not self.differing and self.steps_first == self.steps_second

    @property
    def says(self) -> str:
        """The result as one or two sentences."""
        inputs = (
            "Inputs that differ: " + "; ".join(f"{name} {a} / {b}" for name, (a, b) in list(self.inputs.items())[:8])
            if self.inputs
            else "No recorded input differs."
        )
        if self.steps == 0 and self.heldout:
            return f"Beside {self.of}: {self.heldout} {inputs}"
        if self.steps == 0:
            return f"Nothing to compare with {self.of} yet: the runs have no step in common. {inputs}"
        if self.deterministic:
            if self.same:
                return f"Same as {self.of}: {self.compared} metrics equal over all {self.steps} steps. {inputs}"
            if not self.differing:
                return (
                    f"Same as {self.of} over the {self.steps} steps that both have; they have {self.steps_first} and "
                    f"{self.steps_second}. {inputs}"
                )
            names = ", ".join(self.differing[:_MOST_NAMED])
            return (
                f"Not the same as {self.of}: {len(self.differing)} of {self.compared} metrics differ from step "
                f"{self.first_difference} on ({names}). {inputs}"
            )
        heldout = self.heldout or "Held-out accuracy was not measured in both."
        return f"Beside {self.of}, which was not deterministic, so steps cannot be equal: {heldout} {inputs}"


def is_timing(metric: str) -> bool:
    """Return True if the metric measures time."""
    return (
        metric in _TIMING
        or metric.startswith(("time/", "utilization/"))
        or metric.endswith(("_seconds", "_per_second"))
    )


def compare_runs_of_one(
    of: str,
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    *,
    deterministic: bool,
    inputs: Mapping[str, list[Any]] | None = None,
    heldout: tuple[Proportion | None, Proportion | None] = (None, None),
    measured: str = "held-out accuracy",
) -> Reproduction:
    """Compare the rows of two runs of one specification.

    Args:
        of: Id of the first run.
        first, second: Rows of metrics.jsonl, one per step, in order.
        deterministic: True if the rows must be equal.
        inputs: Result of `differing_inputs`.
        heldout: Accuracies after training, or of a test.
        measured: Name of those accuracies in the text.
    """
    second_by_step = {row["step"]: row for row in second}
    shared = [(row, second_by_step[row["step"]]) for row in first if row["step"] in second_by_step]
    names: set[str] = set()
    differing: dict[str, int] = {}
    for first_row, second_row in shared:
        for name in (first_row.keys() | second_row.keys()) - {"step"}:
            if is_timing(name):
                continue
            names.add(name)
            if first_row.get(name) != second_row.get(name):
                differing.setdefault(name, first_row["step"])
    return Reproduction(
        of=of,
        deterministic=deterministic,
        steps=len(shared),
        steps_first=len(first),
        steps_second=len(second),
        compared=len(names),
        differing=sorted(differing, key=lambda name: (differing[name], name)),
        first_difference=min(differing.values(), default=None),
        inputs=dict(inputs or {}),
        heldout=_heldout(*heldout, measured),
    )


def _heldout(first: Proportion | None, second: Proportion | None, measured: str) -> str:
    if first is None or second is None:
        return ""
    figures = f"{measured} {100 * first.value:.1f}% and {100 * second.value:.1f}%"
    apart = first.high < second.low or second.high < first.low
    return f"{figures}, {'further apart than' if apart else 'within'} their 95 % intervals."


def differing_inputs(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Return the differing leaves of two manifests by dotted name, with both values; None for a missing one."""
    differing: dict[str, list[Any]] = {}
    for key in [*first, *(key for key in second if key not in first)]:
        name, first_value, second_value = f"{prefix}{key}", first.get(key), second.get(key)
        if isinstance(first_value, dict) and isinstance(second_value, dict):
            differing |= differing_inputs(first_value, second_value, f"{name}.")
        elif first_value != second_value:
            differing[name] = [first_value, second_value]
    return differing
