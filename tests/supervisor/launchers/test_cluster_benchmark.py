"""The benchmark of clusters can fail: it counts a second keeper, and doubts runs that took no step."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from benchmarks.cluster import bench, ray_house
from benchmarks.cluster.house import kill_all
from benchmarks.cluster.matrix import FAULTS, keepers_of, launcher_for, processes_of_run
from tests.support import supervisor_stand_ins
from tests.support.run_harness import eventually
from toprope.records.run.folder import RunFolder
from toprope.supervisor.runs.manager import RunManager


@pytest.fixture
def start(local_house, harness):
    """Returns, for stand-ins with a behaviour, a tally and what it asks for runs."""

    def made(behaviours):
        harness.runs(behaviours)
        table = harness.path / "programs.json"
        table.write_text(json.dumps(harness.programs))
        command = (sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table))
        runs = RunManager(harness.path / "runs", launcher_for(local_house, command), lambda: harness.machine)

        def start():
            specification = harness.specification()
            specification.config.launcher.kind = "slurm"
            harness.started.append(runs.start(specification))
            return runs, harness.started[-1]

        return bench._Tally(Console(quiet=True)), SimpleNamespace(house=local_house, command=command, start=start)

    yield made
    for folder in harness.started:
        kill_all(processes_of_run(folder))


def test_second_keeper_leaves_and_a_planted_one_is_counted(start):
    tally, harness = start({"trainer": {"endless": True}})
    tally.play("planted keeper", lambda: tally.plant(harness))
    assert tally.figures()["double_keepers"] == 0
    assert tally.doubts() == "" and tally._planted == 2
    tally._planted = 1
    assert "not counted" in tally.doubts()


def test_shell_that_an_engine_puts_above_a_keeper_is_none(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "a-run")
    words = ["--foreground", str(folder.path)]
    shell = ["sh", "-c", "sleep 60; true", "keeper", *words]
    keeper = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])", *words]
    started = []
    try:
        for command, count in ((shell, 0), (keeper, 1)):
            started.append(subprocess.Popen(command))
            eventually(psutil.Process(started[-1].pid).children)
            assert keepers_of(folder) == count
    finally:
        for one in started:
            kill_all(psutil.Process(one.pid).children())
            one.kill()
            one.wait()


def test_process_above_a_keeper_that_ends_counts_as_no_keeper(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "runs", "a-run")
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    step = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, "--foreground", str(folder.path)])
    try:
        (child,) = eventually(psutil.Process(step.pid).children)
        eventually(lambda: keepers_of(folder) == 1)
        words = psutil.Process.cmdline
        monkeypatch.setattr(psutil.Process, "cmdline", lambda one: [] if one.pid == child.pid else words(one))
        assert keepers_of(folder) == 0
    finally:
        kill_all([child])
        step.wait()


def test_run_that_never_steps_is_doubted(start, monkeypatch):
    monkeypatch.setattr(bench, "_SOON_S", 1.5)
    tally, harness = start({"trainer": {"at": "ready", "do": "hang"}})
    tally.play("stop order", lambda: tally.strike(harness, "stop order", FAULTS["stop order"]))
    assert tally.figures()["wrong_endings"] == 1
    assert tally.doubts() == "1 of 1 runs took no step"


def test_killed_node_of_a_ray_is_no_mended_one(monkeypatch):
    """The head still lists it as alive when the new one starts."""
    house = object.__new__(ray_house.RayHouse)
    processes = {name: [SimpleNamespace(name=lambda: "raylet")] for name in ("head", "n1")} | {"n2": []}
    house.net = SimpleNamespace(addresses={name: f"10.0.0.{name}" for name in processes}, processes=processes.get)
    house._daemons = SimpleNamespace(running={})
    listed = [("old", "10.0.0.n2", "ALIVE"), ("other", "10.0.0.n1", "ALIVE")]

    def asked(method, path):
        names = ("nodeId", "nodeManagerAddress", "state")
        summary = [{"raylet": dict(zip(names, one, strict=True))} for one in listed]
        return SimpleNamespace(json=lambda: {"data": {"summary": summary}})

    def waited(holds, what):
        assert what == "Ray's node n2" and not holds()
        listed.append(("new", "10.0.0.n2", "ALIVE"))
        assert holds()

    house.engine = SimpleNamespace(_ask=asked)
    started = []
    house._start = started.append
    monkeypatch.setattr(ray_house, "wait_until", waited)
    house.mend()
    assert started == ["n2"]
