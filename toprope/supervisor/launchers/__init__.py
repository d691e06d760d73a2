"""The interface of launchers: how the command of a keeper reaches a machine.

The keeper is the unit that a launcher submits; the keeper itself starts everything below it. A launcher for clusters
(`cluster`) submits the same command with `--foreground`, to an engine that decides when and where it runs. It writes
launch.json before it submits, and asks the engine before anybody may call the run lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from toprope.records.run.folder import RunFolder
from toprope.supervisor.environment_variables import OwnerVariables
from toprope.supervisor.lock import RunLock

__all__ = ["KeeperState", "Launcher"]


@dataclass(frozen=True)
class KeeperState:
    """The present state of a run's keeper, as far as a launcher knows.

    `unknown`: the engine could not be asked, so nothing may be concluded; such a run is never settled.
    """

    life: Literal["alive", "gone", "unknown"]
    told: str = ""
    """A sentence for people: the reason for which a job waits, the engine's word about its end."""


class Launcher(Protocol):
    """Starts keepers and stops them. Everything else goes through the run folder."""

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """Start the run's keeper, or submit it to an engine. Does nothing if the run has a keeper.

        Args:
            folder: A run folder with its specification and a status that is `queued`.
            variables: The owner's variables for components.
            lock: The run's lock, taken by the caller. A keeper on this machine gets it handed over; one on a cluster
                takes it once the caller has released it, and launch.json keeps the run alive until then.

        Raises:
            ComponentFailed: The keeper did not start, or the engine refused it.
        """

    def status(self, folder: RunFolder, *, locked: bool = False) -> KeeperState:
        """Return `alive` while the run has its keeper, or guards that are still ending its crew, or a job that waits.

        Args:
            locked: The caller holds the run's lock, which therefore proves no keeper.
        """

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """Ask the keeper to stop the run. Returns at once; harmless if there is no keeper.

        Args:
            grace_s: Seconds for a last checkpoint and an orderly end; launcher.stop_grace_s when None.

        Raises:
            OSError: The order could not be delivered.
        """
