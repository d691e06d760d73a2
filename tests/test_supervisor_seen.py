"""Statuses that are remembered: what was read before is not read again, and what changed always is."""

import os
import time

import pytest
from tools_house import become, make_workshop, step

from toprope.errors import NotFound
from toprope.records.folder import RunFolder
from toprope.records.status import Status
from toprope.supervisor.seen import SeenStatuses

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
    folder, seen = made(tmp_path), SeenStatuses()
    age(folder)
    first = seen.read(folder)
    assert seen.read(folder) is first
    step(folder, 7)
    assert seen.read(folder).progress["step"] == 7


def test_what_was_just_written_is_not_trusted_to_stay(tmp_path):
    folder, seen = made(tmp_path), SeenStatuses()
    assert seen.read(folder) is not seen.read(folder)


def test_what_is_gone_is_forgotten_and_said_to_be(tmp_path):
    folder, seen = made(tmp_path), SeenStatuses()
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
