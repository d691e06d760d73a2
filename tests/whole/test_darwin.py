"""The product where every process sees what it would find on macOS; see `tests/support/darwin/simulation.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.darwin.environment import ROOT, Simulated, make_environment
from tests.support.run_harness import eventually

GUARD = ROOT / "toprope" / "supervisor" / "guard.py"
RUNNER = ROOT / "tests" / "support" / "darwin" / "run_simulated.py"
_FAMILY = """
import os, signal, subprocess, sys
word, leaves = sys.argv[1:3]
sleeper = [sys.executable, "-I", "-S", "-c", "import sys, time; print(flush=True); time.sleep(60)", word]
children = []
for alone in (False, True):
    children.append(subprocess.Popen(sleeper, start_new_session=alone, stdout=subprocess.PIPE))
    children[-1].stdout.readline()
if leaves == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("family", flush=True)
if leaves == "stays":
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return make_environment(tmp_path_factory.mktemp("darwin"))


def run(simulated: Simulated, *arguments: str, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [simulated.python, "-P", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=simulated.variables)


def carriers(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if word in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def word(tmp_path: Path) -> Iterator[str]:
    marked = f"darwin-{tmp_path.name}-{os.getpid()}"
    yield marked
    for process in carriers(marked):
        process.kill()


@contextmanager
def guarded(simulated: Simulated, word: str, leaves: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A guard of a component with a child in its group and one in a session of its own, once all run."""
    reader, control = os.pipe()
    command = [simulated.python, "-I", "-S", RUNNER, GUARD, "--control", str(reader), "--grace", "1", "--"]
    command += [simulated.python, "-I", "-S", "-c", _FAMILY, word, leaves]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[reader], env=simulated.variables, **pipes) as process:
        try:
            os.close(reader)
            assert process.stdout is not None and process.stdout.readline() == b"family\n"
            yield process, control
        finally:
            os.close(control)


def test_our_modules_see_no_linux(simulated: Simulated) -> None:
    program = (
        "import json, os\n"
        "from toprope import machine\n"
        "from toprope.sdk.wall import level_here\n"
        "from toprope.supervisor import guard\n"
        "from toprope.supervisor.keeper.preloading import can_preload\n"
        "print(json.dumps([guard.ADOPTS, guard.become_subreaper(), level_here()[0], can_preload(), machine.boot_id(),\n"
        "    machine.processor_count() >= 1, os.getpid() in sum(guard.children_by_parent().values(), [])]))"
    )
    assert json.loads(run(simulated, "-c", program).stdout) == [False, False, "none", False, "", True, True]


def test_doctor_says_what_macos_lacks(simulated: Simulated) -> None:
    done = run(simulated, "-m", "toprope_server.cli", "doctor", "--json")
    found = {one["subject"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert "no wall around environments, because darwin" in found["sandbox"]["text"]
    assert "without subreaper" in found["containment"]["text"] and found["containment"]["level"] == "warning"


def test_killed_component_takes_children_with_it_that_left_the_group(simulated: Simulated, word: str) -> None:
    with guarded(simulated, word, "stays") as (process, control):
        assert len(carriers(word)) >= 4
        os.write(control, b"stop 0\n")
        process.wait(30)
        eventually(lambda: not carriers(word))


def test_guard_ends_the_group_that_a_component_left(simulated: Simulated, word: str) -> None:
    with guarded(simulated, word, "leaves") as (process, _):
        process.wait(30)
        [left] = eventually(lambda: found if len(found := carriers(word)) == 1 else None)
        assert os.getsid(left.pid) == left.pid, "only the one in a session of its own is left"


def test_keeper_finds_by_its_variables_what_escaped_a_guard(simulated: Simulated, word: str, tmp_path: Path) -> None:
    marks = {"TOPROPE_RUN_FOLDER": str(tmp_path), "TOPROPE_ATTEMPT": "1"}
    sleeper = [simulated.python, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(60)", word]
    program = (
        "import sys\nfrom toprope.supervisor.runs.orphan_reaper import reap_marked\n"
        "print(sum(reap_marked({sys.argv[1]: 1}).values()))"
    )
    variables = simulated.variables | marks
    with subprocess.Popen(sleeper, stdout=subprocess.PIPE, start_new_session=True, env=variables) as escaped:
        assert escaped.stdout is not None and escaped.stdout.readline() == b"\n"
        assert run(simulated, "-c", program, str(tmp_path)).stdout == "1\n"
        assert escaped.wait(10) == -signal.SIGKILL


def test_journal_waits_for_the_disks_own_cache(simulated: Simulated, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom toprope.atomic import allocate, append\n"
        "append(Path(sys.argv[1]), b'one\\n')\n"
        "with open(sys.argv[2], 'w+b') as file:\n    allocate(file.fileno(), 3_000_000)\n"
    )
    before = simulated.noted().count("full sync") if (simulated.folder / "simulated.log").exists() else 0
    done = run(simulated, "-c", program, str(tmp_path / "lines"), str(tmp_path / "room"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    room = (tmp_path / "room").stat()
    assert room.st_size == 3_000_000 and room.st_blocks * 512 >= 3_000_000
    assert simulated.noted().count("full sync") == before + 1


@pytest.mark.engines
def test_whole_demo_learns(simulated: Simulated) -> None:
    done = run(simulated, "-m", "toprope_server.cli", "demo", limit_s=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    noted = Counter(simulated.noted())
    assert noted["guard.py"] >= 8 and noted["enter.py"] >= 2 and noted["full sync"] > 20
    assert not noted["refused fork"] and not noted["refused prctl"]
    [*runs] = (simulated.folder / "home" / "runs").glob("spell-*")
    assert len(runs) == 2 and not [one for folder in runs for one in carriers(str(folder))]
