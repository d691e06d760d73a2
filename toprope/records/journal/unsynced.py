"""Files of a journal whose last records may not be on disk yet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from toprope.atomic import fsync, sync

__all__ = ["Unsynced"]


class Unsynced(NamedTuple):
    """Files to sync so that the first `upto` records are on disk. `flush` may run in any thread."""

    upto: int
    files: tuple[int, ...]
    folder: Path | None
    newest: int = 0
    """The newest segment, whose name is on disk once the folder is flushed."""

    def flush(self) -> None:
        """Wait for the disk.

        Raises:
            OSError: It failed; records may be lost.
        """
        for descriptor in self.files:
            sync(descriptor)
        if self.folder is not None:
            fsync(self.folder)

    def held(self) -> Unsynced | None:
        """The same files under descriptors of their own, for a thread: the commit of a checkpoint may flush and close
        the journal's before it has. None if this process can open no more. `close` closes them."""
        files: list[int] = []
        try:
            for descriptor in self.files:
                files.append(os.dup(descriptor))
        except OSError:
            _close(files)
            return None
        return self._replace(files=tuple(files))

    def close(self) -> None:
        """Close the files of `held`."""
        _close(self.files)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
