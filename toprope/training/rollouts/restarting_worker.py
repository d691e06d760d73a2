"""The environment's worker as the driver has it: when it dies or hangs, another takes its place and work goes on.

User code ends its worker now and then: a crash in a C library, an endless loop over one odd task, memory. Everything
that was being played in it is gone then. Who plays asks for the present worker first, tells of its end (the first one
to do so has it started again), and plays once more; only the item that was at work when it ended is left out.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from toprope.records.messages import Renewed, Report
from toprope.sdk.errors import WorkerDied, WorkerFailure, WorkerTimeout
from toprope.settings.launcher import LauncherSection, RestartAllowance
from toprope.training.rollouts.environment_worker import EnvironmentWorker

__all__ = ["ENOUGH_WORK", "Worker"]

ENOUGH_WORK = 100
"""Groups played by a worker after which its end counts against nobody's allowance."""

_LAST_WORDS = ". Its last lines:\n"


class Worker:
    """Make it by `Worker.start`; can be used with `async with`.

    Args:
        opened: Starts a worker and opens the environment in it.
        link: The first one.
        section: How often it may be started again.
        report: How the keeper is told.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[EnvironmentWorker]],
        link: EnvironmentWorker,
        section: LauncherSection,
        report: Callable[[Report], None],
    ) -> None:
        self._opened, self._link, self._report = opened, link, report
        self._allowance = RestartAllowance(section)
        self._lock = asyncio.Lock()
        self._done = 0
        """Groups that were played since the last start."""
        self.is_sealed = False
        """Whether `sealed` is in force."""

    @classmethod
    async def start(
        cls,
        opened: Callable[[], Awaitable[EnvironmentWorker]],
        section: LauncherSection,
        report: Callable[[Report], None] = lambda report: None,
    ) -> Worker:
        """Starts the first one.

        Raises:
            WorkerFailure: It does not start, or the environment does not load. That is not tried again.
        """
        return cls(opened, await opened(), section, report)

    async def link(self) -> EnvironmentWorker:
        """The present worker; waits while one is being started."""
        async with self._lock:
            return self._link

    def played(self) -> None:
        """A group came to its end."""
        self._done += 1

    async def lost(self, link: EnvironmentWorker, error: WorkerDied | WorkerTimeout) -> None:
        """The worker behind `link` has ended with `error`; returns when there is another.

        Raises:
            WorkerFailure: It ended too often, or there is to be no other: `error`, with how often.
        """
        async with self._lock:
            if link is not self._link:
                return  # somebody else has told
            end: WorkerFailure = error
            while True:
                now = time.monotonic()
                before = self._allowance.used(now)
                # One that did a good deal of work may end over an odd task or a leak for as long as the run goes on.
                earned, self._done = self._done >= ENOUGH_WORK, 0
                wait_s = 0.0 if earned else self._allowance.take(now)
                if wait_s is None:
                    raise _given_up(end, before, self._allowance.window_s)
                said = str(end).partition(_LAST_WORDS)[0] if self.is_sealed else str(end)
                print(f"the worker is started again: {said}", file=sys.stderr, flush=True)
                self._report(Renewed("worker", said, before + (not earned), self._allowance.limit))
                await self._link.close(grace=0)
                await asyncio.sleep(wait_s)
                try:
                    self._link = await self._opened()
                except WorkerFailure as failure:
                    end = failure
                    continue
                if self.is_sealed:
                    self._link.seal()
                return

    @asynccontextmanager
    async def sealed(self) -> AsyncIterator[None]:
        """Drop everything that the worker prints meanwhile, also after a restart. Held-out tasks are sampled within
        it only."""
        self.is_sealed = True
        (await self.link()).seal()
        try:
            yield
        finally:
            self.is_sealed = False
            await self._link.unseal()

    async def close(self) -> None:
        """Ends it."""
        await self._link.close()

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _given_up(end: WorkerFailure, before: int, window_s: float) -> WorkerFailure:
    if not before:
        return end
    often = "once" if before == 1 else f"{before} times"
    said = f"The environment's worker was started again {often} within {window_s:g} s and ended once more. {end}"
    return WorkerDied(said, stderr=getattr(end, "stderr", ""))
