"""Runs on a cluster that shares no folder with the server, from submission to resume, and what breaks on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from toprope_server.cli.doctor import cluster as doctor
from toprope_server.cli.doctor.cluster import check_cluster

from tests.support.run_harness import RunHarness, ended, eventually, until
from tests.support.services.far_cluster import KEY, FarCluster, leave, resume, shown
from toprope.atomic import write_json
from toprope.errors import ComponentFailed, InvalidValue, NotPossibleNow
from toprope.records.run.checkpoints import checkpoint_of
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch
from toprope.records.run.status import Status, read_events
from toprope.records.walls import ENV_WALLS, Walls
from toprope.settings.clusters import Mirror
from toprope.settings.owner import Home
from toprope.supervisor import heartbeat
from toprope.supervisor.launchers import cluster
from toprope.supervisor.lock import is_held
from toprope.supervisor.mirror.far import _walls

CANARY = "canary-4f1b77a0c2"
whole = pytest.mark.engines
"""Whole runs take seconds each."""


@pytest.fixture
def far(harness: RunHarness, local_house: Any, monkeypatch: pytest.MonkeyPatch) -> FarCluster:
    monkeypatch.setattr(heartbeat, "BEATING_S", 2.0)
    monkeypatch.setattr(cluster, "_DELIVERY_AGAIN_S", 0.2)
    return FarCluster(harness, local_house.engine)


def gone(far: FarCluster, folder: RunFolder) -> None:
    """Wait until nothing of a run is left on either side, and the copy is the same."""
    eventually(lambda: not is_held(folder.lock) and not far.harness.processes(folder))
    eventually(lambda: not far.harness.processes(far.there(folder)))
    assert shown(folder) == shown(far.there(folder))
    assert not leave(folder.path)


def squats(squatter: socket.socket, port: int) -> bool:
    try:
        squatter.bind(("0.0.0.0", port))
    except OSError:
        return False
    return True


def test_far_run_completes_and_is_the_same_here(far: FarCluster) -> None:
    runs, own, specification = (
        far.runs({"trainer": {"steps": 3}}),
        far.harness.path / "dice.py",
        far.harness.specification(),
    )
    own.write_text("class Dice: ...\n")
    specification.environment.file = str(own)
    folder = far.start(runs, {"environment": {"MY_API_KEY": CANARY}}, specification)
    status = ended(runs, folder)
    assert status.state == "completed", status
    gone(far, folder)
    there = json.loads(far.there(folder).spec.read_text())
    file = there["environment"]["file"]  # the owner's file went with the run
    assert file.startswith(str(far.home / "inputs")) and Path(file).read_text() == own.read_text()
    assert there["policy_cache"] == str(far.home / "policies")
    assert folder.results.exists() and folder.log("trainer").exists() and folder.log("keeper").exists()
    assert checkpoint_of(folder).step == 3  # the newest came by itself
    everything = [path for path in (*folder.path.rglob("*"), *(far.home / "runs").rglob("*")) if path.is_file()]
    assert not [
        path for path in everything if KEY.encode() in path.read_bytes() or CANARY.encode() in path.read_bytes()
    ]


@whole
def test_keys_stand_in_no_argument_and_reach_their_component(far: FarCluster) -> None:
    runs = far.runs()
    folder = far.start(runs, {"environment": {"MY_API_KEY": CANARY}})
    until(runs, folder, "training")
    family = [far.receiver(folder), *far.harness.processes(far.there(folder))]
    words = [" ".join(process.cmdline()) for process in family]
    assert not [one for one in words if KEY in one or CANARY in one or "PRIVATE KEY" in one]
    member = psutil.Process(runs.status(folder.run_id).crew["environment"].pid or 0)
    assert CANARY in json.dumps(member.environ())
    assert Walls.from_variables(member.environ()).closed == (str(far.home), str(far.key))
    eventually(lambda: not list(folder.path.glob(".variables-*")))
    assert not list(far.there(folder).path.glob(".variables-*"))
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    gone(far, folder)


@whole
def test_run_outlives_the_loss_of_its_receiver_and_silence_settles_nothing(far: FarCluster) -> None:
    runs = far.runs()
    folder = far.start(runs)
    until(runs, folder, "training")
    receiver = far.receiver(folder)
    port = int((Launch.read(folder) or pytest.fail()).mirror.rpartition(":")[2])
    with socket.socket() as squatter:  # so that no other receiver can listen
        receiver.kill()
        eventually(lambda: not receiver.is_running() or receiver.status() == psutil.STATUS_ZOMBIE)
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: squats(squatter, port))
        squatter.listen()
        silent_since = folder.metrics.stat().st_size
        eventually(lambda: "has not been heard of" in runs.status(folder.run_id).reason)
        assert runs.status(folder.run_id).state == "training" and folder.metrics.stat().st_size == silent_since
        with pytest.raises(NotPossibleNow):
            runs.resume(folder.run_id)
    eventually(lambda: runs.status(folder.run_id) and folder.metrics.stat().st_size > silent_since)
    assert not runs.status(folder.run_id).reason
    (folder.crew / cluster.FULL).touch()  # as the receiver does at its limit
    assert "reached mirror.most_mb" in runs.status(folder.run_id).reason
    runs.stop(folder.run_id)
    status = ended(runs, folder)
    assert status.state == "stopped" and status.checkpoint is not None
    gone(far, folder)
    numbers = [event.seq for event in read_events(folder.events)]
    assert numbers == list(range(1, len(numbers) + 1))


@whole
def test_lost_keeper_is_told_by_another_job_and_resumes_from_what_the_cluster_kept(far: FarCluster) -> None:
    runs = far.runs({"trainer": {"endless": True, "patient": True}}, variables=None)
    folder = far.start(runs)
    until(runs, folder, "training")
    runs.stop(folder.run_id)
    first = ended(runs, folder)
    assert first.state == "stopped" and first.checkpoint is not None
    gone(far, folder)
    for path in folder.checkpoints.iterdir():  # the server has no checkpoint at all
        path.rename(folder.path.parent / path.name)
    assert eventually(lambda: resume(runs, folder)) == 2
    until(runs, folder, "training")
    found = Status.read(far.there(folder)).checkpoint
    assert found is not None and found["step"] == first.checkpoint["step"]
    psutil.Process(json.loads(far.there(folder).lock.read_text())["pid"]).kill()
    status = ended(runs, folder)
    assert status.state == "lost" and far.engine.requests[f"{folder.run_id}.2.1"].launcher.room().cpus < 8
    gone(far, folder)
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))  # the second attempt began after the first one's checkpoint


@whole
def test_end_that_did_not_arrive_is_brought_by_another_job(far: FarCluster) -> None:
    """The server was away while the run ended, and longer than its keeper waited."""
    runs = far.runs({"trainer": {"endless": True, "patient": True}})
    folder = far.start(runs)
    until(runs, folder, "training")
    receiver, there = far.receiver(folder), far.there(folder)
    receiver.suspend()  # holds the lock, so that nobody else listens
    write_json(there.orders / "stop-1.json", {"order": "stop"})
    eventually(lambda: Status.read(there).ended_at is not None)
    job = far.engine.steps[f"{folder.run_id}.1"]
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one ends with another
            process.kill()
    eventually(lambda: job.poll() is not None)
    eventually(lambda: "Another job brings" in runs.status(folder.run_id).reason)
    assert Status.read(folder).state != "lost"
    receiver.resume()
    assert ended(runs, folder).state == "stopped"
    gone(far, folder)
    assert not [event for event in read_events(folder.events) if event.data.get("to") == "lost"]


@whole
def test_place_that_is_taken_back_resumes_by_itself_as_another_job(far: FarCluster) -> None:
    runs = far.runs(variables=lambda _: {})
    folder = far.start(runs)
    until(runs, folder, "training")
    os.kill(json.loads(far.there(folder).lock.read_text())["pid"], signal.SIGUSR1)
    second = eventually(lambda: status if (status := runs.status(folder.run_id)).attempt == 2 else None)
    assert second.attempt == 2
    until(runs, folder, "training")
    assert Status.read(far.there(folder)).attempt == 2
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    gone(far, folder)
    numbers = [event.seq for event in read_events(folder.events)]
    assert numbers == list(range(1, len(numbers) + 1))


@whole
def test_second_job_of_an_attempt_starts_nothing(far: FarCluster) -> None:
    runs = far.runs()
    folder = far.start(runs)
    until(runs, folder, "training")
    first = json.loads(far.there(folder).lock.read_text())["pid"]
    name = f"{folder.run_id}.1"
    its_job = far.engine.steps[name]
    far.engine.start(name)  # as an engine that starts a job again does
    second, far.engine.steps[name] = far.engine.steps[name], its_job
    assert eventually(lambda: second.poll()) == 1
    assert json.loads(far.there(folder).lock.read_text())["pid"] == first
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"


@whole
def test_job_that_waits_stops_at_once_and_one_that_never_began_is_lost(far: FarCluster) -> None:
    runs, far.engine.waits = far.runs(), True
    folder = far.start(runs)
    eventually(lambda: "Resources" in runs.status(folder.run_id).reason)
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    other = far.start(runs)
    far.engine.cancel(f"{other.run_id}.1")
    assert ended(runs, other).state == "lost"
    assert not far.there(folder).path.exists() and not leave(other.path)


def test_refused_job_leaves_no_receiver(far: FarCluster) -> None:
    runs = far.runs()
    with pytest.raises(ComponentFailed, match="quota"):
        far.start(runs, account="spent")
    [folder] = [RunFolder(path) for path in (far.harness.path / "runs").iterdir() if not path.name.startswith(".")]
    assert runs.status(folder.run_id).state == "failed" and not is_held(folder.lock)
    far.key.chmod(0o644)
    with pytest.raises(InvalidValue, match="Others can read"):
        far.start(runs)
    assert not [status for status in runs.list() if status.state != "failed"]


def test_job_that_nobody_would_answer_is_cancelled(far: FarCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_RECEIVER", "toprope.no_receiver")
    runs, far.engine.waits = far.runs(), True
    with pytest.raises(ComponentFailed, match="no_receiver"):
        far.start(runs)
    assert [job.phase for job in far.engine.jobs().values()] == ["ended"]


def test_walls_close_the_folders_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/far/me")
    here = Walls(
        closed=("/here/home", "/here/configuration"),
        homes="/here/home/homes",
        rights={"dice": {}},
        agents=("/here/home/environments",),
        added=("/here/code",),
    )
    inputs = {"/here/home/environments/a.py": "/far/inputs/0/a.py", "/here/b.py": "/far/inputs/1/b.py"}
    made = Walls.from_variables(_walls({ENV_WALLS: here.encode()}, Path("/far/toprope"), Path("~/key"), inputs))
    assert [made.wrote_agent(file) for file in inputs.values()] == [True, False]
    assert made.closed == ("/far/toprope", "/far/me/key") and made.rights == here.rights
    assert (made.homes, made.required, made.added) == ("/far/toprope/homes", here.required, ())


def test_port_of_a_run_is_chosen_by_chance() -> None:
    """The first free one may be that of a run whose receiver was lost, or of one that is submitted meanwhile."""
    mirror = Mirror(host="login", home="/far", key_file="key", ports="47000-47099")
    assert len({cluster.free_port(mirror) for _ in range(20)}) > 1


@whole
def test_checkpoint_is_fetched_by_a_job_after_the_end(far: FarCluster) -> None:
    runs = far.runs({"trainer": {"steps": 2}})
    folder = far.start(runs)
    assert ended(runs, folder).state == "completed"
    gone(far, folder)
    for path in folder.checkpoints.iterdir():
        path.rename(folder.path.parent / path.name)
    with pytest.raises(NotPossibleNow, match="is on its cluster"):
        checkpoint_of(folder)
    eventually(lambda: runs.status(folder.run_id) and list(folder.checkpoints.glob("step-*")))
    assert checkpoint_of(folder).step == 2
    gone(far, folder)


@whole
def test_doctor_proves_the_way_from_the_cluster(far: FarCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FILE_S", 0.2)
    home = Home(far.harness.path, far.path.parent)
    found = list(check_cluster(home, "lab", engine=lambda _: far.engine))
    assert not [one for one in found if one.level in ("broken", "warning")], found
    assert any("reaches 127.0.0.1:" in one.text for one in found) and not list(far.home.glob(".doctor-*"))
    far.key.chmod(0o644)
    assert any("Others can read" in one.text for one in check_cluster(home, "lab", engine=lambda _: far.engine))
    far.key.chmod(0o600)
    (far.harness.path / "other").write_text("x" * 32)
    (far.harness.path / "other").chmod(0o600)
    submit = far.engine.submit

    def submit_with_another_key(request: object) -> None:
        request.command[-1] = str(far.harness.path / "other")  # type: ignore[attr-defined]
        submit(request)

    far.engine.submit = submit_with_another_key
    found = list(check_cluster(home, "lab", engine=lambda _: far.engine))
    assert [one.level for one in found] == ["ok", "broken"] and "key file" in found[1].remedy
