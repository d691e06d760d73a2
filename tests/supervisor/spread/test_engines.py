"""Crews on two nodes of a real Slurm and a real Ray, where they are installed: spread, stopped, and without a node."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from benchmarks.cluster import ray_house, slurm_house
from benchmarks.cluster.house import keeper_of, kill_all
from benchmarks.cluster.matrix import FAULTS, launcher_for, processes_of_run, suffer
from tests.support import supervisor_stand_ins
from tests.support.run_harness import RunHarness, ended, eventually
from toprope.records.run.folder import RunFolder
from toprope.supervisor.runs.manager import RunManager

pytestmark = pytest.mark.engines

HOUSES: dict[str, tuple[Any, Any]] = {
    "slurm": (slurm_house.why_not, slurm_house.SlurmHouse),
    "ray": (ray_house.why_not, ray_house.RayHouse),
}
GPUS = {"trainer": {"gpus": 1}, "inference": {"gpus": 1}}
FIRST_S = 120.0
"""Seconds of a first start on cold nodes."""


@pytest.fixture(scope="module", params=HOUSES)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    why_not, make = HOUSES[request.param]
    if why := why_not():
        pytest.skip(why)
    made = make(tmp_path_factory.mktemp(request.param) / "house", sys.executable)
    yield made
    made.close()


def start(house: Any, harness: RunHarness, network: str, **launcher: Any) -> tuple[RunManager, RunFolder]:
    """Start a run of stand-ins over both nodes and wait until its second driver has posted groups."""
    harness.runs({"trainer": {"endless": True, "patient": True}})
    table = harness.path / "programs.json"
    table.write_text(json.dumps(harness.programs))
    house.cluster = house.cluster.model_copy(update={"network": network})
    command = (sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table))
    runs = RunManager(harness.path / "runs", launcher_for(house, command), lambda: harness.machine)
    specification = harness.specification(**launcher)
    section = specification.config.launcher
    section.kind, section.nodes, section.drivers = house.cluster.kind, 2, 2
    folder = runs.start(specification)
    harness.started.append(folder)
    eventually(lambda: runs.status(folder.run_id).making.get("posted", 0) >= 3, FIRST_S)
    return runs, folder


def gpu_of(runs: RunManager, folder: RunFolder, member: str) -> str:
    """Return the one GPU that a member sees."""
    [gpu] = psutil.Process(runs.status(folder.run_id).crew[member].pid).environ()["CUDA_VISIBLE_DEVICES"].split(",")
    assert gpu
    return gpu


def check_nothing_left(folder: RunFolder) -> None:
    eventually(lambda: not processes_of_run(folder), 40.0)
    assert not folder.crew.exists()


@pytest.mark.parametrize("network", ["tls", "trusted"])
def test_crew_on_two_nodes_stops_in_order_and_leaves_nothing(house: Any, harness: RunHarness, network: str) -> None:
    runs, folder = start(house, harness, network)
    crew = runs.status(folder.run_id).crew
    assert crew["policy"].node is None
    assert crew["api"].node == crew["inference"].node == crew["trainer"].node
    assert crew["environment"].node == crew["environment-2"].node not in (None, crew["api"].node)
    shown = [" ".join([*one.cmdline(), *one.environ().values()]) for one in processes_of_run(folder) if one.pid]
    assert not any("PRIVATE KEY" in words for words in shown)
    runs.stop(folder.run_id)
    status = ended(runs, folder, 30.0)
    assert status.state == "stopped" and status.checkpoint is not None
    check_nothing_left(folder)


def test_gpus_are_those_of_the_run_on_each_node_and_free_ones_after_a_loss(house: Any, harness: RunHarness) -> None:
    runs, folder = start(house, harness, "tls", restarts=2, resources=GPUS)
    crew = runs.status(folder.run_id).crew
    near, far = crew["trainer"].node, crew["inference"].node
    assert near != far and crew["api"].node == near
    assert gpu_of(runs, folder, "trainer") and gpu_of(runs, folder, "inference")
    space = next(name for name in house.nodes if name != house.net.node_of(keeper_of(folder).pid))
    kill_all(house.net.processes(space))
    try:

        def moved() -> bool:
            inference = runs.status(folder.run_id).crew["inference"]
            return bool(inference.restarts and inference.state == "ready" and inference.node == near)

        eventually(moved, 60.0)
        assert gpu_of(runs, folder, "inference") != gpu_of(runs, folder, "trainer")
        runs.stop(folder.run_id)
        assert ended(runs, folder, 60.0).state == "stopped"
        check_nothing_left(folder)
    finally:
        house.mend()


@pytest.mark.parametrize("house", ["ray"], indirect=True)
def test_ray_reserves_the_gpus_of_all_nodes_until_the_keeper_is_gone(house: Any, harness: RunHarness) -> None:
    eventually(lambda: house.free_gpus() == 4, 60.0)
    runs, folder = start(house, harness, "tls", resources={"trainer": {"gpus": 1}})
    assert house.free_gpus() == 2
    keeper_of(folder).kill()
    assert ended(runs, folder, 60.0).state == "lost"
    check_nothing_left(folder)
    eventually(lambda: house.free_gpus() == 4, 60.0)


def test_run_goes_on_where_it_can_when_the_drivers_node_is_lost(house: Any, harness: RunHarness) -> None:
    runs, folder = start(house, harness, "tls", restarts=2)
    far = next(name for name in house.nodes if name != house.net.node_of(keeper_of(folder).pid))
    kill_all(house.net.processes(far))
    try:

        def moved() -> bool:
            crew = runs.status(folder.run_id).crew
            drivers = [crew["environment"], crew["environment-2"]]
            return all(one.restarts and one.state == "ready" and one.node == crew["api"].node for one in drivers)

        eventually(moved, 60.0)
        posted = runs.status(folder.run_id).making["posted"]
        eventually(lambda: runs.status(folder.run_id).making["posted"] > posted)
        assert runs.status(folder.run_id).making["given_up"] == {"the environment's driver ended": 1}
        runs.stop(folder.run_id)
        status = ended(runs, folder, 60.0)
        assert status.state == "stopped" and status.checkpoint is not None
        check_nothing_left(folder)
    finally:
        house.mend()


@pytest.mark.parametrize("fault", ["daemon killed", "node killed"])
def test_slurm_that_loses_the_keepers_node_loses_the_run_and_gets_the_other_node_back(
    house: Any, harness: RunHarness, fault: str
) -> None:
    if house.cluster.kind != "slurm":
        pytest.skip("Ray ends a job together with the node of its entrypoint")
    runs, folder = start(house, harness, "tls")
    outcome = suffer(house, runs, folder, FAULTS[fault])
    assert outcome.state == "lost" and not outcome.left, outcome
    eventually(lambda: not house.engine.jobs()[f"{folder.run_id}.1"].holds_nodes, 60.0)
    assert house.engine.jobs()[f"{folder.run_id}.1"].phase == "ended"
