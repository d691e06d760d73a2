"""Installations of the wheel from an empty home, by each installer and Python that is here, with downloads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.support.run_engines import RELEASE_TOOLS

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "bundles" / "requirements" / "server.txt"
NEEDS_TOOLS = pytest.mark.skipif(not (RELEASE_TOOLS / "bin" / "uv").exists(), reason="make tools-release")
pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True, timeout=300)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables of a person whose home is empty."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_", "REQUESTS_"))}
    path = os.pathsep.join([str(RELEASE_TOOLS / "bin"), str(tmp_path / ".local" / "bin"), "/usr/bin", "/bin"])
    return kept | {"HOME": str(tmp_path), "PATH": path, "LANG": "C.UTF-8"}


def run(variables: dict[str, str], *command: str | Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, env=variables, cwd=variables["HOME"])
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def works(variables: dict[str, str], *toprope: str | Path) -> None:
    """Check the program: its version, its report, and a server that offers its tools without PyTorch."""
    assert run(variables, *toprope, "--version").startswith("toprope 0.")
    report = json.loads(run(variables, *toprope, "doctor", "--json"))
    assert report["broken"] == 0
    assert [one["level"] for one in report["findings"] if one["subject"] == "torch"] == ["note"]
    command, *arguments = map(str, toprope)
    server = StdioServerParameters(command=command, args=[*arguments, "serve"], env=variables, cwd=variables["HOME"])

    async def ask() -> str:
        with anyio.fail_after(100):
            async with Client(server) as client:
                found = await client.call_tool("list_environments", {"query": "number"})
                return found.content[0].text

    assert "number_guess" in anyio.run(ask)


@NEEDS_TOOLS
def test_uv_tool_install(wheel: Path, variables: dict[str, str]) -> None:
    run(variables, "uv", "tool", "install", "--quiet", "--python", sys.executable, wheel)
    works(variables, Path(variables["HOME"]) / ".local" / "bin" / "toprope")


@NEEDS_TOOLS
def test_uvx(wheel: Path, variables: dict[str, str]) -> None:
    works(variables, RELEASE_TOOLS / "bin" / "uvx", "--quiet", "--python", sys.executable, "--from", wheel, "toprope")


@NEEDS_TOOLS
def test_pipx(wheel: Path, variables: dict[str, str]) -> None:
    run(variables, "pipx", "install", "--quiet", "--python", sys.executable, wheel)
    works(variables, Path(variables["HOME"]) / ".local" / "bin" / "toprope")


@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
def test_pip_with_hashes(python: str, wheel: Path, variables: dict[str, str], tmp_path: Path) -> None:
    """pip refuses everything whose hash is not locked, and no module of ours is deprecated in that Python."""
    program = interpreter(python)
    if program is None:
        pytest.skip(f"{python} is not installed")
    environment = tmp_path / "environment"
    run(variables, program, "-m", "venv", environment)
    pip = (environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(variables, *pip, "--require-hashes", "-r", LOCK)
    run(variables, *pip, "--no-deps", "--no-index", wheel)
    run(variables, environment / "bin" / "python", "-m", "pip", "check")
    works(variables, environment / "bin" / "toprope")
    [packages] = environment.glob("lib/python*/site-packages")
    ours = [packages / name for name in ("toprope", "toprope_server", "toprope_tools")]
    run(variables, environment / "bin" / "python", "-W", "error", "-m", "compileall", "-q", "-f", *ours)


def interpreter(name: str) -> str | None:
    """The path of a Python, by itself or by pyenv; None if it is missing."""
    found = shutil.which(name)
    if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
        return found
    versions = sorted((Path.home() / ".pyenv" / "versions").glob(f"{name.removeprefix('python')}.*/bin/{name}"))
    return str(versions[-1]) if versions else None
