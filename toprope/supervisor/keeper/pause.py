"""Holding a run still and letting it go on: a full disk, or an owner who wants the machine for an hour.

Its members are told to finish what is at hand and to begin nothing new; they keep their memory and their place. Several
may want a pause for reasons of their own: the run goes on when the last of them has let it.
"""

from __future__ import annotations

from typing import cast

from toprope.records.messages import Pause, Proceed
from toprope.records.run.status import TRANSITIONS, State
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.status_writer import StatusWriter

__all__ = ["PauseControl"]

_ASKED = ("trainer", "environment")
"""Who begins work; the others only answer."""


class PauseControl:
    """Whether a run is held, and by whom."""

    def __init__(self, life: StatusWriter, crew: Crew) -> None:
        self._life, self._crew = life, crew
        self._reasons: dict[str, str] = {}
        self._before: State | None = None

    @property
    def held(self) -> bool:
        """Whether somebody wants the run to stand still."""
        return bool(self._reasons)

    def pause(self, reason: str, by: str = "") -> None:
        """Holds the run; the same party again only changes its reason."""
        known = self._reasons.get(by)
        self._reasons[by] = reason
        if known == reason:
            return
        for name in _ASKED:
            self._crew.order(name, Pause(reason))
        if self._life.state == "paused":
            self._life.update(reason=reason)
        self.enforce()

    def proceed(self, by: str = "") -> None:
        """Lets the run go on, unless another party holds it still."""
        if self._reasons.pop(by, None) is None:
            return
        if self._reasons:
            self._life.update(reason=list(self._reasons.values())[-1])
            return
        for name in _ASKED:
            self._crew.settle(name, Pause())
            self._crew.send(name, Proceed())
        self.release()

    def enforce(self) -> None:
        """Says `paused` as soon as the run's state allows it: at once, or when its start-up has come so far."""
        if self._reasons and "paused" in TRANSITIONS[self._life.state]:
            self._before = cast(State, self._life.state)
            self._life.to("paused", list(self._reasons.values())[-1], can_wait=True)

    def release(self) -> None:
        """Goes back to the state that the pause interrupted."""
        if self._before is not None and self._life.state == "paused":
            self._life.to(self._before, can_wait=True)
        self._life.set_aside()
        self._before = None
