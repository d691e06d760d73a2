"""Finds members that hang: their process lives, but they have been silent for too long.

A member sends a beat about once a second from the very loop that would hang; any other report counts as well. Its first
beat shows that it sends beats (an older version does not). A member is watched only while it serves, because a start
may take long. Time is monotonic, so a change of the clock has no effect. If the keeper itself did not run for some
seconds (the machine or the keeper was suspended), the silence of every member starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from toprope.records.messages import Beat, Report

_SUSPENDED_S = 5.0
"""A gap this long between two checks, which come once a second, means that the keeper was suspended."""


class HangDetector:
    """Remembers when each member reported last.

    Args:
        limit_of: The seconds that a member may be silent, by its name.
    """

    def __init__(self, limit_of: Callable[[str], float]) -> None:
        self._limit_of = limit_of
        self._last_report: dict[str, float] = {}
        self._beating: set[str] = set()
        self._checked_at: float | None = None
        self.suspended = False
        """The keeper did not run for some seconds before the last check."""

    def record(self, name: str, report: Report, now: float) -> None:
        """Note that a member has reported."""
        if isinstance(report, Beat):
            self._beating.add(name)
        self._last_report[name] = now

    def forget(self, name: str) -> None:
        """Stop watching a member that ended; its next beat starts the watch again."""
        self._beating.discard(name)

    def find_silent(self, serving: Set[str], now: float) -> dict[str, float]:
        """Return the serving members that exceed their limit, with the seconds of their silence. Call this about once
        a second."""
        self.suspended = self._checked_at is not None and now - self._checked_at > _SUSPENDED_S
        self._checked_at = now
        if self.suspended:
            # Their reports may be unread still, and the members may have been suspended as well.
            self._last_report = dict.fromkeys(self._last_report, now)
            return {}
        silences = {name: now - self._last_report[name] for name in self._beating & serving}
        return {name: seconds for name, seconds in silences.items() if seconds > self._limit_of(name)}
