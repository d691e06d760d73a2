"""The guard as a program: inheritance, reports, logs, and that no process outlives it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.support.run_harness import eventually
from toprope.supervisor import guard

GUARD = str(Path(guard.__file__))
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has a subreaper")


class Guarded:
    """A guard around some Python code; words after the code are its arguments."""

    def __init__(self, code: str, *words: str, grace: float = 5.0, extra: tuple[str, ...] = (), pass_fds=(), **popen):
        control, self.control = os.pipe()
        self.reports, report = os.pipe()
        self.token = f"token-{uuid.uuid4().hex}"
        command = [sys.executable, "-I", "-S", GUARD, "--control", str(control), "--report", str(report)]
        command += [*extra, "--grace", str(grace), "--", sys.executable, "-I", "-S", "-c", code, self.token, *words]
        self.process = subprocess.Popen(
            command, pass_fds=(control, report, *pass_fds), env={**os.environ, "REPORT": str(report)}, **popen
        )
        os.close(control)
        os.close(report)
        self.said = b""

    def line(self) -> dict:
        while b"\n" not in self.said.lstrip(b"\n"):
            data = os.read(self.reports, 4096)
            assert data, "the reports ended"
            self.said += data
        line, _, self.said = self.said.lstrip(b"\n").partition(b"\n")
        return json.loads(line)

    def stop(self, text: bytes = b"stop 5\n") -> None:
        os.write(self.control, text)

    def marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self.token in process.cmdline() and process.pid != self.process.pid:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait(self) -> int:
        return self.process.wait(timeout=10)

    def close(self) -> None:
        for process in [self.process, *self.marked()]:
            try:
                process.kill()
            except (psutil.Error, ProcessLookupError):
                continue
        self.process.wait()
        os.close(self.reports)
        try:
            os.close(self.control)
        except OSError:
            pass


@pytest.fixture
def guarded():
    made = []

    def make(*args, **kwargs) -> Guarded:
        made.append(Guarded(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


SLEEP = "import time; time.sleep(600)"
DEAF = (
    "import signal,time,os; signal.signal(15, signal.SIG_IGN); os.write(int(os.environ['REPORT']), b'{\"up\":1}\\n'); "
)
DAEMONS = """
import os, sys, signal, time
for kind in ("child", "session", "daemon", "bare"):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if kind != "child":
            os.setsid()
        if kind in ("daemon", "bare") and os.fork():
            os._exit(0)
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", sys.argv[1]],
                  {} if kind == "bare" else dict(os.environ))
