"""The journal of a run on disk: every accepted group once, byte for byte, and marks for its fate, in order.

From it the counts of groups are rebuilt after a crash. A queue of thousands of groups only holds their positions in
memory: their bytes are read back from here for delivery.

A journal is a folder of segments (see `segments`) that are only appended to; closed ones are compressed. A segment is a
sequence of frames, integers little-endian:

    magic 4 | kind 1 | zeros 3 | sequence 8 | note length 4 | body length 4 | CRC-32 of body 4 | CRC-32 of the rest 4
    note | body

Kind 1 is a group: the body is the JSON that was posted, the note a `GroupNote`. Kind 2 is a mark: the note is one of
`Mark`, there is no body, and the sequence number is that of the last group before it. Groups are numbered from 1. The
magic starts with a byte that no JSON contains, so the next whole frame can be found after damage. A writer never
changes an existing segment: it starts a new one, and readers skip a torn end of the old one. The oldest segments may be
removed or no longer needed: a later `Snapshot` holds their sum.
"""

from __future__ import annotations

import os
import threading
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from toprope.atomic import fsync, replacing, sync, write_text
from toprope.errors import Corrupt, DiskFull, NotFound, NotPossibleNow
from toprope.records.journal.frames import FRAME, GROUP, MARK, Frame, pack, scan
from toprope.records.journal.marks import GroupNote, Keep, Mark, Record, Snapshot
from toprope.records.journal.segments import (
    CompressedSegment,
    compress_segment,
    open_segment,
    ordinals,
    plain_path,
    remove_segment,
    sample_path,
    segment_path,
    write_compressed,
)
from toprope.records.journal.unsynced import Unsynced
from toprope.records.run.full_disk import NO_ROOM

_OPEN_SEGMENTS = 32
_START = "start"
"""File that names the first segment that is still needed; written after the snapshot that replaces the earlier ones is
on disk. If it is missing or cannot be read, all segments are needed."""

_SAMPLED = 16
"""With `keep_rollouts: sample`, every sixteenth group is kept."""

Sync = Literal["always", "group", "os"]

_notes = msgspec.json.Decoder(GroupNote)
_marks: msgspec.json.Decoder[Mark] = msgspec.json.Decoder(Mark)
_encode = msgspec.json.Encoder().encode


