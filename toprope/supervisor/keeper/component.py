"""One component from its keeper's side: a guard with the program below it, and the pipes to both.

Orders go in on the program's standard input, reports come out on a descriptor of their own, and the guard says the
program's end on the same one. So what a program reported before it died is always read before its death, and the death
is an event of the loop: nothing is polled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toprope.records.messages import ENV_REPORT_FD, Order, Report, decode_report, encode_line
from toprope.supervisor import guard
from toprope.supervisor.keeper.containment import GUARD, level_from, wrap_command
from toprope.supervisor.keeper.logs import read_tail
from toprope.supervisor.lock import RunLock

__all__ = ["Component", "Exit", "reap_orphans"]

LOG_BYTES = 4 << 20
LOG_KEEP = 2
"""A component's log is at most three parts of 4 MiB: the newest and two before it."""

_GUARD = Path(guard.__file__).resolve()
_LONGEST_LINE = 1 << 20
_MOST_UNSENT = 1 << 20
_LAST_READS = 64


class _GuardStarted(msgspec.Struct, tag="guard_started"):
    pid: int


class _GuardExited(msgspec.Struct, tag="guard_exited"):
    code: int | None
    signal: str | None


_from_guard = msgspec.json.Decoder(_GuardStarted | _GuardExited)


@dataclass(frozen=True)
class Exit:
    """How a program ended. Both are None when its guard was killed and nobody saw the program's own end."""

    code: int | None = None
    signal: str | None = None

    def __str__(self) -> str:
        if self.signal:
            return f"was ended by {self.signal}"
        return f"exited with code {self.code}" if self.code is not None else "lost its guard and was swept"


