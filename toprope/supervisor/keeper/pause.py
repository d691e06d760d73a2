"""Pauses a run and lets it proceed, for example while the disk is full.

Trainer and environment finish the work at hand and begin nothing new; they keep their memory.
"""

from __future__ import annotations

from typing import cast

from toprope.records.messages import Pause, Proceed
from toprope.records.run.status import TRANSITIONS, State
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.status_writer import StatusWriter


class PauseControl:
    """The pause that is wanted now, if any, and the state to return to."""

    def __init__(self, writer: StatusWriter, crew: Crew) -> None:
        self._writer, self._crew = writer, crew
        self._reason: str | None = None
        self._interrupted: State | None = None

    def pause(self, reason: str) -> None:
        """Pause the run. A second call only changes the reason."""
        if self._reason == reason:
            return
        self._reason = reason
        for name in self._members():
            self._crew.send_until_settled(name, Pause(reason))
        if self._writer.state == "paused":
            self._writer.update(reason=reason)
        self.apply()

    def proceed(self) -> None:
        """Withdraw the pause."""
        if self._reason is None:
            return
        self._reason = None
        for name in self._members():
            self._crew.settle(name, Pause())
            self._crew.send(name, Proceed())
        self.leave_pause()

    def _members(self) -> list[str]:
        """The members that begin work; the others only answer requests."""
        return ["trainer", *(self._crew.drivers or ["environment"])]

    def apply(self) -> None:
        """Enter `paused` if a pause is wanted and the present state allows it."""
        if self._reason is not None and "paused" in TRANSITIONS[self._writer.state]:
            self._interrupted = cast(State, self._writer.state)
            self._writer.enter("paused", self._reason, can_wait=True)

    def leave_pause(self) -> None:
        """Return to the state that the pause interrupted."""
        if self._interrupted is not None and self._writer.state == "paused":
            self._writer.enter(self._interrupted, can_wait=True)
        self._writer.take_ballast()
        self._interrupted = None
