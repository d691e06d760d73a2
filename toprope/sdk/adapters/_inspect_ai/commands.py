"""inspect's local sandbox behind a wall for each sample: its commands, and the files that it uses itself."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from toprope.sdk.adapters._harbor.sandbox import KEPT_VARIABLES
from toprope.sdk.wall.within import RolloutWall

__all__ = ["confine_commands", "with_refusal"]

_TOOL_SERVER = re.compile(r"SandboxInjectionError: .*(framework directory|tools server)")
"""Its error if the server of its tools is not installed or does not start."""
_NO_TOOL_SERVER = (
    "inspect's tool server does not run behind the wall, which refuses local sockets. Tasks "
    "without text_editor, bash_session, web_browser and agents in the sandbox do without it"
)
_PLACE = re.compile(
    r"(Failed to execute setup script .*: |^(?:OSError|PermissionError): \[Errno \d+\] )"
    r"(?:Permission denied|Read-only file system)",
    re.DOTALL,
)
"""The wall's refusal of a place that is not the rollout's."""
_NO_IMAGE = "Rollouts have no folders of the task's image, and the wall leaves each only its own to write"
_TEMPORARY = re.compile(r"(?:(?<![\w./})\]*~-])|(?<=\s-[A-Za-z]))/tmp(?=$|[^\w.-])(?P<first>/[^/\s'\"`;|&<>()]+)?")
"""/tmp in a command, with the first name below it."""
_SHELLS = ("sh", "bash", "dash", "zsh")
_PASSED = (*KEPT_VARIABLES, "PATH", "HOME", "TMPDIR")
_CONFINED = "_toprope_confined"


def confine_commands() -> None:
    """Start inspect's commands behind the walls of their samples, without the worker's variables.

    The variables may be keys of the owner.
    """
    from inspect_ai.util import _subprocess
    from inspect_ai.util._sandbox import local

    Local = local.LocalSandboxEnvironment
    start, run, read, write = _subprocess.open_process, Local.exec, Local.read_file, Local.write_file
    if hasattr(start, _CONFINED):
        return

    async def stripped(*arguments: Any, env: dict[str, str], **settings: Any) -> Any:
        variables = {name: value for name, value in env.items() if name in _PASSED or os.environ.get(name) != value}
        return await start(*arguments, env=variables, **settings)

    async def confined(
        self: Any, cmd: list[str], input: Any = None, cwd: Any = None, env: Any = None, *more: Any, **settings: Any
    ) -> Any:
        wall, home = _wall(self)
        env = {"HOME": home, "TMPDIR": home, **(env or {})}
        if cmd[:1] == [getattr(local, "SANDBOX_CLI", None)]:  # which inspect does not see behind the wall
            self._sandbox_tools_used = True
            env[self._SANDBOX_TOOLS_DIR_ENV] = str(self._sandbox_tools_dir)
        words = _own_words(self, cmd)
        variables = {name: _own_place(self, value) for name, value in env.items()}
        return await run(self, wall.command(words), input, _own_place(self, cwd), variables, *more, **settings)

    async def read_file(self: Any, file: str, *arguments: Any, **settings: Any) -> Any:
        place = _own_place(self, file)
        return await _touch(self, lambda: asyncio.run(read(self, place, *arguments, **settings)))

    async def write_file(self: Any, file: str, *arguments: Any, **settings: Any) -> None:
        place = _own_place(self, file)
        await _touch(self, lambda: asyncio.run(write(self, place, *arguments, **settings)))

    setattr(stripped, _CONFINED, True)
    _subprocess.open_process = stripped
    Local.exec, Local.read_file, Local.write_file = confined, read_file, write_file


def with_refusal(reason: str) -> str:
    """Put before inspect's reason what the wall refuses: folders of an image, or local sockets of the tool server."""
    if _PLACE.search(reason):
        return f"{_NO_IMAGE}: {reason}"
    if not _TOOL_SERVER.search(reason):
        return reason
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError:
        return f"{_NO_TOOL_SERVER}: {reason}"
    return reason


def _own_words(sandbox: Any, words: list[str]) -> list[str]:
    """Return a command whose paths, and the script of whose shell, are of the sample's HOME.

    Programs of other interpreters and what a command reads are data of the task.
    """
    moved: list[str] = []
    option, is_of_shell = "", False
    for word in words:
        is_script = is_of_shell and re.fullmatch(r"-[a-z]*c", option) is not None
        moved.append(_own_place(sandbox, word) if is_script or word.startswith("/tmp") else word)
        is_value = re.fullmatch(r"[-+][a-z]*o", option) is not None
        is_of_shell = os.path.basename(word) in _SHELLS or is_of_shell and (word[:1] in ("-", "+") or is_value)
        option = word
    return moved


def _own_place(sandbox: Any, text: Any) -> Any:
    """Return a text with the paths in /tmp as paths in the sample's HOME: the wall closes /tmp, where inspect puts
    setup scripts, and where scorers put theirs and start them by a shell's command. Other values are left alone."""
    if not isinstance(text, str):
        return text

    def moved(path: re.Match[str]) -> str:
        below = path["first"] or ""
        if below and os.path.lexists(f"/tmp{below}"):  # somebody else's, or there is no wall
            return path[0]
        return _wall(sandbox)[1] + below

    return _TEMPORARY.sub(moved, text)


async def _touch(sandbox: Any, act: Callable[[], Any]) -> Any:
    """Call a function behind a sample's wall, with the caller's context, which has inspect's limits."""
    context = contextvars.copy_context()
    return await asyncio.to_thread(_wall(sandbox)[0].touch, lambda: context.run(act))


def _wall(sandbox: Any) -> tuple[RolloutWall, str]:
    """The wall of a sample's sandbox, and the HOME of its commands."""
    if not hasattr(sandbox, _CONFINED):
        home = tempfile.mkdtemp()
        weakref.finalize(sandbox, shutil.rmtree, home, True)
        setattr(sandbox, _CONFINED, (RolloutWall([sandbox.directory.name, home]), home))
    confinement: tuple[RolloutWall, str] = getattr(sandbox, _CONFINED)
    return confinement
