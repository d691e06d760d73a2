"""Where a journal has to be taken up: segments that a checkpoint has passed are kept as the run's rollouts, and whoever
starts on the journal again need not read them.

A file `start` beside the segments names the first one that is needed. It is written after the snapshot that stands for
the ones before it is on disk. Without it, or with one that cannot be read, all segments are needed.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["note_start", "start_of", "sync_file", "sync_folder"]


def start_of(folder: Path) -> int:
    """The number of the first segment that is needed; 0 where that is not known."""
    try:
        return int((folder / "start").read_text("ascii"))
    except (OSError, ValueError):
        return 0


def note_start(folder: Path, ordinal: int) -> None:
    """Writes it down for good.

    Raises:
        OSError: It could not; what was noted before still holds.
    """
    aside = folder / "start.new"
    with aside.open("w") as file:
        file.write(str(ordinal))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / "start")
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Waits until a file's bytes are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