class FileJournal:
    """A journal in a folder. One writer at a time; any number of readers, which see the records present at opening.

    Args:
        folder: The folder of the segments; the first append creates it.
        sync: `os` hands every record to the operating system, so it survives this process but not a power cut. `always`
            also waits for the disk at every record. `group` leaves that to the caller, who flushes `unsynced` for many
            records at once.
        segment_bytes: Size at which a new segment begins.
        recent: Whether to skip segments that are no longer needed; opening then does not slow down with checkpoints.

    It keeps 20 bytes per group in memory. `damage` lists the parts that opening skipped. Not thread-safe.
    """

    def __init__(
        self, folder: Path, *, sync: Sync = "os", segment_bytes: int = 16 * 1024 * 1024, recent: bool = False
    ) -> None:
        self._folder = folder
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._last_of: dict[int, int] = {}
        """The number of the last group at the end of each segment, oldest segment first."""
        self._segment = array("I")
        self._offset = array("Q")
        self._length = array("I")
        self._crc = array("I")
        self._base = 0
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._removing = threading.Lock()
        self._writer: int | None = None
        self._written = 0
        self._retired: list[tuple[int, int]] = []
        """Files of full segments that are not flushed, each with the number of records up to its end."""
        self._new_segment = False
        self._broken = ""
        self.appended = self.durable = 0
        """Records that this process has written, and those known to be on disk."""
        self.damage: list[str] = []
        self.has_snapshot = False
        """True if one of the marks is a snapshot."""
        self._open(_first_needed(folder) if recent else 0)

    @property
    def first(self) -> int:
        """The number of the oldest group that may still exist; above 1 if segments were removed."""
        return self._base + 1

    @property
    def last(self) -> int:
        """The number of the last group; 0 in an empty journal."""
        return self._base + len(self._offset)

    def append(self, body: bytes, note: GroupNote) -> int:
        """Store a group and return its number. Raises NotPossibleNow, with nothing changed, if it was not written."""
        seq, packed = self.last + 1, _encode(note)
        crc = zlib.crc32(body)
        start = self._write(GROUP, seq, packed, body, crc)
        self._extend(self._newest, start + FRAME.size + len(packed), len(body), crc)
        self._last_of[self._newest] = seq
        return seq

    def mark(self, mark: Mark) -> None:
        """Store a mark. Raises as `append`."""
        self._write(MARK, self.last, _encode(mark), b"", 0)
        self._last_of[self._newest] = self.last

    def read(self, seq: int) -> bytes:
        """A group's body. Raises NotFound if no group has this number, Corrupt if its bytes are damaged."""
        if not self.first <= seq <= self.last:
            removed = " Earlier ones are removed or skipped, because a checkpoint has them." if self._base else ""
            raise NotFound(
                f"The journal holds no group {seq}.",
                hint=f"Groups are numbered {self.first} to {self.last}.{removed}",
            )
        index = seq - self.first
        at, length = self._offset[index], self._length[index]
        if not at:
            raise Corrupt(f"Group {seq} of the journal in {self._folder} is damaged.")
        reader = self._reader(self._segment[index])
        body = reader.read(at, length)
        # Bodies that this process wrote are checked only if they were compressed.
        checked = seq <= self._recovered or reader.compressed
        if len(body) != length or (checked and zlib.crc32(body) != self._crc[index]):
            raise Corrupt(f"Group {seq} of the journal in {self._folder} is damaged.")
        return body

    def iterate(self, after: int = 0) -> Iterator[Record]:
        """Groups numbered above `after`, and the marks after group `after`, in the order written."""
        started = self._segment[after - self.first] if self.first <= after <= self.last else 0
        for ordinal in list(self._last_of):
            if ordinal < started:
                continue
            for frame in scan(self._path(ordinal)):
                if frame.kind == GROUP and frame.seq > after:
                    yield Record(frame.seq, _notes.decode(frame.note), frame.body_length)
                elif frame.kind == MARK and frame.seq >= after:
                    try:
                        yield Record(frame.seq, _marks.decode(frame.note), 0)
                    except msgspec.ValidationError:
                        continue  # a mark of a newer version

    def removable(self, before: int) -> bool:
        """Return True if some segments only hold groups numbered below `before`."""
        return bool(self._segments_before(before))

    def leave(self, before: int, snapshot: Snapshot, *, keep: Keep) -> None:
        """Skip the `removable` segments from now on, after the snapshot is on disk; remove what is not to be kept.
        Raises as `append`."""
        passed = self._segments_before(before)
        if not passed:
            return
        self.mark(snapshot)
        pending = self.unsynced()
        if pending is None:
            assert self._writer is not None
            pending = Unsynced(self.appended, (self._writer,), self._folder)
        try:
            pending.flush()
        except OSError as error:
            raise self.fail(error) from error
        self.synced(pending)
        self.has_snapshot = True
        if keep == "all":
            try:
                first_needed = next(ordinal for ordinal in self._last_of if ordinal > passed[-1])
                write_text(self._folder / _START, str(first_needed), durable=True)
            except OSError:
                return  # reading all segments again only costs time
        gone = self._last_of[passed[-1]] - self._base
        for ordinal in passed:  # oldest first, so a crash in between leaves no gap
            if (reader := self._readers.pop(ordinal, None)) is not None:
                reader.close()
            if keep != "all":
                self._remove(ordinal, sample=keep == "sample")
            del self._last_of[ordinal]
        for numbers in (self._segment, self._offset, self._length, self._crc):
            del numbers[:gone]
        self._base += gone

    def unsynced(self) -> Unsynced | None:
        """The files to sync; None if there are none, or if nobody waits for the disk."""
        if self._sync != "group" or self.durable == self.appended:
            return None
        writers = [] if self._writer is None else [self._writer]  # none after a full disk refused the next segment
        files = (*(descriptor for descriptor, _ in self._retired), *writers)
        return Unsynced(self.appended, files, self._folder if self._new_segment else None, self._newest)

    def refusal(self) -> NotPossibleNow | None:
        """The error of a journal whose disk failed: a later flush that succeeds says nothing of what was lost."""
        return self._unwritable() if self._broken else None

    def synced(self, done: Unsynced) -> None:
        """Record that `done` was flushed, unless the disk failed meanwhile."""
        if self._broken:
            return
        self.durable = max(self.durable, done.upto)
        # By records, not by descriptors: one that was closed meanwhile may be another file's now.
        flushed = [descriptor for descriptor, upto in self._retired if upto <= done.upto]
        self._retired = self._retired[len(flushed) :]
        for descriptor in flushed:
            with suppress(OSError):
                os.close(descriptor)
        if done.folder is not None and done.newest == self._newest:
            self._new_segment = False

    def fail(self, error: OSError) -> NotPossibleNow:
        """Refuse all further records, because the disk lost some. Return the error to raise."""
        self._broken = error.strerror or str(error)
        return self._unwritable()

    def close(self) -> None:
        """Close the files. The journal cannot be used afterwards."""
        writers = [] if self._writer is None else [self._writer]
        for reader in self._readers.values():
            reader.close()
        for descriptor in [*(retired for retired, _ in self._retired), *writers]:
            os.close(descriptor)
        self._readers.clear()
        self._retired.clear()
        self._writer = None

    def compressible(self) -> list[int]:
        """The closed segments that are not compressed yet, those that are no longer needed included."""
        written = self._newest if self._writer is not None or self._retired else 0
        return [
            ordinal
            for ordinal in ordinals(self._folder)
            # Segments that wait for the disk are as new as the one that is written.
            if not (written and ordinal >= written - len(self._retired)) and plain_path(self._folder, ordinal).exists()
        ]

    def compress(self, ordinal: int) -> bool:
        """Compress a segment that `compressible` names; the only method that may run in another thread.

        Raises:
            OSError: The disk is full, for example; the segment is unchanged.
        """
        return compress_segment(self._folder, ordinal, self._removing)

    @property
    def _newest(self) -> int:
        return next(reversed(self._last_of), 0)

    def _path(self, ordinal: int) -> Path:
        return segment_path(self._folder, ordinal)

    def _remove(self, ordinal: int, *, sample: bool) -> None:
        """Remove a segment, after writing a sample of its groups if asked; without room for that it stays."""
        path, target = self._path(ordinal), sample_path(self._folder, ordinal)
        try:
            if sample:
                with replacing(target, durable=True) as part, open_segment(path) as view:
                    groups = (frame for frame in scan(path) if frame.kind == GROUP and frame.seq % _SAMPLED == 1)
                    write_compressed(part, (view[frame.start : frame.end] for frame in groups))
            with self._removing:
                remove_segment(self._folder, ordinal)
        except FileNotFoundError:
            pass
        except OSError:
            if not sample:
                raise

    def _segments_before(self, before: int) -> list[int]:
        passed = []
        for ordinal, last in self._last_of.items():
            if last >= before or ordinal == self._newest:
                break
            passed.append(ordinal)
        return passed

    def widen(self) -> bool:
        """Read skipped segments too; return True if there were any."""
        first_ordinal = next(iter(self._last_of), None)
        self._open(0)
        return first_ordinal != next(iter(self._last_of), None)

    def _open(self, start: int) -> None:
        self._last_of.clear()
        for numbers in (self._segment, self._offset, self._length, self._crc, self.damage):
            del numbers[:]
        self._base = 0
        present = ordinals(self._folder)
        for ordinal in present[present.index(start) if start in present else 0 :]:
            self._open_segment(ordinal)
            if self._sync != "os":  # a killed writer's last records may be in memory only: what is found is to last
                fsync(self._path(ordinal))
        if present and self._sync != "os":
            fsync(self._folder)
        self._recovered = self.last

    def _open_segment(self, ordinal: int) -> None:
        oldest = not self._last_of
        self._last_of[ordinal] = self.last
        for frame in scan(self._path(ordinal), self.damage):
            if oldest and ordinal > 1:
                self._base = frame.seq - (frame.kind == GROUP)
                oldest = False
            if frame.kind == GROUP:
                self._index(ordinal, frame)
            else:
                self.has_snapshot |= b'"type":"snapshot"' in frame.note[:64]
            self._last_of[ordinal] = self.last

    def _index(self, ordinal: int, frame: Frame) -> None:
        while self.last < frame.seq - 1:  # offset 0 marks a gap that damage left
            self._extend(ordinal, 0, 0, 0)
        if self.last == frame.seq - 1:
            self._extend(ordinal, frame.body_at, frame.body_length, frame.body_crc)

    def _extend(self, ordinal: int, at: int, length: int, crc: int) -> None:
        self._segment.append(ordinal)
        self._offset.append(at)
        self._length.append(length)
        self._crc.append(crc)

    def _write(self, kind: int, seq: int, note: bytes, body: bytes, crc: int) -> int:
        """Write one frame; return its offset in the segment."""
        if self._broken:
            raise self._unwritable()
        head = pack(kind, seq, note, len(body), crc)
        size = len(head) + len(note) + len(body)
        try:
            descriptor = self._open_for(size)
        except OSError as error:
            raise self._unwritable(error) from error
        start = self._written
        try:
            written = os.writev(descriptor, [head, note, body])
            if written < size:
                unwritten = memoryview(head + note + body)[written:]
                while unwritten:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
            if self._sync == "always":
                sync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, start)  # half a record would hide later ones
            raise self._unwritable(error) from error
        self._written += size
        self.appended += 1
        if self._sync == "always":
            self.durable = self.appended
        return start

    def _open_for(self, size: int) -> int:
        if self._writer is not None and (not self._written or self._written + size <= self._segment_bytes):
            return self._writer
        if self._writer is not None:
            if self._sync == "group" and self.durable < self.appended:
                self._retired.append((self._writer, self.appended))
            else:
                os.close(self._writer)
            self._writer = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ordinal = self._newest + 1
        # O_EXCL: a second writer in the folder fails here instead of mixing its frames with ours.
        self._writer = os.open(self._path(ordinal), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._last_of[ordinal] = self.last
        self._written = 0
        self._new_segment = True
        if self._sync == "always":
            fsync(self._folder)
        return self._writer

    def _reader(self, ordinal: int) -> _Reader:
        reader = self._readers.get(ordinal)
        if reader is not None and not reader.compressed and ordinal != self._newest:
            if not plain_path(self._folder, ordinal).exists():  # compressed meanwhile: an open file keeps its space
                self._readers.pop(ordinal).close()
                reader = None
        if reader is None:
            if len(self._readers) >= _OPEN_SEGMENTS:
                self._readers.popitem(last=False)[1].close()
            try:
                reader = _Reader(self._path(ordinal))
            except FileNotFoundError:  # compressed between the look and the opening
                reader = _Reader(self._path(ordinal))
            self._readers[ordinal] = reader
        self._readers.move_to_end(ordinal)
        return reader

    def _unwritable(self, error: OSError | None = None) -> NotPossibleNow:
        if error is None:
            return NotPossibleNow(
                f"The disk of the journal in {self._folder} failed ({self._broken}): no more groups are accepted.",
                hint="Check that disk, then resume the run; no acknowledged group is lost.",
            )
        kind = DiskFull if error.errno in NO_ROOM else NotPossibleNow
        return kind(
            f"The journal in {self._folder} cannot be written: {error.strerror or error}.",
            hint="Free space on that disk; no acknowledged group is lost.",
        )


class _Reader:
    """Reads ranges of one segment; offsets count bytes of the plain segment."""

    def __init__(self, path: Path) -> None:
        self.compressed = path.suffix == ".zst"
        self._descriptor = -1 if self.compressed else os.open(path, os.O_RDONLY)
        self._view = CompressedSegment(path) if self.compressed else None

    def read(self, at: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, at) if self._view is None else self._view[at : at + length]

    def close(self) -> None:
        if self._view is None:
            os.close(self._descriptor)
        else:
            self._view.close()


def _first_needed(folder: Path) -> int:
    """Number of the first segment that is needed; 0 if it is not known."""
    try:
        return int((folder / _START).read_text("ascii"))
    except (OSError, ValueError):
        return 0
