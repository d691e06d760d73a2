"""Appending lines to a file that must survive a full disk: what finds no room waits in memory, in its order.

A line is written whole or not at all, as readers see it: a disk that fills in the middle of one leaves a piece that the
next write ends with a newline, and the line is written again.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path

__all__ = ["NO_ROOM", "Ballast", "PatientLines"]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What writing fails with where there is no room: disk, quota, or limit of a file's size."""


class PatientLines:
    """Lines at the end of the file at `path`; one writer at a time.

    Args:
        path: Made at the first line, readable by its owner only.
        most: Lines kept while there is no room; of more the oldest are dropped.
    """

    def __init__(self, path: Path, most: int = 1000) -> None:
        self._path, self._most = path, most
        self._waiting: deque[bytes] = deque()
        self._torn = _torn(path)

    @property
    def behind(self) -> int:
        """How many lines are not in the file yet."""
        return len(self._waiting)

    def append(self, line: bytes) -> bool:
        """Writes a line, which ends in a newline, after those that wait; False where it has to wait itself.

        Raises:
            OSError: The file cannot be written, and not for lack of room.
        """
        self._waiting.append(line)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
        return self.catch_up()

    def catch_up(self) -> bool:
        """Writes what waits; whether nothing waits any more. Raises: see `append`."""
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
                        self._waiting[0] = b""  # all but its end: that comes next
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._torn = False
                self._waiting.popleft()
        finally:
            os.close(descriptor)


class Ballast:
    """Room that is set aside, to be given up when a disk is full: for saying that it is.

    Args:
        path: A file that holds the room, made at once where that is possible.
        size: Bytes.
    """

    def __init__(self, path: Path, size: int = 1 << 18) -> None:
        self._path, self._size = path, size
        self.take()

    def take(self) -> None:
        """Sets the room aside, unless it is, or there is none."""
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
        """Gives the room up; whether there was any."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        return True


def _torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
    except FileNotFoundError:
        return False
