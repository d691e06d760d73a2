"""Runs a program with its tests under limits, and ends everything that it started. A program of its own:

    python -I test_program.py < {"code", "tests", "seconds", "memory_mb"}  >  {"passed", "why", "network"}

The code is what a model wrote: it may loop, eat memory, fork, write files, print, or exit before its tests. It gets a
process of its own with limits on processor time, memory, files and open descriptors, an empty folder, no descriptor of
ours but one, and, where the system allows it (Linux with user namespaces), no network. That keeps accidents and lazy
cheating away; it is no jail for an attacker.

Passing is said by a random word that the program is not given, after the last test: to exit early is to fail.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import signal
import sys
import time
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_CHILD_SUBREAPER = 36
_FILE_BYTES = 1 << 20
_OPEN_FILES = 64
_LONGEST_WHY = 300


def _libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (allowed, allowed))
    except (ValueError, OSError):
        pass  # macOS has no limit of memory


def _child(request: dict[str, Any], answer: int, word: bytes) -> None:
    """Never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    libc = _libc()
    alone = getattr(libc, "unshare", None)
    network = alone is None or alone(_CLONE_NEWUSER | _CLONE_NEWNET) != 0
    os.write(answer, b"N" if network else b"-")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(request["seconds"]) + 1)
    _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _limit(resource.RLIMIT_AS, int(request["memory_mb"]) << 20)
    try:
        space: dict[str, Any] = {"__name__": "__main__"}
        for name in ("code", "tests"):
            exec(compile(request[name], f"<{name}>", "exec"), space)
        said = word
    except BaseException as error:  # a model's code may raise anything, SystemExit and MemoryError too
        said = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:_LONGEST_WHY]
    os.write(answer, said)
    os._exit(0)


def _descendants() -> list[int]:
    """Processes below this one, as Linux lists them; elsewhere the child's group alone is known."""
    found, waiting = [], [os.getpid()]
    while waiting:
        process = waiting.pop()
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    children = [int(one) for one in file.read().split()]
                found += children
                waiting += children
        except OSError:
            continue
    return found


def _end_all(child: int) -> None:
    """Kills the child, its group and what left it; they are ours to bury, since we adopt orphans."""
    try:
        os.killpg(child, signal.SIGKILL)
    except OSError:
        pass
    for _ in range(100):
        left = _descendants()
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        time.sleep(0.002)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one program. See the module."""
    libc = _libc()
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    word = secrets.token_hex(16).encode()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        _child(request, writing, word)
    os.close(writing)
    deadline = time.monotonic() + float(request["seconds"])
    os.set_blocking(reading, False)
    said, over = b"", False
    while True:
        try:
            piece = os.read(reading, 4096)
            if not piece or len(said) > 4096:
                break
            said += piece
            if said[1:] == word:
                break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                over = True
                break
            time.sleep(0.002)
    _end_all(child)
    passed = said[1:] == word
    why = "" if passed else said[1:].decode("utf-8", "replace")
    if over:
        why = f"not done within {float(request['seconds']):g} s"
    return {
        "passed": passed,
        "why": why or ("" if passed else "it ended before its tests"),
        "network": said[:1] != b"-",
    }


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)
