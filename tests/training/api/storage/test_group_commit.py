"""Group commit: answers wait for a flush, in a thread on a slow disk, also beside the commits of checkpoints."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_api_server import SECRET, served
from toprope.errors import NotPossibleNow
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Group
from toprope.records.journal.marks import GroupNote
from toprope.records.journal.unsynced import Unsynced
from toprope.training.api.clients.sync_client import SyncApiClient
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import TrajectoryStore


def test_one_flush_serves_all_waiting_answers(tmp_path: Path) -> None:
    async def main() -> None:
        journal = FileJournal(tmp_path, sync="group")
        commit = GroupCommit(journal)
        for _ in range(3):
            journal.append(b"x", GroupNote(rows=1))
        assert (journal.appended, journal.durable) == (3, 0)
        await asyncio.gather(*(commit.wait() for _ in range(5)))
        assert (journal.durable, commit.rounds) == (3, 1)
        await commit.wait()
        assert commit.rounds == 1, "nothing new to wait for"
        journal.close()

    asyncio.run(main())


def test_slow_disk_is_flushed_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    go = threading.Event()
    flush = Unsynced.flush

    def slow(self: Unsynced) -> None:
        threads.append(threading.current_thread())
        assert len(threads) == 1 or go.wait(10)
        flush(self)
        deadline = time.monotonic() + 0.005
        while time.monotonic() < deadline:
            pass

    monkeypatch.setattr(Unsynced, "flush", slow)

    async def main() -> None:
        journal = FileJournal(tmp_path, sync="group", segment_bytes=1)
        commit = GroupCommit(journal)
        journal.append(b"x", GroupNote(rows=1))
        await commit.wait()  # flushed on the loop, which measures that the disk is slow
        journal.append(b"x", GroupNote(rows=1))
        waiting = asyncio.create_task(commit.wait())
        while len(threads) < 2:
            await asyncio.sleep(0)
        journal.append(b"later", GroupNote(rows=1))  # during the flush, in a segment of its own
        go.set()
        await waiting
        assert journal.durable == 2
        await commit.wait()
        assert journal.durable == 3
        assert [thread is threading.main_thread() for thread in threads] == [True, False, False]
        commit.close()
        journal.close()

    asyncio.run(main())


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each flush take long enough to be handed to a thread from then on."""
    flush = Unsynced.flush

    def slow(self: Unsynced) -> None:
        flush(self)
        time.sleep(0.006)

    monkeypatch.setattr(Unsynced, "flush", slow)


def leave(journal: FileJournal) -> None:
    """Flush and close old segments, as the commit of a checkpoint does."""
    store = TrajectoryStore(FileJournal(journal._folder.with_name("other"), segment_bytes=1))
    snapshot = store.queue.snapshot()
    journal.leave(journal.last, snapshot, keep="all")


def test_commit_before_a_flush_in_a_thread_begins_releases_the_waiters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all later posts wait for ever, and the run fails."""
    slow_disk(monkeypatch)

    async def main() -> None:
        journal = FileJournal(tmp_path / "own", sync="group", segment_bytes=1)
        commit = GroupCommit(journal)
        for _ in range(20):
            journal.append(b"x", GroupNote(rows=1))
            waiting = asyncio.create_task(commit.wait())
            while commit._thread_flush is None and not waiting.done():
                await asyncio.sleep(0)
            leave(journal)
            await asyncio.wait_for(waiting, 10)
            commit._thread_flush = None
        journal.append(b"x", GroupNote(rows=1))
        await asyncio.wait_for(commit.wait(), 10)
        assert journal.durable == journal.appended
        commit.close()
        journal.close()

    asyncio.run(main())


def test_commit_during_a_flush_in_a_thread_closes_no_file_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    flush, failed, files = Unsynced.flush, list[NotPossibleNow](), list[list[int]]()

    def held(self: Unsynced) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            files.append([os.fstat(one).st_ino for one in self.files])
            assert go.wait(10)
            files.append([os.fstat(one).st_ino for one in self.files])
        flush(self)
        time.sleep(0.006)

    monkeypatch.setattr(Unsynced, "flush", held)

    async def main() -> None:
        journal = FileJournal(tmp_path / "own", sync="group", segment_bytes=1)
        commit = GroupCommit(journal, failed.append)
        journal.append(b"x", GroupNote(rows=1))
        await commit.wait()  # slow: later ones are flushed in a thread
        for _ in range(3):
            journal.append(b"x", GroupNote(rows=1))  # each closes the segment before
        waiting = asyncio.create_task(commit.wait())
        while not begun.is_set():
            await asyncio.sleep(0)
        leave(journal)
        for _ in range(3):
            journal.append(b"x", GroupNote(rows=1))  # new segments may take the numbers of the closed files
        go.set()
        await waiting
        assert not failed and len(files[0]) == 3 and files[0] == files[1]
        pending = journal.unsynced()
        assert pending is not None and len(pending.files) == 3 and pending.folder is not None
        await commit.wait()
        assert journal.durable == journal.appended and journal.unsynced() is None
        commit.close()
        journal.close()

    asyncio.run(main())


def test_flush_that_fails_unexpectedly_refuses_instead_of_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk(monkeypatch)
    failed = list[NotPossibleNow]()

    async def main() -> None:
        journal = FileJournal(tmp_path, sync="group")
        commit = GroupCommit(journal, failed.append)
        journal.append(b"x", GroupNote(rows=1))
        await commit.wait()

        def broken(self: Unsynced) -> None:
            raise ValueError("no file")

        monkeypatch.setattr(Unsynced, "flush", broken)
        journal.append(b"x", GroupNote(rows=1))
        with pytest.raises(NotPossibleNow, match="ValueError: no file"):
            await asyncio.wait_for(commit.wait(), 10)
        assert failed
        commit.close()
        journal.close()

    asyncio.run(main())


def test_commit_that_meets_a_failed_disk_refuses_the_posts_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of lost bytes once: the next flush succeeds, and must not count."""
    failed = list[NotPossibleNow]()

    async def main() -> None:
        journal = FileJournal(tmp_path / "own", sync="group", segment_bytes=1)
        commit = GroupCommit(journal, failed.append)
        for _ in range(2):
            journal.append(b"x", GroupNote(rows=1))
        waiting = asyncio.create_task(commit.wait())
        await asyncio.sleep(0)
        real = os.fdatasync

        def once(descriptor: int) -> None:
            monkeypatch.setattr(os, "fdatasync", real)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", once)
        with pytest.raises(NotPossibleNow, match="Input/output error"):
            leave(journal)
        for late in (waiting, commit.wait()):
            with pytest.raises(NotPossibleNow, match="Input/output error"):
                await asyncio.wait_for(late, 10)
        assert failed and journal.durable == 0
        commit.close()
        journal.close()

    asyncio.run(main())


