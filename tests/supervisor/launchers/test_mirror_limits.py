"""A mirrored run whose server has no room for a while, reaches its limit or starts again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.supervisor.launchers.test_mirror import Sides, make_checkpoint, same, sides, write_some
from tests.support.run_harness import RunHarness
from toprope.records.run.checkpoints import checkpoint_of
from toprope.records.run.status import Status
from toprope.supervisor import heartbeat
from toprope.supervisor.launchers import cluster
from toprope.supervisor.lock import RunLock
from toprope.supervisor.mirror import sender
from toprope.supervisor.mirror.receiver import Receiver

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
