"""The interface of launchers: how the command of a keeper reaches a machine.

The keeper is the unit that a launcher submits; the keeper itself starts everything below it. A launcher for other
machines (Ray, Slurm) submits the same command with `--foreground` and without a lock that this process holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from toprope.records.run.folder import RunFolder
from toprope.supervisor.environment_variables import OwnerVariables
from toprope.supervisor.keeper.logs import LogPage
from toprope.supervisor.lock import RunLock

__all__ = ["Launcher"]


class Launcher(Protocol):
    """Starts keepers, stops them and reaches their logs. Everything else goes through the run folder."""

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """Start the run's keeper and return when it holds the run's lock. Does nothing if the run has a keeper.

        Args:
            folder: A run folder with its specification and a status that is `queued`.
            variables: The owner's variables for components.
            lock: The run's lock, taken by the caller, to be handed over.

        Raises:
            ComponentFailed: The keeper did not start.
        """

    def status(self, folder: RunFolder) -> Literal["alive", "gone"]:
        """Return `alive` while the run has its keeper, or guards that are still ending its crew."""

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """Ask the keeper to stop the run. Returns at once; harmless if there is no keeper.

        Args:
            grace_s: Seconds for a last checkpoint and an orderly end; launcher.stop_grace_s when None.

        Raises:
            OSError: The order could not be delivered.
        """

    def logs(
        self, folder: RunFolder, component: str, *, lines: int, before: int | None = None, secrets: Iterable[str] = ()
    ) -> LogPage:
        """Return the last `lines` lines of a component's log, or of the keeper's, safe to show.

        Args:
            component: A member of the crew, or `keeper`.
            lines: Most lines of the page.
            before: Only lines that end at or before this byte.
            secrets: Values to mask.
        """
