"""Closed segments are compressed without loss at any moment, and every reader reads both forms."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from toprope.errors import Corrupt
from toprope.records.journal import file_journal, segments
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.frames import GROUP, scan
from toprope.records.journal.marks import Committed, GroupNote, Snapshot
from toprope.records.journal.segments import (
    compress_segment,
    compressed_path,
    open_segment,
    ordinals,
    plain_bytes,
    plain_path,
    sample_path,
    sampled_ordinals,
    segment_path,
)

_GROUPS = 60


def _bodies(seed: int = 0) -> list[bytes]:
    chooser = random.Random(seed)
    return [
        b'{"tokens":[[%s]]}' % b",".join(b"%d" % chooser.randrange(300) for _ in range(400)) for _ in range(_GROUPS)
    ]


def _filled(folder: Path, segment_bytes: int = 20_000) -> FileJournal:
    journal = FileJournal(folder, segment_bytes=segment_bytes)
    for number, body in enumerate(_bodies(), 1):
        journal.append(body, GroupNote(rows=number))
        if number % 7 == 0:
            journal.mark(Committed(number))
    return journal


def _everything(folder: Path) -> tuple[list[object], list[bytes], list[str]]:
    """All records, all bodies and the damage, as a new reader finds them."""
    journal = FileJournal(folder)
    try:
        bodies = [journal.read(seq) for seq in range(journal.first, journal.last + 1)]
        return list(journal.iterate()), bodies, list(journal.damage)
    finally:
        journal.close()


def _compress_all(journal: FileJournal) -> int:
    return sum(journal.compress(ordinal) for ordinal in journal.compressible())


def test_readers_find_the_same_records_in_compressed_segments(tmp_path: Path) -> None:
    journal = _filled(tmp_path)
    before, size = _everything(tmp_path), sum(path.stat().st_size for path in tmp_path.iterdir())
    count = len(ordinals(tmp_path))
    assert count > 3
    assert _compress_all(journal) == count - 1, "the segment that is written stays plain"
    assert not journal.compressible()
    assert [path.name for path in tmp_path.glob("*.journal")] == [f"{count:08d}.journal"]
    assert _everything(tmp_path) == before
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 0.6 * size
    assert [journal.read(seq) for seq in (40, 2, _GROUPS, 1)] == [_bodies()[seq - 1] for seq in (40, 2, _GROUPS, 1)]
    assert journal.append(b"later", GroupNote(rows=1)) == _GROUPS + 1
    journal.close()
    _compress_all(journal)
    assert not list(tmp_path.glob("*.journal"))
    assert _everything(tmp_path)[1] == [*_bodies(), b"later"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads the descriptors of this process from /proc")
def test_open_reader_does_not_keep_the_space_of_a_compressed_segment(tmp_path: Path) -> None:
    journal = _filled(tmp_path)
    assert journal.read(1) == _bodies()[0]
    _compress_all(journal)
    assert journal.read(1) == _bodies()[0]
    held = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the folder that is listed
            held.append(os.readlink(descriptor))
    journal.close()
    assert not [path for path in held if str(tmp_path) in path and path.endswith("(deleted)")]


def test_readers_at_their_limit_survive_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_journal, "_OPEN_SEGMENTS", 2)
    journal = _filled(tmp_path)
    assert len(ordinals(tmp_path)) > 2
    for seq in (1, _GROUPS):
        journal.read(seq)
    _compress_all(journal)
    assert journal.read(1) == _bodies()[0], "its descriptor is closed once"
    journal.close()


@pytest.mark.parametrize("step", ["write", "read back", "fsync", "replace", "fsync folder", "unlink"])
def test_crash_at_any_step_of_compression_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A crash is an exception that nothing handles; files stay as they are at that moment."""

    class Crash(BaseException):
        pass

    _filled(tmp_path).close()
    before = _everything(tmp_path)
    fsyncs = []

    def crash(*_: object, **__: object) -> None:
        raise Crash

    def crash_at_fsync(path: Path) -> None:
        fsyncs.append(path)
        if (len(fsyncs) == 1) == (step == "fsync"):
            raise Crash

    with monkeypatch.context() as patch:
        unlink = Path.unlink

        def crash_at_unlink(path: Path, missing_ok: bool = False) -> None:
            if path.suffix == ".part":
                return  # a killed process cleans nothing up
            if step == "unlink":
                raise Crash
            unlink(path, missing_ok=missing_ok)

        patch.setattr(Path, "unlink", crash_at_unlink)
        if step == "write":
            import pyzstd

            patch.setattr(pyzstd.SeekableZstdFile, "write", crash)
        elif step == "read back":
            patch.setattr(segments, "CompressedSegment", crash)
        elif step == "replace":
            patch.setattr(os, "replace", crash)
        elif step.startswith("fsync"):
            patch.setattr(segments, "fsync", crash_at_fsync)
        with pytest.raises(Crash):
            compress_segment(tmp_path, 2, threading.Lock())
    assert plain_path(tmp_path, 2).exists(), "the plain segment is removed last"
    assert _everything(tmp_path) == before
    if step in ("fsync folder", "unlink"):
        plain_path(tmp_path, 2).unlink()  # as if the crash had come right after it
        assert _everything(tmp_path) == before
        return
    journal = FileJournal(tmp_path)
    _compress_all(journal)
    assert [path for path in tmp_path.iterdir() if not path.name.endswith(".journal.zst")] == []
    assert _everything(tmp_path) == before


