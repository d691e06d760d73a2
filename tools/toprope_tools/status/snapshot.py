"""Snapshots of runs: one run at one moment, with its news for a caller and the numbers that may be told.

The limit on fresh numbers applies to a run over all callers (the index keeps the stamp). News are the events after the
caller's cursor; without a cursor, the events that nobody has seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toprope.analysis.findings.failed_groups import SKIPPED
from toprope.errors import NotPossibleNow
from toprope.records.index.stamps import Stamp, read_stamps, write_stamps
from toprope.records.run.status import ENDED, Event, Status
from toprope.text_format import clip, duration, number, percent, plural
from toprope_tools.status.cursor import unknown_place

if TYPE_CHECKING:
    from toprope.analysis.reports.results import Results
    from toprope.settings.owner import StatusLimit
    from toprope_tools.workshop import Workshop

_QUIET = frozenset({"checkpoint", "first_step"})
"""Events that are not news. All others pass, including those of later versions."""
_WAKING_STATES = frozenset({"paused"}) | ENDED
"""States that end a wait. An evaluation or numbers soon follow the others."""
_NUMBERS = (
    "step",
    "total_steps",
    "reward",
    "success",
    "recent",
    "loss",
    "rollouts_per_second",
    "eta_s",
    "what",
    "done",
    "total",
    "best",
    "environments",
)


_MOST_ENVIRONMENTS = 8
"""Environments and curricula in one line of numbers."""


@dataclass(frozen=True)
class Look:
    """A run at one moment, as one caller may see it."""

    status: Status
    stamp: Stamp | None
    place: int | None
    """The caller's place in the events; None without a cursor."""
    events: Sequence[Event]
    """Events after the place."""
    interval_s: float
    now: float

    @property
    def run_id(self) -> str:
        return self.status.run_id

    @property
    def numbers(self) -> dict[str, Any]:
        """The present numbers, whether told or not."""
        progress = present_numbers(self.status)
        numbers = {key: progress[key] for key in _NUMBERS if key in progress}
        if self.status.curricula:
            numbers["curricula"] = self.status.curricula
        given_up = self.status.making.get("given_up") or {}
        if skipped := sum(given_up.get(reason, 0) for reason in SKIPPED):
            numbers["skipped"] = skipped
        if self.status.started_at is not None:
            numbers["elapsed_s"] = round((self.status.ended_at or self.now) - self.status.started_at, 1)
        return numbers

    @property
    def news(self) -> list[Event]:
        """Events to tell the caller, oldest first."""
        return [event for event in self.events if event.kind not in _QUIET]

    @property
    def due(self) -> bool:
        """True if fresh numbers may be told: the run has ended, the interval is over, or none were told."""
        if self.status.ended or self.stamp is None or not work_of(self.stamp.snapshot):
            return True
        # The clock was set back since a stamp that lies ahead of it; such a stamp withholds nothing.
        return not 0 <= self.now - self.stamp.at < self.interval_s

    @property
    def has_new_numbers(self) -> bool:
        """True if the work has other numbers than those last told."""
        told_snapshot = self.stamp.snapshot if self.stamp else {}
        return any(told_snapshot.get(key) != quantity for key, quantity in work_of(self.numbers).items())

    @property
    def told_the_end(self) -> bool:
        """True if the caller knows of the end. Unknown without a cursor, so the end is told again."""
        return self.status.ended and self.place is not None and all(event.kind == "end" for event in self.news)

    @property
    def wakes(self) -> bool:
        """True if a wait for any news ends: at an event, the end, the first step, or new numbers that may be told."""
        if self.status.ended:
            return not self.told_the_end
        if any(event.kind != "state" or event.data.get("to") in _WAKING_STATES for event in self.news):
            return True
        if self.stamp is None:
            return "step" in self.numbers
        return self.has_new_numbers and self.due


def present_numbers(status: Status) -> dict[str, Any]:
    """Return the newest numbers of a run that still hold: the remaining time in training, the pace until the end."""
    numbers = {key: figure for key, figure in status.progress.items() if figure is not None}
    if status.state != "training":
        numbers.pop("eta_s", None)  # it estimates the end of training alone
    if status.ended:
        numbers.pop("rollouts_per_second", None)
    return numbers


def look_at(
    workshop: Workshop,
    run_ids: Sequence[str],
    places: Mapping[str, int] | None = None,
    limit: StatusLimit | None = None,
) -> list[Look]:
    """Take snapshots of runs, in the given order.

    Args:
        places: The caller's places in their events.
        limit: The owner's limit on fresh numbers; read from the settings if None.

    Raises:
        NotFound, Corrupt: There is no such run, or its records cannot be read.
        InvalidValue: A place lies beyond a run's events.
    """
    places, looks = places or {}, []
    statuses = [workshop.runs.status(run_id) for run_id in run_ids]
    stamps = read_stamps(workshop.index, run_ids)
    limit = limit or workshop.settings().status
    for status in statuses:
        stamp, place = stamps.get(status.run_id), places.get(status.run_id)
        interval_s = limit.interval(_expected_s(workshop, status))
        events = _events(workshop, status.run_id, place, stamp)
        looks.append(Look(status, stamp, place, events, interval_s, time.time()))
    return looks


