"""The caches return unchanged statuses and events without reading them again."""

import os
import time

import pytest

from tests.support import records
from tests.support.tools_house import become, make_workshop, step
from toprope.errors import NotFound
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import EventLog, Status
from toprope.supervisor.runs import status_cache as module
from toprope.supervisor.runs.status_cache import EventCache, StatusCache

RUN = "run-1"


def made(path, run_id=RUN, state="training", **fields):
    folder = RunFolder.create(path, run_id)
    records.status(run_id, state, **fields).write(folder)
    return folder


def age(folder):
    """Set the time of the status file back by a minute."""
    long_ago = time.time() - 60
    os.utime(folder.status, (long_ago, long_ago))


def test_status_is_read_again_only_after_change(tmp_path):
    folder, cache = made(tmp_path), StatusCache()
    age(folder)
    first = cache.read(folder)
    assert cache.read(folder) is first
    step(folder, 7)
    assert cache.read(folder).progress["step"] == 7


def test_recent_status_is_not_cached(tmp_path):
    folder, cache = made(tmp_path), StatusCache()
    assert cache.read(folder) is not cache.read(folder)


def test_removed_run_is_forgotten(tmp_path):
    folder, cache = made(tmp_path, state="stopped", ended_at=2.0), StatusCache()
    age(folder)
    cache.read(folder)
    assert list(cache.unchanged_ended(tmp_path)) == [RUN]
    cache.retain(set())
    assert cache.unchanged_ended(tmp_path) == {}
    folder.status.unlink()
    with pytest.raises(NotFound):
        cache.read(folder)


def test_ended_runs_are_listed_from_cache(tmp_path, monkeypatch):
    shop, launcher = make_workshop(tmp_path)
    folders = [made(shop.runs.path, f"run-{n}", "stopped", ended_at=float(n)) for n in range(3)]
    for folder in folders:
        age(folder)
    assert len(shop.statuses()) == 3
    reads = []
    read = Status.read.__func__
    monkeypatch.setattr(
        Status, "read", classmethod(lambda cls, folder: reads.append(folder.run_id) or read(cls, folder))
    )
    assert [run.state for run in shop.statuses()] == ["stopped"] * 3
    assert reads == []
    become(folders[1], "queued", ended_at=None)
    assert sorted(run.state for run in shop.statuses()) == ["lost", "stopped", "stopped"]
    assert set(reads) == {"run-1"}
    launcher.close()


def test_only_new_events_are_read(tmp_path, monkeypatch):
    folder, cache = made(tmp_path), EventCache()
    log = EventLog(folder)
    for number in range(4):
        log.append("evaluation", label=str(number))
    assert [event.seq for event in cache.read(folder, 2)] == [3, 4]
    asked = []
    read = module.read_events
    monkeypatch.setattr(module, "read_events", lambda path, after: asked.append(after) or read(path, after))
    assert [event.seq for event in cache.read(folder, 3)] == [4]
    assert asked == []
    log.append("end")
    assert [event.seq for event in cache.read(folder, 3)] == [4, 5]
    assert [event.seq for event in cache.read(folder)] == [1, 2, 3, 4, 5]
    assert asked == [4, 0]


def test_half_written_event_is_read_when_complete(tmp_path):
    folder, cache = made(tmp_path), EventCache()
    log = EventLog(folder)
    log.append("evaluation")
    log.append("finding", what="x")
    whole = folder.events.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    folder.events.write_bytes(whole[: -len(line) // 2])
    assert [event.seq for event in cache.read(folder)] == [1]
    with folder.events.open("ab") as file:
        file.write(whole[-len(line) // 2 :])
    assert [event.seq for event in cache.read(folder)] == [1, 2]


def test_event_cache_is_bounded(tmp_path, monkeypatch):
    cache, reads, read = EventCache(most=40), [], module.read_events
    monkeypatch.setattr(module, "read_events", lambda path, after: reads.append(path) or read(path, after))
    folders = [made(tmp_path, f"run-{n}") for n in range(12)]
    for folder in folders:
        log = EventLog(folder)
        for _ in range(3):
            log.append("evaluation")
        assert len(cache.read(folder)) == 3
    reads.clear()
    assert all(len(cache.read(folder)) == 3 for folder in reversed(folders))
    # Each run takes four places, so that ten of twelve stay in the cache.
    assert len(reads) == 2


def test_event_cache_keeps_the_newest_events_of_a_long_run(tmp_path, monkeypatch):
    folder, cache, asked, read = made(tmp_path), EventCache(most=50), [], module.read_events
    monkeypatch.setattr(module, "read_events", lambda path, after: asked.append(after) or read(path, after))
    log = EventLog(folder)
    for _ in range(12):
        log.append("evaluation")
    assert [event.seq for event in cache.read(folder)] == [*range(1, 13)]
    log.append("evaluation")
    assert [event.seq for event in cache.read(folder, 10)] == [11, 12, 13]
    assert asked == [0, 12]
    assert [event.seq for event in cache.read(folder, 2)] == [*range(3, 14)]
    assert asked == [0, 12, 2]