class Component:
    """One program of a crew. Iterate over it for its reports: the iteration ends when the program has ended.

    Args:
        name: Its name in the crew.
        argv: The program and its arguments; never a shell.
        variables: Its whole environment.
        log: File that gets what it prints; rotated and bounded.
        grace_s: Seconds it gets to end when the keeper is gone.
        lock: The run's lock, of which the guard holds a copy.
        folder: Its working directory.
        inherits: Descriptors that it gets under their numbers here.
        lets_go: What it detaches is not held, as keepers of runs that it starts.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        variables: Mapping[str, str],
        log: Path,
        grace_s: float,
        lock: RunLock | None = None,
        folder: Path | None = None,
        inherits: Sequence[int] = (),
        lets_go: bool = False,
    ) -> None:
        self.name, self._lets_go = name, lets_go
        self.pid: int | None = None
        """The program's process id; None until its guard said it."""
        self.exit: Exit | None = None
        """How it ended; None while it runs."""
        self.gone = asyncio.Event()
        """Set when the guard has ended as well: nothing of the component is left, unless the guard was killed."""
        self._started = asyncio.Event()
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        self._pending = b""
        self._background: set[asyncio.Task[None]] = set()
        self._spawn(argv, variables, log, grace_s, lock, folder, inherits)

    def _spawn(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        grace_s: float,
        lock: RunLock | None,
        folder: Path | None,
        inherits: Sequence[int],
    ) -> None:
        orders, self._orders = os.pipe()
        control, self._control = os.pipe()
        self._report, report = os.pipe()
        passed = [control, report, *inherits]
        command = [sys.executable, "-I", "-S", str(_GUARD), "--control", str(control), "--report", str(report)]
        if lock is not None:
            passed.append(lock.fileno())
            command += ["--hold", str(lock.fileno())]
        command += ["--log", str(log), "--log-bytes", str(LOG_BYTES), "--log-keep", str(LOG_KEEP)]
        command += ["--detached", "free"] if self._lets_go else []
        command += ["--grace", str(grace_s), "--", *argv]
        entry = wrap_command(command, GUARD if self._lets_go else level_from(os.environ))
        self._namespace = bool(entry.descriptors)
        try:
            self._guard = subprocess.Popen(
                entry.command,
                stdin=orders,
                stdout=subprocess.DEVNULL,
                env={**variables, ENV_REPORT_FD: str(report)},
                cwd=folder,
                pass_fds=[*passed, *entry.descriptors],
                start_new_session=True,
            )
        except BaseException:
            for descriptor in (self._orders, self._control, self._report):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (orders, control, report, *entry.descriptors):
                os.close(descriptor)
        self._unsent = b""
        for descriptor in (self._orders, self._report):
            os.set_blocking(descriptor, False)
        self._loop.add_reader(self._report, self._readable)
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self._guard.pid)
            self._loop.add_reader(self._pidfd, self._guard_ended)
        else:
            task = self._loop.create_task(self._wait_in_thread())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    async def started(self) -> int | None:
        """The program's process id, as soon as it is known; None if its guard ended before."""
        await self._started.wait()
        return self.pid

    def __aiter__(self) -> AsyncIterator[Report]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Report]:
        while (report := await self._reports.get()) is not None:
            yield report

    def send(self, order: Order) -> None:
        """Hands an order over without waiting. A component that has ended, or reads nothing, misses it."""
        if self._orders < 0 or len(self._unsent) > _MOST_UNSENT:
            return
        idle = not self._unsent
        self._unsent += encode_line(order)
        if idle:
            self._write()

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL to all that is left of it after `grace_s` seconds. Called again it can only shorten."""
        if self.gone.is_set():
            return
        try:
            os.write(self._control, f"stop {max(grace_s, 0.0):.3f}\n".encode())
        except BrokenPipeError:
            pass

    def kill_guard(self) -> None:
        """The last resort for a guard that does not answer; what it kept is then the keeper's to sweep."""
        if not self.gone.is_set():
            self._guard.kill()

    def excerpt(self, lines: int = 20, secrets: Sequence[str] = ()) -> list[str]:
        """The last lines it printed."""
        return read_tail(self._log, lines, secrets)

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._orders, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._close_orders()
            return
        if self._unsent:
            self._loop.add_writer(self._orders, self._write)
        else:
            self._loop.remove_writer(self._orders)

    def _close_orders(self) -> None:
        if self._orders >= 0:
            self._loop.remove_writer(self._orders)
            os.close(self._orders)
            self._orders, self._unsent = -1, b""

    def _close_report(self) -> None:
        if self._report >= 0:
            self._loop.remove_reader(self._report)
            os.close(self._report)
            self._report = -1

    def _readable(self) -> bool:
        """Takes in what is there now; False if there was nothing, or it was the end of file."""
        if self._report < 0:
            return False
        try:
            data = os.read(self._report, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close_report()
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            self._pending = b""
        for line in lines:
            if line:
                self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        report = decode_report(line)
        if report is not None:
            if self.exit is None:
                self._reports.put_nowait(report)
            return
        try:
            said = _from_guard.decode(line)
        except msgspec.DecodeError:
            return
        if isinstance(said, _GuardStarted):
            self.pid = said.pid
            self._started.set()
        else:
            self._ended(Exit(said.code, said.signal))

    def _ended(self, how: Exit) -> None:
        if self.exit is None:
            self.exit = how
            self._started.set()
            self._reports.put_nowait(None)
            self._close_orders()

    async def _wait_in_thread(self) -> None:
        await asyncio.to_thread(self._guard.wait)
        self._guard_ended()

    def _guard_ended(self) -> None:
        if hasattr(self, "_pidfd"):
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        code = self._guard.wait()
        # What it said last may still be in the pipe. If the guard was killed, others hold the pipe's other end and may
        # go on writing, so the end of file is not waited for.
        for _ in range(_LAST_READS):
            if not self._readable():
                break
        self._close_report()
        # bwrap ends like the guard within it: by a code, also where that was killed and said nothing.
        killed = code < 0 or (self._namespace and code == 128 + signal.SIGKILL)
        self._ended(Exit() if killed else Exit(code))
        os.close(self._control)
        self.gone.set()


async def reap_orphans(components: Sequence[Component], limit_s: float = guard.SWEEP_LIMIT_S) -> int:
    """Ends what came to this process because its guard was killed; needs `guard.become_subreaper`.

    Everything below the guards in `components` that still run is spared.

    Returns:
        How many processes were there.
    """
    found: set[int] = set()
    loop = asyncio.get_running_loop()
    limit = loop.time() + limit_s
    while loop.time() < limit:
        tree = guard.children_by_parent()
        ours = {component.guard_pid for component in components if not component.gone.is_set()}
        orphans = [pid for pid in tree.get(os.getpid(), []) if pid not in ours]
        if not orphans:
            break
        everything = guard.descendants(orphans, tree)
        found.update(everything)
        guard.kill(everything)
        for pid in orphans:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        await asyncio.sleep(0.005)
    return len(found)
