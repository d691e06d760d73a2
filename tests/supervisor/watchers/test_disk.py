"""A full disk costs a pause: the watcher, the keeper's own writing, and lines that wait."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toprope.errors import DiskFull, NotPossibleNow
from toprope.records.index.database import Index
from toprope.records.messages import Checkpointed, NoRoom, Warned
from toprope.records.run import folder as records_folder
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


class Hands:
    """What a watcher may do, written down."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.said, self.findings = folder, [], []

    def event(self, kind: str, **data: Any) -> None:
        if kind == "finding":
            self.findings.append((data["rule"], data["level"]))
        else:
            self.said.append((kind, data["what"]))

    def pause(self, reason: str) -> None:
        self.said.append(("pause", reason))

    def proceed(self) -> None:
        self.said.append(("proceed", ""))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of 10 GB whose free space the test sets."""
    now = SimpleNamespace(bytes=5_000 * MB)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Usage(10_000 * MB, 0, now.bytes))
    return now


def test_a_run_pauses_below_the_floor_and_goes_on_well_above_it(folder: RunFolder, free: SimpleNamespace) -> None:
    hands = Hands(folder)
    watch = DiskWatcher(hands)
    watch.looked(0.0)
    assert hands.said == []
    free.bytes = 199 * MB
    watch.looked(1.0)
    watch.looked(2.0)
    assert [kind for kind, _ in hands.said] == ["pause"] and "199.0 MB left" in hands.said[0][1]
    free.bytes = 201 * MB
    watch.looked(3.0)
    assert len(hands.said) == 1, "not to be paused again at once"
    free.bytes = 300 * MB
    watch.looked(4.0)
    assert hands.said[1:] == [("proceed", "")]
    assert hands.findings == [("disk_full", "critical"), ("disk_full", "over")]


def test_the_owner_sets_the_floor_and_a_checkpoint_needs_room_too(folder: RunFolder, free: SimpleNamespace) -> None:
    Reservations(folder.path.parent).announce(Machine(threads=1, disk_floor=50 * MB))
    hands = Hands(folder)
    watch = DiskWatcher(hands)
    free.bytes = 60 * MB
    watch.looked(0.0)
    assert hands.said == []
    path = folder.checkpoints / "step-000001"
    path.mkdir()
    with (path / "weights").open("wb") as file:
        file.truncate(20 * MB)
    watch.heard("trainer", Checkpointed(1, "checkpoints/step-000001", 2))
    watch.looked(1.0)
    assert [kind for kind, _ in hands.said] == ["pause"]
    assert (default_floor(1_000 * MB), default_floor(10**15)) == (20 * MB, 500 * MB)


def test_a_member_that_finds_no_room_pauses_the_run_and_is_let_try_again(
    folder: RunFolder, free: SimpleNamespace
) -> None:
    hands = Hands(folder)
    watch = DiskWatcher(hands)
    watch.heard("trainer", NoRoom("the checkpoint of step 3 waits"))
    watch.looked(0.0)
    assert hands.said[0][0] == "pause" and "the checkpoint of step 3 waits" in hands.said[0][1]
    watch.looked(10.0)
    assert len(hands.said) == 1
    watch.looked(30.0)
    assert hands.said[-1] == ("proceed", "")


def test_what_members_warn_of_is_an_event(folder: RunFolder, free: SimpleNamespace) -> None:
    hands = Hands(folder)
    DiskWatcher(hands).heard("trainer", Warned("a checkpoint is damaged"))
    assert hands.said == [("warning", "trainer: a checkpoint is damaged")]


class FullDisk:
    """Stands in the way of writing while `full`, or after `left` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.left, self._write = False, None, os.write
        monkeypatch.setattr(os, "write", self.write)
        real = records_folder.tempfile.mkstemp

        def mkstemp(*arguments: Any, **options: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        monkeypatch.setattr(records_folder.tempfile, "mkstemp", mkstemp)

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
def test_lines_wait_for_room_and_none_is_torn_or_twice(tmp_path: Path, full: FullDisk, left: int) -> None:
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


def test_lines_that_wait_are_bounded_and_another_failure_is_raised(tmp_path: Path, full: FullDisk) -> None:
    lines = PatientLines(tmp_path / "lines", most=3)
    full.full = True
    for number in range(10):
        lines.append(b"%d\n" % number)
    full.full = False
    lines.catch_up()
    assert (tmp_path / "lines").read_text() == "7\n8\n9\n"
    with pytest.raises(NotADirectoryError):
        PatientLines(tmp_path / "lines" / "x").append(b"x\n")


def test_ballast_is_given_up_once(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "ballast", 5000)
    assert (tmp_path / "ballast").stat().st_size == 5000
    assert ballast.drop() and not ballast.drop()
    ballast.take()
    assert ballast.drop()


def test_a_keeper_lives_on_without_room_and_catches_up(folder: RunFolder, full: FullDisk) -> None:
    now = {"created_at": 1.0, "since": 1.0, "updated_at": 1.0}
    status = Status(run_id="run-1", kind="train", environment="dice", state="training", **now)
    status.write(folder)

    async def live() -> None:
        life = StatusWriter(folder, status)
        full.full = True
        life.to("paused", "the disk is full")
        life.event("finding", rule="disk_full")
        assert life.state == "paused" and Status.read(folder).state == "training"
        full.full = False
        async with asyncio.timeout(20):
            while Status.read(folder).state != "paused":
                await asyncio.sleep(0.01)
        assert [event.kind for event in read_events(folder.events)] == ["state", "finding"]
        full.full = True
        life.to("training")
        full.full = False
        life.write_at_last()
        assert Status.read(folder).state == "training"
        assert [event.seq for event in read_events(folder.events)] == [1, 2, 3]

    asyncio.run(live())


def test_room_set_aside_lets_a_keeper_say_that_the_disk_is_full(folder: RunFolder, full: FullDisk) -> None:
    now = {"created_at": 1.0, "since": 1.0, "updated_at": 1.0}
    status = Status(run_id="run-1", kind="train", environment="dice", state="training", **now)
    status.write(folder)

    async def live() -> None:
        life = StatusWriter(folder, status)
        full.full = True
        ballast = folder.crew / "ballast"
        drop = life._ballast.drop

        def makes_room() -> bool:
            full.full = False
            return drop()

        life._ballast.drop = makes_room  # type: ignore[method-assign]
        assert ballast.exists()
        life.to("paused", "the disk is full")
        assert Status.read(folder).state == "paused" and not ballast.exists()

    asyncio.run(live())


def test_a_stop_needs_no_room(folder: RunFolder, full: FullDisk) -> None:
    full.full = True
    write_stop_order(folder, 3.0)
    full.full = False
    write_stop_order(folder, 3.0)
    orders = take_orders(folder)
    assert sorted(str(stop.grace_s) for stop in orders.stops) == ["3.0", "None"] and not orders.complaints
    assert list(folder.orders.iterdir()) == []


def test_the_index_is_read_as_it_lies_where_sqlite_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(DiskFull, match="no room on its disk"):
        index.create_draft("p", {}, [], {})
    monkeypatch.setattr("toprope.records.index.database.shutil.disk_usage", lambda _: Usage(1, 1, 5_000 * MB))
    with pytest.raises(NotPossibleNow, match="disk I/O error") as raised:
        index.draft(draft.id)
    assert not isinstance(raised.value, DiskFull)
