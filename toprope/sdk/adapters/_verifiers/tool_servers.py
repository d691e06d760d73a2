"""Tool servers of rollouts as forks of one process that has imported verifiers.

verifiers starts a process for each tool server of each rollout, which imports it anew: eight processor seconds, for
a dictionary behind a tool. A fork begins after those imports and makes the author's itself. Each server keeps a
process, an environment, a working folder and a log of its own.

Builds on the private API of the installed verifiers 0.4, imported on use.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["fork_tool_servers"]

_IMPORTED = ("verifiers.v1", "mcp.server.mcpserver", "uvicorn", "httpx", "tenacity")
_AT_START = ("PYTHON", "LD_")
"""Beginnings of variables that only count when an interpreter starts."""
_LOOK_S = 0.02
_FORKS = "toprope_forks"
_PORT_FILE, _PORTS = "MCP_PORT_FILE", "/tmp/vf-port-"
_PROGRAM = """
import ctypes, gc, json, os, runpy, signal, sys
names, sys.argv = json.loads(sys.argv[1]), [""]
orders, answers, nothing = os.fdopen(os.dup(0)), os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(2, 1)
for name in names:
    try:
        __import__(name)
    except Exception:
        pass  # the server itself says what is wrong
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
control, parent = ctypes.CDLL(None).prctl, os.getpid()
for line in orders:
    try:
        child = os.fork()
    except OSError:
        os.write(answers, b"\\n")
        continue
    if child == 0:
        break
else:
    os._exit(0)
os.setsid()  # before its number is told, since signals go to its group
control(1, signal.SIGKILL)  # ends with its parent
os.write(answers, b"%d\\n" % os.getpid())
os.close(answers)
orders.close()
if os.getppid() != parent:
    os._exit(1)
order = json.loads(line)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
log = os.open(order["log"], os.O_WRONLY)
os.dup2(log, 1)
os.dup2(log, 2)
os.environ.clear()
os.environ.update(order["environment"])
os.chdir(order["folder"])
if "tempfile" in sys.modules:
    sys.modules["tempfile"].tempdir = None
sys.path.insert(0, order["folder"])
sys.argv = [order["module"]]
runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
"""


class _Fork:
    """A process as verifiers uses one: a child of the process that forks, which reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """None while it lives; its status is not known afterwards."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, PermissionError):  # a number that a process of others has by now
            return 0
        return None

    async def wait(self) -> int:
        """Return when it has ended."""
        while self.returncode is None:
            await asyncio.sleep(_LOOK_S)
        return 0


class _Forker:
    """The process that forks. It ends with this process, and its servers with it. Its imports take seconds, for which
    only the first server waits."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(_IMPORTED)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_passed_on())
        self._thread = ThreadPoolExecutor(1, "tool servers")

    async def start(self, module: str, environment: dict[str, str], folder: Path, log: Path) -> _Fork | None:
        """Start `python -m module`; None if it cannot be forked."""
        order = {"module": module, "environment": environment, "folder": str(folder), "log": str(log)}
        starting = asyncio.get_running_loop().run_in_executor(
            self._thread, self._ask, json.dumps(order).encode() + b"\n"
        )
        try:
            pid = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end)
            raise
        return _Fork(pid) if pid else None

    def _ask(self, order: bytes) -> int:
        """Return the number of the new process; 0 if it was not made."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(order)
            self._process.stdin.flush()
        except BrokenPipeError:
            return 0
        return int(self._process.stdout.readline().strip() or 0)


def _end(starting: asyncio.Future[int]) -> None:
    """End a server for which nobody waits any more."""
    with suppress(OSError):
        if not starting.cancelled() and starting.exception() is None and starting.result():
            os.killpg(starting.result(), signal.SIGKILL)


def _passed_on() -> dict[str, str]:
    """This process's variables without keys, as verifiers passes them on."""
    return {name: value for name, value in os.environ.items() if "API_KEY" not in name.upper()}


def fork_tool_servers() -> None:
    """Let verifiers fork the servers that it starts on this machine, and tell their ports through a file in the working
    folder of the server: /tmp, which verifiers uses, is not open to every environment.

    Only Linux forks: other systems cannot fork a process that has used their frameworks.
    """
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    original: Any = SubprocessRuntime.run_background
    original_read: Any = SubprocessRuntime._read
    if hasattr(original, _FORKS):
        return
    forker = _Forker() if sys.platform == "linux" else None

    async def run_background(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        if port_file := env.get(_PORT_FILE):
            env = env | {_PORT_FILE: str(self.workdir / Path(port_file).name)}
        variables = self.process_env(env)
        starts_alike = not any(
            name.startswith(_AT_START) and os.environ.get(name) != variables[name] for name in variables
        )
        if forker is not None and starts_alike and argv[:2] == [sys.executable, "-m"] and len(argv) == 3:
            (self.workdir / log).write_bytes(b"")
            server = await forker.start(argv[2], _passed_on() | variables, self.workdir, self.workdir / log)
            if server is not None:
                self._background.append(server)
                return
        await original(self, argv, env, log)

    async def _read(self: Any, path: str, *more: Any, **options: Any) -> bytes:
        content: bytes = await original_read(
            self, Path(path).name if path.startswith(_PORTS) else path, *more, **options
        )
        return content

    setattr(run_background, _FORKS, True)
    SubprocessRuntime.run_background, SubprocessRuntime._read = run_background, _read