def test_flush_without_a_spare_descriptor_is_made_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_disk(monkeypatch)

    async def main() -> None:
        journal = FileJournal(tmp_path, sync="group", segment_bytes=1)
        commit = GroupCommit(journal)
        journal.append(b"x", GroupNote(rows=1))
        await commit.wait()
        made, real = list[int](), os.dup

        def few(descriptor: int) -> int:
            if made:
                raise OSError(24, "Too many open files")
            made.append(real(descriptor))
            return made[0]

        monkeypatch.setattr(os, "dup", few)
        for _ in range(2):
            journal.append(b"x", GroupNote(rows=1))
        await asyncio.wait_for(commit.wait(), 10)
        assert journal.durable == 3 and commit._thread is None
        with pytest.raises(OSError):
            os.fstat(made[0])
        commit.close()
        journal.close()

    asyncio.run(main())


def test_records_before_a_segment_that_cannot_be_made_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = FileJournal(tmp_path, sync="group", segment_bytes=1)
        commit = GroupCommit(journal)
        journal.append(b"x", GroupNote(rows=1))
        real = os.open

        def full(path: Any, flags: int, *given: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(28, "No space left on device")
            return real(path, flags, *given)

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(NotPossibleNow):
            journal.append(b"x", GroupNote(rows=1))
        assert journal.unsynced() is not None, "an answer must wait for the first record"
        await asyncio.wait_for(commit.wait(), 10)
        assert journal.durable == journal.appended == 1
        monkeypatch.undo()
        journal.append(b"x", GroupNote(rows=1))
        await commit.wait()
        journal.close()

    asyncio.run(main())


@pytest.mark.parametrize("keep", ["all", "none"])
def test_posts_batches_and_checkpoints_on_a_slow_disk_neither_hang_nor_lose_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    """Flushes take 0 to 12 ms, so they go back and forth between the loop and the thread."""
    luck, real = random.Random(0), os.fdatasync
    posted, stop = [0] * 4, threading.Event()

    def slow(descriptor: int) -> None:
        time.sleep(luck.choice((0.0, 0.0, 0.005, 0.012)))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    with served(tmp_path / "journal", segment_bytes=4000, keep=keep) as api:

        def post(who: int) -> None:
            with SyncApiClient(api.url, SECRET, patience_s=5.0) as client:
                while not stop.is_set():
                    client.post_group(group(100 * who + posted[who] % 100, group_id=f"{who}-{posted[who]}"))
                    posted[who] += 1

        def group(mark: int, group_id: str) -> Group:
            return Group(tokens=[[mark, 2, 3]] * 2, masks=[[-100, 2, 3]] * 2, scores=[0.0, 1.0], group_id=group_id)

        posters = [threading.Thread(target=post, args=(who,)) for who in range(4)]
        for thread in posters:
            thread.start()
        cursor, end = 0, time.monotonic() + 4.0
        with SyncApiClient(api.url, SECRET, patience_s=5.0) as trainer:
            while time.monotonic() < end:
                answer = trainer.next_batch(cursor, 8, 1.0)
                cursor = answer.cursor
                if luck.random() < 0.5:
                    trainer.commit(cursor)
                for ordinal in api.journal.compressible()[:1]:
                    with suppress(FileNotFoundError):
                        api.journal.compress(ordinal)
            stop.set()
            for thread in posters:
                thread.join(20)
                assert not thread.is_alive(), "a post has no answer"
            counts = trainer.counts()
        assert counts.balanced() and counts.accepted == sum(posted) > 100 and counts.committed > 20
    journal = FileJournal(tmp_path / "journal", recent=True)
    again = TrajectoryStore(journal).queue.counts()
    assert (again.accepted, again.committed) == (counts.accepted, counts.committed)
    journal.close()
