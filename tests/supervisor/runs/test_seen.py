"""Statuses that are remembered: what was read before is not read again, and what changed always is."""

import os
import time

import pytest

from tests.support.tools_house import become, make_workshop, step
from toprope.errors import NotFound
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import EventLog, Status
from toprope.supervisor.runs import status_cache as module
from toprope.supervisor.runs.status_cache import EventCache, StatusCache

RUN = "run-1"


def made(path, run_id=RUN, state="training", **fields):
    folder = RunFolder.create(path, run_id)
    status = Status(
        run_id=run_id, kind="train", environment="e", state=state, created_at=1.0, since=1.0, updated_at=1.0, **fields
    )
    status.write(folder)
    return folder


def age(folder):
    """As if it had been written a while ago."""
    long_ago = time.time() - 60
    os.utime(folder.status, (long_ago, long_ago))


def test_a_status_is_read_once_until_its_file_is_another(tmp_path):
    folder, seen = made(tmp_path), StatusCache()
    age(folder)
    first = seen.read(folder)
    assert seen.read(folder) is first
    step(folder, 7)
    assert seen.read(folder).progress["step"] == 7


def test_what_was_just_written_is_not_trusted_to_stay(tmp_path):
    folder, seen = made(tmp_path), StatusCache()
    assert seen.read(folder) is not seen.read(folder)


def test_what_is_gone_is_forgotten_and_said_to_be(tmp_path):
    folder, seen = made(tmp_path), StatusCache()
    age(folder)
    seen.read(folder)
    folder.status.unlink()
    with pytest.raises(NotFound):
        seen.read(folder)
    seen.keep_only(set())
    assert seen._known == {}


def test_runs_that_ended_are_listed_without_reading_them_again_and_resumed_ones_anew(tmp_path, monkeypatch):
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


def test_events_are_read_on_from_those_that_are_known(tmp_path, monkeypatch):
    folder, seen = made(tmp_path), EventCache()
    log = EventLog(folder)
    for number in range(4):
        log.append("evaluation", label=str(number))
    assert [event.seq for event in seen.read(folder, 2)] == [3, 4]
    asked = []
    read = module.read_events
    monkeypatch.setattr(module, "read_events", lambda path, after: asked.append(after) or read(path, after))
    assert [event.seq for event in seen.read(folder, 3)] == [4]
    assert asked == []
    log.append("end")
    assert [event.seq for event in seen.read(folder, 3)] == [4, 5]
    assert [event.seq for event in seen.read(folder)] == [1, 2, 3, 4, 5]
    assert asked == [4, 0]


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    folder, seen = made(tmp_path), EventCache()
    log = EventLog(folder)
    log.append("evaluation")
    line = log.append("finding", what="x").model_dump_json() + "\n"
    whole = folder.events.read_bytes()
    folder.events.write_bytes(whole[: -len(line) // 2])
    assert [event.seq for event in seen.read(folder)] == [1]
    with folder.events.open("ab") as file:
        file.write(whole[-len(line) // 2 :])
    assert [event.seq for event in seen.read(folder)] == [1, 2]


def test_no_more_events_are_kept_than_there_is_room_for(tmp_path):
    seen = EventCache(most=10)
    folders = [made(tmp_path, f"run-{n}") for n in range(6)]
    for folder in folders:
        log = EventLog(folder)
        for _ in range(3):
            log.append("evaluation")
        assert len(seen.read(folder)) == 3
    assert sum(len(known.events) + 1 for known in seen._known.values()) <= 10
    assert all(len(seen.read(folder)) == 3 for folder in folders)
