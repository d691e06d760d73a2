"""Group commit: an answer waits until what it speaks of is on disk, and one wait for the disk serves all who wait.

Posts that come close together share a wait: before the disk is asked, those whose bytes are already here are taken in.
What comes while the disk is busy shares the next wait. A disk that answers within a few milliseconds is waited for
right in the loop: handing that to a thread costs more processor time than everything else about a post but its
decoding. A slower one is left to a thread, and the loop goes on meanwhile. When the disk fails to keep what was
written, nobody can say which records are lost: everybody who waits is refused, and so is every later record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from toprope.errors import NotPossibleNow
from toprope.records.journal.journal import FileJournal

__all__ = ["GroupCommit"]

_TURNS = 3
"""Turns of the event loop from a record to the wait for it: one finds out who else has sent something, one starts their
requests, one takes their groups in."""
_TURNS_AT_MOST = 32
_QUICK_S = 0.004
_SLOW_ROUNDS = 32
"""Rounds that a thread does before the disk is tried from the loop again: only there can be seen how quick it is, since
a thread has to wait for the interpreter after the disk has answered."""


class GroupCommit:
    """Waits for a journal's records to be on disk.

    Args:
        journal: What to wait for.
        failed: Called when the disk failed.
    """

    def __init__(self, journal: FileJournal, failed: Callable[[NotPossibleNow], None] | None = None) -> None:
        self._journal = journal
        self._failed = failed
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._scheduled = False
        self._turns = self._quiet = self._seen = 0
        self._slow: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._in_threads = 0
        self.rounds = 0
        """Waits for the disk so far."""

    async def wait(self) -> None:
        """Returns when all that was appended before this call is on disk, if the journal is to wait for it.

        Raises:
            NotPossibleNow: The disk failed.
        """
        if self._journal.unsynced() is None:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.append((self._journal.appended, future))
        if not self._scheduled:
            self._schedule()
        await future

    def close(self) -> None:
        """Ends the thread, if there is one, after its round."""
        if self._thread is not None:
            self._thread.shutdown()

    def _schedule(self) -> None:
        self._scheduled, self._turns, self._quiet, self._seen = True, 0, 0, len(self._waiters)
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Lets the loop turn until nobody has come for `_TURNS`, then asks the disk."""
        self._turns += 1
        self._quiet = self._quiet + 1 if len(self._waiters) == self._seen else 0
        self._seen = len(self._waiters)
        if self._quiet < _TURNS and self._turns < _TURNS_AT_MOST:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._round()

    def _round(self) -> None:
        pending = self._journal.unsynced()
        if pending is None:
            self._settle()
            return
        self.rounds += 1
        if self._in_threads:
            self._in_threads -= 1
            self._slow = asyncio.get_running_loop().create_task(self._in_thread())
            return
        began = time.monotonic()
        try:
            pending.flush()
        except OSError as error:
            self._give_up(error)
            return
        if time.monotonic() - began > _QUICK_S:
            self._in_threads = _SLOW_ROUNDS
        self._journal.synced(pending)
        self._settle()

    async def _in_thread(self) -> None:
        pending = self._journal.unsynced()
        assert pending is not None, "nothing but a round makes records durable"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, pending.flush)
        except OSError as error:
            self._give_up(error)
            return
        self._journal.synced(pending)
        self._settle()

    def _settle(self) -> None:
        """Answers those whose records are on disk; another round for the others."""
        durable, waiters, self._waiters = self._journal.durable, self._waiters, []
        for upto, future in waiters:
            if upto > durable:
                self._waiters.append((upto, future))
            elif not future.done():
                future.set_result(None)
        self._scheduled = False
        if self._waiters:
            self._schedule()

    def _give_up(self, error: OSError) -> None:
        refusal = self._journal.fail(error)
        waiters, self._waiters, self._scheduled = self._waiters, [], False
        for _, future in waiters:
            if not future.done():
                future.set_exception(refusal)
        if self._failed is not None:
            self._failed(refusal)
