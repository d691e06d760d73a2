"""A spawner that lets one process import PyTorch for all programs that need it, and fork them.

The programs share the imported libraries in memory, and start as soon as these are imported once. Linux only: a forked
guard becomes a child of the keeper, which is a subreaper. If the process fails or takes too long, the programs start
like all others: also where bubblewrap works and the process may not make namespaces.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from toprope.machine import has_pidfd
from toprope.records.messages import ENV_REPORT_FD
from toprope.supervisor.environment_variables import library_part
from toprope.supervisor.keeper.containment import BUBBLEWRAP, level_from
from toprope.supervisor.keeper.spawner import (
    GUARD_FILE,
    LocalSpawner,
    Pipes,
    SpawnedGuard,
    SpawnRequest,
    guard_options,
    start_guard,
    wait_for_end,
    write_stop,
)

MODULE = "toprope.training.component.preload"
LIBRARIES = (
    "torch",
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "toprope.training.component.member",
)
"""Imports that trainer and inference have in common."""
PATIENCE_S = 120.0
"""After so long without an answer the programs start like all others."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Libraries may open a GPU while they are imported, and a fork cannot use it."""


def can_preload() -> bool:
    """True if forked programs work here: on Linux with pidfds and without a GPU."""
    return sys.platform.startswith("linux") and has_pidfd() and not any(Path(device).exists() for device in _GPUS)