os.write(int(os.environ["REPORT"]), b'{"up":1}\\n')
"""


def test_exit_code_is_reported_and_passed_on(guarded):
    one = guarded("raise SystemExit(7)")
    started = one.line()
    assert started["type"] == "guard_started" and started["pid"] > 0
    assert one.line() == {"type": "guard_exited", "code": 7, "signal": None}
    assert one.wait() == 7


def test_signal_is_reported_by_name(guarded):
    one = guarded(SLEEP)
    os.kill(one.line()["pid"], signal.SIGKILL)
    assert one.line() == {"type": "guard_exited", "code": None, "signal": "SIGKILL"}
    assert one.wait() == 128 + 9


def test_end_without_descendants_reads_no_other_process(tmp_path):
    """The list of all processes costs more than all else at a member's end, when its run needs the processor."""
    code = "import os, sys; from toprope.supervisor import guard; control, order = os.pipe()\n"
    code += "guard.children_by_parent = lambda: print('listed') or {}\n"
    code += "sys.exit(guard.Guard(['true'], control).run())"
    done = subprocess.run([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, timeout=20)
    assert (done.returncode, done.stdout) == (0, b"")


def test_torn_last_report_comes_before_exit(guarded):
    one = guarded("import os; os.write(int(os.environ['REPORT']), b'{\"half\":')")
    one.line()
    one.wait()
    one.said += os.read(one.reports, 4096)
    half, end = one.said.split()[0], one.said.partition(b"\n")[2]
    assert half == b'{"half":'
    assert json.loads(end)["type"] == "guard_exited"


def test_component_has_session_input_and_descriptors(guarded):
    inside, outside = os.pipe()
    code = "import os,sys; print(sys.stdin.readline().strip(), os.getsid(0) == os.getpid()); "
    code += "os.write(int(sys.argv[2]), b'!')"
    one = guarded(code, str(outside), pass_fds=(outside,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        answer, _ = one.process.communicate("orders\n", timeout=10)
        assert answer == "orders True\n"
        assert os.read(inside, 9) == b"!"
    finally:
        os.close(inside)
        os.close(outside)


def test_guard_closes_component_input(guarded):
    """The keeper's next order to a component that closed its input must fail, not vanish into a pipe."""
    one = guarded(f"import os; os.close(0); {DEAF}time.sleep(600)", stdin=subprocess.PIPE)
    one.line(), one.line()
    with pytest.raises(BrokenPipeError):
        os.write(one.process.stdin.fileno(), b"order\n")
    one.process.stdin.close()


@linux
@pytest.mark.parametrize("ending", ["itself", "stop", "end of file", "signal"])
def test_no_descendant_outlives_the_guard(guarded, ending):
    one = guarded(DAEMONS + ("" if ending == "itself" else "time.sleep(600)"), grace=1.0)
    assert one.line()["type"] == "guard_started"
    assert one.line() == {"up": 1}
    if ending == "stop":
        one.stop()
    elif ending == "end of file":
        os.close(one.control)
        one.control = -1
    elif ending == "signal":
        one.process.terminate()
    assert one.line()["type"] == "guard_exited"
    one.wait()
    assert one.marked() == []


def test_exit_is_reported_before_descendants_are_killed(guarded):
    """Otherwise the keeper would learn of a component's end only after that of its children."""
    one = guarded(DAEMONS)
    one.line(), one.line()
    assert one.line()["type"] == "guard_exited"
    one.wait()


@pytest.mark.parametrize("order", [b"stop 0.2\n", b"stop 60\nstop 0.2\n", b"x"])
def test_component_that_ignores_sigterm_is_killed_after_grace(guarded, order):
    one = guarded(DEAF + "time.sleep(600)", grace=0.2)
    one.line(), one.line()
    one.stop(order)
    assert one.line() == {"type": "guard_exited", "code": None, "signal": "SIGKILL"}
    assert one.wait() == 137


def test_later_order_shortens_grace(guarded):
    one = guarded(DEAF + "time.sleep(600)", grace=60)
    one.line(), one.line()
    one.stop(b"stop 60\n")
    assert one.process.poll() is None
    one.stop(b"stop 0\n")
    assert one.wait() == 137


def test_suspended_component_is_stopped(guarded):
    one = guarded(SLEEP, grace=60)
    pid = one.line()["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    one.stop(b"stop 60\n")
    assert one.line()["signal"] == "SIGTERM"


def test_log_is_bounded_rotated_and_private(guarded, tmp_path):
    log = tmp_path / "noisy.log"
    extra = ("--log", str(log), "--log-bytes", "10000", "--log-keep", "2")
    one = guarded("for i in range(5000): print('line', i)", extra=extra)
    assert one.wait() == 0
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == ["noisy.log", "noisy.log.1", "noisy.log.2"]
    assert all(part.stat().st_size <= 10000 and stat.S_IMODE(part.stat().st_mode) == 0o600 for part in parts)
    text = "".join(part.read_text() for part in reversed(parts)).splitlines()
    assert text[-1] == "line 4999"
    numbers = [int(line.split()[1]) for line in text]
    assert numbers == list(range(numbers[0], 5000))


def test_unwritable_log_does_not_stop_component(guarded, tmp_path):
    one = guarded("print('x' * 200000)", extra=("--log", str(tmp_path / "absent" / "a.log")))
    assert one.wait() == 0


def test_missing_program_is_reported_in_log(tmp_path):
    control, writer = os.pipe()
    log = tmp_path / "a.log"
    command = [sys.executable, "-I", "-S", GUARD, "--control", str(control), "--log", str(log), "--grace", "1"]
    assert subprocess.run([*command, "--", "/no/such/program"], pass_fds=(control,), timeout=10).returncode == 127
    assert "/no/such/program could not be started" in log.read_text()
    os.close(control)
    os.close(writer)


def test_wrong_arguments_are_refused(capfd):
    assert guard.main(["--grace", "1", "--", "true"]) == 2
    assert guard.main(["--contrl", "1", "--", "true"]) == 2
    assert "--contrl" in capfd.readouterr().err


def test_held_descriptor_is_not_passed_on(guarded, tmp_path):
    path = tmp_path / "lock"
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    code = f"import os; os.write(int(os.environ['REPORT']), b'%d\\n' % os.path.exists('/dev/fd/{held}')); {SLEEP}"
    one = guarded(code, extra=("--hold", str(held)), pass_fds=(held,))
    os.close(held)
    one.line()
    assert one.line() == 0
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    one.stop()
    one.wait()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
