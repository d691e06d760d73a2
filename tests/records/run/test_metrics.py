"""metrics.jsonl is read in bounded time whatever its size, and events from their end."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from toprope.errors import TooNew
from toprope.records.run import status
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import header, last_row, read_history, read_rows
from toprope.records.run.status import EventLog, read_events

PADDING = "x" * 500


def write_rows(path: Path, steps: range, mode: str = "wb") -> None:
    with path.open(mode) as file:
        file.write(header(1))
        for step in steps:
            file.write(b'{"step": %d, "reward": %.4f, "note": "%s"}\n' % (step, step / 1e6, PADDING.encode()))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60,000 rows, 33 MB: read alike to 1,000,000, since only places in it are."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    write_rows(path, range(1, 60_001))
    return path


def test_large_file_is_sampled_evenly_with_newest_row(large: Path) -> None:
    found = read_history(large, 200)
    steps = [row["step"] for row in found.rows]
    assert not found.whole
    assert 190 <= len(steps) <= 200 and steps[0] == 1 and steps[-1] == 60_000 == found.last["step"]
    distances = [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)]
    assert max(distances) < 2.0 * 60_000 / 199
    assert last_row(large)["step"] == 60_000


def test_reading_large_file_takes_milliseconds(large: Path) -> None:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        read_history(large)
        took.append(time.perf_counter() - began)
    # All of it takes some hundred milliseconds; 5 is usual.
    assert min(took) < 0.05


def test_small_file_is_read_whole(tmp_path: Path) -> None:
    write_rows(tmp_path / "m", range(1, 101))
    found = read_history(tmp_path / "m", 10)
    assert found.whole and [row["step"] for row in found.rows] == list(range(1, 101))
    assert read_history(tmp_path / "none").rows == [] and last_row(tmp_path / "none") == {}


def test_resumed_attempt_replaces_rows(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_rows(path, range(1, 8))
    write_rows(path, range(4, 6), "ab")
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]
    write_rows(path, range(6, 20_000), "ab")
    write_rows(path, range(5_000, 6_000), "ab")
    steps = [row["step"] for row in read_history(path, 300).rows]
    assert steps == sorted(set(steps)) and steps[-1] == 5_999


def test_torn_and_long_rows_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_rows(path, range(1, 4_000))
    with path.open("ab") as file:
        file.write(b'{"step": 4000, "note": "' + b"y" * 50_000 + b'"}\n{"step": 4001, "rew')
    assert last_row(path)["step"] == 4_000
    assert read_history(path, 50).last["step"] == 4_000


@pytest.mark.parametrize("read", [read_rows, read_history, last_row])
def test_newer_file_is_refused(tmp_path: Path, read) -> None:
    (tmp_path / "m").write_text('{"version": 99}\n{"mark": 3}\n')
    with pytest.raises(TooNew, match="Update Toprope"):
        read(tmp_path / "m")


def test_events_are_read_from_the_end_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "run-a")
    log = EventLog(folder)
    for number in range(3_000):
        log.append("checkpoint" if number % 10 else "state", path="p" * 60)
    read = []
    decode = status._decode
    monkeypatch.setattr(status, "_decode", lambda line: read.append(line) or decode(line))
    assert [event.seq for event in read_events(folder.events, 2_990)] == list(range(2_991, 3_001))
    assert len(read) < 500
    assert [event.seq for event in read_events(folder.events, 2_970, ["state"])] == [2_971, 2_981, 2_991]
    assert list(read_events(folder.events, 3_000)) == []
    monkeypatch.undo()
    assert len(list(read_events(folder.events))) == 3_000
    assert EventLog(folder).append("end").seq == 3_001


def test_events_of_one_kind_are_read_without_holding_the_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    EventLog(folder).append("finding", what="x")
    line = folder.events.read_bytes()
    with folder.events.open("ab") as file:
        for seq in range(2, 20_000):
            file.write(line.replace(b'"seq":1', b'"seq":%d' % seq).replace(b'"finding"', b'"warning"'))
    tracemalloc.start()
    try:
        assert [event.seq for event in read_events(folder.events, kinds=["finding"])] == [1]
        assert tracemalloc.get_traced_memory()[1] < folder.events.stat().st_size / 10
    finally:
        tracemalloc.stop()
