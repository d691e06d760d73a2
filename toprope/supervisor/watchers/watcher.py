"""The interface of watchers: what the keeper calls on them, and what they may do to their run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toprope.records.messages import Report
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.supervisor.runs.orders import StopOrder


@dataclass(frozen=True)
class RunControl:
    """A watcher's access to its run."""

    folder: RunFolder
    specification: Specification
    status: Callable[[], Status]
    """Returns the present status."""
    record_event: Callable[..., None]
    """Appends an event: `record_event(kind, **data)`."""
    update: Callable[..., None]
    """Replaces fields of the status."""
    stop: Callable[[StopOrder], None]
    """Ends the run in order, with a last checkpoint."""
    pause: Callable[[str], None]
    """Has the crew finish the work at hand and begin nothing new: `pause(reason)`. The state becomes `paused` as soon
    as the run has come far enough; a second call changes the reason."""
    proceed: Callable[[], None]
    """Lets a paused run proceed in the state that it was in; does nothing if the run is not paused."""


class Watcher:
    """Base class of watchers. Every method does nothing unless a watcher overrides it.

    A watcher runs in the keeper's only thread, so it must not compute much or wait.
    """

    holds_limits = False
    """True for a watcher that enforces the owner's limits: it stays active however often it fails."""

    def on_report(self, component: str, report: Report) -> None:
        """A member has reported."""

    def on_tick(self, now: float) -> None:
        """About a second has passed; `now` is the event loop's monotonic time in seconds."""

    def on_end(self) -> None:
        """The crew is gone. May be called more than once."""
