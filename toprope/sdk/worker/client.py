"""Talks to a worker: starts it, asks it, gives it its time, and leaves nothing of it behind.

A worker answers in order, one request at a time, so a call's time runs from when it is the oldest one unanswered: calls
that wait behind a slow one do not pay for it. Requests that a worker carries out beside the others (`beside=True`) have
a clock of their own. A call that runs out of time costs the worker its life, with whatever processes it started in its
group; so does `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from toprope.sdk.errors import WorkerDied, WorkerError, WorkerFailure, WorkerTimeout

__all__ = ["KEY_IN_URL", "WorkerClient", "worker_environment"]

WORKER = Path(__file__).with_name("program.py")
_LONGEST_LINE = 1 << 30
_CHUNK = 1 << 16
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|^TOPROPE_", re.IGNORECASE)
KEY_IN_URL = re.compile(r"(https?|wss?)://[^/\s@]+@|://[^/\s:@]+:[^/\s@]+@", re.IGNORECASE)
"""A URL with a user or password in it, as those of package indexes and databases often have."""


class Sink(Protocol):
    """Where a worker's standard error goes: a binary file, a log."""

    def write(self, data: bytes, /) -> object: ...


def worker_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for a worker: ours without what looks like a secret, and what it is given on purpose.

    Args:
        extra: Variables to add; an environment that needs a key gets it here.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        # Without its proxy a program has no network at all: whoever names one to all programs means these as well.
        if not _SECRET.search(name) and (not KEY_IN_URL.search(value) or name.lower().endswith("_proxy"))
    }
    return {**kept, **(extra or {})}


class _Call:
    """A request without an answer yet."""

    def __init__(self, operation: str, timeout: float, future: asyncio.Future[Any], beside: bool) -> None:
        self.operation = operation
        self.timeout = timeout
        self.future = future
        self.beside = beside
        self.timer: asyncio.TimerHandle | None = None
        """Of a call that is carried out beside the others."""


