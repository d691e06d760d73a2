"""An engine that runs jobs as processes of this machine, as Slurm and Ray do, and houses for the contract's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.support.run_harness import eventually
from toprope.records.run.folder import read_json
from toprope.settings.clusters import Cluster
from toprope.supervisor import heartbeat
from toprope.supervisor.launchers import engine
from toprope.supervisor.launchers.engine import Job, Refused, Unreachable

_STEP = """
import signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
sys.exit(child.wait() and 1)
"""
"""A parent like slurmstepd and Ray's supervisor: it passes SIGTERM on, and leaves its child if it is killed."""


class LocalEngine:
    """See `Engine`. `waits`: jobs never start; `silent`: nobody answers."""

    title = "Engine"

    def __init__(self):
        self.steps, self.requests, self.cancelled = {}, {}, set()
        self.waits = self.silent = self.loses_answer = False
        self.gave_up, self.beheaded = set(), set()

    def submit(self, request):
        if self.silent:
            raise Unreachable("nobody answers.")
        if request.launcher.account == LocalHouse.spent:
            raise Refused(f"Engine refused the job: {LocalHouse.quota}.")
        if request.name not in self.requests:
            self.requests[request.name] = request
            if not self.waits:
                self.start(request.name)
        if self.loses_answer:
            raise Unreachable("the answer was lost.")

    def start(self, name):
        request = self.requests[name]
        with request.log.open("ab") as log:
            self.steps[name] = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _STEP, *request.command],
                cwd=request.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "CUDA_VISIBLE_DEVICES": "4,5,6",
                     "SLURM_JOB_ID": "7"},
            )  # fmt: skip

    def jobs(self):
        if self.silent:
            raise Unreachable("nobody answers.")
        return {name: self._job(name) for name in list(self.requests)}  # another thread may submit meanwhile

    def _job(self, name):
        step = self.steps.get(name)
        if step is None:
            ended = name in self.cancelled
            return Job(name, "ended" if ended else "waiting", "PENDING", "" if ended else "Resources")
        if name in self.gave_up:
            return Job(name, "ended", "NODE_FAIL", "NODE_FAIL")
        if name in self.beheaded:
            return Job(name, "ended", "RUNNING", "its first node n1 failed", holds_nodes=True)
        code = step.poll()
        return Job(name, "running" if code is None else "ended", "RUNNING" if code is None else f"EXIT {code}")

    def cancel(self, name, *, running=False):
        if self.silent:
            raise Unreachable("nobody answers.")
        if running:
            self.beheaded.remove(name)
        if name not in self.steps:
            self.cancelled.add(name)

    def describe(self, request):
        return f"Engine: {request.launcher.room().cpus} CPUs"


class LocalHouse:
    """See `benchmarks.cluster.house.House`: `LocalEngine` as a cluster of one node."""

    features, spent, quota = (), "spent", "its quota is used up"

    def __init__(self):
        self.cluster = Cluster(kind="slurm", python=sys.executable)
        self.engine = LocalEngine()

    def _step(self, folder):
        return self.engine.steps[f"{folder.run_id}.1"]

    def cancel(self, folder):
        self._step(folder).terminate()

    def kill_engine_process(self, folder):
        self._step(folder).kill()

    def kill_daemon(self, folder):
        self.engine.gave_up.add(f"{folder.run_id}.1")

    def kill_node(self, folder):
        keeper = psutil.Process(read_json(folder.lock)["pid"])
        family = [psutil.Process(self._step(folder).pid), keeper, *keeper.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in family:
                with suppress(psutil.NoSuchProcess):  # such as the guard of the program that placed the policy
                    process.send_signal(number)

    def mend(self):
        pass

    @contextmanager
    def unreachable(self):
        self.engine.silent = True
        yield
        self.engine.silent = False

    @contextmanager
    def full(self):
        self.engine.waits = True
        yield self.features

    def close(self):
        for step in self.engine.steps.values():
            eventually(lambda one=step: one.poll() is not None or one.kill())


@pytest.fixture
def local_house(monkeypatch):
    """Asks and concludes faster than is wise with a real engine."""
    monkeypatch.setattr(heartbeat, "BEATING_S", 1.2)
    monkeypatch.setattr(engine, "_ASK_EVERY_S", 0.05)
    house = LocalHouse()
    yield house
    house.close()
