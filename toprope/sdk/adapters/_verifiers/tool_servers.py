"""Tool servers of rollouts as forks of one process that has imported verifiers.

verifiers starts a process for each tool server of each rollout, which imports it anew: eight processor seconds, for
a dictionary behind a tool. A fork begins after the imports. Each server keeps a process, an environment, a working
folder and a log of its own.

Builds on the private API of the installed verifiers 0.4, imported on use.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["fork_tool_servers"]

_IMPORTED = ("verifiers.v1", "mcp.server.mcpserver", "uvicorn", "httpx", "tenacity")
_LOOK_S = 0.02
_FORKS = "toprope_forks"
_PORT_FILE, _PORTS = "MCP_PORT_FILE", "/tmp/vf-port-"
_PROGRAM = """
import gc, json, os, runpy, signal, sys
for name in json.loads(sys.argv[1]):
    try:
        __import__(name)
    except Exception:
        pass  # the server itself says what is wrong
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
with os.fdopen(os.dup(0)) as orders:
    answers, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.write(answers, b"ready\\n")
    for line in orders:
        if os.fork() == 0:
            break
    else:
        sys.exit()
order = json.loads(line)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.setsid()  # before its number is told, since signals go to its group
log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
os.dup2(log, 1)
os.dup2(log, 2)
os.environ.clear()
os.environ.update(order["environment"])
os.chdir(order["folder"])
os.write(answers, b"%d\\n" % os.getpid())
os.close(answers)
sys.argv = [order["module"]]
runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
"""


class _Fork:
    """A process as verifiers uses one: a child of the forking process, which reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """None while it lives; its status is not known afterwards."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    async def wait(self) -> int:
        """Return when it has ended."""
        while self.returncode is None:
            await asyncio.sleep(_LOOK_S)
        return 0


class _Forker:
    """The process that forks. It ends with this process, and its servers with it.

    Args:
        packages: Imported before the first fork, as far as they can be; that takes seconds.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        command = [sys.executable, "-c", _PROGRAM, json.dumps([*_IMPORTED, *packages])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._turn = threading.Lock()
        self._answer()

    async def start(self, module: str, environment: dict[str, str], folder: Path, log: Path) -> _Fork | None:
        """Start `python -m module`; None if the process that forks does not live."""
        order = {"module": module, "environment": environment, "folder": str(folder), "log": str(log)}
        told = await asyncio.to_thread(self._ask, json.dumps(order).encode() + b"\n")
        return _Fork(int(told)) if told else None

    def _ask(self, order: bytes) -> bytes:
        assert self._process.stdin is not None
        with self._turn:
            try:
                self._process.stdin.write(order)
                self._process.stdin.flush()
            except BrokenPipeError:
                return b""
            return self._answer()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def fork_tool_servers(packages: Sequence[str]) -> None:
    """Let verifiers fork the servers that it starts on this machine, and tell their ports through a file in the working
    folder of the server: /tmp, which verifiers uses, is not open to environments.

    Only Linux forks: other systems cannot fork a process that has used their frameworks.

    Args:
        packages: Those of the servers.
    """
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    own: Any = SubprocessRuntime.run_background
    read: Any = SubprocessRuntime._read
    if hasattr(own, _FORKS):
        return
    forker = _Forker(packages) if sys.platform == "linux" else None

    async def run_background(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        if port_file := env.get(_PORT_FILE):
            env = env | {_PORT_FILE: str(self.workdir / Path(port_file).name)}
        if forker is not None and argv[:2] == [sys.executable, "-m"] and len(argv) == 3:
            known = {name: value for name, value in os.environ.items() if "API_KEY" not in name.upper()}
            server = await forker.start(argv[2], known | self.process_env(env), self.workdir, self.workdir / log)
            if server is not None:
                self._background.append(server)
                return
        await own(self, argv, env, log)

    async def _read(self: Any, path: str, *more: Any, **options: Any) -> bytes:
        found: bytes = await read(self, Path(path).name if path.startswith(_PORTS) else path, *more, **options)
        return found

    setattr(run_background, _FORKS, True)
    SubprocessRuntime.run_background, SubprocessRuntime._read = run_background, _read
