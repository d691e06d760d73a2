"""A full disk pauses a run: the watcher, the keeper's own files, and lines that wait for room."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import tempfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import records
from toprope.errors import DiskFull, NotPossibleNow
from toprope.records.index.database import Index
from toprope.records.messages import Checkpointed, NoRoom
from toprope.records.run.folder import RunFolder
from toprope.records.run.full_disk import Ballast, PatientLines
from toprope.records.run.status import Status, read_events
from toprope.supervisor.capacity.reservations import Machine, Reservations
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.runs.orders import take_orders, write_stop_order
from toprope.supervisor.watchers import disk
from toprope.supervisor.watchers.disk import DiskWatcher, default_floor

Usage = namedtuple("Usage", "total used free")
MB = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "run-1")


class Control:
    """Stands for a RunControl and records the calls."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.calls, self.findings = folder, [], []

    def record_event(self, kind: str, **data: Any) -> None:
        if kind == "finding":
            self.findings.append((data["rule"], data["level"]))
        else:
            self.calls.append((kind, data["what"]))

    def pause(self, reason: str) -> None:
        self.calls.append(("pause", reason))

    def proceed(self) -> None:
        self.calls.append(("proceed", ""))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of 10 GB whose free space the test sets."""
    now = SimpleNamespace(bytes=5_000 * MB)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Usage(10_000 * MB, 0, now.bytes))
    return now


def test_run_pauses_below_floor_and_proceeds_above_it(folder: RunFolder, free: SimpleNamespace) -> None:
    control = Control(folder)
    watch = DiskWatcher(control)
    watch.on_tick(0.0)
    assert control.calls == []
    free.bytes = 199 * MB
    watch.on_tick(1.0)
    watch.on_tick(2.0)
    assert [kind for kind, _ in control.calls] == ["pause"] and "199.0 MB left" in control.calls[0][1]
    free.bytes = 201 * MB
    watch.on_tick(3.0)
    assert len(control.calls) == 1, "not to be paused again at once"
    free.bytes = 300 * MB
    watch.on_tick(4.0)
    assert control.calls[1:] == [("proceed", "")]
    assert control.findings == [("disk_full", "critical"), ("disk_full", "over")]


def test_floor_of_owner_plus_room_for_checkpoint(folder: RunFolder, free: SimpleNamespace) -> None:
    Reservations(folder.path.parent).announce(Machine(threads=1, disk_floor=50 * MB))
    control = Control(folder)
    watch = DiskWatcher(control)
    free.bytes = 60 * MB
    watch.on_tick(0.0)
    assert control.calls == []
    path = folder.checkpoints / "step-000001"
    path.mkdir()
    with (path / "weights").open("wb") as file:
        file.truncate(20 * MB)
    watch.on_report("trainer", Checkpointed(1, "checkpoints/step-000001", 2))
    watch.on_tick(1.0)
    assert [kind for kind, _ in control.calls] == ["pause"]
    assert (default_floor(1_000 * MB), default_floor(10**15)) == (20 * MB, 500 * MB)


def test_no_room_report_pauses_run_for_a_while(folder: RunFolder, free: SimpleNamespace) -> None:
    control = Control(folder)
    watch = DiskWatcher(control)
    watch.on_report("trainer", NoRoom("the checkpoint of step 3 waits"))
    watch.on_tick(0.0)
    assert control.calls[0][0] == "pause" and "the checkpoint of step 3 waits" in control.calls[0][1]
    watch.on_tick(10.0)
    assert len(control.calls) == 1
    watch.on_tick(30.0)
    assert control.calls[-1] == ("proceed", "")


class FullDisk:
    """Fails writes while `full`, after `left` more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.left, self._write = False, None, os.write
        monkeypatch.setattr(os, "write", self.write)
        real = tempfile.mkstemp

        def mkstemp(*arguments: Any, **options: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        monkeypatch.setattr(tempfile, "mkstemp", mkstemp)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.full and not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.full:
            data, self.left = bytes(data)[: self.left], 0
        return self._write(descriptor, data)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


@pytest.mark.parametrize("left", [0, 1, 5, 8, 9])
def test_lines_wait_for_room_without_tearing_or_repetition(tmp_path: Path, full: FullDisk, left: int) -> None:
    path = tmp_path / "lines"
    lines = PatientLines(path)
    assert lines.append(b'{"n": 1}\n')
    full.full, full.left = True, left
    for number in (2, 3):
        assert not lines.append(b'{"n": %d}\n' % number) or left == 9
    assert lines.behind >= 1
    full.full = False
    assert lines.catch_up() and lines.behind == 0
    found = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert found == ['{"n": 1}', '{"n": 2}', '{"n": 3}']


def test_waiting_lines_are_bounded_and_other_errors_raise(tmp_path: Path, full: FullDisk) -> None:
    lines = PatientLines(tmp_path / "lines", most=3)
    full.full = True
    for number in range(10):
        lines.append(b"%d\n" % number)
    full.full = False
    lines.catch_up()
    assert (tmp_path / "lines").read_text() == "7\n8\n9\n"
    with pytest.raises(NotADirectoryError):
        PatientLines(tmp_path / "lines" / "x").append(b"x\n")


def test_ballast_is_dropped_once(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "ballast", 5000)
    assert (tmp_path / "ballast").stat().st_size == 5000
    assert ballast.drop() and not ballast.drop()
    ballast.take()
    assert ballast.drop()


def test_status_writer_catches_up_after_full_disk(folder: RunFolder, full: FullDisk) -> None:
    status = records.status()
    status.write(folder)

    async def live() -> None:
        writer = StatusWriter(folder, status)
        full.full = True
        writer.enter("paused", "the disk is full")
        writer.record_event("finding", rule="disk_full")
        assert writer.state == "paused" and Status.read(folder).state == "training"
        full.full = False
        async with asyncio.timeout(20):
            while Status.read(folder).state != "paused":
                await asyncio.sleep(0.01)
        assert [event.kind for event in read_events(folder.events)] == ["state", "finding"]
        full.full = True
        writer.enter("training")
        full.full = False
        writer.write_final()
        assert Status.read(folder).state == "training"
        assert [event.seq for event in read_events(folder.events)] == [1, 2, 3]

    asyncio.run(live())


def test_status_writer_drops_ballast_on_full_disk(
    folder: RunFolder, full: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = records.status()
    status.write(folder)

    async def live() -> None:
        writer = StatusWriter(folder, status)
        full.full = True
        ballast = folder.crew / "ballast"
        unlink = os.unlink

        def make_room(path: Any, *arguments: Any, **options: Any) -> None:
            unlink(path, *arguments, **options)
            full.full = full.full and os.fspath(path) != str(ballast)

        monkeypatch.setattr(os, "unlink", make_room)
        assert ballast.exists()
        writer.enter("paused", "the disk is full")
        assert Status.read(folder).state == "paused" and not ballast.exists()

    asyncio.run(live())


def test_stop_order_needs_no_room(folder: RunFolder, full: FullDisk) -> None:
    full.full = True
    write_stop_order(folder, 3.0)
    full.full = False
    write_stop_order(folder, 3.0)
    orders = take_orders(folder, 1)
    assert sorted(str(stop.grace_s) for stop in orders.stops) == ["3.0", "None"] and not orders.complaints
    assert list(folder.orders.iterdir()) == []


def test_index_is_read_without_room_for_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(tmp_path / "index.db")
    draft = index.create_draft("p", {"name": "e"}, [], {})
    real = sqlite3.connect

    class NoRoomToRead(sqlite3.Connection):
        def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
            if not self.told:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(statement, *arguments)

    def connect(name: Any, **options: Any) -> sqlite3.Connection:
        db = real(name, factory=NoRoomToRead, **options)
        db.told = "immutable" in str(name)  # type: ignore[attr-defined]
        return db

    monkeypatch.setattr("toprope.records.index.database.sqlite3.connect", connect)
    monkeypatch.setattr("toprope.records.index.database.shutil.disk_usage", lambda _: Usage(1, 1, 0))
    assert index.draft(draft.id).id == draft.id
    with pytest.raises(DiskFull, match="disk seems to be full"):
        index.create_draft("p", {}, [], {})
    monkeypatch.setattr("toprope.records.index.database.shutil.disk_usage", lambda _: Usage(1, 1, 5_000 * MB))
    with pytest.raises(NotPossibleNow, match="disk I/O error") as raised:
        index.draft(draft.id)
    assert not isinstance(raised.value, DiskFull)
    monkeypatch.setattr("toprope.records.index.database.os.access", lambda *_: False)  # mounted read-only
    assert index.draft(draft.id).id == draft.id
