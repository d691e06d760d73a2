"""The journal keeps every group once, survives what a crash leaves, and says so when it cannot write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from toprope.errors import Corrupt, NotFound, NotPossibleNow
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import Committed, Delivered, GroupNote, Record

NOTE = GroupNote(rows=8, lane="words", group_id="a", equal_score=True, tokens=24, oldest_version=3, at=12.5)


def filled(folder: Path, count: int = 3, **options: int) -> FileJournal:
    journal = FileJournal(folder, **options)
    for number in range(1, count + 1):
        assert journal.append(b"body %d" % number, GroupNote(rows=number)) == number
    return journal


def test_iterate_returns_groups_and_marks_in_order(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    assert journal.append(b'{"x":1}', NOTE) == 1
    journal.mark(Delivered(0, [1], 16))
    assert journal.append(b'{"x":2}', GroupNote(rows=1)) == 2
    journal.mark(Committed(1))
    expected = [
        Record(1, NOTE, 7),
        Record(1, Delivered(0, [1], 16), 0),
        Record(2, GroupNote(rows=1), 7),
        Record(2, Committed(1), 0),
    ]
    for reader in (journal, FileJournal(tmp_path)):
        assert list(reader.iterate()) == expected
        assert list(reader.iterate(1)) == expected[1:]
        assert [reader.read(seq) for seq in (1, 2)] == [b'{"x":1}', b'{"x":2}']
        with pytest.raises(NotFound, match="numbered 1 to 2"):
            reader.read(3)
        reader.close()


def test_reopened_journal_continues_numbers_in_new_segment(tmp_path: Path) -> None:
    filled(tmp_path).close()
    before = (tmp_path / "00000001.journal").read_bytes()
    again = FileJournal(tmp_path)
    assert again.last == 3
    assert again.append(b"later", NOTE) == 4
    assert (tmp_path / "00000001.journal").read_bytes() == before
    assert [again.read(seq) for seq in (1, 4)] == [b"body 1", b"later"]
    assert [record.seq for record in FileJournal(tmp_path).iterate(2)] == [3, 4]


def test_segments_are_bounded_and_hold_whole_records(tmp_path: Path) -> None:
    journal = filled(tmp_path, 200, segment_bytes=1000)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 10 and max(sizes) <= 1000
    assert [journal.read(seq) for seq in range(1, 201)] == [b"body %d" % seq for seq in range(1, 201)]
    assert len(list(FileJournal(tmp_path).iterate(150))) == 50
    assert len(os.listdir("/proc/self/fd")) < 100
    journal.close()


@pytest.mark.parametrize("cut", range(1, 60))
def test_torn_last_record_is_skipped(tmp_path: Path, cut: int) -> None:
    filled(tmp_path).close()
    path = tmp_path / "00000001.journal"
    whole = path.read_bytes()
    record = len(whole) // 3
    path.write_bytes(whole[: 2 * record + cut % record])
    again = FileJournal(tmp_path)
    assert [again.read(seq) for seq in range(1, again.last + 1)] == [b"body 1", b"body 2"]
    assert len(again.damage) == (cut % record > 0)
    assert again.append(b"new", NOTE) == 3
    assert FileJournal(tmp_path).read(3) == b"new"


def test_zeros_after_last_record_are_skipped(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / "00000001.journal"
    path.write_bytes(path.read_bytes()[:-3] + bytes(4096))
    assert FileJournal(tmp_path).last in (2, 3)
    path.write_bytes(path.read_bytes()[:-4096] + bytes(3))
    assert FileJournal(tmp_path).last == 2, "a body of the right length with the wrong bytes is torn"


def test_damage_in_the_middle_loses_one_record(tmp_path: Path) -> None:
    filled(tmp_path, 5).close()
    path = tmp_path / "00000001.journal"
    data = bytearray(path.read_bytes())
    record = len(data) // 5
    data[2 * record + 10] ^= 0xFF  # in the head of group 3
    data[4 * record - 1] ^= 0xFF  # in the body of group 4
    path.write_bytes(data)
    journal = FileJournal(tmp_path)
    assert journal.last == 5 and len(journal.damage) == 1
    assert [journal.read(seq) for seq in (1, 2, 5)] == [b"body 1", b"body 2", b"body 5"]
    for seq in (3, 4):
        with pytest.raises(Corrupt, match=f"Group {seq}"):
            journal.read(seq)


def test_full_disk_refuses_record_and_keeps_journal_whole(tmp_path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from toprope.errors import NotPossibleNow
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import GroupNote
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
journal = FileJournal(Path({str(tmp_path)!r}))
kept = 0
try:
    while kept < 1000:
        journal.append(b"x" * 900, GroupNote(rows=1))
        kept += 1
except NotPossibleNow as error:
    assert "cannot be written" in str(error)
journal.append(b"small", GroupNote(rows=1))
print(kept)
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    kept = int(result.stdout)
    journal = FileJournal(tmp_path)
    assert kept == 5 and journal.last == 6 and not journal.damage
    assert journal.read(6) == b"small"


def test_uncreatable_folder_is_an_error_with_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotPossibleNow, match="cannot be written"):
        FileJournal(tmp_path / "file" / "journal").append(b"x", NOTE)


def test_records_survive_sigkill(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import GroupNote
journal = FileJournal(Path({str(tmp_path)!r}))
for number in range(100):
    journal.append(b"x" * 5000, GroupNote(rows=1))
print(journal.last, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGKILL and result.stdout == "100\n"
    assert FileJournal(tmp_path).last == 100


def test_sync_setting_decides_about_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    filled(tmp_path / "os").close()
    assert not synced
    journal = FileJournal(tmp_path / "disk", sync="always")
    journal.append(b"x", NOTE)
    journal.mark(Committed(1))
    assert len(synced) == 2
    journal.close()


def test_memory_holds_positions_only(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    body = b"x" * 131_072
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(1000):
        journal.append(body, NOTE)
    assert process.memory_info().rss - before < 8 * 1024 * 1024, "131 MB were appended"
    journal.close()


def test_journal_is_private(tmp_path: Path) -> None:
    filled(tmp_path / "journal").close()
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
    assert (tmp_path / "journal" / "00000001.journal").stat().st_mode & 0o077 == 0
