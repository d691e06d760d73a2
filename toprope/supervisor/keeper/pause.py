"""Pauses a run and lets it proceed, for example while the disk is full.

Trainer and environment finish the work at hand and begin nothing new; they keep their memory. Several parties may ask
for a pause, each for its own reason; the run proceeds when the last of them agrees.
"""

from __future__ import annotations

from typing import cast

from toprope.records.messages import Pause, Proceed
from toprope.records.run.status import TRANSITIONS, State
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.status_writer import StatusWriter


class PauseControl:
    """The pauses that are wanted now, by party, and the state to return to."""

    def __init__(self, writer: StatusWriter, crew: Crew) -> None:
        self._writer, self._crew = writer, crew
        self._reasons: dict[str, str] = {}
        self._interrupted: State | None = None

    def pause(self, reason: str, by: str = "") -> None:
        """Pause the run. A second call by the same party only changes the reason."""
        known = self._reasons.get(by)
        self._reasons[by] = reason
        if known == reason:
            return
        for name in self._members():
            self._crew.send_until_settled(name, Pause(reason))
        if self._writer.state == "paused":
            self._writer.update(reason=reason)
        self.apply()

    def proceed(self, by: str = "") -> None:
        """Withdraw a party's pause; the run proceeds if no other party wants one."""
        if self._reasons.pop(by, None) is None:
            return
        if self._reasons:
            self._writer.update(reason=list(self._reasons.values())[-1])
            return
        for name in self._members():
            self._crew.settle(name, Pause())
            self._crew.send(name, Proceed())
        self.leave_pause()

    def _members(self) -> list[str]:
        """The members that begin work; the others only answer requests."""
        return ["trainer", *(self._crew.drivers or ["environment"])]

    def apply(self) -> None:
        """Enter `paused` if a pause is wanted and the present state allows it."""
        if self._reasons and "paused" in TRANSITIONS[self._writer.state]:
            self._interrupted = cast(State, self._writer.state)
            self._writer.enter("paused", list(self._reasons.values())[-1], can_wait=True)

    def leave_pause(self) -> None:
        """Return to the state that the pause interrupted."""
        if self._interrupted is not None and self._writer.state == "paused":
            self._writer.enter(self._interrupted, can_wait=True)
        self._writer.take_ballast()
        self._interrupted = None
