"""inspect's local sandbox behind a wall for each sample: its commands, and the files that it uses itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from typing import Any

from toprope.sdk.adapters._harbor.sandbox import KEPT_VARIABLES
from toprope.sdk.wall.within import RolloutWall

__all__ = ["confine_commands"]

_PASSED = (*KEPT_VARIABLES, "PATH", "HOME", "TMPDIR")
_CONFINED = "_toprope_confined"


def confine_commands() -> None:
    """Start inspect's commands behind the walls of their samples, without the worker's variables.

    The variables may be keys of the owner.
    """
    from inspect_ai.util import _subprocess
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment as Local

    start, run, read, write = _subprocess.open_process, Local.exec, Local.read_file, Local.write_file
    if hasattr(start, _CONFINED):
        return

    async def stripped(*arguments: Any, env: dict[str, str], **settings: Any) -> Any:
        own = {name: value for name, value in env.items() if name in _PASSED or os.environ.get(name) != value}
        return await start(*arguments, env=own, **settings)

    async def confined(
        self: Any, cmd: list[str], input: Any = None, cwd: Any = None, env: Any = None, *more: Any, **settings: Any
    ) -> Any:
        wall, home = _wall(self)
        env = {"HOME": home, "TMPDIR": home, **(env or {})}
        return await run(self, wall.command(cmd), input, cwd, env, *more, **settings)

    async def read_file(self: Any, *arguments: Any, **settings: Any) -> Any:
        return _wall(self)[0].touch(lambda: asyncio.run(read(self, *arguments, **settings)))

    async def write_file(self: Any, *arguments: Any, **settings: Any) -> None:
        _wall(self)[0].touch(lambda: asyncio.run(write(self, *arguments, **settings)))

    setattr(stripped, _CONFINED, True)
    _subprocess.open_process = stripped
    Local.exec, Local.read_file, Local.write_file = confined, read_file, write_file


def _wall(sandbox: Any) -> tuple[RolloutWall, str]:
    """The wall of a sample's sandbox, and the HOME of its commands."""
    if not hasattr(sandbox, _CONFINED):
        home = tempfile.mkdtemp()
        weakref.finalize(sandbox, shutil.rmtree, home, True)
        setattr(sandbox, _CONFINED, (RolloutWall([sandbox.directory.name, home]), home))
    found: tuple[RolloutWall, str] = getattr(sandbox, _CONFINED)
    return found
