"""inspect's local sandbox behind a wall for each sample: its commands, and the files that it uses itself.

A sample's absolute paths, such as inspect's own `/tmp` for its setup, lie in a folder of the sample, where the image
would have them: see `_shared/moved_paths.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from toprope.sdk.adapters._harbor.sandbox import KEPT_VARIABLES
from toprope.sdk.adapters._shared.moved_paths import DEEPER, OWN_FOLDERS, MovedPaths
from toprope.sdk.wall.paths import interpreter_paths
from toprope.sdk.wall.within import RolloutWall

__all__ = ["confine_commands", "with_refusal"]

_TOOL_SERVER = re.compile(r"SandboxInjectionError: .*(framework directory|tools server)")
"""Its error if the server of its tools is not installed or does not start."""
_NO_TOOL_SERVER = (
    "inspect's tool server does not run behind the wall, which refuses local sockets. Tasks "
    "without text_editor, bash_session, web_browser and agents in the sandbox do without it"
)

_PASSED = (*KEPT_VARIABLES, "PATH", "HOME", "TMPDIR")
_CONFINED = "_toprope_confined"
_TOP = re.compile(r"(?<![\w./-])(/[\w.-]+)")


def confine_commands() -> None:
    """Start inspect's commands behind the walls of their samples, without the worker's variables.

    The variables may be keys of the owner.
    """
    from inspect_ai.util import _subprocess
    from inspect_ai.util._sandbox import context, local

    Local = local.LocalSandboxEnvironment
    start, run, read, write = _subprocess.open_process, Local.exec, Local.read_file, Local.write_file
    prepare = context.setup_sandbox_environment
    if hasattr(start, _CONFINED):
        return

    async def stripped(*arguments: Any, env: dict[str, str], **settings: Any) -> Any:
        own = {name: value for name, value in env.items() if name in _PASSED or os.environ.get(name) != value}
        return await start(*arguments, env=own, **settings)

    async def prepared(setup: bytes, environments: dict[str, Any]) -> None:
        for one in environments.values():
            if isinstance(one, Local):
                _machine(one).own(setup.decode(errors="replace"))
        await prepare(setup, environments)

    async def confined(
        self: Any, cmd: list[str], input: Any = None, cwd: Any = None, env: Any = None, *more: Any, **settings: Any
    ) -> Any:
        machine = _machine(self)
        own = {**machine.variables, **{name: machine.into(value) for name, value in (env or {}).items()}}
        if cmd[:1] == [getattr(local, "SANDBOX_CLI", None)]:  # which inspect does not see behind the wall
            self._sandbox_tools_used = True
            own[self._SANDBOX_TOOLS_DIR_ENV] = str(self._sandbox_tools_dir)
        words = machine.wall.command([machine.into(word) for word in cmd])
        ran = await run(self, words, machine.into(input), machine.into(cwd), own, *more, **settings)
        ran.stdout, ran.stderr = machine.back(ran.stdout), machine.back(ran.stderr)
        return ran

    async def read_file(self: Any, file: str, text: bool = True) -> Any:
        machine = _machine(self)
        return machine.back(await machine.touch(lambda: asyncio.run(read(self, machine.into(file), text))))

    async def write_file(self: Any, file: str, contents: str | bytes) -> None:
        machine = _machine(self)
        machine.own(file)
        await machine.touch(lambda: asyncio.run(write(self, machine.into(file), machine.into(contents))))

    setattr(stripped, _CONFINED, True)
    _subprocess.open_process = stripped
    context.setup_sandbox_environment = prepared
    Local.exec, Local.read_file, Local.write_file = confined, read_file, write_file


def with_refusal(reason: str) -> str:
    """Put before inspect's reason that the wall refuses its tool server local sockets, if it does."""
    if not _TOOL_SERVER.search(reason):
        return reason
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError:
        return f"{_NO_TOOL_SERVER}: {reason}"
    return reason


class _Machine:
    """The machine of one sample: its wall, and where its absolute paths lie."""

    def __init__(self, sandbox: Any) -> None:
        self._root = os.path.realpath(tempfile.mkdtemp())
        weakref.finalize(sandbox, shutil.rmtree, self._root, True)
        for name in OWN_FOLDERS:
            os.mkdir(self._root + name)
        self.variables = {"HOME": f"{self._root}/root", "TMPDIR": f"{self._root}/tmp"}
        folder = sandbox.directory.name
        self.wall = RolloutWall([folder, self._root])
        self._kept = [folder, os.path.realpath(folder), *interpreter_paths(sys.executable)]
        self._folders = set(OWN_FOLDERS)
        self._paths = MovedPaths(self._root, self._folders, self._kept)

    def own(self, text: str) -> None:
        """Have the folders that a text names, and that this machine lacks, to itself."""
        named = {*_TOP.findall(text), *(f"/{path}" for path in DEEPER.findall(text))}
        self._folders |= {path for path in named if not os.path.lexists(path)}
        self._paths = MovedPaths(self._root, self._folders, self._kept)

    def into(self, given: Any) -> Any:
        """Return a text, or the content of a file, with the sample's paths replaced; others as they are."""
        if isinstance(given, bytes):
            return self._paths.into_data(given)
        return self._paths.into(given) if isinstance(given, str) else given

    def back(self, given: Any) -> Any:
        """Return a text, or the content of a file, with the folder's paths replaced by the sample's."""
        if isinstance(given, bytes):
            return self._paths.back_data(given)
        return self._paths.back(given) if isinstance(given, str) else given

    async def touch(self, act: Callable[[], Any]) -> Any:
        """Call a function behind the wall, with the caller's context, which has inspect's limits."""
        context = contextvars.copy_context()
        return await asyncio.to_thread(self.wall.touch, lambda: context.run(act))


def _machine(sandbox: Any) -> _Machine:
    if not hasattr(sandbox, _CONFINED):
        setattr(sandbox, _CONFINED, _Machine(sandbox))
    found: _Machine = getattr(sandbox, _CONFINED)
    return found
