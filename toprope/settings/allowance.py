"""How often something that ended may be started again: so many times within a window, each time after a longer wait."""

from __future__ import annotations

from collections import deque

from toprope.settings.schema import LauncherSection

__all__ = ["Allowance"]

_LONGEST_WAIT_S = 60.0


class Allowance:
    """The restarts of one thing. Times are of any clock that never goes back, in seconds."""

    def __init__(self, section: LauncherSection) -> None:
        self.limit, self.window_s = section.restarts, section.restart_window_s
        self._backoff_s = section.restart_backoff_s
        self._taken: deque[float] = deque()
        self.total = 0
        """How many were taken, within the window or before."""

    def used(self, now: float) -> int:
        """How many were taken within the window that ends now."""
        while self._taken and now - self._taken[0] > self.window_s:
            self._taken.popleft()
        return len(self._taken)

    def take(self, now: float) -> float | None:
        """Takes one: the seconds to wait before it, or None when there is none left."""
        used = self.used(now)
        if used >= self.limit:
            return None
        self._taken.append(now)
        self.total += 1
        return min(self._backoff_s * 2.0**used, _LONGEST_WAIT_S)
