"""The frames of a journal's segments: pack records, and find whole ones again after a crash."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from toprope.errors import TooNew
from toprope.records.journal.segments import CompressedSegment, open_segment

_MAGIC = b"\xffTJ1"
"""The last byte is the version of the frame."""
FRAME = struct.Struct("<4sB3xQIIII")
_UNCHECKED = struct.Struct("<4sB3xQIII")
GROUP, MARK = 1, 2


class Frame(NamedTuple):
    """The place of a record in a segment, and its note."""

    kind: int
    seq: int
    note: bytes
    body_at: int
    body_length: int
    body_crc: int
    start: int
    end: int


def pack(kind: int, seq: int, note: bytes, body_length: int, body_crc: int) -> bytes:
    """The head of a frame; note and body follow it."""
    head = _UNCHECKED.pack(_MAGIC, kind, seq, len(note), body_length, body_crc)
    return head + zlib.crc32(note, zlib.crc32(head)).to_bytes(4, "little")


def scan(path: Path, damage: list[str] | None = None, start: int = 0) -> Iterator[Frame]:
    """The whole frames of a segment from byte `start` on, in order. Bytes between them are listed in `damage`.

    Args:
        path: The segment, plain or compressed.

    Raises:
        TooNew: A newer version wrote the next one.
        OSError: The file cannot be read.
    """
    with open_segment(path) as view:
        at, size = start, len(view)
        if damage is not None and isinstance(view, CompressedSegment) and view.is_damaged:
            damage.append(f"{path.name}: all of it")
        while at < size:
            frame = _frame_at(view, at, size)
            if frame is None and view[at : at + 3] == _MAGIC[:3] and view[at + 3 : at + 4] > _MAGIC[3:]:
                raise TooNew(
                    f"{path} was written by a newer version of Toprope; it was left as it is.",
                    hint="Update Toprope to continue this run.",
                )
            if frame is None:
                gap = at
                at = view.find(_MAGIC, at + 1)
                while at != -1 and _frame_at(view, at, size) is None:
                    at = view.find(_MAGIC, at + 1)
                if damage is not None:
                    damage.append(f"{path.name}: bytes {gap} to {size if at == -1 else at}")
                if at == -1:
                    return
                continue
            yield frame
            at = frame.end


class _View(Protocol):
    def __getitem__(self, range_: slice, /) -> bytes: ...


def _frame_at(view: _View, at: int, size: int) -> Frame | None:
    """The frame that starts at `at`; None if there is no whole one.

    The body is checked only at the end of a segment, where a crash may have torn it; elsewhere its reader checks it.
    """
    note_at = at + FRAME.size
    if note_at > size:
        return None
    head = view[at:note_at]
    magic, kind, seq, note_length, body_length, body_crc, crc = FRAME.unpack(head)
    body_at = note_at + note_length
    end = body_at + body_length
    if magic != _MAGIC or end > size:
        return None
    note = view[note_at:body_at]
    if zlib.crc32(note, zlib.crc32(head[:-4])) != crc:
        return None
    if end == size and zlib.crc32(view[body_at:end]) != body_crc:
        return None
    return Frame(kind, seq, note, body_at, body_length, body_crc, at, end)
