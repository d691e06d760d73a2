"""How a keeper's command reaches a machine.

The keeper is the unit that a launcher submits; what runs below it is the keeper's own affair. A launcher that reaches
another machine (Ray, Slurm) submits the same command with `--foreground` and without a lock of ours.
"""

from __future__ import annotations

from typing import Literal, Protocol

from toprope.records.run.folder import RunFolder
from toprope.supervisor.environment_variables import OwnerVariables
from toprope.supervisor.lock import RunLock

__all__ = ["Launcher"]


class Launcher(Protocol):
    """Brings keepers to life and says whether they live. Everything else goes through the run folder."""

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """Starts the run's keeper and returns when it holds the run's lock. Idempotent: a run that has its keeper
        keeps it.

        Args:
            folder: A run folder with its specification and a status that is `queued`.
            variables: What the owner's settings give to components.
            lock: The run's lock, taken by the caller, to be handed over.

        Raises:
            ComponentFailed: No keeper came up.
        """
        ...

    def status(self, folder: RunFolder) -> Literal["alive", "gone"]:
        """Whether the run has its keeper, or guards that are still ending its crew."""
        ...

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """Asks the keeper to stop the run. Returns at once, harmless when there is no keeper."""
        ...
