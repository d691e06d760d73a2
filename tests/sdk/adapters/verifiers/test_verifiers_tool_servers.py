"""Tool servers of verifiers: forks with an environment, a folder and a log of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from toprope.sdk.adapters._verifiers import tool_servers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")

_SERVER = """
import os, pathlib, tempfile, time
print("serving", flush=True)
told = [__name__, os.getcwd(), os.environ["VF_CONFIG"], str(os.environ.get("OWNERS_API_KEY")), tempfile.gettempdir()]
assert b"secret" not in pathlib.Path("/proc/self/environ").read_bytes()
pathlib.Path(os.environ["MCP_PORT_FILE"]).write_text(" ".join(told))
time.sleep(600)
"""
_PORT_FILE = "/tmp/vf-port-0"


class Runtime:
    """The parts of verifiers' local runtime that start servers and read files."""

    forker: subprocess.Popen[bytes]

    def __init__(self, workdir: Path) -> None:
        self.workdir, self._background, self.others = workdir, list[Any](), list[list[str]]()
        workdir.mkdir()

    def process_env(self, env: dict[str, str]) -> dict[str, str]:
        return env

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        self.others.append(argv)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        return (self.workdir / path).read_bytes()


@pytest.fixture
def runtime(
    tmp_path: Path, stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Runtime]]:
    """A function that makes a runtime with a folder of that name."""
    made: list[tool_servers._Forker] = []

    class Forker(tool_servers._Forker):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(tool_servers, "_Forker", Forker)
    (tmp_path / "served.py").write_text(_SERVER)
    (tmp_path / "noisy.py").write_text("import tempfile\nprint(tempfile.gettempdir(), flush=True)\n")
    monkeypatch.setattr(tool_servers, "_IMPORTED", ("noisy", "no_such_module"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OWNERS_API_KEY", "secret")
    kind = type("SubprocessRuntime", (Runtime,), dict(vars(Runtime)))
    stand_in("verifiers.v1.runtimes.subprocess", SubprocessRuntime=kind)
    tool_servers.fork_tool_servers()
    tool_servers.fork_tool_servers()  # once is enough
    [forker] = made

    def make(name: str) -> Runtime:
        one: Runtime = kind(tmp_path / name)
        one.forker = forker._process
        return one

    yield make
    process = forker._process
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait(30)
    process.stdout.close()


async def _port(runtime: Runtime) -> str:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        try:
            if told := await runtime._read(_PORT_FILE):
                return told.decode()
        except FileNotFoundError:
            pass
        await asyncio.sleep(0.02)
    raise TimeoutError((runtime.workdir / "log").read_text())


def test_servers_are_forks_with_an_environment_a_folder_and_a_log_of_their_own(runtime: Any) -> None:
    async def start_and_stop() -> None:
        runtimes = [runtime("a"), runtime("b")]
        for number, one in enumerate(runtimes):
            environment = {"MCP_PORT_FILE": _PORT_FILE, "VF_CONFIG": str(number), "TMPDIR": str(one.workdir)}
            await one.run_background([sys.executable, "-m", "served"], environment, "log")
        for number, one in enumerate(runtimes):
            assert await _port(one) == f"__main__ {one.workdir} {number} None {one.workdir}"
            assert (one.workdir / "log").read_text() == "serving\n" and not one.others
            [server] = one._background
            assert server.returncode is None and os.getpgid(server.pid) == server.pid
        for one in runtimes:
            [server] = one._background
            os.killpg(server.pid, signal.SIGTERM)
            assert await asyncio.wait_for(server.wait(), 30) == server.returncode == 0

    asyncio.run(start_and_stop())


def test_server_that_cannot_start_says_why_in_its_log(runtime: Any) -> None:
    async def start() -> None:
        one = runtime("a")
        await one.run_background([sys.executable, "-m", "no_such_server"], {}, "log")
        await asyncio.wait_for(one._background[0].wait(), 30)
        assert "No module named no_such_server" in (one.workdir / "log").read_text()

    asyncio.run(start())


def test_server_of_a_rollout_that_was_cancelled_meanwhile_is_ended(runtime: Any) -> None:
    async def cancel() -> None:
        one, other = runtime("a"), runtime("b")
        command = [sys.executable, "-m", "served"]
        environment = {"MCP_PORT_FILE": _PORT_FILE, "VF_CONFIG": "0", "TMPDIR": "/"}
        starting = asyncio.create_task(one.run_background(command, environment, "log"))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await other.run_background(command, environment, "log")
        assert (await _port(other)).split()[1] == str(other.workdir), "the answers still belong to their orders"
        [living] = psutil.Process(one.forker.pid).children()
        assert not one._background and living.pid == other._background[0].pid
        os.killpg(living.pid, signal.SIGTERM)

    asyncio.run(cancel())


def test_servers_end_with_the_process_that_forks(runtime: Any) -> None:
    async def end() -> None:
        one = runtime("a")
        environment = {"MCP_PORT_FILE": _PORT_FILE, "VF_CONFIG": "0"}
        await one.run_background([sys.executable, "-m", "served"], environment, "log")
        one.forker.kill()
        assert await asyncio.wait_for(one._background[0].wait(), 30) == 0

    asyncio.run(end())


def test_other_programs_start_as_before_and_so_do_servers_once_nothing_forks(runtime: Any) -> None:
    async def start() -> None:
        one = runtime("a")
        await one.run_background(["sleep", "9"], {}, "log")
        (one.workdir / "file").write_text("text")
        assert await one._read("file") == b"text"
        command = [sys.executable, "-m", "served"]
        await one.run_background(command, {"PYTHONPATH": "/elsewhere"}, "log")  # counts when an interpreter starts
        one.forker.kill()
        one.forker.wait(30)
        await one.run_background(command, {}, "log")
        assert one.others == [["sleep", "9"], command, command] and not one._background
        with pytest.raises(FileNotFoundError):
            await one.run_background(command, {}, "no/log")

    asyncio.run(start())
