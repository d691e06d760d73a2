"""Where a policy comes from that is another run's: `run:<run_id>` in `policy.model`."""

from __future__ import annotations

from pathlib import Path

from toprope.errors import NotPossibleNow
from toprope.records.checkpoints import newest_sound
from toprope.records.folder import RunFolder
from toprope.records.status import Status

__all__ = ["RUN", "base_of"]

RUN = "run:"
"""Begins the name of a run, in place of a model's."""

_HASH_BYTES = 256 << 20
"""Of its checkpoint so much is compared here, while others wait to start; whoever loads it compares the rest."""


def base_of(model: str, runs: Path) -> tuple[str, str] | None:
    """The run that a model's name names, and the folder of the newest weights that it left; None where it names none.

    Args:
        model: What `policy.model` says.
        runs: The folder of runs.

    Raises:
        NotFound, Corrupt: There is no such run, or its status cannot be read.
        NotPossibleNow: It still trains, or has no sound checkpoint.
    """
    if not model.startswith(RUN):
        return None
    folder = RunFolder.open(runs, model.removeprefix(RUN).strip())
    status = Status.read(folder)
    if not status.ended:
        raise NotPossibleNow(
            f"policy.model is {model}, which is still {status.state}: its weights are not there yet.",
            hint=f'check_status(run_ids=["{folder.run_id}"], wait_s=45, until="end") waits for it.',
        )
    found, damaged = newest_sound(folder, hash_bytes=_HASH_BYTES)
    if found is None:
        why = str(damaged[0]) if damaged else "it left none"
        raise NotPossibleNow(
            f"policy.model is {model}, which has no checkpoint to begin with: {why}.",
            hint="list_runs names other runs.",
        )
    return folder.run_id, str(found.path / "model")
