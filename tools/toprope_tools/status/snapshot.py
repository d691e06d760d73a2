"""One run at one moment, beside what its caller was told of it: what is new, and what may be told of the numbers.

The limit on fresh numbers holds for a run, whoever asks (its stamp lies in the index). Events are the caller's own
affair where it has a cursor; without one, what nobody was told yet is news.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toprope.errors import DiskFull
from toprope.records.index.stamps import Stamp, read_stamps, write_stamps
from toprope.records.run.status import ENDED, Event, Status
from toprope_tools.status.cursor import unknown_place

if TYPE_CHECKING:
    from toprope.settings.owner import StatusLimit
    from toprope_tools.workshop import Workshop

__all__ = ["Look", "look_at", "told_numbers", "work_of"]

_QUIET = frozenset({"checkpoint", "first_step"})
"""Events that are no news. All others pass, those of versions to come as well."""
_WAKING_STATES = frozenset({"paused"}) | ENDED
"""States whose coming ends a wait. Of the others the next answer tells: an evaluation or numbers follow soon."""
_NUMBERS = (
    "step",
    "total_steps",
    "reward",
    "success",
    "loss",
    "rollouts_per_second",
    "eta_s",
    "what",
    "done",
    "total",
    "best",
    "environments",
)


@dataclass(frozen=True)
class Look:
    """See the module. `place`: the caller's own, None where it has none; `events` are those after it."""

    status: Status
    stamp: Stamp | None
    place: int | None
    events: Sequence[Event]
    interval_s: float
    now: float

    @property
    def run_id(self) -> str:
        return self.status.run_id

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers as they are now, told or not."""
        progress = self.status.progress
        shown = {key: progress[key] for key in _NUMBERS if progress.get(key) is not None}
        if self.status.state != "training":
            shown.pop("eta_s", None)  # it is training's
        if self.status.curricula:
            shown["curricula"] = self.status.curricula
        if self.status.started_at is not None:
            shown["elapsed_s"] = round((self.status.ended_at or self.now) - self.status.started_at, 1)
        return shown

    @property
    def news(self) -> list[Event]:
        """Events that the caller is to be told, oldest first."""
        return [event for event in self.events if event.kind not in _QUIET]

    @property
    def due(self) -> bool:
        """Whether fresh numbers may be told: it ended, the interval is over, or none were told so far."""
        if self.status.ended or self.stamp is None or not work_of(self.stamp.snapshot):
            return True
        # A stamp ahead of the clock is of before it was set back: it withholds nothing.
        return not 0 <= self.now - self.stamp.at < self.interval_s

    @property
    def has_new_numbers(self) -> bool:
        """Whether there are numbers of work, and others than were last told."""
        told = self.stamp.snapshot if self.stamp else {}
        return any(told.get(key) != one for key, one in work_of(self.numbers).items())

    @property
    def told_the_end(self) -> bool:
        """Whether the caller knows already how it ended. Without a cursor nobody can tell, so it is told again."""
        return self.status.ended and self.place is not None and all(event.kind == "end" for event in self.news)

    @property
    def wakes(self) -> bool:
        """Whether a wait for any news ends here: at an event, the end, the first step, or new numbers once they may be
        told."""
        if self.status.ended:
            return not self.told_the_end
        if any(event.kind != "state" or event.data.get("to") in _WAKING_STATES for event in self.news):
            return True
        if self.stamp is None:
            return "step" in self.numbers
        return self.has_new_numbers and self.due


def look_at(
    workshop: Workshop,
    run_ids: Sequence[str],
    places: Mapping[str, int] | None = None,
    limit: StatusLimit | None = None,
) -> list[Look]:
    """Looks at runs, in the order in which they are named.

    Args:
        workshop: The server's.
        run_ids: Which.
        places: The caller's own places in their events.
        limit: The owner's limit on fresh numbers; read from the settings when None.

    Raises:
        NotFound, Corrupt: There is no such run, or its records cannot be read.
        InvalidValue: A place is beyond a run's events.
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
    """The numbers of a live run that anybody may see now, and when they were told: fresh ones where they are due, which
    are then told, else the last ones. For whatever shows a run in another way than check_status does."""
    (look,) = look_at(workshop, [run_id])
    if look.stamp is not None and not look.due:
        return look.stamp.snapshot, look.stamp.at
    numbers = look.numbers
    with suppress(DiskFull):
        seq = look.stamp.seq if look.stamp else 0
        write_stamps(workshop.index, {run_id: Stamp(look.now, seq, numbers)})
    return numbers, look.now


def work_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that work moves; time moves the others."""
    return {key: one for key, one in numbers.items() if key not in ("elapsed_s", "eta_s")}


def _events(workshop: Workshop, run_id: str, place: int | None, stamp: Stamp | None) -> list[Event]:
    if not place:
        return list(workshop.runs.events(run_id, stamp.seq if place is None and stamp else 0))
    # The event of the place itself must be there: a number from elsewhere would hide what comes until it is reached.
    events = list(workshop.runs.events(run_id, place - 1))
    if not events:
        last = max((event.seq for event in workshop.runs.events(run_id)), default=0)
        raise unknown_place(run_id, place, last)
    return [event for event in events if event.seq > place]


def _expected_s(workshop: Workshop, status: Status) -> float | None:
    """How long training will have taken: by its pace so far, else by its budget, else unknown."""
    eta = status.progress.get("eta_s")
    if status.training_at is not None and eta is not None:
        return time.time() - status.training_at + float(eta)
    return workshop.longest_s(status.run_id)
