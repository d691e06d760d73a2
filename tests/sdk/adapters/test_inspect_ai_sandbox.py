"""inspect's local sandbox behind the walls of its samples, with a stand-in for the package."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from toprope.sdk.adapters._inspect_ai.commands import confine_commands
from toprope.sdk.wall import kernel

pytestmark = pytest.mark.skipif(not kernel.landlock_abi(), reason="this machine has no Landlock")
longest: ContextVar[int] = ContextVar("longest", default=1)
"""inspect's limit of a file that is read."""
turned = threading.Event()


class Local:
    """inspect's local sandbox; what `exec` returns also has the command and its own variables."""

    _SANDBOX_TOOLS_DIR_ENV = "TOOLS_DIR"

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.directory = Thing(name=str(place))
        self._sandbox_tools_dir, self._sandbox_tools_used = place / "tools", False

    async def exec(self, cmd: list[str], input: Any, cwd: Any, env: dict[str, str]) -> Any:
        """Run a command."""
        if cmd[0] == "/its/tools":
            self._sandbox_tools_used = True
            env = {**env, self._SANDBOX_TOOLS_DIR_ENV: str(self._sandbox_tools_dir)}
        place = cwd or self.directory.name
        ran = subprocess.run(cmd, cwd=place, env=os.environ | env, input=input, capture_output=True, text=True)
        return Thing(command=cmd, env=env, stdout=ran.stdout, stderr=ran.stderr)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        if file == "slow":
            return str(turned.wait(10))
        return Path(file).read_text()[: longest.get()] if text else Path(file).read_bytes()

    async def write_file(self, file: str, contents: str | bytes) -> None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(contents.encode() if isinstance(contents, str) else contents)


async def setup_sandbox_environment(setup: bytes, environments: dict[str, Any]) -> None:
    """Run a sample's setup as inspect does: from a file in /tmp."""
    for one in environments.values():
        await one.write_file("/tmp/setup", setup)
        ran = await one.exec(["bash", "/tmp/setup"])
        assert not ran.stderr, ran.stderr


@pytest.fixture
def boxes(stand_in: Callable[..., None], tmp_path: Path) -> tuple[Any, Any]:
    """The sandboxes of two samples, in `one` and `other`, behind their walls."""
    kind: Any = type("Local", (Local,), {})
    stand_in("inspect_ai.util._sandbox.local", LocalSandboxEnvironment=kind, SANDBOX_CLI="/its/tools")
    stand_in("inspect_ai.util._sandbox.context", setup_sandbox_environment=setup_sandbox_environment)
    local, context = (sys.modules[f"inspect_ai.util._sandbox.{name}"] for name in ("local", "context"))
    stand_in("inspect_ai.util._sandbox", local=local, context=context)
    stand_in("inspect_ai.util._subprocess", open_process=None)
    stand_in("inspect_ai.util", _subprocess=sys.modules["inspect_ai.util._subprocess"])
    confine_commands()
    return kind(tmp_path / "one"), kind(tmp_path / "other")


def test_samples_do_not_reach_each_other_s_files(boxes: tuple[Any, Any], tmp_path: Path) -> None:
    (one, other), mine, link = boxes, f"{tmp_path}/one/mine", f"{tmp_path}/other/link"
    Path(link).symlink_to(mine)

    async def use() -> None:
        await one.write_file(mine, "12")
        assert await one.read_file(mine, text=True) == "1"
        longest.set(2)
        assert await one.read_file(mine) == "12", "its limits count there"
        asyncio.get_running_loop().call_soon(turned.set)
        assert await one.read_file("slow") == "True", "others go on meanwhile"
        with pytest.raises(PermissionError):
            await other.read_file(link)
        with pytest.raises(PermissionError):
            await other.write_file(link, "2")

    asyncio.run(use())
    for box, path, expected in ((one, mine, "12"), (other, link, ""), (other, mine, "")):
        ran = asyncio.run(box.exec(["cat", path]))
        assert ran.stdout == expected and ran.env["HOME"] != os.environ["HOME"]
    assert not one._sandbox_tools_used
    ran = asyncio.run(one.exec(["/its/tools", "start-server"]))
    assert one._sandbox_tools_used and ran.env["TOOLS_DIR"] == f"{tmp_path}/one/tools"
    assert ran.command[0] != "/its/tools"


def test_each_sample_has_its_own_tmp_and_the_folders_that_its_setup_makes(boxes: tuple[Any, Any]) -> None:
    name, setup = f"/tmp/{uuid.uuid4().hex}", b"mkdir -p /log-of-a-task && echo begun in /tmp > /log-of-a-task/log"
    log = "/log-of-a-task/log"

    async def use(box: Any, said: str) -> None:
        await sys.modules["inspect_ai.util._sandbox.context"].setup_sandbox_environment(setup, {"default": box})
        await box.exec(["bash", "-c", f"cat > {name}"], said)
        await box.write_file(log, f"{await box.read_file(log)}{said} in {name}\n")
        ran = await box.exec(["bash", "-c", f"cat {log} $0; pwd; echo $TMPDIR ~", name], None, "/tmp")
        assert ran.stdout == f"begun in /tmp\n{said} in {name}\n{said}/tmp\n/tmp /root\n" and not ran.stderr
        assert await box.read_file(name, text=False) == said.encode()
        ran = await box.exec([sys.executable, "-c", "import sys; print(sys.executable)"])
        assert ran.stdout.strip() == sys.executable, ran.stderr

    longest.set(1000)
    for box, said in zip(boxes, ("first", "second"), strict=True):
        asyncio.run(use(box, said))
    assert not os.path.lexists(name) and not os.path.lexists(os.path.dirname(log))
