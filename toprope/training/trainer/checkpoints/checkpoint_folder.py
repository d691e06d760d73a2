"""The folder of a checkpoint, whatever holds the tensors: the numbers in it, and how it appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.atomic import fsync
from toprope.errors import Corrupt
from toprope.records.run.checkpoints import STATE_VERSION, problem_of, seal, set_aside
from toprope.records.run.folder import checkpoints_in
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.trained_tasks import sync_trained


@dataclass(frozen=True)
class CheckpointState:
    """The numbers of a checkpoint. `cursor` is the position after the last group trained on; `rollouts` counts the
    rollouts delivered until then, `dropped` the dropped groups by reason."""

    step: int
    cursor: int
    policy_version: int
    train_seconds: float
    rollouts: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    version: int = STATE_VERSION


def commit_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Writes a checkpoint aside, seals it, renames it into place, and removes all but the newest `keep` and those that
    other runs began with.

    Args:
        folder: Folder of the checkpoints, in the run's folder.
        step: Number of the checkpoint.
        write: Creates the folder that it is given and writes all files into it.
        keep: Number of checkpoints to keep.

    Returns:
        The checkpoint's path. A sound checkpoint of that step is left as it is; a damaged one is renamed.

    Raises:
        OSError: It could not be written, for example because the disk is full. Partial files are removed, and earlier
            checkpoints stay.
    """
    final = folder / f"step-{step:06d}"
    if final.exists():
        if problem_of(final) is None:
            return final
        set_aside(final)
    aside = folder / f".writing-{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write(aside)
        seal(aside)
        sync_trained(folder.parent)
        os.rename(aside, final)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        number = disk_full_errno(str(error))
        if number is not None and not isinstance(error, OSError):
            raise OSError(number, os.strerror(number)) from error
        raise
    fsync(folder)
    old = checkpoints_in(folder)[: -max(keep, 1)]
    needed = _named_by_others(folder, old) if old else set()
    for path in old:
        if path not in needed:
            shutil.rmtree(path, ignore_errors=True)
    return final


def _named_by_others(folder: Path, checkpoints: Sequence[Path]) -> set[Path]:
    """The checkpoints that specifications of other runs name: these runs need them, as the base of their adapters for
    example, for as long as they exist."""
    run = folder.absolute().parent
    texts = {path: f"/{run.name}/{folder.name}/{path.name}/".encode() for path in checkpoints}
    named_paths: set[Path] = set()
    for specification in run.parent.glob("*/spec.json"):
        with suppress(OSError):  # another user's, or deleted meanwhile
            content = specification.read_bytes() if specification.parent != run else b""
            named_paths.update(path for path, text in texts.items() if text in content)
    return named_paths


def disk_full_errno(text: str) -> int | None:
    """Error number of a full disk, if the text names one; safetensors and tokenizers raise no OSError."""
    return next((number for number in NO_ROOM if f"(os error {number})" in text), None)


def read_state(path: Path) -> CheckpointState:
    """The numbers of a checkpoint.

    Raises:
        Corrupt: state.json is missing or damaged.
    """
    try:
        return state_of(json.loads((path / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise unusable(path, error) from error


def state_of(document: Mapping[str, Any]) -> CheckpointState:
    """The numbers in the content of a state.json; fields of later versions are left out."""
    fields = CheckpointState.__dataclass_fields__
    return CheckpointState(**{key: value for key, value in document.items() if key in fields})


def unusable(path: Path, error: Exception | str) -> Corrupt:
    """The error of a checkpoint that cannot be used."""
    return Corrupt(
        f"The checkpoint {path} cannot be used: {error}.",
        hint="It was left as it is. Move the folder away to resume from the checkpoint before it.",
    )
