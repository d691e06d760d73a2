"""Chooses the launcher of each run: this machine, or one of the owner's clusters."""

from __future__ import annotations

from toprope.errors import TopropeError
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.settings.clusters import Cluster
from toprope.supervisor.environment_variables import OwnerVariables
from toprope.supervisor.launchers import KeeperState, Launcher
from toprope.supervisor.launchers.engine import Engine
from toprope.supervisor.launchers.slurm import SlurmEngine
from toprope.supervisor.lock import RunLock


def engine_of(cluster: Cluster) -> Engine:
    """Return the engine of a cluster; it is not asked yet."""
    if cluster.kind == "slurm":
        return SlurmEngine(cluster)
    from toprope.supervisor.launchers.ray import RayEngine  # an HTTP client is slow to load, and few need it

    return RayEngine(cluster)


class LauncherByKind:
    """Passes each run on: by launcher.kind when it starts, by launch.json from then on. See `Launcher`."""

    def __init__(self, local: Launcher, cluster: Launcher) -> None:
        self._local, self._cluster = local, cluster

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """See `Launcher.submit`."""
        specification = Specification.read(folder)
        # A run that starts others computes nothing itself, and the runs that it starts go to the cluster.
        is_local = specification.config.launcher.kind == "local" or specification.run_kind.starts_runs
        (self._local if is_local else self._cluster).submit(folder, variables, lock)

    def status(self, folder: RunFolder, *, locked: bool = False) -> KeeperState:
        """See `Launcher.status`."""
        try:
            return self._of(folder).status(folder, locked=locked)
        except (TopropeError, OSError) as error:  # another user's folder, a damaged launch.json or clusters.yaml
            return KeeperState("unknown", f"Nothing is known of its keeper: {error}")

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """See `Launcher.stop`."""
        self._of(folder).stop(folder, grace_s)

    def _of(self, folder: RunFolder) -> Launcher:
        return self._cluster if folder.launch.exists() else self._local
