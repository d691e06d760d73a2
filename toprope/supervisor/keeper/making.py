"""The account of the groups that an environment begins, over all the lives of its driver.

Of a driver that ended nobody hears what became of the groups that it was making: they are given up here, so that none
is lost without a count.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from toprope.records.messages import Making
from toprope.supervisor.keeper.status_writer import StatusWriter

__all__ = ["GroupCounts"]

_WITH_DRIVER = "the environment's driver ended"


class GroupCounts:
    """Keeps `making` of a run's status."""

    def __init__(self, life: StatusWriter) -> None:
        self._life = life
        self._before: dict[str, Any] = dict(life.status.making)
        self._now: Making | None = None

    def take(self, making: Making) -> None:
        """What the driver says now."""
        self._now = making
        self._life.update(making=self._sum(making.posting, dict(making.given_up)))

    def close(self) -> None:
        """The driver has ended: what it was making came to nothing."""
        if (now := self._now) is None:
            return
        given_up = Counter(now.given_up)
        left = now.begun - now.posting - now.posted - given_up.total()
        if left > 0:
            given_up[_WITH_DRIVER] += left
        self._before = self._sum(now.posting, given_up)
        self._now = None
        self._life.update(making=self._before)

    def _sum(self, unanswered: int, given_up: dict[str, int]) -> dict[str, Any]:
        assert self._now is not None
        before = self._before
        total = Counter(before.get("given_up", {}))
        total.update(given_up)
        return {
            "begun": before.get("begun", 0) + self._now.begun,
            "posted": before.get("posted", 0) + self._now.posted,
            "unanswered": before.get("unanswered", 0) + unanswered,
            "given_up": dict(total),
            "rollouts": before.get("rollouts", 0) + self._now.rollouts,
            "errors": dict(Counter(before.get("errors", {})) + Counter(self._now.errors)),
        }
