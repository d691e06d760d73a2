"""Real training on nodes that have none of the server's folders, by a real Slurm where one is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from toprope_server.cli.doctor.cluster import check_cluster

from benchmarks.cluster import slurm_house
from benchmarks.cluster.matrix import processes_of_run
from benchmarks.faults.lives import RealHarness
from tests.support.run_harness import ended, eventually
from tests.support.services.far_cluster import FarCluster, leave, resume, shown
from toprope.records.run.checkpoints import checkpoint_of
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.metrics import read_rows
from toprope.settings.owner import Home
from toprope.supervisor.lock import is_held

pytestmark = pytest.mark.engines
FIRST_S = 180.0


def test_slurm_without_a_shared_folder_trains_is_shown_stopped_and_resumed(tmp_path: Path) -> None:
    if why := slurm_house.why_not():
        pytest.skip(why)
    (tmp_path / "server").mkdir()
    harness = RealHarness(tmp_path / "server")
    harness._policy.rename(tmp_path / "policy")
    harness._policy = tmp_path / "policy"  # models are there under the same path, or come from the Hub
    house = slurm_house.SlurmHouse(tmp_path / "slurm", sys.executable, hidden=harness.path)
    try:
        far = FarCluster(harness, house.engine, tmp_path / "far", house.net.host, config=house.cluster.config)
        findings = list(check_cluster(Home(harness.path, far.path.parent), "lab", engine=lambda _: house.engine))
        assert not [one for one in findings if one.level == "broken"], findings
        runs = far.runs(real=True)
        folder = far.start(runs)
        there = far.there(folder)
        eventually(lambda: runs.status(folder.run_id) and len(read_rows(folder.metrics)) >= 3, FIRST_S)
        pid = read_json(there.lock)["pid"]
        assert house.net.node_of(pid) in house.nodes and not os.listdir(f"/proc/{pid}/root{harness.path}")
        assert runs.read_log(folder.run_id, "trainer", lines=5).size
        rows = read_rows(folder.metrics)
        assert rows == read_rows(there.metrics)[: len(rows)]
        runs.stop(folder.run_id)
        status = ended(runs, folder, FIRST_S)
        assert status.state == "stopped" and status.checkpoint is not None
        check_over(far, folder)
        assert checkpoint_of(folder).step == status.checkpoint["step"]

        for path in folder.checkpoints.iterdir():  # the cluster has it all the same
            path.rename(harness.path / path.name)
        assert eventually(lambda: resume(runs, folder)) == 2
        step = status.checkpoint["step"]
        eventually(lambda: runs.status(folder.run_id).progress.get("step", 0) > step, FIRST_S)
        runs.stop(folder.run_id)
        assert ended(runs, folder, FIRST_S).state == "stopped"
        check_over(far, folder)
    finally:
        house.close()
        harness.close()


def check_over(far: FarCluster, folder: RunFolder) -> None:
    """Fail unless the copy is whole and nothing is left of the run on either side."""
    there = far.there(folder)
    eventually(lambda: not is_held(folder.lock) and not processes_of_run(folder) and not processes_of_run(there))
    assert shown(folder) == shown(there) and not leave(folder.path) and not leave(there.path)
