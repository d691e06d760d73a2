"""The segment files of a journal: plain while they are written, compressed when they are closed.

`00000001.journal` is a plain segment. `00000001.journal.zst` holds the same bytes in the seekable format of Zstandard:
independent frames of 256 KB with a table of their places at the end, so that any range can be read without the rest,
and `zstd -d` restores the file. Offsets always count bytes of the plain segment. If both files exist, a crash came
between writing the compressed file and removing the plain one; they have the same content.

`00000001.sample.zst` replaces a segment of which only a sample of groups was kept (`logging.keep_rollouts: sample`). It
is for people and exports; the trajectory API treats the segment as removed.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toprope.atomic import fsync

SUFFIX, COMPRESSED, SAMPLE = ".journal", ".journal.zst", ".sample.zst"
_FRAME_BYTES = 256 * 1024
_LEVEL = 3
_CHUNK = 1 << 20


def ordinals(folder: Path) -> list[int]:
    """The numbers of the segments in a journal's folder, in order, without samples."""
    return sorted({number for path in folder.glob("*.journal*") if (number := _ordinal(path)) is not None})


def sampled_ordinals(folder: Path) -> list[int]:
    """The numbers of the segments of which only a sample was kept, in order."""
    numbers = (path.name.removesuffix(SAMPLE) for path in folder.glob(f"*{SAMPLE}"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def plain_path(folder: Path, ordinal: int) -> Path:
    """The file of a segment while it is written."""
    return folder / f"{ordinal:08d}{SUFFIX}"


def compressed_path(folder: Path, ordinal: int) -> Path:
    """The file of a segment once it is compressed."""
    return folder / f"{ordinal:08d}{COMPRESSED}"


def sample_path(folder: Path, ordinal: int) -> Path:
    """The file with the kept groups of a segment whose others were removed."""
    return folder / f"{ordinal:08d}{SAMPLE}"


def segment_path(folder: Path, ordinal: int) -> Path:
    """The file that holds a segment now; the plain one without any."""
    plain = plain_path(folder, ordinal)
    if plain.exists():
        return plain
    # The compressed file is in place before the plain one is removed.
    compressed = compressed_path(folder, ordinal)
    return compressed if compressed.exists() else plain


def plain_bytes(path: Path) -> int:
    """The size of a segment's content.

    Raises:
        OSError: The file cannot be read.
    """
    if path.suffix != ".zst":
        return path.stat().st_size
    with open_segment(path) as view:
        return len(view)


def remove_segment(folder: Path, ordinal: int) -> None:
    """Remove a segment in both forms."""
    plain_path(folder, ordinal).unlink(missing_ok=True)
    compressed_path(folder, ordinal).unlink(missing_ok=True)


class CompressedSegment:
    """The content of a compressed segment, read in slices. Ranges that are damaged read as zeros.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        from pyzstd import SeekableFormatError, SeekableZstdFile, ZstdError

        self._errors: tuple[type[Exception], ...] = (ZstdError, SeekableFormatError, EOFError, ValueError)
        self._file: Any = None
        self._size = 0
        try:
            self._file = SeekableZstdFile(path, "r")
            self._size = self._file.seek_table_info[2]
        except self._errors:
            pass
        self.is_damaged = self._file is None
        """True if the table of frames cannot be read, and so nothing of the file."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, range_: slice) -> bytes:
        start, end, _ = range_.indices(self._size)
        length = max(0, end - start)
        if not length:
            return b""
        try:
            self._file.seek(start)
            data: bytes = self._file.read(length)
        except self._errors:
            return bytes(length)
        return data if len(data) == length else bytes(length)

    def find(self, text: bytes, start: int) -> int:
        """The place of `text` at or after `start`; -1 if it is not there."""
        while start < self._size:
            place = self[start : start + _CHUNK].find(text)
            if place >= 0:
                return start + place
            start += _CHUNK - len(text) + 1
        return -1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextmanager
def open_segment(path: Path) -> Iterator[mmap.mmap | CompressedSegment | bytes]:
    """Yield a segment's content, which has a length, slices and `find`, in either form.

    Raises:
        OSError: The file is missing or cannot be read.
    """
    if path.suffix == ".zst":
        compressed = CompressedSegment(path)
        try:
            yield compressed
        finally:
            compressed.close()
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # an empty file cannot be mapped
            yield b""
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
            yield view


def compress_segment(folder: Path, ordinal: int, removing: threading.Lock) -> bool:
    """Replace a plain segment that nobody writes to any more by a compressed one; may run in any thread.

    A crash at any point leaves a readable segment: the plain file is removed only after the compressed one was read
    back and is on disk. Repeat the call after a crash.

    Args:
        folder: The journal's folder.
        ordinal: Number of the segment.
        removing: Lock that is held while segments are removed, so that a removed segment does not come back.

    Returns:
        False if the segment was removed meanwhile.

    Raises:
        OSError: The disk is full, for example; the plain segment is unchanged.
    """
    plain, part = plain_path(folder, ordinal), folder / f".{ordinal:08d}.part"
    try:
        try:
            with open_segment(plain) as view:
                write_compressed(part, (view[at : at + _FRAME_BYTES] for at in range(0, len(view), _FRAME_BYTES)))
        except FileNotFoundError:
            return False
        fsync(part)
        with removing:
            if not plain.exists():
                return False
            os.replace(part, compressed_path(folder, ordinal))
        fsync(folder)
        plain.unlink(missing_ok=True)
        return True
    finally:
        part.unlink(missing_ok=True)


def write_compressed(path: Path, chunks: Iterator[bytes]) -> None:
    """Write chunks as a compressed file, and read it back.

    Raises:
        OSError: It cannot be written, or does not read back as it was written.
    """
    from pyzstd import CParameter, SeekableZstdFile

    size = crc = 0
    options: dict[int, int] = {CParameter.compressionLevel: _LEVEL, CParameter.checksumFlag: 1}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        with SeekableZstdFile(target, "w", level_or_option=options, max_frame_content_size=_FRAME_BYTES) as file:
            for chunk in chunks:
                file.write(chunk)
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    view, crc_read = CompressedSegment(path), 0
    try:
        for at in range(0, len(view), _FRAME_BYTES):
            crc_read = zlib.crc32(view[at : at + _FRAME_BYTES], crc_read)
        if (len(view), crc_read) != (size, crc):
            raise OSError(f"{path} does not read back as it was written")
    finally:
        view.close()


def _ordinal(path: Path) -> int | None:
    name = path.name.removesuffix(".zst")
    number = name.removesuffix(SUFFIX)
    return int(number) if name.endswith(SUFFIX) and number.isdecimal() else None
