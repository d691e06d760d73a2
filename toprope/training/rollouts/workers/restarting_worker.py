"""An environment's worker that is replaced when it dies or hangs.

User code ends its worker now and then: a crash in a C library, an endless loop over one task, too much memory. All
rollouts in it are lost. A caller asks for the current worker, reports its end (the first report replaces it), and
samples again; only the task that was at work when the worker ended is given up.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from toprope.records.messages import Renewed, Report
from toprope.sdk.errors import WorkerDied, WorkerFailure, WorkerTimeout
from toprope.settings.sections.launcher import LauncherSection, RestartAllowance
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker

GROUPS_PER_FREE_RESTART = 100
"""A worker that sampled this many groups is replaced without using up a restart."""

_LAST_LINES = ". Its last lines:\n"


class RestartingWorker:
    """Create it with `RestartingWorker.start`; works with `async with`.

    Args:
        open_worker: Starts a worker and opens the environment in it.
        worker: The first worker.
        section: Limits for restarts.
        report: Sends reports to the keeper.
        name_error: Adds the environment's name to the error that is raised when restarts are used up.
    """

    def __init__(
        self,
        open_worker: Callable[[], Awaitable[EnvironmentWorker]],
        worker: EnvironmentWorker,
        section: LauncherSection,
        report: Callable[[Report], None],
        name_error: Callable[[WorkerFailure], BaseException],
    ) -> None:
        self._open_worker, self._worker = open_worker, worker
        self._report, self._name_error = report, name_error
        self._allowance = RestartAllowance(section)
        self._lock = asyncio.Lock()
        self._groups = 0
        """Groups sampled since the last start."""
        self.is_sealed = False
        """True while `sealed` is in force."""

    @classmethod
    async def start(
        cls,
        open_worker: Callable[[], Awaitable[EnvironmentWorker]],
        section: LauncherSection,
        report: Callable[[Report], None] = lambda report: None,
        name_error: Callable[[WorkerFailure], BaseException] = lambda error: error,
    ) -> RestartingWorker:
        """Starts the first worker.

        Raises:
            WorkerFailure: It does not start, or the environment does not load. This is not retried.
        """
        return cls(open_worker, await open_worker(), section, report, name_error)

    async def current(self) -> EnvironmentWorker:
        """The current worker; waits while one is being started."""
        async with self._lock:
            return self._worker

    def count_group(self) -> None:
        """Counts a finished group."""
        self._groups += 1

    async def replace(self, worker: EnvironmentWorker, error: WorkerDied | WorkerTimeout) -> None:
        """Starts another worker in place of `worker`, which ended with `error`; returns once it is ready.

        Raises:
            WorkerFailure: Restarts are used up; `error`, with the number of restarts.
        """
        async with self._lock:
            if worker is not self._worker:
                return  # another caller has reported it
            end: WorkerFailure = error
            while True:
                now = time.monotonic()
                restarts = self._allowance.used(now)
                # A worker that sampled a good deal may end over an odd task or a leak as often as the run lasts.
                is_free, self._groups = self._groups >= GROUPS_PER_FREE_RESTART, 0
                wait_s = 0.0 if is_free else self._allowance.take(now)
                if wait_s is None:
                    failure = _used_up(end, restarts, self._allowance.window_s)
                    raise self._name_error(failure) from failure.__cause__
                reason = str(end).partition(_LAST_LINES)[0] if self.is_sealed else str(end)
                print(f"the worker is started again: {reason}", file=sys.stderr, flush=True)
                self._report(Renewed("worker", reason, restarts + (not is_free), self._allowance.limit))
                await self._worker.close(grace=0)
                await asyncio.sleep(wait_s)
                try:
                    self._worker = await self._open_worker()
                except WorkerFailure as failure:
                    end = failure
                    continue
                if self.is_sealed:
                    self._worker.seal()
                return

    @asynccontextmanager
    async def sealed(self) -> AsyncIterator[None]:
        """Drops everything that the worker prints meanwhile, also after a restart.

        Held-out tasks are sampled only within it. After an error the seal stays: it ends the run, and the worker may
        still be at work on such tasks.
        """
        worker = await self.current()
        self.is_sealed = True
        worker.seal()
        yield
        self.is_sealed = False
        await self._worker.unseal()

    async def close(self) -> None:
        """Ends the worker."""
        await self._worker.close()

    async def __aenter__(self) -> RestartingWorker:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def was_killed(error: WorkerFailure) -> bool:
    """True if the system or a person killed the worker, so that no task is at fault."""
    return isinstance(error, WorkerDied) and error.code == -signal.SIGKILL


def _used_up(end: WorkerFailure, restarts: int, window_s: float) -> WorkerFailure:
    if not restarts:
        return end
    often = "once" if restarts == 1 else f"{restarts} times"
    text = f"The environment's worker was started again {often} within {window_s:g} s and ended once more. {end}"
    return WorkerDied(text, stderr=getattr(end, "stderr", ""))
