"""Runs programs that a policy wrote, in a process that can compute and nothing else. Linux only; elsewhere it refuses.

`_confined.py` says what such a process cannot do. Here are its wall time and its output, and that it is
gone afterwards.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from toprope.sdk.errors import InvalidRequest

__all__ = ["Ran", "Unconfined", "run_python"]

_CHILD = Path(__file__).with_name("_confined.py")
_MARK = b"confined\n"
_LONGEST_PROGRAM = 100_000


class Unconfined(InvalidRequest):
    """This machine cannot confine a program, so none was run."""


@dataclass(frozen=True)
class Ran:
    """What became of a program."""

    output: str
    """Standard output and error together, cut at the limit."""
    code: int | None
    """Its exit code; None where it was ended."""
    why: str = ""
    """Why it was ended: `time limit`, `output limit`, `memory limit or a signal (SIGSEGV)`; else empty."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == 0


def run_python(
    program: str, *, seconds: float = 5.0, memory_mb: int = 512, output_chars: int = 4000, python: str | None = None
) -> Ran:
    """Runs a Python program that has the standard library, and no files, network or other processes.

    Args:
        program: The source. The value of a last expression is printed, as in a notebook.
        seconds: Wall time, the interpreter's start of some hundredths of a second included.
        memory_mb: Address space in MiB.
        output_chars: Output after which it is ended.
        python: The interpreter; this one by default.

    Raises:
        Unconfined: This machine has no way to confine it. Nothing was run.
        InvalidRequest: The program is longer than 100,000 characters.
    """
    if len(program) > _LONGEST_PROGRAM:
        raise InvalidRequest(f"A program may have {_LONGEST_PROGRAM:,} characters; this one has {len(program):,}.")
    if not sys.platform.startswith("linux"):
        raise Unconfined("Programs are confined by Linux (Landlock and seccomp); this system is none, so none is run.")
    began = time.monotonic()
    arguments = [str(memory_mb << 20), str(max(1, round(seconds) + 1))]
    process = subprocess.Popen(
        [python or sys.executable, "-I", "-S", "-B", str(_CHILD), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        cwd="/",
        start_new_session=True,
    )
    try:
        output, why = _converse(process, program.encode("utf-8", "replace"), began + seconds, 4 * output_chars)
    finally:
        _end(process)
    taken = time.monotonic() - began
    if not output.startswith(_MARK):
        if why or process.returncode != 70:
            return Ran("", None, why or _signal(process.returncode) or "it could not be started", taken)
        reason = output.decode("utf-8", "replace").removeprefix("unconfined: ").strip()
        raise Unconfined(f"This machine cannot confine a program, so none was run: {reason}.")
    text = output[len(_MARK) :].decode("utf-8", "replace")
    if len(text) > output_chars:
        text, why = text[:output_chars], why or "output limit"
    code = process.returncode if not why and process.returncode >= 0 else None
    return Ran(text, code, why or _signal(process.returncode), taken)


def _converse(process: subprocess.Popen[bytes], program: bytes, until: float, limit: int) -> tuple[bytes, str]:
    """Hands the program over and reads what comes back, until the end, the time or the limit."""
    assert process.stdin is not None and process.stdout is not None
    output, left = bytearray(), memoryview(program)
    for stream in (process.stdin, process.stdout):
        os.set_blocking(stream.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return bytes(output), "time limit"
            for key, _ in selector.select(remaining):
                if key.fileobj is process.stdin:
                    try:
                        left = left[os.write(key.fd, left) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 1 << 16)
                if not data:
                    return bytes(output), ""
                output += data
                if len(output) > limit + len(_MARK):
                    return bytes(output), "output limit"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It has no children, so its own end is the end of all of it."""
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            try:
                stream.close()
            except OSError:
                pass
    try:
        # One that closed its output goes on computing for nobody.
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _signal(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    name = signal.Signals(-code).name
    return "time limit" if name == "SIGXCPU" else f"memory limit or a signal ({name})"
