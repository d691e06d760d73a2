"""Group commit: answers wait until their records are on disk, and one flush serves all that wait.

Posts that arrive close together share a flush: before it starts, posts whose bytes have arrived are accepted. Posts
that arrive during a flush share the next one. A disk that flushes within a few milliseconds is awaited on the event
loop; handing the flush to a thread would cost more processor time than everything else about a post but its decoding.
A slower disk is flushed in a thread while the loop continues. If a flush fails, nobody can tell which records are lost:
all waiting requests are refused, and so is every later record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from toprope.errors import NotPossibleNow
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.unsynced import Unsynced

_TURNS = 3
"""Turns of the event loop without a new waiter before a flush: one finds readable sockets, one starts their requests,
one accepts their groups."""
_MAX_TURNS = 32
_QUICK_S = 0.004
_THREAD_ROUNDS = 32
"""Flushes in a thread before one on the loop measures the disk again. A thread cannot measure it: it waits for the
interpreter after the disk has answered."""


class GroupCommit:
    """Waits until the records of a journal are on disk.

    Args:
        failed: Called if the disk fails.
    """

    def __init__(self, journal: FileJournal, failed: Callable[[NotPossibleNow], None] | None = None) -> None:
        self._journal = journal
        self._failed = failed
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        """Calls of `wait`, each with the number of the newest record that it waits for."""
        self._scheduled = False
        """True from the first waiter until its flush has ended: a second flush never begins meanwhile."""
        self._turns = self._quiet = self._waiter_count = 0
        """Before a flush: turns of the loop, the last of them without a new waiter, and waiters at the last turn."""
        self._thread_flush: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._thread_rounds = 0
        """Flushes that are left for the thread; 0 while the disk is quick."""
        self.rounds = 0
        """Number of flushes so far."""

    async def wait(self) -> None:
        """Return when all records appended before this call are on disk, if the journal's policy asks for that.

        Raises:
            NotPossibleNow: The disk failed.
        """
        if (refusal := self._journal.refusal()) is not None:  # a checkpoint's commit may have met the failed disk
            self._tell_failed(refusal)
            raise refusal
        if self._journal.unsynced() is None:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.append((self._journal.appended, future))
        if not self._scheduled:
            self._schedule()
        await future

    def close(self) -> None:
        """Stop the thread, if there is one, after its current flush."""
        if self._thread is not None:
            self._thread.shutdown()

    def _schedule(self) -> None:
        self._scheduled, self._turns, self._quiet, self._waiter_count = True, 0, 0, len(self._waiters)
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Flush once no waiter has arrived for `_TURNS` turns of the loop."""
        self._turns += 1
        self._quiet = self._quiet + 1 if len(self._waiters) == self._waiter_count else 0
        self._waiter_count = len(self._waiters)
        if self._quiet < _TURNS and self._turns < _MAX_TURNS:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._flush()

    def _flush(self) -> None:
        pending = self._journal.unsynced()
        if pending is None or self._journal.refusal() is not None:
            self._settle()
            return
        self.rounds += 1
        if self._thread_rounds and (records := pending.held()) is not None:
            self._thread_rounds -= 1
            self._thread_flush = asyncio.get_running_loop().create_task(self._flush_in_thread(records))
            return
        began = time.monotonic()
        try:
            pending.flush()
        except Exception as error:
            self._fail(error)
            return
        if time.monotonic() - began > _QUICK_S:
            self._thread_rounds = _THREAD_ROUNDS
        self._journal.synced(pending)
        self._settle()

    async def _flush_in_thread(self, records: Unsynced) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, records.flush)
        except Exception as error:  # nobody awaits this task, so its waiters would wait for ever
            self._fail(error)
            return
        finally:
            records.close()
        self._journal.synced(records)
        self._settle()

    def _settle(self) -> None:
        """Release the waiters whose records are on disk; schedule another flush for the others."""
        if (refusal := self._journal.refusal()) is not None:  # since this flush began
            self._refuse(refusal)
            return
        durable, waiters, self._waiters = self._journal.durable, self._waiters, []
        for upto, future in waiters:
            if upto > durable:
                self._waiters.append((upto, future))
            elif not future.done():
                future.set_result(None)
        self._scheduled = False
        if self._waiters:
            self._schedule()

    def _fail(self, error: Exception) -> None:
        disk_error = error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
        self._refuse(self._journal.fail(disk_error))

    def _refuse(self, refusal: NotPossibleNow) -> None:
        waiters, self._waiters, self._scheduled = self._waiters, [], False
        for _, future in waiters:
            if not future.done():
                future.set_exception(refusal)
        self._tell_failed(refusal)

    def _tell_failed(self, refusal: NotPossibleNow) -> None:
        if self._failed is not None:
            self._failed(refusal)
