"""Starts a program under a guard, on this machine or (later) on another one.

`Component` reads and writes two byte streams and waits for the end of the guard; a `Spawner` decides where that guard
runs. `LocalSpawner` starts it as a child process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from toprope.records.messages import ENV_REPORT_FD
from toprope.supervisor import guard
from toprope.supervisor.keeper.containment import GUARD, level_from, wrap_command
from toprope.supervisor.lock import RunLock

LOG_BYTES = 4 << 20
LOG_KEEP = 2
"""A component's log has at most three parts of 4 MiB: the newest and two before it."""

_GUARD = Path(guard.__file__).resolve()


@dataclass(frozen=True)
class SpawnRequest:
    """A program to start under a guard."""

    argv: Sequence[str]
    """The program and its arguments; never a shell."""
    variables: Mapping[str, str]
    """Its whole environment, without TOPROPE_REPORT_FD, which the spawner adds."""
    log: Path
    """File that receives its output; rotated and bounded by the guard."""
    grace_s: float
    """Seconds that the program gets to end after the keeper is gone."""
    lock: RunLock | None = None
    """The run's lock. The guard holds a copy until it ends."""
    folder: Path | None = None
    """Working directory."""
    inherits: Sequence[int] = ()
    """Descriptors that the program inherits under the same numbers."""
    releases_detached: bool = False
    """Processes that the program detaches, such as keepers of runs that it starts, may outlive it."""


class SpawnedGuard(Protocol):
    """A guard that was started, with its program below it."""

    pid: int
    """The guard's process id."""
    orders: int
    """Non-blocking descriptor to write the program's standard input to. The caller closes it."""
    reports: int
    """Non-blocking descriptor to read the program's reports from; the guard reports the program's end on it as well.
    The caller closes it."""

    def stop(self, grace_s: float) -> None:
        """Ask for SIGTERM now and SIGKILL to everything below the guard after `grace_s` seconds. A later call can only
        shorten the time. Returns at once; harmless after the end."""

    def kill(self) -> None:
        """Kill the guard itself, if it does not react. The caller then has to reap the processes that it kept."""

    async def wait(self) -> int | None:
        """Wait for the end of the guard, which is the end of every process below it.

        Returns:
            Its exit code, which is the program's (128 + n after signal n); None if the guard was killed.
        """


class Spawner(Protocol):
    """Decides where the programs of a crew run."""

    def spawn(self, request: SpawnRequest) -> SpawnedGuard:
        """Start a program under a guard and return at once.

        Raises:
            OSError: The guard cannot be started.
        """


class LocalSpawner:
    """Starts guards as children of this process, in a pid namespace where containment allows it."""

    def spawn(self, request: SpawnRequest) -> SpawnedGuard:
        """See `Spawner.spawn`."""
        orders_reader, orders = os.pipe()
        control_reader, control = os.pipe()
        reports, reports_writer = os.pipe()
        options = ["--control", str(control_reader), "--report", str(reports_writer)]
        passed = [control_reader, reports_writer, *request.inherits]
        if request.lock is not None:
            passed.append(request.lock.fileno())
            options += ["--hold", str(request.lock.fileno())]
        options += ["--log", str(request.log), "--log-bytes", str(LOG_BYTES), "--log-keep", str(LOG_KEEP)]
        options += ["--detached", "free"] if request.releases_detached else []
        options += ["--grace", str(request.grace_s), "--", *request.argv]
        level = GUARD if request.releases_detached else level_from(os.environ)
        wrapped = wrap_command([sys.executable, "-I", "-S", str(_GUARD), *options], level)
        try:
            process = subprocess.Popen(
                wrapped.command,
                stdin=orders_reader,
                stdout=subprocess.DEVNULL,
                env={**request.variables, ENV_REPORT_FD: str(reports_writer)},
                cwd=request.folder,
                pass_fds=[*passed, *wrapped.descriptors],
                start_new_session=True,
            )
        except BaseException:
            for descriptor in (orders, control, reports):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (orders_reader, control_reader, reports_writer, *wrapped.descriptors):
                os.close(descriptor)
        for descriptor in (orders, reports):
            os.set_blocking(descriptor, False)
        return _LocalGuard(process, orders, reports, control, in_namespace=bool(wrapped.descriptors))


class _LocalGuard:
    """A guard that is a child of this process. See `SpawnedGuard`."""

    def __init__(
        self, process: subprocess.Popen[bytes], orders: int, reports: int, control: int, *, in_namespace: bool
    ) -> None:
        self.pid, self.orders, self.reports = process.pid, orders, reports
        self._process, self._control, self._in_namespace = process, control, in_namespace

    def stop(self, grace_s: float) -> None:
        if self._control >= 0:
            try:
                os.write(self._control, f"stop {max(grace_s, 0.0):.3f}\n".encode())
            except BrokenPipeError:
                pass

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int | None:
        if hasattr(os, "pidfd_open"):
            await self._wait_for_pidfd()
        else:
            await asyncio.to_thread(self._process.wait)
        code = self._process.wait()
        os.close(self._control)
        self._control = -1
        # bwrap exits with a code like the guard within it, even if the guard was killed and reported nothing.
        killed = code < 0 or (self._in_namespace and code == 128 + signal.SIGKILL)
        return None if killed else code

    async def _wait_for_pidfd(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
