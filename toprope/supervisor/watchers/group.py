"""Who watches a run."""

from __future__ import annotations

from toprope.supervisor.heartbeat import Heartbeat
from toprope.supervisor.watchers.budget import BudgetWatcher
from toprope.supervisor.watchers.diagnosis import DiagnosisWatcher
from toprope.supervisor.watchers.disk import DiskWatcher
from toprope.supervisor.watchers.provenance import ProvenanceWatcher
from toprope.supervisor.watchers.stall import StallWatcher
from toprope.supervisor.watchers.sweep_members import SweepMembersWatcher
from toprope.supervisor.watchers.watcher import RunControl, Watcher

__all__ = ["create_watchers"]


def create_watchers(hands: RunControl) -> list[Watcher]:
    """The watchers of a run."""
    return [
        Heartbeat(hands.folder),
        DiskWatcher(hands),
        ProvenanceWatcher(hands),
        DiagnosisWatcher(hands),
        BudgetWatcher(hands),
        StallWatcher(hands),
        *([SweepMembersWatcher(hands)] if hands.specification.run_kind.starts_runs else []),
    ]
