"""One program of a crew as its keeper sees it: orders go in, reports come out, and its end is an event.

Orders go to the program's standard input. Reports come back on a descriptor of their own, on which the guard also
reports the program's end. So the keeper always reads the last report of a program before its end, without polling.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from toprope.machine import has_pidfd
from toprope.records.messages import Keys, Order, Report, decode_report, encode_line
from toprope.supervisor import guard
from toprope.supervisor.keeper.logs import read_tail
from toprope.supervisor.keeper.spawner import Spawner, SpawnRequest, wait_for_end

_LONGEST_LINE = 1 << 20
_MOST_UNSENT = 1 << 20
_LAST_READS = 64
_BUNDLE_S = 0.04
"""Reports that follow a read wait so long in the pipe and are read together: a wake-up costs more than a report, and a
training crew sends one at every step. Not once the program has ended: the guard then has the last report."""


class _GuardStarted(msgspec.Struct, tag="guard_started"):
    pid: int


class _GuardExited(msgspec.Struct, tag="guard_exited"):
    code: int | None
    signal: str | None


_guard_decoder = msgspec.json.Decoder(_GuardStarted | _GuardExited)


@dataclass(frozen=True)
class Exit:
    """The end of a program. Both fields are None if its guard was killed, so that nothing observed the end."""

    code: int | None = None
    signal: str | None = None

    def __str__(self) -> str:
        if self.signal:
            return f"was ended by {self.signal}"
        return f"exited with code {self.code}" if self.code is not None else "lost its guard and was killed"


class BundledReader:
    """Reads the lines of a pipe: at once after a silence, and what follows a read together, a moment later.

    Args:
        pipe: A non-blocking descriptor; closed at its end, or by `drain`.
        handle: Called with each line.
    """

    def __init__(self, pipe: int, handle: Callable[[bytes], None]) -> None:
        self._pipe, self._handle = pipe, handle
        self._unread, self._bundles = b"", True
        self.heard: float | None = None
        """The loop's time of the last read."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._on_readable)

    def hasten(self) -> None:
        """Read everything at once from now on."""
        self._bundles = False
        self._resume()

    def drain(self) -> None:
        """Read what is in the pipe and close it. If the guard was killed, other processes hold it open and may go on
        writing, so its end is not awaited."""
        for _ in range(_LAST_READS):
            if not self._read():
                break
        self._close()

    def _on_readable(self) -> None:
        if self._read() and self._bundles:
            self._loop.remove_reader(self._pipe)
            self._loop.call_later(_BUNDLE_S, self._resume)

    def _resume(self) -> None:
        if self._pipe >= 0:
            self._loop.add_reader(self._pipe, self._on_readable)

    def _read(self) -> bool:
        """Read what is in the pipe now; False if there was nothing, or the pipe has ended."""
        if self._pipe < 0:
            return False
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close()
            return False
        self.heard = self._loop.time()
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > _LONGEST_LINE:
            self._unread = b""
        for line in lines:
            if line:
                self._handle(line)
        return True

    def _close(self) -> None:
        if self._pipe >= 0:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


