"""The contract of launchers on clusters, for a stand-in engine and, where they are installed, for real ones."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest
from toprope_server.cli.doctor.cluster import check_cluster

from benchmarks.cluster import ray_house, slurm_house
from benchmarks.cluster.matrix import FAULTS, keepers_of, launcher_for, processes_of_run, suffer
from tests.support import supervisor_stand_ins
from tests.support.run_harness import ended, eventually, until
from toprope.errors import ComponentFailed, NotPossibleNow
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.launch import Launch
from toprope.records.run.status import Status
from toprope.settings.clusters import Cluster
from toprope.settings.owner import Home
from toprope.supervisor.launchers.engine import Job
from toprope.supervisor.lock import ALREADY_KEPT, is_held
from toprope.supervisor.runs.cleanup import stop_members
from toprope.supervisor.runs.manager import RunManager

LIMIT_S = 60.0
CANARY = "canary-4f1b77a0c2"
ENGINES = ("slurm", "ray")


@pytest.fixture(params=["stand-in", *(pytest.param(name, marks=pytest.mark.engines) for name in ENGINES)])
def house(request):
    if request.param == "stand-in":
        return request.getfixturevalue("local_house")
    return request.getfixturevalue(f"real_{request.param}")


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory):
    yield from _real(slurm_house.why_not(), slurm_house.SlurmHouse, tmp_path_factory.mktemp("slurm") / "house")


@pytest.fixture(scope="session")
def real_ray(tmp_path_factory):
    yield from _real(ray_house.why_not(), ray_house.RayHouse, tmp_path_factory.mktemp("ray") / "house")


def _real(why_not, house, folder):
    if why_not:
        pytest.skip(why_not)
    made = house(folder, sys.executable)
    yield made
    made.close()


@pytest.fixture
def cluster(house, harness):
    """Starts runs with stand-in crews on the house."""
    return OnCluster(house, harness)


class OnCluster:
    def __init__(self, house, harness):
        self.house, self.harness = house, harness

    def runs(self, behaviours=None, variables=None) -> RunManager:
        harness = self.harness
        harness.runs(behaviours or {"trainer": {"endless": True}})
        table = harness.path / "programs.json"
        table.write_text(json.dumps(harness.programs))
        launcher = launcher_for(
            self.house, (sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table))
        )
        return RunManager(harness.path / "runs", launcher, lambda: harness.machine, variables)

    def specification(self, **launcher):
        specification = self.harness.specification(**launcher)
        specification.config.launcher.kind = self.house.cluster.kind
        return specification

    def start(self, runs, specification=None, variables=None):
        folder = runs.start(specification or self.specification(), variables or {})
        self.harness.started.append(folder)
        return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_run_ends_in_known_state_after_fault(cluster, fault):
    runs = cluster.runs()
    folder = cluster.start(runs)
    until(runs, folder, "training", limit_s=LIMIT_S)
    outcome = suffer(cluster.house, runs, folder, FAULTS[fault])
    assert outcome.state in FAULTS[fault].ends, outcome
    assert not outcome.left
    assert not is_held(folder.lock)


def test_run_completes_and_leaves_nothing(cluster):
    runs = cluster.runs({"trainer": {"steps": 3}})
    folder = cluster.start(runs)
    assert ended(runs, folder, LIMIT_S).state == "completed"
    eventually(lambda: not processes_of_run(folder), LIMIT_S)
    assert not folder.crew.exists()


def test_engine_that_does_not_answer_settles_nothing(cluster):
    runs = cluster.runs()
    folder = cluster.start(runs)
    until(runs, folder, "training", limit_s=LIMIT_S)
    with cluster.house.unreachable():
        assert runs.status(folder.run_id).state == "training"
        os.kill(read_json(folder.lock)["pid"], signal.SIGKILL)
        eventually(lambda: not processes_of_run(folder), LIMIT_S)
        other = cluster.runs()  # has never had an answer
        eventually(lambda: other.launcher.status(folder).life == "unknown", LIMIT_S)
        assert "Nothing is known" in other.status(folder.run_id).reason
        assert other.list()[0].state == "training"
        with pytest.raises(NotPossibleNow, match="may still run"):
            other.resume(folder.run_id)
    assert ended(other, folder, LIMIT_S).state == "lost"


def test_attempt_never_has_two_keepers(cluster):
    runs = cluster.runs()
    folder = cluster.start(runs)
    until(runs, folder, "training", limit_s=LIMIT_S)
    runs.launcher.submit(folder, {})
    cluster.runs().launcher.submit(folder, {})
    # Where flock is not carried from node to node, each node sees a lock of its own.
    folder.lock.rename(folder.lock.with_suffix(".elsewhere"))
    table = cluster.harness.path / "programs.json"
    command = [sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table), str(folder.path)]
    second = subprocess.run([*command, "--foreground"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert second.returncode == ALREADY_KEPT and "claimed before" in second.stderr
    folder.lock.with_suffix(".elsewhere").rename(folder.lock)
    assert keepers_of(folder) == 1
    assert Status.read(folder).state == "training"
    runs.stop(folder.run_id)
    assert ended(runs, folder, LIMIT_S).state == "stopped"


def test_secrets_reach_members_and_nobody_else(cluster):
    runs = cluster.runs()
    folder = cluster.start(runs, variables={"environment": {"MY_API_KEY": CANARY}})
    until(runs, folder, "training", limit_s=LIMIT_S)
    assert not list(folder.path.glob(".variables-*"))

    def look():
        """The variables and arguments of the members; False if one ended meanwhile."""
        crew = [member for member in runs.status(folder.run_id).crew.values() if member.state == "ready"]
        try:
            return [(one.environ(), one.cmdline()) for one in (psutil.Process(member.pid) for member in crew)]
        except psutil.NoSuchProcess:
            return False

    members = eventually(look)
    assert [given for given, _ in members if CANARY in json.dumps(given)]
    assert not any(CANARY in word for _, command in members for word in command)
    keeper = psutil.Process(read_json(folder.lock)["pid"])
    assert CANARY not in json.dumps([keeper.environ(), keeper.parent().environ(), keeper.parent().cmdline()])
    assert CANARY not in folder.log("keeper").read_text() + folder.launch.read_text() + folder.status.read_text()
    runs.stop(folder.run_id)
    assert ended(runs, folder, LIMIT_S).state == "stopped"


def test_doctor_proves_a_cluster_by_a_job(house, tmp_path):
    home = Home(tmp_path / "home", tmp_path / "config")
    home.configuration.mkdir()
    entry = house.cluster.model_dump(mode="json", exclude_defaults=True)
    (home.configuration / "clusters.yaml").write_text(json.dumps({"lab": entry}))
    found = list(check_cluster(home, "lab", engine=lambda _: house.engine))
    assert not [finding for finding in found if finding.level in ("broken", "warning")], found
    assert any("sees the home under its path" in finding.text for finding in found)
    assert not list(home.runs.glob(".doctor-*"))


def test_far_run_leaves_this_machines_room_alone(cluster):
    cluster.harness.machine = cluster.harness.machine.model_copy(update={"threads": 1})
    runs = cluster.runs()
    folders = [cluster.start(runs) for _ in range(2)]
    for folder in folders:
        until(runs, folder, "training", limit_s=LIMIT_S)
        runs.stop(folder.run_id)
    assert {ended(runs, folder, LIMIT_S).state for folder in folders} == {"stopped"}


def test_job_that_waits_is_told_and_stops_at_once(cluster):
    runs, specification = cluster.runs(), cluster.specification()
    with cluster.house.full() as features:
        specification.config.launcher.features = list(features)
        folder = cluster.start(runs, specification)
        eventually(lambda: f"{cluster.house.engine.title}: " in runs.status(folder.run_id).reason, LIMIT_S)
        assert [status.state for status in runs.list() if status.run_id == folder.run_id] == ["queued"]
        with pytest.raises(NotPossibleNow):
            runs.resume(folder.run_id)
        begun = time.monotonic()
        runs.stop(folder.run_id)
        assert ended(runs, folder, LIMIT_S).state == "stopped"
        assert time.monotonic() - begun < 10


def test_job_whose_keeper_never_began_is_told_with_the_likely_reason(local_house, harness, monkeypatch):
    cluster, jobs = OnCluster(local_house, harness), local_house.engine.jobs
    local_house.engine.waits = True
    runs = cluster.runs()
    folder = cluster.start(runs, cluster.specification(resume_lost="never"))
    failed = {f"{folder.run_id}.1": Job("7", "ended", "FAILED", "FAILED (JobLaunchFailure) on n1")}
    monkeypatch.setattr(local_house.engine, "jobs", lambda: {**jobs(), **failed})
    status = ended(runs, folder)
    assert status.state == "lost" and "keeper never began" in status.reason
    assert "toprope doctor --cluster house" in status.reason


def test_job_that_starts_after_its_run_was_stopped_starts_nothing(local_house, harness):
    cluster = OnCluster(local_house, harness)
    runs, local_house.engine.waits = cluster.runs(), True
    folder = cluster.start(runs)
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    local_house.engine.start(f"{folder.run_id}.1")
    eventually(lambda: local_house.engine.steps[f"{folder.run_id}.1"].poll() is not None)
    assert Status.read(folder).state == "stopped" and not processes_of_run(folder)


def test_waiting_jobs_of_a_stopped_sweep_are_cancelled(local_house, harness):
    cluster = OnCluster(local_house, harness)
    runs, local_house.engine.waits = cluster.runs(), True
    sweep, spec = RunFolder(runs.path / "sweep-1"), cluster.specification()
    folder = cluster.start(runs, spec.model_copy(update={"run_id": f"{sweep.run_id}-m01"}))
    stop_members(sweep)  # as its keeper does
    assert ended(runs, folder).state == "stopped"
    assert local_house.engine.cancelled == {f"{folder.run_id}.1"}


def test_inference_gets_gpus_of_its_own_among_those_of_the_job(local_house, harness):
    cluster = OnCluster(local_house, harness)
    runs = cluster.runs()
    folder = cluster.start(runs, cluster.specification(inference_gpus=1, num_processes=2))
    until(runs, folder, "training")
    crew = runs.status(folder.run_id).crew
    seen = [psutil.Process(crew[name].pid).environ()["CUDA_VISIBLE_DEVICES"] for name in ("trainer", "inference")]
    assert seen == ["4,5", "6"]
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"


def test_job_of_ray_that_asks_for_no_gpus_sees_none_of_its_nodes(local_house, harness):
    """The variable is that of the node's daemon."""
    local_house.cluster = Cluster(kind="ray", python=sys.executable, address="http://127.0.0.1:1")
    cluster = OnCluster(local_house, harness)
    runs = cluster.runs()
    folder = cluster.start(runs)
    until(runs, folder, "training")
    assert psutil.Process(runs.status(folder.run_id).crew["trainer"].pid).environ()["CUDA_VISIBLE_DEVICES"] == ""
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"


