"""Stops the members of a sweep that ends, however it ends, so that no run is left behind.

The keeper of the sweep does this and not the conductor, because the conductor may have failed. A lost sweep, whose
keeper is gone, keeps its members: it resumes by itself and finds them.
"""

from __future__ import annotations

from toprope.records.run.folder import RunFolder
from toprope.records.sweep_journal import members_in
from toprope.supervisor.lock import is_held
from toprope.supervisor.runs.orders import write_stop_order
from toprope.supervisor.watchers.watcher import RunControl, Watcher

__all__ = ["SweepMembersWatcher", "stop_members"]


def stop_members(sweep: RunFolder) -> list[str]:
    """Order the live members of a sweep to stop; return their ids."""
    runs = sweep.path.parent
    live = [run_id for run_id in members_in(runs, sweep.run_id) if is_held(runs / run_id / "keeper.lock")]
    for run_id in live:
        write_stop_order(RunFolder(runs / run_id), None)
    return live


class SweepMembersWatcher(Watcher):
    """Stops the members when the conductor is gone and nothing starts members any more."""

    def __init__(self, control: RunControl) -> None:
        self._folder = control.folder

    def on_end(self) -> None:
        stop_members(self._folder)
