"""Confined programs can compute and do nothing else. `make bench-orchestrator` tries many more ways out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.orchestrator.hostile_programs import PROGRAMS
from toprope.sdk import sandbox
from toprope.sdk.errors import InvalidRequest
from toprope.sdk.orchestration.tools import Toolbox, code_interpreter
from toprope.sdk.sandbox import Unconfined, passes_tests, run_python


@pytest.fixture(scope="module", autouse=True)
def confined():
    try:
        run_python("1")
    except Unconfined as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("1 + 1", "2\n"),
        ("x = 3\nprint(x)\nx * 2", "3\n6\n"),
        ("import math, decimal, statistics, heapq\nmath.sqrt(16)", "4.0\n"),
        (
            "names = 'collec-tions date-time deci-mal fract-ions iter-tools js-on ma-th rand-om r-e stat-istics'\n"
            "all(__import__(name.replace('-', '')) for name in names.split())",
            "True\n",
        ),
        ("import threading\nr = []\nt = threading.Thread(target=r.append, args=(1,))\nt.start()\nt.join()\nr", "[1]\n"),
        ("import datetime\ndatetime.date(2026, 1, 1).isoformat()", "'2026-01-01'\n"),
    ],
)
def test_sandbox_runs_programs(program, output):
    ran = run_python(program, seconds=20)
    assert (ran.output, ran.code, ran.why) == (output, 0, "")


def test_sandbox_reports_exception_with_line():
    ran = run_python("x = 1\nraise ValueError('no')", seconds=20)
    assert ran.output == "ValueError: no (line 2)\n" and ran.code == 1
    assert "SyntaxError" in run_python("x =", seconds=20).output


QUICK = ("fork bomb", "another program", "all memory at once", "endless output", "endless loop", "write a file outside",
         "remove a file", "the parent's memory", "a connection", "kill the parent", "signal by a pipe's owner",
         "lie about being confined")  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_sandbox_contains_hostile_program(name, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("alive")
    canary.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        ran = run_python(
            PROGRAMS[name].format(parent=os.getpid(), canary=canary, port=server.getsockname()[1]), seconds=2
        )
        assert ran.code != 0 or ran.why
        with pytest.raises(BlockingIOError):
            server.accept()
    assert canary.read_text() == "alive" and list(tmp_path.iterdir()) == [canary]
    assert "alive" not in ran.output and len(ran.output) <= 4000 and ran.seconds < 20


MANY_THREADS = """
import threading
threading.stack_size(32768)
wait, made = threading.Event(), 0
try:
    for made in range(6000): threading.Thread(target=wait.wait, daemon=True).start()
except RuntimeError: pass
made
"""


def test_sandbox_limits_threads_of_any_user():
    ran = run_python(MANY_THREADS, seconds=30)
    assert ran.code == 0 and 16 <= int(ran.output) <= 64
    few = "import threading\nfor n in range(300):\n t = threading.Thread(target=abs, args=(n,)); t.start(); t.join()\n"
    assert run_python(few, seconds=30).code == 0, "threads that have ended do not count"


def test_code_interpreter_is_a_tool():
    box = Toolbox([code_interpreter(seconds=20)])
    assert box.call("code_interpreter", "```python\nprint(6 * 7)\n```").content == "42"
    failed = box.call("code_interpreter", "open('/etc/passwd')")
    assert failed.failed and "PermissionError" in failed.content
    assert "time limit" in Toolbox([code_interpreter(seconds=0.5)]).call("code_interpreter", "while True: pass").content


def test_sandbox_refuses_to_run_unconfined(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unconfined, match="none was run"):
        run_python("1")
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="100,000"):
        run_python("x" * 200_000)


def test_without_landlock_only_a_scratch_folder_runs_limited(tmp_path):
    """A kernel without Landlock, by a system call that does not exist."""
    source = Path(sandbox.__file__).with_name("_confined.py").read_text()
    program = tmp_path / "confined.py"
    program.write_text(source)
    (tmp_path / "wall").mkdir()
    kernel = Path(sandbox.__file__).with_name("wall") / "kernel.py"
    (tmp_path / "wall" / "kernel.py").write_text(kernel.read_text().replace("(444, 444)", "(9444, 9444)"))
    command = [sys.executable, "-I", "-B", str(program), str(512 << 20), "20", "0"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], input="6 * 7", capture_output=True, text=True, timeout=60)

    refused, limited = run(), run(str(tmp_path))
    assert refused.returncode == 70 and refused.stdout.startswith("unconfined: this kernel has no Landlock")
    assert limited.returncode == 0 and limited.stdout == "limited\n42\n"


def test_tested_code_may_print_and_leave_threads():
    code = "import threading, time\nprint('x' * 2_000_000)\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    began = time.monotonic()
    assert passes_tests(code, "assert True", seconds=20.0, memory_mb=1024)
    assert time.monotonic() - began < 20.0
    assert not passes_tests(code, "assert False", seconds=2.0, memory_mb=1024)
