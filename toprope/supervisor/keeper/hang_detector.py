"""Finding members that hang: alive as processes, and silent for too long.

A member sends a beat about once a second from the very loop that would hang, and any other report counts as well. Its
first beat says that it can (an older version cannot); it is watched from when it serves: how long a start may take is
not this file's affair. Time is monotonic, so that a clock that is set does not matter; and when the keeper itself did
not look for some seconds, because the machine was suspended or the keeper stopped, everybody's silence begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from toprope.records.messages import Beat, Report

__all__ = ["HangDetector"]

_SLEPT_S = 5.0
"""A keeper that looks once a second and finds so many gone by has slept, and so may have everybody else."""


class HangDetector:
    """When each member was heard last.

    Args:
        limit_of: Seconds of silence that a member is allowed.
    """

    def __init__(self, limit_of: Callable[[str], float]) -> None:
        self._limit_of = limit_of
        self._heard: dict[str, float] = {}
        self._beating: set[str] = set()
        self._looked: float | None = None

    def heard(self, name: str, report: Report, now: float) -> None:
        """A member reported."""
        if isinstance(report, Beat):
            self._beating.add(name)
        self._heard[name] = now

    def forget(self, name: str) -> None:
        """A member ended: it is watched again from its next beat on."""
        self._beating.discard(name)

    def silent(self, serving: Set[str], now: float) -> dict[str, float]:
        """Of the members that serve those that were silent for longer than they may, with the seconds. To be called
        about once a second."""
        slept = self._looked is not None and now - self._looked > _SLEPT_S
        self._looked = now
        if slept:
            # What they sent meanwhile may not have been read yet, and they may have slept as well.
            self._heard = dict.fromkeys(self._heard, now)
            return {}
        silences = {name: now - self._heard[name] for name in self._beating & serving}
        return {name: seconds for name, seconds in silences.items() if seconds > self._limit_of(name)}
