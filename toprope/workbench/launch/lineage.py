"""Where a policy comes from that is another run's (`run:<run_id>` in `policy.model`), and what a run learns from where
that is a data set (`sft.dataset`)."""

from __future__ import annotations

from pathlib import Path

from toprope.errors import NotPossibleNow
from toprope.records.run.checkpoints import newest_sound
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import DatasetSource, Specification
from toprope.records.run.status import Status
from toprope.trajectories.datasets.store import DatasetStore

__all__ = ["RUN", "base_of", "with_dataset"]

RUN = "run:"
"""Begins the name of a run, in place of a model's."""

_HASH_BYTES = 256 << 20
"""Of a checkpoint or a data set so much is compared here, while others wait to start; whoever loads it compares it
whole."""


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


def with_dataset(specification: Specification, datasets: Path) -> Specification:
    """The specification with the version that `sft.dataset` means now, by its file and digest; the same where it names
    none.

    Raises:
        NotFound: There is no such data set or version.
        Corrupt: Its files are not what was written.
    """
    asked = specification.config.sft.dataset
    if not asked:
        return specification
    version = DatasetStore(datasets).find(asked)
    if sum(one.bytes for one in version.record.files.values()) <= _HASH_BYTES:
        version.require_sound()
    file = version.training_file()
    stored = version.record.files[file.name]
    config = specification.config.model_copy(deep=True)
    config.sft.dataset = version.name
    source = DatasetSource(name=version.name, file=str(file), sha256=stored.sha256, items=stored.items)
    return specification.model_copy(update={"config": config, "dataset": source})