def test_launch_is_written_before_submission(local_house, harness):
    seen = []
    real = local_house.engine.submit

    def watches(request):
        launch = Launch.read(cluster_folder())
        seen.append((launch.name, launch.deadline > launch.submitted_at))
        variables = request.folder / ".variables-1.json"
        seen.append((stat.S_IMODE(variables.stat().st_mode), CANARY in variables.read_text()))
        assert CANARY not in json.dumps(request.command)
        return real(request)

    local_house.engine.submit = watches
    cluster = OnCluster(local_house, harness)
    runs, specification = cluster.runs({"trainer": {"steps": 1}}), cluster.specification()

    def cluster_folder():
        return runs.folder(specification.run_id)

    folder = cluster.start(runs, specification, {"environment": {"MY_API_KEY": CANARY}})
    assert seen == [(f"{folder.run_id}.1", True), (0o600, True)]
    assert ended(runs, folder).state == "completed"


def test_lost_answer_is_no_lost_run(local_house, harness):
    local_house.engine.loses_answer = True
    cluster = OnCluster(local_house, harness)
    runs = cluster.runs({"trainer": {"steps": 1}})
    folder = cluster.start(runs)
    assert ended(runs, folder).state == "completed"


def test_late_job_of_another_attempt_starts_nothing(local_house, harness):
    cluster = OnCluster(local_house, harness)
    local_house.engine.silent = True
    folder = cluster.start(cluster.runs())
    table = harness.path / "programs.json"
    command = [sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table), str(folder.path)]
    late = [*command, "--foreground", "--variables", ".variables-9.json"]
    done = subprocess.run(late, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == ALREADY_KEPT, done.stderr
    assert Status.read(folder).state == "queued" and not (folder.crew / "claim-1").exists()


def test_submission_that_never_arrived_is_lost_after_its_deadline(local_house, harness, monkeypatch):
    cluster = OnCluster(local_house, harness)
    local_house.engine.silent = True
    runs = cluster.runs()
    folder = cluster.start(runs)
    local_house.engine.silent = False
    eventually(lambda: "being submitted" in runs.status(folder.run_id).reason)
    Launch.read(folder).model_copy(update={"deadline": time.time() - 1}).write(folder)
    assert eventually(lambda: runs.status(folder.run_id) if runs.status(folder.run_id).ended else None).state == "lost"


def test_job_that_its_engine_forgot_after_it_began_is_lost_before_its_deadline(local_house, harness):
    cluster = OnCluster(local_house, harness)
    local_house.engine.silent = True
    runs = cluster.runs()
    folder = cluster.start(runs)
    local_house.engine.silent = False
    claimed = folder.crew / "claim-1"
    folder.crew.mkdir(exist_ok=True)
    claimed.write_text(json.dumps({"by": "job", "at": time.time() - 20}))
    eventually(lambda: "being submitted" in runs.status(folder.run_id).reason)  # its engine may not list it yet
    claimed.write_text(json.dumps({"by": "job", "at": time.time() - 90}))
    assert eventually(lambda: runs.status(folder.run_id) if runs.status(folder.run_id).ended else None).state == "lost"


def test_job_that_its_engine_refuses_for_a_quota_fails_its_run(cluster):
    if not cluster.house.spent:
        pytest.skip("Ray accepts every job")
    runs, specification = cluster.runs(), cluster.specification(account=cluster.house.spent)
    with pytest.raises(ComponentFailed, match=cluster.house.quota):
        cluster.start(runs, specification)
    status, folder = runs.status(specification.run_id), runs.folder(specification.run_id)
    assert status.state == "failed" and cluster.house.quota in status.failure.reason
    assert not list(folder.path.glob(".variables-*")) and not is_held(folder.lock)
    assert f"{folder.run_id}.1" not in cluster.house.engine.jobs()
    with pytest.raises(ComponentFailed, match=cluster.house.quota):  # it is submitted again at once
        runs.resume(specification.run_id)
    assert runs.status(specification.run_id).attempt == 2


def test_job_that_lost_its_keepers_node_ends_its_run_and_gives_the_other_nodes_back(local_house, harness):
    cluster = OnCluster(local_house, harness)
    runs = cluster.runs()
    folder, other = cluster.start(runs), cluster.start(runs)
    for one in (folder, other):
        until(runs, one, "training")
    engine, name = local_house.engine, f"{folder.run_id}.1"
    engine.beheaded |= {name, "somebody-elses.1"}
    engine.requests["somebody-elses.1"] = None
    engine.steps["somebody-elses.1"] = engine.steps[name]
    status = ended(runs, folder, LIMIT_S)
    assert status.state == "lost" and "its first node n1 failed" in status.reason
    eventually(lambda: runs.status(other.run_id).state == "training" and engine.beheaded == {"somebody-elses.1"})
    runs.stop(other.run_id)
    assert ended(runs, other).state == "stopped"


def test_place_that_is_taken_back_resumes_as_another_job(local_house, harness):
    cluster = OnCluster(local_house, harness)
    runs = cluster.runs({"trainer": {"endless": True, "patient": True}}, variables=lambda _: {})
    folder = cluster.start(runs)
    until(runs, folder, "training")
    os.kill(read_json(folder.lock)["pid"], signal.SIGUSR1)
    second = eventually(lambda: status if (status := runs.status(folder.run_id)).attempt == 2 else None)
    assert second.attempt == 2 and Launch.read(folder).name == f"{folder.run_id}.2"
    assert any("took the job's place back" in str(event.data) for event in runs.events(folder.run_id))
    until(runs, folder, "training")
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"


def test_run_that_is_stopped_while_its_place_is_taken_back_does_not_resume(local_house, harness):
    cluster = OnCluster(local_house, harness)
    behaviour = {"endless": True, "patient": True, "saving": 1.5}  # longer than stop_grace_s
    runs = cluster.runs({"trainer": behaviour}, variables=lambda _: {})
    folder = cluster.start(runs)
    until(runs, folder, "training")
    os.kill(read_json(folder.lock)["pid"], signal.SIGUSR1)
    eventually(lambda: "took the job's place back" in Status.read(folder).reason)
    runs.stop(folder.run_id)
    status = ended(runs, folder)
    assert (status.state, status.attempt, status.resume_at) == ("stopped", 1, None)
    assert status.checkpoint is not None, "Slurm leaves it a minute"
    states = [event.data["to"] for event in runs.events(folder.run_id) if event.kind == "state"]
    assert states[-2:] == ["stopping", "stopped"]


_SHOWN = (
    "JobId=7 JobName={name} UserId=me(1000) JobState={state} Reason=None Dependency=(null) Requeue=0 Restarts=0 "
    "PreemptEligibleTime=2026-11-23T00:37:56 PreemptTime={preempted} SuspendTime=None\n"
)


@pytest.mark.parametrize(
    ("state", "preempted", "ends"),
    [
        ("RUNNING", "2026-11-23T01:08:09", "lost"),  # in the grace time of its partition
        ("COMPLETING", "2026-11-23T01:08:09", "lost"),
        ("PREEMPTED", "None", "lost"),
        ("COMPLETING", "None", "stopped"),  # scancel
        ("", "", "stopped"),  # Slurm does not answer
    ],
)
def test_terminated_job_is_lost_if_slurm_preempts_it(local_house, harness, monkeypatch, state, preempted, ends):
    scontrol = harness.path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    said = _SHOWN.format(name="x", state=state, preempted=preempted)
    answer = f"[ \"$*\" = '-o show job 7' ] && cat <<'END'\n{said}END\n" if state else "exit 1\n"
    scontrol.write_text(f"#!/bin/sh\n{answer}")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=os.pathsep)
    cluster = OnCluster(local_house, harness)
    runs = cluster.runs()
    folder = cluster.start(runs)
    until(runs, folder, "training")
    local_house.cancel(folder)
    status = ended(runs, folder)
    assert (status.state, status.resume_at is not None) == (ends, ends == "lost")
    assert ("took the job's place back" in status.reason) == (ends == "lost")
    assert ("as a job that is cancelled" in status.reason) == (ends == "stopped")