class _Seal:
    """What is printed until `mark` comes is dropped."""

    def __init__(self, mark: bytes) -> None:
        self.mark, self.held, self.dropped = mark, b"", 0
        self.broken = asyncio.Event()


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Says when the process has ended. `Process.wait` waits until its pipes are closed as well, and a daemon that the
    environment left holds them open for as long as it likes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_LONGEST_LINE, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class WorkerClient:
    """A running worker. Create it with `WorkerClient.start`; calls may be concurrent. Works with `async with`."""

    def __init__(self, process: asyncio.subprocess.Process, exited: asyncio.Event, stderr: Sink | None) -> None:
        self._process = process
        self._exited = exited
        self._sink = stderr
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Call] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timed = 0
        """The call that it is of."""
        self._timed_out: str = ""
        self._ended_for: str = ""
        self._tail: deque[bytes] = deque()
        self._sealed: _Seal | None = None
        self._end: WorkerDied | WorkerTimeout | None = None
        self._closing = False
        self._stderr_task = asyncio.create_task(self._read_stderr())
        self._stdout_task = asyncio.create_task(self._read_answers())
        self._watch_task = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        interpreter: str | None = None,
        *,
        wrapper: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stderr: Sink | None = None,
        timeout: float = 30.0,
    ) -> Self:
        """Starts a worker and waits for its first answer.

        Args:
            interpreter: Path of its Python, 3.11 or newer; ours by default.
            wrapper: Command that starts it in turn, such as a guard or a sandbox.
            env: All its variables; `worker_environment()` by default.
            cwd: Its working directory.
            stderr: Gets what it writes to standard error and what the environment prints; only the last lines are
                kept without it.
            timeout: Seconds until the first answer.

        Raises:
            WorkerTimeout: It did not answer in time.
            WorkerDied: It cannot be started, or ended.
        """
        variables = dict(worker_environment() if env is None else env)
        variables.setdefault("PYTHONHASHSEED", "0")
        command = [*wrapper, interpreter or sys.executable, "-P", str(WORKER)]
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: _Protocol(loop),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=variables,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerDied(f"The worker cannot be started by {command[0]}: {error}") from error
        link = cls(asyncio.subprocess.Process(transport, protocol, loop), protocol.exited, stderr)
        try:
            await link.call("ping", timeout=timeout)
        except BaseException:
            await link.close(grace=0)
            raise
        return link

    @property
    def pid(self) -> int:
        """Process id of the worker, or of its wrapper; also the id of its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether calls can be answered; False once the worker is gone or going."""
        return self._end is None and not self._closing

    async def call(self, op: str, /, *, timeout: float = 60.0, beside: bool = False, **arguments: Any) -> Any:
        """Asks and waits for the result.

        Args:
            op: The operation; toprope.sdk.worker.service has them all.
            timeout: Seconds that the worker may be busy with this request.
            beside: Whether it is one of those that the worker carries out beside others, in any order
                (toprope.sdk.worker.service.BESIDE); its time runs from now.
            **arguments: What the operation takes; values that JSON can say.

        Raises:
            WorkerError: The worker answered with an error; it goes on.
            WorkerTimeout: It did not answer in time and was killed.
            WorkerDied: It ended.
        """
        if self._end is not None:
            raise self._copy_of_end()
        if self._closing:
            raise WorkerDied("The worker was closed.")
        number = next(self._ids)
        line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
        loop = asyncio.get_running_loop()
        call = _Call(op, timeout, loop.create_future(), beside)
        self._waiting[number] = call
        if beside:
            call.timer = loop.call_later(timeout, self._out_of_time, number)
        elif self._timer is None:
            self._start_clock()
        stdin = self._process.stdin
        assert stdin is not None  # it was asked for as a pipe
        stdin.write(line)
        with contextlib.suppress(ConnectionError):  # the end of the worker fails the future
            await stdin.drain()
        return await call.future

    @property
    def sealed(self) -> bool:
        """Whether everything that the worker prints is dropped."""
        return self._sealed is not None

    def seal(self) -> None:
        """Drop everything that the worker prints until `unseal`: an author's code may print held-out tasks."""
        self._sealed = _Seal(f"seal {secrets.token_hex(16)}".encode())

    async def unseal(self) -> None:
        """Keep what the worker prints from now on, after one line with the number of dropped bytes."""
        seal = self._sealed
        if seal is None or not self.alive:
            return  # the last output of a worker that has ended stays sealed
        with contextlib.suppress(WorkerFailure):
            await self.call("mark", text=seal.mark.decode())
            await seal.broken.wait()

    async def close(self, grace: float = 2.0) -> None:
        """Ends the worker: by the end of its input, after `grace` seconds by force. Never raises; may be repeated."""
        self._closing = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.returncode is None and grace > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), grace)
        self._kill()
        await asyncio.wait([self._watch_task])

    def end(self, why: str) -> None:
        """Kills the worker; those who wait for it are told why."""
        self._ended_for = why
        self._kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _start_clock(self) -> None:
        """Times the oldest call. Its time goes on where a later one was answered before it."""
        oldest = next((number for number, call in self._waiting.items() if not call.beside), 0)
        if self._timer is not None:
            if oldest == self._timed:
                return
            self._timer.cancel()
            self._timer = None
        self._timed = oldest
        if oldest:
            timeout = self._waiting[oldest].timeout
            self._timer = asyncio.get_running_loop().call_later(timeout, self._out_of_time, oldest)

    def _out_of_time(self, number: int) -> None:
        call = self._waiting.get(number)
        if call is None:
            return
        self._timed_out = f"The worker did not answer {call.operation!r} within {call.timeout:g} s and was killed."
        del self._waiting[number]
        if not call.future.done():
            call.future.set_exception(_at_work(WorkerTimeout(self._timed_out)))
        self._kill()

    def _kill(self) -> None:
        """Kills the group. It has the number of its leader, which the system does not give out again so soon."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_answers(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None  # it was asked for as a pipe
        while line := await stdout.readline():
            try:
                answer = json.loads(line)
                number = answer["id"]
            except (ValueError, TypeError, KeyError):
                continue  # the last line of a worker that was killed
            call = self._waiting.pop(number, None)
            if call is not None and call.timer is not None:
                call.timer.cancel()
            else:
                self._start_clock()
            if call is None or call.future.done():
                continue  # the caller does not wait any more
            if answer["ok"]:
                call.future.set_result(answer["result"])
            else:
                call.future.set_exception(WorkerError(**answer["error"]))

    async def _read_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None  # it was asked for as a pipe
        while chunk := await stderr.read(_CHUNK):
            if self._sealed is not None and not (chunk := self._open_seal(self._sealed, chunk)):
                continue
            if self._sink is not None:
                self._sink.write(chunk)
            self._tail.append(chunk[-_TAIL_BYTES:])
            while len(self._tail) > 1 and sum(map(len, self._tail)) - len(self._tail[0]) >= _TAIL_BYTES:
                self._tail.popleft()

    def _open_seal(self, seal: _Seal, chunk: bytes) -> bytes:
        """What comes after the mark, with a word about what came before it; empty while the mark has not come."""
        seal.held += chunk
        before, found, after = seal.held.partition(seal.mark + b"\n")
        if not found:
            seal.dropped += max(0, len(seal.held) - len(seal.mark))
            seal.held = seal.held[-len(seal.mark) :]
            return b""
        self._sealed = None
        seal.broken.set()
        dropped = seal.dropped + len(before)
        said = b"[toprope] %d bytes printed while held-out tasks were played are not kept\n" % dropped
        return (said if dropped else b"") + after

    async def _watch(self) -> None:
        """Waits for the worker's end, then clears up: nobody waits for an answer that cannot come."""
        await self._exited.wait()
        code = self._process.returncode
        assert code is not None  # it has ended
        self._kill()  # what the environment left in the group; it would hold our pipes open
        await asyncio.wait([self._stdout_task, self._stderr_task], timeout=1.0)
        for task in (self._stdout_task, self._stderr_task):
            task.cancel()
        if self._sealed is not None:
            self._sealed.broken.set()
        for timer in (self._timer, *(call.timer for call in self._waiting.values())):
            if timer is not None:
                timer.cancel()
        if self._timed_out:
            self._end = WorkerTimeout(self._timed_out)
        elif self._ended_for:
            self._end = WorkerDied(self._ended_for, None, self._last_words())
        else:
            self._end = WorkerDied(_epitaph(code, self._last_words()), code, self._last_words())
        # Which of those beside each other it ended over, nobody can tell.
        first = next((call for call in self._waiting.values() if not call.beside), None)
        for call in self._waiting.values():
            if not call.future.done():
                at_work = call is first and not self._timed_out
                call.future.set_exception(_at_work(self._copy_of_end()) if at_work else self._copy_of_end())
        self._waiting.clear()
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    def _last_words(self) -> str:
        lines = b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _copy_of_end(self) -> WorkerDied | WorkerTimeout:
        """A new exception for each caller: one that is raised twice would gather both tracebacks."""
        end = self._end
        if isinstance(end, WorkerTimeout):
            return WorkerTimeout(str(end))
        code = end.code if end is not None else None
        return WorkerDied(str(end), code, end.stderr if end is not None else "")


def _at_work(end: WorkerDied | WorkerTimeout) -> WorkerDied | WorkerTimeout:
    end.at_work = True
    return end


def _epitaph(code: int, words: str) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        how = f"The worker was ended by {name}"
    else:
        how = f"The worker ended with exit code {code}"
    if "Unknown option: -P" in words:
        return f"{how}: its Python is older than 3.11."
    return f"{how}. Its last lines:\n{words}" if words else f"{how}."
