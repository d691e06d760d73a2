"""The ledger of experiments, a file."""

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from toprope.errors import NotFound, NotPossibleNow
from toprope.records.experiments import Experiment, Figures, Ledger


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.jsonl")


def entry(ledger, at=1.0, **fields):
    given = {"environment": "words", "hypothesis": "h", **fields}
    return Experiment(id=ledger.new_id(), at=at, updated_at=at, **given)


def test_reading_creates_no_file(ledger, tmp_path):
    assert ledger.entries() == [] and ledger.goals() == {}
    with pytest.raises(NotFound, match="none yet"):
        ledger.get("exp-none")
    assert list(tmp_path.iterdir()) == []


def test_entries_are_newest_first_in_latest_version(ledger):
    first, second = ledger.put(entry(ledger, 1.0)), ledger.put(entry(ledger, 2.0, environment="sums"))
    ledger.put(first.model_copy(update={"outcome": "better", "decision": "keep"}))
    assert [one.id for one in ledger.entries()] == [second.id, first.id]
    assert ledger.get(first.id).outcome == "better"
    assert [one.id for one in ledger.entries("words")] == [first.id]
    assert len(ledger.path.read_text().splitlines()) == 3
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    with pytest.raises(NotFound, match=second.id):
        ledger.get("exp-none")


def test_amendments_follow_each_other(ledger):
    identity = ledger.put(entry(ledger)).id

    def add(run):
        with ledger.amending():
            found = ledger.get(identity)
            ledger.put(found.model_copy(update={"runs": [*found.runs, run]}))

    runs = [f"run-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, runs))
    assert sorted(ledger.get(identity).runs) == runs


def test_entries_and_goals_are_read_back(ledger):
    kept = ledger.put(entry(ledger, figures={"r": Figures(state="completed", accuracy=0.5, tasks=9)}))
    ledger.set_goal("words", "half of them")
    ledger.set_goal("words", "all of them")
    assert ledger.entries() == [kept]
    assert ledger.goals() == {"words": "all of them"}


def test_replaced_file_is_read(ledger, tmp_path):
    ledger.put(entry(ledger))
    other = Ledger(tmp_path / "other.jsonl")
    moved = [other.put(entry(other, number)) for number in (1.0, 2.0)]
    other.path.replace(ledger.path)
    assert [one.id for one in ledger.entries()] == [one.id for one in reversed(moved)]
    ledger.path.unlink()
    assert ledger.entries() == []


def test_torn_and_foreign_lines_are_skipped(ledger):
    first = ledger.put(entry(ledger, 1.0))
    with ledger.path.open("a") as file:
        file.write("no json\n" + json.dumps({"v": 9, "op": "newer"}) + '\n{"v":1,"op":"experiment","id":"exp-to')
    assert [one.id for one in ledger.entries()] == [first.id]
    second = ledger.put(entry(ledger, 2.0))
    assert [one.id for one in ledger.entries()] == [second.id, first.id]


def _add(path, count):
    ledger = Ledger(path / "ledger.jsonl")
    for number in range(count):
        ledger.put(entry(ledger, float(number)))


def test_concurrent_writers_lose_nothing(ledger, tmp_path):
    # Nothing is shared between two ledgers but the files, in threads as in processes.
    with ThreadPoolExecutor(3) as writers:
        for done in [writers.submit(_add, tmp_path, 10) for _ in range(3)]:
            done.result(60)
    assert len(ledger.path.read_text().splitlines()) == 30
    assert len(ledger.entries()) == len({one.id for one in ledger.entries()}) == 30


def test_partly_written_line_does_not_count(ledger, monkeypatch):
    kept, write = ledger.put(entry(ledger)), os.write
    lost = entry(ledger, 2.0)

    def fill(descriptor: int, data: bytes) -> int:
        if len(data) < 40 or not data.startswith(b"{"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:40])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(NotPossibleNow, match="cannot be written: No space left"):
        ledger.put(lost)
    monkeypatch.undo()
    later = ledger.put(entry(ledger, 3.0))
    assert [one.id for one in ledger.entries()] == [later.id, kept.id]
