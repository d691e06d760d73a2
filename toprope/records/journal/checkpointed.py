"""Where a journal has to be taken up: segments that a checkpoint has passed are kept as the run's rollouts, and whoever
starts on the journal again need not read them.

A file `start` beside the segments names the first one that is needed. It is written after the snapshot that stands for
the ones before it is on disk. Without it, or with one that cannot be read, all segments are needed.
"""

from __future__ import annotations

from pathlib import Path

from toprope.atomic import write_text

__all__ = ["note_start", "start_of"]


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
    write_text(folder / "start", str(ordinal), durable=True)
