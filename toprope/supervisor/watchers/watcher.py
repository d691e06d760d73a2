"""What whoever looks at a run while nobody does may do to it, and how the keeper calls them.

A watcher hears every report of the crew and is asked to look about once a second. It tells what it saw as events, and
may have the run stopped, paused or go on. It computes little: it shares the keeper's only thread. One that raises is
told of once and asked again, since what failed may pass; one that goes on raising is silenced, unless it holds the
owner's limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from toprope.records.messages import Report
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.supervisor.runs.orders import StopOrder

__all__ = ["RunControl", "Watcher", "WatcherGroup"]

_MOST_FAILURES = 10


@dataclass(frozen=True)
class RunControl:
    """What a watcher may do to its run."""

    folder: RunFolder
    specification: Specification
    status: Callable[[], Status]
    """The status as it is now."""
    event: Callable[..., None]
    """Appends an event: `event(kind, **data)`."""
    update: Callable[..., None]
    """Replaces fields of the status."""
    stop: Callable[[StopOrder], None]
    """Ends the run in order, with a last checkpoint."""
    pause: Callable[[str], None]
    """Has the crew finish what is at hand and begin nothing new: `pause(reason)`. The state is `paused` as soon as the
    run has come far enough to be held; called again, the reason changes."""
    proceed: Callable[[], None]
    """Lets a paused run go on, in the state that it was in; nothing where it is not paused."""


class Watcher(Protocol):
    """One kind of attention."""

    def heard(self, component: str, report: Report) -> None:
        """A member reported."""

    def looked(self, now: float) -> None:
        """About a second has passed; `now` is the loop's monotonic time in seconds."""


class WatcherGroup:
    """All watchers of one run, called safely. Those with a true attribute `holds_limits` are never silenced."""

    def __init__(self, watchers: list[Watcher], event: Callable[..., None]) -> None:
        self._watchers, self._event = watchers, event
        self._failures: Counter[Watcher] = Counter()

    def heard(self, component: str, report: Report) -> None:
        """See `Watcher.heard`."""
        self._each(lambda watcher: watcher.heard(component, report))

    def looked(self, now: float) -> None:
        """See `Watcher.looked`."""
        self._each(lambda watcher: watcher.looked(now))

    def ended(self) -> None:
        """The crew is gone: the last look of those that want one, by their method `ended`. May be called again."""
        self._each(lambda watcher: getattr(watcher, "ended", lambda: None)())

    def _each(self, call: Callable[[Watcher], Any]) -> None:
        for watcher in list(self._watchers):
            try:
                call(watcher)
            except Exception as error:
                self._failed(watcher, error)

    def _failed(self, watcher: Watcher, error: Exception) -> None:
        self._failures[watcher] += 1
        silenced = self._failures[watcher] >= _MOST_FAILURES and not getattr(watcher, "holds_limits", False)
        if silenced:
            self._watchers.remove(watcher)
        if silenced or self._failures[watcher] == 1:
            how = "failed again and again and watches no more" if silenced else "failed and is asked again"
            self._event("warning", what=f"{type(watcher).__name__} {how}: {type(error).__name__}: {error}")