class Preloaded:
    """A child process that imports libraries and then forks programs.

    Args:
        variables: Its environment; libraries read some of it when they are imported.
        room: Bytes for the arguments that its forks show in lists of processes, in place of its own.
        log: Descriptor that receives its errors.
        folder: Working directory.
        libraries: Modules to import.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        room: int,
        log: int = subprocess.DEVNULL,
        folder: Path | None = None,
        libraries: Sequence[str] = LIBRARIES,
    ) -> None:
        self.variables, self._room = dict(variables), room
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(GUARD_FILE), ",".join(libraries), "-" * room]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self.variables,
                cwd=folder,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fits(self, request: SpawnRequest) -> bool:
        """Return True if it lives, imported as this program would import, and has room for its arguments."""
        alike = library_part(self.variables) == library_part(request.variables)
        return alike and self.process.poll() is None and _room_for(request) <= self._room

    def end(self) -> None:
        """Kill the process. What it has forked goes on."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class PreloadingSpawner:
    """Forks preloadable programs from one process, and starts all others by itself. See `Spawner`.

    Args:
        count: Preloadable programs to expect; after them the process ends.
        libraries: Modules to import.
        waiting: A process that was started before, and is used if it fits.
    """

    def __init__(self, count: int, libraries: Sequence[str] = LIBRARIES, waiting: Preloaded | None = None) -> None:
        self._remaining, self._local, self._libraries = count, LocalSpawner(), libraries
        self._waiting = waiting
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pending: deque[_ForkedGuard] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._reaper: asyncio.Task[None] | None = None

    def spawn(self, member: str, request: SpawnRequest) -> SpawnedGuard:
        """See `Spawner.spawn`."""
        if not request.preloadable or request.inherits or self._remaining <= 0:
            return self._local.spawn(member, request)
        self._remaining -= 1
        if self._socket is None:
            self._start(request)
        assert self._socket is not None
        forked = _ForkedGuard(request)
        try:
            socket.send_fds(self._socket, [json.dumps(_message(request)).encode()], forked.descriptors)
        except OSError:
            forked.start_alone()
            return forked
        self._pending.append(forked)
        return forked

    def close(self) -> None:
        """See `Spawner.close`."""
        self._remaining = 0
        self.drop_waiting()
        self._end()

    def drop_waiting(self) -> None:
        """End the process that was started before, if it was not used yet."""
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None

    def _start(self, request: SpawnRequest) -> None:
        preloaded, self._waiting = self._waiting, None
        if preloaded is not None and not preloaded.fits(request):
            preloaded.end()
            preloaded = None
        if preloaded is None:
            with open(request.log, "ab") as log:
                room = _room_for(request)
                preloaded = Preloaded(request.variables, room, log.fileno(), request.folder, self._libraries)
        self._process, ours = preloaded.process, preloaded.socket
        ours.setblocking(False)
        self._socket, loop = ours, asyncio.get_running_loop()
        loop.add_reader(ours, self._read_answers)
        self._timer = loop.call_later(PATIENCE_S, self._give_up)

    def _read_answers(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._give_up()
            return
        answer = json.loads(data)
        forked = self._pending.popleft()
        if "pid" in answer:
            forked.set_pid(answer["pid"])
        else:
            forked.start_alone()
        if not self._pending and self._remaining <= 0:
            self._disconnect()  # the process lets the last guard begin, then ends by itself
            self._reaper = asyncio.get_running_loop().create_task(self._reap())

    def _give_up(self) -> None:
        """End the process; what it has not started starts like all other programs."""
        self._remaining = 0
        self._end()
        while self._pending:
            self._pending.popleft().start_alone()

    def _disconnect(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def _reap(self) -> None:
        if self._process is not None:
            await wait_for_end(self._process.pid)
            self._end()

    def _end(self) -> None:
        self._disconnect()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _room_for(request: SpawnRequest) -> int:
    """Return the bytes for the arguments of a guard and its program, with some to spare."""
    words = [*request.argv, *guard_options(request), str(GUARD_FILE)]
    return 2 * sum(len(os.fsencode(word)) + 1 for word in words) + 200


def _message(request: SpawnRequest) -> dict[str, object]:
    return {
        "module": request.argv[3],
        "arguments": list(request.argv[4:]),
        "variables": dict(request.variables),
        "folder": None if request.folder is None else str(request.folder),
        "log": str(request.log.absolute()),
        "namespace": level_from(os.environ) == BUBBLEWRAP and not request.releases_detached,
        "guard": guard_options(request),
        "descriptors": ["--control", "--report", *(["--hold"] if request.lock is not None else [])],
        "report_variable": ENV_REPORT_FD,
    }


class _ForkedGuard:
    """A guard that another process forks for this one, which becomes its parent. See `SpawnedGuard`."""

    node: str | None = None
    silence_limit_s: float | None = None

    def __init__(self, request: SpawnRequest) -> None:
        self._request, self._pipes = request, Pipes()
        self.orders, self.reports = self._pipes.orders, self._pipes.reports
        self.pid = -1
        """-1 until it is known."""
        self._alone: SpawnedGuard | None = None
        self._settled = asyncio.Event()
        self._control = self._pipes.control

    @property
    def descriptors(self) -> list[int]:
        """Descriptors for the guard: standard input, control, reports, and the lock."""
        lock = [] if self._request.lock is None else [self._request.lock.fileno()]
        return [self._pipes.orders_reader, self._pipes.control_reader, self._pipes.reports_writer, *lock]

    def set_pid(self, pid: int) -> None:
        """The guard was forked. If it was stopped before, the end of its control pipe ends it."""
        self._pipes.close_theirs()
        if not self._settled.is_set():
            self.pid = pid
            self._settled.set()

    def start_alone(self) -> None:
        """Start the guard as a child of this process."""
        if self._settled.is_set():
            self._pipes.close_theirs()
            return
        try:
            self._alone = start_guard(self._request, self._pipes)
            self.pid = self._alone.pid
        except OSError as error:
            print(f"{self._request.argv[-1]} could not be started: {error}", file=sys.stderr, flush=True)
        self._pipes.close_theirs()
        self._settled.set()

    def stop(self, grace_s: float) -> None:
        self._settled.set()  # what has not started by now does not start
        if self._alone is not None:
            self._alone.stop(grace_s)
        elif self._control >= 0:
            write_stop(self._control, grace_s)

    def kill(self) -> None:
        self._settled.set()
        if self.pid > 0 and self._control >= 0:
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        await self._settled.wait()
        if self._alone is not None:
            code = await self._alone.wait()
            self._control = -1
            return code
        ended: int | None = None
        if self.pid > 0:
            await wait_for_end(self.pid)
            _, status = os.waitpid(self.pid, 0)
            ended = os.waitstatus_to_exitcode(status)
        os.close(self._control)
        self._control = -1
        return None if ended is None or ended < 0 else ended
