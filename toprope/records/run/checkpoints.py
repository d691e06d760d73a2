"""Seal checkpoints and verify them: each has a manifest with the sizes and digests of its files.

    step-000120/manifest.json   {"version": 1, "files": {"state.json": {"bytes": 912, "sha256": "..."}, ...}}

The manifest is written last, after every file was synced, so a checkpoint without one is unfinished. Checkpoints of
older versions have none (their state.json says version 1); only their state.json can be checked. Nothing damaged is
deleted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.atomic import fsync, write_json
from toprope.errors import Corrupt, InvalidValue, NotFound, TooNew, shown
from toprope.records.run.folder import RunFolder, checkpoints_in, read_json
from toprope.records.run.launch import ask_for

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
STATE_VERSION = 2
"""Version of state.json. Since version 2 there is a manifest beside it."""

_HASHERS = 4


@dataclass(frozen=True)
class Checkpoint:
    """A sound checkpoint: its folder, its step, and the cursor after the last group in it."""

    path: Path
    step: int
    cursor: int

    def told(self, folder: RunFolder) -> dict[str, Any]:
        """The checkpoint as a status shows it."""
        at = self.path.stat().st_mtime
        return {"step": self.step, "path": str(self.path.relative_to(folder.path)), "cursor": self.cursor, "at": at}


@dataclass(frozen=True)
class Damage:
    """A checkpoint that cannot be used, with the file that is damaged and how."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"The checkpoint {self.path.name} cannot be used: {self.what}."


