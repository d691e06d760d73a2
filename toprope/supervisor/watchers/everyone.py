"""Who watches a run."""

from __future__ import annotations

from toprope.supervisor.heartbeat import Heartbeat
from toprope.supervisor.watchers.budget import Budget
from toprope.supervisor.watchers.diagnosis import DiagnosisWatcher
from toprope.supervisor.watchers.disk import DiskWatch
from toprope.supervisor.watchers.hands import Hands, Watcher
from toprope.supervisor.watchers.provenance import Provenance
from toprope.supervisor.watchers.stall import StallWatch
from toprope.supervisor.watchers.sweep_members import MembersWatch

__all__ = ["watchers_for"]


def watchers_for(hands: Hands) -> list[Watcher]:
    """The watchers of a run."""
    return [
        Heartbeat(hands.folder),
        DiskWatch(hands),
        Provenance(hands),
        DiagnosisWatcher(hands),
        Budget(hands),
        StallWatch(hands),
        *([MembersWatch(hands)] if hands.specification.run_kind.starts_runs else []),
    ]
