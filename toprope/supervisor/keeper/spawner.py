"""Starts a program under a guard, on this machine or on another one.

`Component` reads and writes two byte streams and waits for the end of the guard; a `Spawner` decides where that guard
runs. `LocalSpawner` starts it as a child process, `toprope.supervisor.spread.spawner` on any node of the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from toprope.machine import has_pidfd
from toprope.records.messages import ENV_REPORT_FD
from toprope.supervisor import guard
from toprope.supervisor.keeper.containment import GUARD, level_from, wrap_command
from toprope.supervisor.lock import RunLock

LOG_BYTES = 4 << 20
LOG_KEEP = 2
"""A component's log has at most three parts of 4 MiB: the newest and two before it."""

GUARD_FILE = Path(guard.__file__).resolve()


@dataclass(frozen=True)
class SpawnRequest:
    """A program to start under a guard."""

    argv: Sequence[str]
    """The program and its arguments; never a shell."""
    variables: Mapping[str, str]
    """Its environment, without TOPROPE_REPORT_FD, which the spawner adds."""
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
    preloadable: bool = False
    """The program may be forked from a process that has imported PyTorch; argv is then `python -P -m MODULE ...`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Secret variables; the program gets them as its first order."""


class SpawnedGuard(Protocol):
    """A guard that was started, with its program below it."""

    pid: int
    """The guard's process id; that of the connection to it, if it runs elsewhere."""
    node: str | None
    """Name of the node that it runs on; None beside the keeper."""
    silence_limit_s: float | None
    """Seconds without a report after which it is cut off; None if it cannot be."""
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

    def spawn(self, member: str, request: SpawnRequest) -> SpawnedGuard:
        """Start a member's program under a guard and return at once.

        Raises:
            OSError: The guard cannot be started.
        """

    def close(self) -> None:
        """End what the spawner itself keeps. The guards that it started go on."""


class Pipes:
    """The pipes between a keeper and one guard."""

    def __init__(self) -> None:
        self.orders_reader, self.orders = os.pipe()
        self.control_reader, self.control = os.pipe()
        self.reports, self.reports_writer = os.pipe()
        for descriptor in (self.orders, self.reports):
            os.set_blocking(descriptor, False)

    def close_theirs(self) -> None:
        """Close the ends that the guard has by now."""
        for descriptor in (self.orders_reader, self.control_reader, self.reports_writer):
            os.close(descriptor)

    def close_ours(self) -> None:
        """Close the keeper's ends, if no guard was started."""
        for descriptor in (self.orders, self.control, self.reports):
            os.close(descriptor)


def guard_options(request: SpawnRequest) -> list[str]:
    """The guard's options without descriptors."""
    options = ["--log", str(request.log), "--log-bytes", str(LOG_BYTES), "--log-keep", str(LOG_KEEP)]
    options += ["--detached", "free"] if request.releases_detached else []
    return [*options, "--grace", str(request.grace_s)]


def start_guard(request: SpawnRequest, pipes: Pipes) -> SpawnedGuard:
    """Start a guard as a child of this process, in a pid namespace where containment allows it.

    Raises:
        OSError: It cannot be started; the pipes are left open.
    """
    options = ["--control", str(pipes.control_reader), "--report", str(pipes.reports_writer)]
    passed = [pipes.control_reader, pipes.reports_writer, *request.inherits]
    if request.lock is not None:
        passed.append(request.lock.fileno())
        options += ["--hold", str(request.lock.fileno())]
    level = GUARD if request.releases_detached else level_from(os.environ)
    command = [sys.executable, "-I", "-S", str(GUARD_FILE), *options, *guard_options(request), "--", *request.argv]
    wrapped = wrap_command(command, level)
    try:
        process = subprocess.Popen(
            wrapped.command,
            stdin=pipes.orders_reader,
            stdout=subprocess.DEVNULL,
            env={**request.variables, ENV_REPORT_FD: str(pipes.reports_writer)},
            cwd=request.folder,
            pass_fds=[*passed, *wrapped.descriptors],
            start_new_session=True,
        )
    finally:
        for descriptor in wrapped.descriptors:
            os.close(descriptor)
    return _LocalGuard(process, pipes, in_namespace=bool(wrapped.descriptors))


class LocalSpawner:
    """Starts guards as children of this process, in a pid namespace where containment allows it."""

    def spawn(self, member: str, request: SpawnRequest) -> SpawnedGuard:
        """See `Spawner.spawn`."""
        pipes = Pipes()
        try:
            return start_guard(request, pipes)
        except BaseException:
            pipes.close_ours()
            raise
        finally:
            pipes.close_theirs()

    def close(self) -> None:
        """See `Spawner.close`."""


class _LocalGuard:
    """A guard that is a child of this process. See `SpawnedGuard`."""

    node: str | None = None
    silence_limit_s: float | None = None

    def __init__(self, process: subprocess.Popen[bytes], pipes: Pipes, *, in_namespace: bool) -> None:
        self.pid, self.orders, self.reports = process.pid, pipes.orders, pipes.reports
        self._process, self._control, self._in_namespace = process, pipes.control, in_namespace

    def stop(self, grace_s: float) -> None:
        if self._control >= 0:
            write_stop(self._control, grace_s)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int | None:
        if has_pidfd():
            await wait_for_end(self.pid)
        else:
            await asyncio.to_thread(self._process.wait)
        code = self._process.wait()
        os.close(self._control)
        self._control = -1
        # bwrap exits with a code like the guard within it, even if the guard was killed and reported nothing.
        killed = code < 0 or (self._in_namespace and code == 128 + signal.SIGKILL)
        return None if killed else code


def write_stop(control: int, grace_s: float) -> None:
    """Write an order to stop to a guard's control pipe."""
    try:
        os.write(control, f"stop {max(grace_s, 0.0):.3f}\n".encode())
    except BrokenPipeError:
        pass


async def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, without reaping it (Linux)."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