def test_cut_compressed_file_beside_its_plain_segment_does_no_harm(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    before = _everything(tmp_path)
    compressed_path(tmp_path, 1).write_bytes(b"\x28\xb5\x2f\xfd cut")
    assert _everything(tmp_path) == before
    journal = FileJournal(tmp_path)
    _compress_all(journal)
    assert _everything(tmp_path) == before


def test_torn_end_and_damage_are_found_in_compressed_segments_too(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    last = max(ordinals(tmp_path))
    with plain_path(tmp_path, last).open("r+b") as file:
        file.truncate(plain_path(tmp_path, last).stat().st_size - 5)
    with plain_path(tmp_path, 2).open("r+b") as file:
        file.seek(3000)
        file.write(b"\0" * 2000)

    def found() -> tuple[list[object], set[int]]:
        journal = FileJournal(tmp_path)
        unreadable = set()
        for seq in range(journal.first, journal.last + 1):
            try:
                journal.read(seq)
            except Corrupt:
                unreadable.add(seq)
        assert len(journal.damage) == 2
        records = list(journal.iterate())
        journal.close()
        return records, unreadable

    before = found()
    journal = FileJournal(tmp_path)
    _compress_all(journal)
    assert not list(tmp_path.glob("*.journal"))
    assert found() == before


def test_damaged_compressed_file_costs_its_groups_only(tmp_path: Path) -> None:
    journal = _filled(tmp_path)
    journal.close()
    _compress_all(journal)
    damaged = compressed_path(tmp_path, 2)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 255
    damaged.write_bytes(data)
    reader = FileJournal(tmp_path)
    assert reader.damage
    bodies = {}
    for seq in range(1, _GROUPS + 1):
        try:
            bodies[seq] = reader.read(seq)
        except Corrupt:
            continue
    assert bodies.items() < dict(enumerate(_bodies(), 1)).items()
    assert len(bodies) > _GROUPS // 2


def test_offsets_count_plain_bytes_and_the_library_restores_the_file(tmp_path: Path) -> None:
    import pyzstd

    _filled(tmp_path).close()
    plain = plain_path(tmp_path, 1).read_bytes()
    frames = list(scan(plain_path(tmp_path, 1)))
    assert compress_segment(tmp_path, 1, threading.Lock())
    path = segment_path(tmp_path, 1)
    assert path == compressed_path(tmp_path, 1)
    assert pyzstd.decompress(path.read_bytes()) == plain
    assert plain_bytes(path) == len(plain)
    assert list(scan(path)) == frames
    assert list(scan(path, start=frames[3].start)) == frames[3:]
    with open_segment(path) as view:
        assert view[frames[5].start : frames[5].end] == plain[frames[5].start : frames[5].end]


def test_removed_segment_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint removes a segment while it is being compressed."""
    journal = _filled(tmp_path)
    written = segments.write_compressed

    def slow(path: Path, chunks: object) -> None:
        written(path, chunks)  # type: ignore[arg-type]
        journal.leave(_GROUPS, Snapshot(), keep="none")

    monkeypatch.setattr(segments, "write_compressed", slow)
    assert journal.compress(1) is False
    journal.close()
    assert ordinals(tmp_path) == [max(ordinals(tmp_path))]
    assert not list(tmp_path.glob(".*"))


def test_sample_keeps_every_sixteenth_group_of_left_segments(tmp_path: Path) -> None:
    journal = _filled(tmp_path)
    newest = max(ordinals(tmp_path))
    left = [frame.seq for ordinal in range(1, newest) for frame in scan(plain_path(tmp_path, ordinal))]
    assert journal.compress(1), "compressed segments are sampled like plain ones"
    journal.leave(_GROUPS, Snapshot(), keep="sample")
    assert ordinals(tmp_path) == [newest]
    kept = {
        frame.seq: view[frame.body_at : frame.body_at + frame.body_length]
        for ordinal in sampled_ordinals(tmp_path)
        for path in [sample_path(tmp_path, ordinal)]
        for view in [_content(path)]
        for frame in scan(path)
        if frame.kind == GROUP
    }
    assert kept == {seq: _bodies()[seq - 1] for seq in range(1, max(left) + 1, 16)}
    assert journal.append(b"later", GroupNote(rows=1)) == _GROUPS + 1
    journal.close()
    assert FileJournal(tmp_path).first > 1, "the API treats a sampled segment as removed"


def _content(path: Path) -> bytes:
    with open_segment(path) as view:
        return bytes(view[0 : len(view)])
