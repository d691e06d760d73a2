"""Leaves no run behind of a sweep that ends: whatever ended it, its members are ordered to stop.

The keeper of a sweep does this and not the sweep's conductor, which may be what failed. A sweep that is lost, its
keeper gone, keeps its members: it goes on by itself and finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprope.records.messages import Report
from toprope.records.run.folder import RunFolder
from toprope.records.sweep_journal import members_in
from toprope.supervisor.lock import is_held
from toprope.supervisor.runs.orders import write_stop_order

if TYPE_CHECKING:
    from toprope.supervisor.watchers.watcher import RunControl

__all__ = ["SweepMembersWatcher", "stop_members"]


def stop_members(sweep: RunFolder) -> list[str]:
    """Orders a sweep's members that live to stop; their ids."""
    runs = sweep.path.parent
    live = [run_id for run_id in members_in(runs, sweep.run_id) if is_held(runs / run_id / "keeper.lock")]
    for run_id in live:
        write_stop_order(RunFolder(runs / run_id), None)
    return live


class SweepMembersWatcher:
    """The watcher; see the module."""

    def __init__(self, hands: RunControl) -> None:
        self._hands = hands

    def heard(self, component: str, report: Report) -> None:
        """See `Watcher.heard`: nothing."""

    def looked(self, now: float) -> None:
        """See `Watcher.looked`: nothing."""

    def ended(self) -> None:
        """The conductor is gone: nothing starts members any more."""
        stop_members(self._hands.folder)
