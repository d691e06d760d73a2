"""A mirrored run whose server has no room, reaches its limit or starts again, or whose job is killed; scores."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.supervisor.launchers.test_mirror import Sides, make_checkpoint, same, sides, write_some
from tests.support.run_harness import RunHarness
from toprope.records.run.checkpoints import checkpoint_of
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Status
from toprope.supervisor import heartbeat
from toprope.supervisor.launchers import cluster
from toprope.supervisor.lock import RunLock
from toprope.supervisor.mirror import far, sender
from toprope.supervisor.mirror.receiver import Receiver
from toprope.supervisor.mirror.sender import Sender
from toprope.supervisor.mirror.wire import Wire

__all__ = ["sides"]  # the fixture


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "")


def end(sides: Sides) -> Status:
    ended = sides.status.model_copy(update={"state": "completed", "ended_at": 2.0})
    ended.write(sides.there)
    return ended


@pytest.mark.parametrize("last", [False, True])
def test_end_waits_for_files_without_room(sides: Sides, monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    write_some(sides.there, 1)
    ended = end(sides)
    with monkeypatch.context() as full:
        full.setattr(Receiver, "_extend", no_room)
        if last:
            with pytest.raises(OSError, match="no room for"):
                sides.sender._look(last=True)
        else:
            sides.sender._look(last=False)
    assert not sides.sender.arrived and Status.read(sides.here).ended_at is None
    sides.sender._look(last=True)  # a moment later, not after a minute
    assert sides.sender.arrived and Status.read(sides.here) == ended
    same(sides)


def test_checkpoint_without_room_comes_once_there_is_some(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_ROOM_S", 0.0)
    make_checkpoint(sides.there, 10)
    end(sides)
    sides.sender._look(last=True)
    with monkeypatch.context() as full:
        full.setattr(Receiver, "_extend", no_room)
        with pytest.raises(OSError, match="no room for the checkpoint"):
            sides.sender._look(last=True)
        sides.sender._look(last=False)
    for _ in range(3):
        sides.sender._look(last=True)
    assert sides.sender.arrived and checkpoint_of(sides.here).step == 10


def test_run_at_its_limit_still_tells_how_it_went(tmp_path: Path, harness: RunHarness) -> None:
    sides = Sides(tmp_path, harness, most_mb=1)
    try:
        sides.there.log("driver").write_bytes(b"x" * 940_000)
        sides.sender._look(last=False)
        with sides.there.log("driver").open("ab") as file:
            file.write(b"x" * 20_000)
        write_some(sides.there, 1)
        sides.there.results.write_bytes(b"{}" + b" " * 20_000)
        ended = end(sides)
        sides.sender._look(last=True)
        assert sides.sender.arrived and Status.read(sides.here) == ended
        for path in (sides.there.events, sides.there.metrics, sides.there.results, sides.there.evaluation("step-1")):
            assert (sides.here.path / path.relative_to(sides.there.path)).read_bytes() == path.read_bytes()
        assert sides.here.log("driver").stat().st_size == 940_000
        assert (sides.here.crew / cluster.FULL).exists()
    finally:
        sides.close()


def test_receiver_that_starts_again_takes_signs_of_life(sides: Sides) -> None:
    sides.sender._look(last=False)
    assert heartbeat.is_beating(sides.here)
    sides.close()
    lock = RunLock.acquire(sides.here.lock)
    assert lock is not None
    lock.write_holder(pid=1, since=1.0)  # as its program does first
    lock.release()
    assert not heartbeat.is_beating(sides.here)
    sides.serve()
    assert heartbeat.is_beating(sides.here)


def test_job_after_one_that_was_killed_while_it_fetched_erases_nothing(
    sides: Sides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(sides.here, 1)
    sides.close()
    sides.serve()  # a receiver that knows these files
    wire, purged = sides.wire(), RunFolder(tmp_path / "purged" / sides.here.run_id)
    assignment = wire.ask("POST", "/begin", json={"job": f"{sides.here.run_id}.1"}).json()
    held = {name: (sides.here.path / name).read_bytes() for name in assignment["files"]}
    fetch = Wire.fetch

    def cut(wire: Wire, path: str, target: Path) -> None:
        if path.startswith("journal/"):
            raise KeyboardInterrupt
        fetch(wire, path, target)

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Wire, "fetch", cut)
        far._fetch(wire, purged, assignment)
    far._fetch(wire, purged, assignment | {"delivery": 1})
    Sender(purged, wire, 1)._look(last=False)
    assert held == {name: (sides.here.path / name).read_bytes() for name in held}


def test_scores_on_standard_tasks_arrive_and_the_servers_own_stay(sides: Sides) -> None:
    scores = [folder.path / "standard" / "ask-1.json" for folder in (sides.there, sides.here)]
    own = scores[1].with_name("ask-2.json")
    for path in (scores[0], own):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    sides.close()
    sides.serve()
    sides.begin()._look(last=False)
    assert scores[1].read_text() == "{}" and own.exists()