def seal(folder: Path) -> None:
    """Sync every file of a checkpoint, then write its manifest and sync it and the folders.

    Threads compute the digests while the disk syncs. Raises: OSError.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    names = list(_files(folder))
    with ThreadPoolExecutor(max_workers=min(_HASHERS, max(len(names), 1))) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        for name in names:
            fsync(folder / name)
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in zip(names, digests, strict=True)}
    write_json(folder / MANIFEST, {"version": MANIFEST_VERSION, "files": files})
    fsync(folder / MANIFEST)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            fsync(path)
    fsync(folder)


def problem_of(path: Path, *, hash_bytes: int | None = None) -> str | None:
    """The first problem of a checkpoint, with the file's name; None if it is sound.

    Args:
        path: Its folder.
        hash_bytes: Compare digests of at most so many bytes, smallest files first, and only sizes of the others; None:
            digests of all files.

    Raises:
        TooNew: A newer version wrote it.
    """
    name = "state.json"
    try:
        _state(path)
        name = MANIFEST
        manifest = _manifest(path)
    except NotFound:
        return f"{name} is missing"
    except TooNew:
        raise
    except Corrupt as error:
        return error.message.removeprefix(f"{path}/").rstrip(".")
    if manifest is None:
        return None
    for name, entry in sorted(manifest.items(), key=lambda item: item[1]["bytes"]):
        try:
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if hash_bytes is not None and (hash_bytes := hash_bytes - size) < 0:
                continue
            if _digest(path / name)[1] != entry["sha256"]:
                return f"{name} is damaged: its SHA-256 differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def newest_sound(
    folder: RunFolder, *, below: int | None = None, hash_bytes: int | None = None
) -> tuple[Checkpoint | None, list[Damage]]:
    """The newest sound checkpoint (or None), and the damaged ones after it, newest first.

    Args:
        below: Only consider checkpoints of steps up to this one.
        hash_bytes: See `problem_of`.

    Raises:
        TooNew: A newer version wrote one of them.
    """
    damaged: list[Damage] = []
    for path in reversed(checkpoints_in(folder.checkpoints)):
        if below is not None and int(path.name.removeprefix("step-")) > below:
            continue
        problem = problem_of(path, hash_bytes=hash_bytes)
        if problem is None:
            step, cursor = _state(path)
            return Checkpoint(path, step, cursor), damaged
        damaged.append(Damage(path, problem))
    return None, damaged


def split_step(name: str) -> tuple[str, int | None]:
    """Split `RUN@STEP` into the run and the step; the step is None for `RUN` alone.

    Raises:
        InvalidValue: What follows the @ is not the number of a step.
    """
    run, at, step = name.strip().partition("@")
    if at and not (step.isdecimal() and step.isascii()):
        raise InvalidValue(
            f"{shown(name)} does not name a checkpoint.", hint="RUN names the last one, RUN@120 step 120."
        )
    return run, int(step) if at else None


def checkpoint_of(folder: RunFolder, step: int | None = None, *, hash_bytes: int | None = None) -> Checkpoint:
    """The checkpoint of a step, or the newest sound one if `step` is None.

    Args:
        hash_bytes: See `problem_of`.

    Raises:
        NotFound: The run has no checkpoint of that step, or no checkpoint; the hint names the others.
        Corrupt: It is damaged, or every one is.
        NotPossibleNow: Only the run's cluster has it; it was asked for.
    """
    ask_for(folder, step)
    if step is None:
        checkpoint, damaged = newest_sound(folder, hash_bytes=hash_bytes)
        if checkpoint is None and damaged:
            raise no_sound_checkpoint(folder, damaged)
        if checkpoint is None:
            raise NotFound(f"{folder.run_id} has no checkpoint.", hint="list_runs names other runs.")
        return checkpoint
    path = folder.checkpoints / f"step-{step:06d}"
    if not path.is_dir():
        steps = [
            str(int(checkpoint_path.name.removeprefix("step-")))
            for checkpoint_path in checkpoints_in(folder.checkpoints)
        ]
        others = f"It keeps those of step {', '.join(steps[-8:])}." if steps else "It has none."
        raise NotFound(
            f"{folder.run_id} has no checkpoint of step {step}.",
            hint=f"{others} logging.save_steps and logging.save_total_limit decide what a run keeps.",
        )
    if (problem := problem_of(path, hash_bytes=hash_bytes)) is not None:
        raise Corrupt(str(Damage(path, problem)), hint="It was left as it is; name another step.")
    number, cursor = _state(path)
    return Checkpoint(path, number, cursor)


def no_sound_checkpoint(folder: RunFolder, damaged: Sequence[Damage]) -> Corrupt:
    """The error to raise if a run has checkpoints but none can be used."""
    problems = " ".join(str(damage) for damage in damaged[:3])
    return Corrupt(
        f"{folder.run_id} has no sound checkpoint to resume from. {problems}",
        hint="They were left as they are. Move the folder away to start again at step 0, or restore its files.",
    )


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that a new one can take its place; return its new path."""
    for number in range(1, 1000):
        aside = path.with_name(f"damaged-{path.name}" + (f"-{number}" if number > 1 else ""))
        if not aside.exists():
            os.rename(path, aside)
            return aside
    raise FileExistsError(f"{path.parent} holds a thousand damaged checkpoints")


def _state(path: Path) -> tuple[int, int]:
    """Step and cursor.

    Raises:
        NotFound, Corrupt: state.json is missing or damaged.
    """
    state = read_json(path / "state.json", STATE_VERSION)
    try:
        return int(state["step"]), int(state["cursor"])
    except (TypeError, KeyError, ValueError) as error:
        raise Corrupt(f"state.json is not a checkpoint's state: {type(error).__name__} {error}") from None


def _manifest(path: Path) -> dict[str, dict[str, Any]] | None:
    try:
        manifest = read_json(path / MANIFEST, MANIFEST_VERSION)
    except NotFound:
        if read_json(path / "state.json").get("version", 1) < 2:
            return None
        raise
    try:
        entries = manifest["files"].items()
        files = {str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])} for name, entry in entries}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise Corrupt(f"{MANIFEST} is not a manifest") from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise Corrupt(f"{MANIFEST} names files outside the checkpoint")
    return files


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield path.relative_to(folder).as_posix()


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest
