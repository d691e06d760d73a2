"""Write on a full disk: lines that wait in memory for room, and room that is held in reserve.

For readers a line is written whole or not at all: if the disk fills in the middle of one, the next write ends the piece
with a newline and writes the line again.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path

from toprope.atomic import open_plain

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write without room: the disk, a quota, or the limit on a file's size."""


class PatientLines:
    """Appends lines to the file at `path`, in order; lines without room wait in memory. One writer at a time.

    Args:
        path: Created at the first line, readable by its owner only.
        most: Lines that may wait; beyond that the oldest are dropped.
    """

    def __init__(self, path: Path, most: int = 1000) -> None:
        self._path, self._most = path, most
        self._waiting: deque[bytes] = deque()
        self._torn = _torn(path)

    @property
    def behind(self) -> int:
        """Number of waiting lines."""
        return len(self._waiting)

    def append(self, line: bytes) -> bool:
        """Write a line (with its newline) after the waiting ones; return False if it has to wait too.

        Raises:
            OSError: The file cannot be written, for another reason than lack of room.
        """
        self._waiting.append(line)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
        return self.catch_up()

    def catch_up(self) -> bool:
        """Write the waiting lines; return whether none is left. Raises: see `append`."""
        if self._waiting:
            try:
                self._write()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
        return not self._waiting

    def _write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while self._waiting:
                line = (b"\n" if self._torn else b"") + self._waiting[0]
                written = os.write(descriptor, line)
                if written < len(line):
                    self._torn = self._torn or written > 0
                    if written == len(line) - 1:
                        self._waiting[0] = b""  # only its newline is missing, which `_torn` adds
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._torn = False
                self._waiting.popleft()
        finally:
            os.close(descriptor)


class Ballast:
    """Reserved room on a disk, released when the disk is full so that this can be reported.

    Args:
        path: The file that holds the room; created at once if possible.
        size: Bytes.
    """

    def __init__(self, path: Path, size: int = 1 << 18) -> None:
        self._path, self._size = path, size
        self.take()

    def take(self) -> None:
        """Reserve the room, unless it is reserved already or the disk is full."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size < self._size:
                    os.pwrite(descriptor, bytes(self._size), 0)
            finally:
                os.close(descriptor)
        except OSError:
            self.drop()

    def drop(self) -> bool:
        """Release the room; return whether any was reserved."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        return True


def _torn(path: Path) -> bool:
    try:
        with open_plain(path) as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
    except FileNotFoundError:
        return False