def told_numbers(workshop: Workshop, run_id: str) -> tuple[dict[str, Any], float]:
    """Return the numbers of a live run that may be shown now, and the time they were told.

    Fresh numbers that are due count as told by this call; otherwise the last ones are returned. Everything but
    check_status that shows a live run calls this.
    """
    (look,) = look_at(workshop, [run_id])
    if look.stamp is not None and not look.due:
        return look.stamp.snapshot, look.stamp.at
    numbers = look.numbers
    with suppress(NotPossibleNow):
        seq = look.stamp.seq if look.stamp else 0
        write_stamps(workshop.index, {run_id: Stamp(look.now, seq, numbers)})
    return numbers, look.now


def work_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that change with work rather than with time."""
    return {key: quantity for key, quantity in numbers.items() if key not in ("elapsed_s", "eta_s")}


def _events(workshop: Workshop, run_id: str, place: int | None, stamp: Stamp | None) -> list[Event]:
    if not place:
        return list(workshop.runs.events(run_id, stamp.seq if place is None and stamp else 0))
    # The event at the place must exist: a number from elsewhere would hide events until it is reached.
    events = list(workshop.runs.events(run_id, place - 1))
    if not events:
        last_seq = max((event.seq for event in workshop.runs.events(run_id)), default=0)
        raise unknown_place(run_id, place, last_seq)
    return [event for event in events if event.seq > place]


def _expected_s(workshop: Workshop, status: Status) -> float | None:
    """Estimate the seconds of all of training by its pace, or else by its budget; None if unknown."""
    eta = status.progress.get("eta_s")
    if status.training_at is not None and eta is not None:
        return time.time() - status.training_at + float(eta)
    return workshop.longest_s(status.run_id)


def limit_report(workshop: Workshop, report: Results) -> Results:
    """Cut the report of a live run to the last step told, so that no other tool undermines the limit on numbers.

    Evaluations and checkpoints pass that limit, so their steps count as told.
    """
    step = int(told_numbers(workshop, report.run_id)[0].get("step") or 0)
    passed = [label.removeprefix("step-") for label in report.evaluations]
    step = max(step, report.checkpoint_step or 0, *(int(number) for number in passed if number.isdecimal()))
    if report.steps <= step:
        return report
    return report.model_copy(
        update={
            "steps": step,
            "seconds": report.seconds.model_copy(update={"training": None}),  # at that step it is unknown
            "rollouts": 0,
            "rollouts_per_second": None,
            "metrics": {},
            "counts": {},
            "time": {},
            "history": [point for point in report.history if point.step <= step],
        }
    )


def numbers_line(numbers: Mapping[str, Any]) -> str:
    """Format numbers as short text: `step 120/1500, reward 0.43, success 31.0% (means of 20 steps), ETA 52 s`."""
    parts = []
    if "what" in numbers:
        total = f"/{numbers['total']}" if numbers.get("total") else ""
        parts.append(f"{clip(numbers['what'], 60)} {numbers.get('done', 0)}{total}")
    if "best" in numbers:
        parts.append(f"best {number(numbers['best'])}")
    if "step" in numbers:
        total = f"/{numbers['total_steps']}" if numbers.get("total_steps") else ""
        parts.append(f"step {numbers['step']}{total}")
    parts += _reward_and_success(numbers)
    if "rollouts_per_second" in numbers:
        parts.append(f"{number(numbers['rollouts_per_second'])} rollouts/s")
    parts += [
        _environment(label, shares)
        for label, shares in list((numbers.get("environments") or {}).items())[:_MOST_ENVIRONMENTS]
    ]
    for label, curriculum in list((numbers.get("curricula") or {}).items())[:_MOST_ENVIRONMENTS]:
        parts.append(f"{clip(label, 60)} at level {curriculum.get('level', 0) + 1}/{curriculum.get('levels')}")
    if numbers.get("skipped"):
        parts.append(f"{plural(numbers['skipped'], 'task')} skipped as always or never solved")
    if "elapsed_s" in numbers:
        parts.append(f"{duration(numbers['elapsed_s'])} so far")
    if "eta_s" in numbers:
        parts.append(f"ETA {duration(numbers['eta_s'])}")
    return clip(", ".join(parts), 1000) or "no numbers yet"


def _reward_and_success(numbers: Mapping[str, Any]) -> list[str]:
    """Format reward and success as their means over the recent steps, or else those of the last batch."""
    recent = numbers.get("recent") or {}
    shown = {name: recent.get(name, numbers[name]) for name in ("reward", "success") if name in numbers}
    parts = [f"{name} {percent(figure) if name == 'success' else number(figure)}" for name, figure in shown.items()]
    if parts and recent.get("steps", 1) > 1:
        parts[-1] += f" ({'means' if len(parts) > 1 else 'mean'} of the last {recent['steps']} steps)"
    return parts


def _environment(label: str, numbers: Mapping[str, Any]) -> str:
    """Format one of several environments: `sums success 31.0% (a third of the groups)`."""
    result = f"success {percent(numbers['success'])}" if "success" in numbers else ""
    result = result or (f"reward {number(numbers['reward'])}" if "reward" in numbers else "")
    share = f"share {percent(numbers['share'])}" if "share" in numbers else ""
    return f"{clip(label, 60)} {' '.join(filter(None, (result, share)))}".strip()
