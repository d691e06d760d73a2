"""Run programs that a policy wrote, in a process that can compute and do nothing else.

`_confined.py` is that process and describes its limits. This file starts it, bounds its wall time and output, and makes
sure that it is gone afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import marshal
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from toprope.sdk import _apart  # noqa: F401 - compiled here, for processes that may write no compiled files
from toprope.sdk.errors import InvalidRequest

__all__ = ["Ran", "Unconfined", "passes_tests", "run_python"]

_CHILD = Path(__file__).with_name("_confined.py")
_CONFINED, _LIMITED = b"confined\n", b"limited\n"
_LONGEST_PROGRAM = 100_000
_LONGEST_OUTPUT = 4000
_MOST_THREADS = 64
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
"""SECCOMP_IOCTL_NOTIF_RECV and _SEND (linux/seccomp.h)."""
_START_S = 10.0
"""Seconds for the interpreter to start, before the program's own time begins."""


class Unconfined(InvalidRequest):
    """This machine cannot confine a program, so none was run."""


@dataclass(frozen=True)
class Ran:
    """The result of a program."""

    output: str
    """Standard output and error together, cut at the limit; the program that printed more was killed."""
    code: int | None
    """Its exit code; None if it was killed."""
    why: str = ""
    """Reason of a kill: `time limit`, `output limit`, `memory limit or a signal (SIGSEGV)`; else empty."""

    @property
    def ok(self) -> bool:
        return self.code == 0


def run_python(program: str, *, seconds: float = 5.0, memory_mb: int = 512) -> Ran:
    """Run a Python program with the standard library, but without files, network and other processes.

    Args:
        program: The source. The value of a last expression is printed, as in a notebook.
        seconds: Wall time of the program.
        memory_mb: Address space in MiB.

    Raises:
        Unconfined: Not Linux, or a kernel without Landlock or seccomp. Nothing was run.
        InvalidRequest: The program is longer than 100,000 characters.
    """
    if len(program) > _LONGEST_PROGRAM:
        raise InvalidRequest(f"A program may have {_LONGEST_PROGRAM:,} characters; this one has {len(program):,}.")
    if not sys.platform.startswith("linux"):
        raise Unconfined("Only Linux can confine a program (Landlock and seccomp), so none was run.")
    text = program.encode("utf-8", "replace")
    return _run(text, seconds, memory_mb, _LONGEST_OUTPUT, ["-S"], [], "/")


def passes_tests(code: str, tests: str, *, seconds: float, memory_mb: int) -> bool:
    """Return True if `tests` run through after `code`, which they see as if they stood below it.

    Both have this interpreter's packages and an empty folder to write to, and run in two processes where the tests
    permit it; `_apart.py` says when, and what stays open otherwise. To exit early is to fail: success is reported by a
    random word, which the process of the code never has. A machine that cannot confine a program runs both with limits
    only, which stops accidents but no attacker.

    Args:
        code: The source under test.
        tests: Source that raises if the code is wrong.
        seconds: Wall time of both.
        memory_mb: Address space in MiB, of each process.
    """
    word = secrets.token_hex(16)
    program = marshal.dumps((code, tests, word))
    with tempfile.TemporaryDirectory(prefix="toprope-tests-", ignore_cleanup_errors=True) as folder:
        outcome = _run(program, seconds, memory_mb, 1_000_000, [], [folder, "tests"], folder)
    return word in outcome.output


def _run(
    program: bytes,
    seconds: float,
    memory_mb: int,
    output_chars: int,
    options: list[str],
    scratch: list[str],
    cwd: str,
) -> Ran:
    counter, theirs = socket.socketpair()
    arguments = [str(memory_mb << 20), str(max(1, round(seconds) + 1)), str(theirs.fileno()), *scratch]
    process = subprocess.Popen(
        [sys.executable, "-I", *options, "-B", str(_CHILD), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **({"HOME": cwd, "TMPDIR": cwd} if scratch else {})},
        cwd=cwd,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )
    theirs.close()
    threads = _Threads(process.pid, counter)
    try:
        output, why = _converse(process, program, seconds, 4 * output_chars, threads)
    finally:
        _end(process)
        threads.close()
    mark = next((mark for mark in (_CONFINED, _LIMITED) if output.startswith(mark)), None)
    if mark is None:
        if why or process.returncode != 70:
            return Ran("", None, why or _signal(process.returncode) or "it could not be started")
        reason = output.decode("utf-8", "replace").removeprefix("unconfined: ").strip()
        raise Unconfined(f"This machine cannot confine a program, so none was run: {reason}.")
    text = output[len(mark) :].decode("utf-8", "replace")
    if len(text) > output_chars:
        text, why = text[:output_chars], why or "output limit"
    code = process.returncode if not why and process.returncode >= 0 else None
    return Ran(text, code, why or _signal(process.returncode))


class _Threads:
    """Answers a program's requests for threads, which its filter of system calls sends here.

    The kernel has no limit on threads that also holds for root.
    """

    def __init__(self, pid: int, counter: socket.socket) -> None:
        self._pid, self._counter, self._requests = pid, counter, -1

    def register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._counter, selectors.EVENT_READ, lambda: self._take(selector))

    def _take(self, selector: selectors.BaseSelector) -> None:
        selector.unregister(self._counter)
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._counter, 1, 1)
            if descriptors:
                [self._requests] = descriptors
                selector.register(self._requests, selectors.EVENT_READ, lambda: self._answer(selector))

    def _answer(self, selector: selectors.BaseSelector) -> None:
        request = bytearray(80)  # struct seccomp_notif
        try:
            fcntl.ioctl(self._requests, _RECEIVE, request)
            few = len(os.listdir(f"/proc/{self._pid}/task")) < _MOST_THREADS
            answer = struct.pack(
                "=QqiI", *struct.unpack_from("=Q", request), 0, *((0, _CONTINUE) if few else (-errno.EAGAIN, 0))
            )
            fcntl.ioctl(self._requests, _SEND, answer)
        except FileNotFoundError:
            return  # the thread that asked is gone
        except OSError:
            selector.unregister(self._requests)

    def close(self) -> None:
        self._counter.close()
        if self._requests >= 0:
            os.close(self._requests)


def _converse(
    process: subprocess.Popen[bytes], program: bytes, seconds: float, limit: int, threads: _Threads
) -> tuple[bytes, str]:
    """Send the program and read its output until its end, the time limit or the output limit."""
    assert process.stdin is not None and process.stdout is not None
    output, unsent = bytearray(), memoryview(program)
    until, started = time.monotonic() + _START_S, False
    for stream in (process.stdin, process.stdout):
        os.set_blocking(stream.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        threads.register(selector)
        while True:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return bytes(output), "time limit"
            for key, _ in selector.select(remaining):
                if callable(key.data):
                    key.data()
                    continue
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not unsent:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 1 << 16)
                if not data:
                    return bytes(output), ""
                if not started:
                    until, started = time.monotonic() + seconds, True
                output += data
                if len(output) > limit + len(_CONFINED):
                    return bytes(output), "output limit"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and, if it was not confined, the processes of its group."""
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(0.2)  # a program that closed its output may still be computing
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    name = signal.Signals(-code).name
    return "time limit" if name == "SIGXCPU" else f"memory limit or a signal ({name})"