class Component:
    """One running program of a crew. Iterate over it for its reports; the iteration ends with the program.

    Args:
        name: Its name in the crew.
        request: The program to start.
        spawner: Starts it.

    Raises:
        OSError: Its guard cannot be started.
    """

    def __init__(self, name: str, request: SpawnRequest, spawner: Spawner) -> None:
        self.name = name
        self.pid: int | None = None
        """The program's process id; None until its guard has reported it."""
        self.exit: Exit | None = None
        """The end of the program; None while it runs."""
        self.gone = asyncio.Event()
        """Set when the guard has ended as well: no process of the component is left, unless the guard was killed."""
        self._log = request.log
        self._started = asyncio.Event()
        self._queue: asyncio.Queue[Report | None] = asyncio.Queue()
        self._unsent = b""
        self._loop = asyncio.get_running_loop()
        self._guard = spawner.spawn(name, request)
        self._orders = self._guard.orders
        self._reports = BundledReader(self._guard.reports, self._handle_line)
        self._follower = self._loop.create_task(self._follow_guard())
        if request.keys and self.node is None:  # elsewhere they do not travel with the orders
            self.send(Keys(dict(request.keys)))

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    @property
    def node(self) -> str | None:
        """Name of the node that it runs on; None beside the keeper."""
        return self._guard.node

    @property
    def is_cut_off(self) -> bool:
        """True if nothing has come of it for so long that the connection to its node must be broken."""
        limit, heard = self._guard.silence_limit_s, self._reports.heard
        silent = limit is not None and heard is not None and self._loop.time() - heard > limit
        return silent and self.exit is None

    def restart_silence(self) -> None:
        """Measure its silence from now on, because what it said may be unread."""
        if self._reports.heard is not None:
            self._reports.heard = self._loop.time()

    async def wait_started(self) -> int | None:
        """Return the program's process id as soon as it is known; None if the guard ended before."""
        await self._started.wait()
        return self.pid

    async def __aiter__(self) -> AsyncIterator[Report]:
        while (report := await self._queue.get()) is not None:
            yield report

    def send(self, order: Order) -> None:
        """Send an order without waiting. A component that has ended, or that does not read, misses it."""
        if self._orders < 0 or len(self._unsent) > _MOST_UNSENT:
            return
        idle = not self._unsent
        self._unsent += encode_line(order)
        if idle:
            self._write_orders()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM now and SIGKILL to all that is left after `grace_s` seconds. A later call can only shorten."""
        if not self.gone.is_set():
            self._guard.stop(grace_s)

    def kill_guard(self) -> None:
        """Kill a guard that does not react. The keeper then has to reap the processes that it kept."""
        if not self.gone.is_set():
            self._guard.kill()

    def kill_group(self) -> None:
        """Kill what is left in the program's process group, after its guard was killed."""
        if self.pid is not None and self.node is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def excerpt(self, lines: int = 20, secrets: Sequence[str] = ()) -> list[str]:
        """Return the last lines that the program printed."""
        return read_tail(self._log, lines, secrets)

    def _write_orders(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._orders, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._close_orders()
            return
        if self._unsent:
            self._loop.add_writer(self._orders, self._write_orders)
        else:
            self._loop.remove_writer(self._orders)

    def _close_orders(self) -> None:
        if self._orders >= 0:
            self._loop.remove_writer(self._orders)
            os.close(self._orders)
            self._orders, self._unsent = -1, b""

    async def _hasten(self, pid: int) -> None:
        with suppress(OSError):  # it has ended already
            await wait_for_end(pid)
        self._reports.hasten()

    def _handle_line(self, line: bytes) -> None:
        report = decode_report(line)
        if report is not None:
            if self.exit is None:
                self._queue.put_nowait(report)
            return
        try:
            message = _guard_decoder.decode(line)
        except msgspec.DecodeError:
            return
        if isinstance(message, _GuardStarted):
            self.pid = message.pid
            self._started.set()
            if self.node is None and has_pidfd():
                self._hastener = self._loop.create_task(self._hasten(message.pid))
        else:
            self._set_exit(Exit(message.code, message.signal))

    def _set_exit(self, outcome: Exit) -> None:
        if self.exit is None:
            self.exit = outcome
            self._started.set()
            self._queue.put_nowait(None)
            self._close_orders()

    async def _follow_guard(self) -> None:
        """Wait for the end of the guard, then read its last reports."""
        code = await self._guard.wait()
        self._reports.drain()
        self._set_exit(Exit(code))
        self.gone.set()


async def reap_orphans(components: Sequence[Component], limit_s: float = guard.REAP_LIMIT_S) -> int:
    """Kill the processes that became children of this process because their guard was killed.

    Needs `guard.become_subreaper`. Spares everything below the guards in `components` that still run.

    Returns:
        The number of processes that were killed.
    """
    killed: set[int] = set()
    loop = asyncio.get_running_loop()
    limit = loop.time() + limit_s
    while loop.time() < limit:
        tree = guard.children_by_parent()
        ours = {component.guard_pid for component in components if not component.gone.is_set()}
        orphans = [pid for pid in tree.get(os.getpid(), []) if pid not in ours]
        if not orphans:
            break
        everything = guard.descendants(orphans, tree)
        killed.update(everything)
        guard.kill(everything)
        for pid in orphans:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        await asyncio.sleep(0.005)
    return len(killed)
