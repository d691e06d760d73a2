"""All watchers of one run, called so that an error in one of them does not reach the run.

The first error of a watcher is recorded and the watcher stays active, because the cause may pass. A watcher that goes
on failing is removed, unless it holds the owner's limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from toprope.records.messages import Report
from toprope.supervisor.runs.cleanup import stop_members
from toprope.supervisor.watchers.budget import BudgetWatcher
from toprope.supervisor.watchers.diagnosis import DiagnosisWatcher
from toprope.supervisor.watchers.disk import DiskWatcher
from toprope.supervisor.watchers.provenance import ProvenanceWatcher
from toprope.supervisor.watchers.stall import StallWatcher
from toprope.supervisor.watchers.watcher import RunControl, Watcher

_MOST_FAILURES = 10


def create_watchers(control: RunControl) -> list[Watcher]:
    """Create the watchers of a run."""
    return [
        DiskWatcher(control),
        ProvenanceWatcher(control),
        DiagnosisWatcher(control),
        BudgetWatcher(control),
        StallWatcher(control),
        *([SweepMembersWatcher(control)] if control.specification.run_kind.starts_runs else []),
    ]


class SweepMembersWatcher(Watcher):
    """Stops the members of a sweep that ends, however it ends, so that no run is left behind.

    The keeper of the sweep does this and not the conductor, because the conductor may have failed. A lost sweep, whose
    keeper is gone, keeps its members: it resumes by itself and finds them.
    """

    def __init__(self, control: RunControl) -> None:
        self._folder = control.folder

    def on_end(self) -> None:
        stop_members(self._folder)


class WatcherGroup(Watcher):
    """Passes every call on to its watchers."""

    def __init__(self, watchers: list[Watcher], record_event: Callable[..., None]) -> None:
        self._watchers, self._record_event = watchers, record_event
        self._failures: Counter[Watcher] = Counter()

    def on_report(self, component: str, report: Report) -> None:
        self._call_each(lambda watcher: watcher.on_report(component, report))

    def on_tick(self, now: float) -> None:
        self._call_each(lambda watcher: watcher.on_tick(now))

    def on_end(self) -> None:
        self._call_each(lambda watcher: watcher.on_end())

    def _call_each(self, call: Callable[[Watcher], None]) -> None:
        for watcher in list(self._watchers):
            try:
                call(watcher)
            except Exception as error:
                self._count_failure(watcher, error)

    def _count_failure(self, watcher: Watcher, error: Exception) -> None:
        self._failures[watcher] += 1
        removed = self._failures[watcher] >= _MOST_FAILURES and not watcher.holds_limits
        if removed:
            self._watchers.remove(watcher)
        if removed or self._failures[watcher] == 1:
            how = "failed again and again and is switched off" if removed else "failed and stays active"
            self._record_event("warning", what=f"{type(watcher).__name__} {how}: {type(error).__name__}: {error}")
