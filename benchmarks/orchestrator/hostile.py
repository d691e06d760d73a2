"""Run hostile programs in `code_interpreter` and watch from outside: files, ports, processes, memory, time.

    python -P -m benchmarks.orchestrator.hostile FOLDER

This process is the parent that the programs try to harm; `make bench-orchestrator` starts it and checks that it
survives. It adopts the orphans of its children, and so sees every process that a program leaves. Control: the same
checks watch a few programs without confinement, and must detect each of them. Needs Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from benchmarks.orchestrator.hostile_programs import PROGRAMS
from toprope.sdk.orchestration.tools import Toolbox, code_interpreter

__all__ = ["tried"]

_SECONDS, _SLACK_S, _MEMORY_MB = 2.0, 8.0, 256
_LONGEST_ANSWER = 5000
_CANARY = "TOPROPE_BENCH_CANARY"
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_UNCONFINED = (
    "read a file outside",
    "write a file outside",
    "remove a file",
    "change rights",
    "read the passwords",
    "the parent's variables",
    "a connection",
    "a datagram",
    "fork, then on in the background",
)
"""Harm that anyone may do to their own files and ports."""


def tried(folder: Path) -> dict[str, Any]:
    """Start the parent, let it run all programs, and return its figures.

    Raises:
        SystemExit: It did not survive.
    """
    command = [sys.executable, "-P", "-m", "benchmarks.orchestrator.hostile", str(folder)]
    variables = os.environ | {_CANARY: secrets.token_hex(16)}
    ran = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=variables)
    if ran.returncode:
        raise SystemExit(f"the process that ran hostile programs ended with {ran.returncode}")
    return json.loads(ran.stdout.splitlines()[-1])


class _Targets:
    """The targets of the programs, and the checks on them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._secret = folder, os.environ[_CANARY]
        self._passwords = Path("/etc/passwd").read_text().splitlines()[0]
        self._canary = folder / "canary"
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(self._tcp.getsockname())
        self._tcp.setblocking(False)
        self._udp.setblocking(False)

    def close(self) -> None:
        self._tcp.close()
        self._udp.close()

    def told(self, program: str) -> str:
        """Return the program with the places of its targets."""
        for path in self._folder.iterdir():
            path.unlink()
        self._canary.write_text(self._secret)
        self._canary.chmod(0o600)
        self._was = self._stat()
        return program.format(parent=os.getpid(), canary=self._canary, port=self._tcp.getsockname()[1])

    def harmed(self, said: str) -> list[str]:
        """Return the harm that was done."""
        found = []
        if self._secret in said or self._passwords in said:
            found.append("it read a secret")
        if [path.name for path in self._folder.iterdir()] != ["canary"] or self._stat() != self._was:
            found.append("it changed a file")
        elif self._canary.read_text() != self._secret:
            found.append("it wrote into a file")
        for kind, take in (("connection", self._tcp.accept), ("datagram", lambda: self._udp.recv(100))):
            try:
                got = take()
            except BlockingIOError:
                continue
            if kind == "connection":
                got[0].close()
            found.append(f"a {kind} came")
        left = psutil.Process().children(recursive=True)
        if left:
            found.append(f"{len(left)} processes were left")
            for process in left:
                process.kill()
            psutil.wait_procs(left, 10)
        if len(said) > _LONGEST_ANSWER:
            found.append("its output was not cut")
        return found

    def _stat(self) -> tuple[int, ...]:
        try:
            stat = self._canary.stat()
        except FileNotFoundError:
            return ()
        return stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns


def _unconfined(program: str) -> str:
    with tempfile.TemporaryFile() as output:  # a pipe would be waited for while any process holds it
        subprocess.run(
            [sys.executable, "-c", program], stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=60
        )
        output.seek(0)
        return output.read().decode("utf-8", "replace")


def _try_all(folder: Path) -> dict[str, Any]:
    if ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0):
        raise SystemExit("this system lets no process adopt orphans (Linux does)")
    box = Toolbox([code_interpreter(_SECONDS, _MEMORY_MB)])
    probe = box.call("code_interpreter", "6 * 7")
    if probe.content != "42":
        raise SystemExit(f"code_interpreter does not work here: {probe.content}")
    with closing(_Targets(folder)) as targets:
        unseen = [name for name in _UNCONFINED if not _harm(targets, name, _unconfined)[0]]
        peak = _own_peak_mb()
        escapes: dict[str, list[str]] = {}
        slowest = 0.0
        for name in PROGRAMS:
            found, seconds = _harm(targets, name, lambda program: box.call("code_interpreter", program).content)
            slowest = max(slowest, seconds)
            if seconds > _SECONDS + _SLACK_S:
                found.append(f"it ran for {seconds:.1f} s")
            if found:
                escapes[name] = found
    grew = _own_peak_mb() - peak
    if grew > _MEMORY_MB:
        escapes["all of them"] = [f"the parent grew by {grew:.0f} MB"]
    return {
        "hostile_programs": len(PROGRAMS),
        "hostile_escapes": len(escapes),
        "hostile_escaped": escapes,
        "hostile_controls": len(_UNCONFINED),
        "hostile_controls_unseen": unseen,
        "hostile_slowest_seconds": round(slowest, 2),
        "hostile_parent_grew_mb": round(grew, 1),
        "hostile_limit_seconds": _SECONDS,
        "code_interpreter_ms": round(1000 * _median_call(box), 1),
    }


def _harm(targets: _Targets, name: str, run: Callable[[str], str]) -> tuple[list[str], float]:
    program = targets.told(PROGRAMS[name])
    began = time.monotonic()
    said = run(program)
    seconds = time.monotonic() - began
    return targets.harmed(said), seconds


def _own_peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _median_call(box: Toolbox) -> float:
    """Return the seconds of a program that does next to nothing."""
    times = []
    for _ in range(21):
        began = time.monotonic()
        box.call("code_interpreter", "6 * 7")
        times.append(time.monotonic() - began)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    print(json.dumps(_try_all(Path(sys.argv[1]))))
