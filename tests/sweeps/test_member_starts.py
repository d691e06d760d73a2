"""Starts and resumes of members by a conductor without a keeper, on a cluster that answers or not."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import anyio
import pytest

from tests.support import sweep_stand_ins
from toprope.records.messages import Warned
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Status
from toprope.records.sweep_journal import Candidate, Generation, SweepLog
from toprope.settings.owner import Home
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers import KeeperState
from toprope.supervisor.launchers.engine import NotReached, QueueFull
from toprope.supervisor.runs.manager import RunManager
from toprope.sweeps import conductor
from toprope.sweeps.conductor import Conductor
from toprope.sweeps.members import SweepMembers
from toprope.workbench.launch import open_runs
from toprope.workbench.launch.budgets.reserve_budget import NoRoomWithin


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A conductor without keeper whose members go to a cluster; the cluster answers after `silent` questions."""
    monkeypatch.setattr(conductor, "_RETRY_START_EVERY_S", 0.001)
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    cluster = SimpleNamespace(silent=0, refusal=NotReached)

    def submit(folder, variables, lock=None):
        if cluster.silent:
            raise cluster.refusal("Slurm gave no answer.")
        status = Status.read(folder)
        assert status.state == "queued"
        status.model_copy(update={"state": "completed", "ended_at": 1.0}).write(folder)

    def state(folder, *, locked=False):
        cluster.silent = max(0, cluster.silent - locked)
        return KeeperState("unknown" if cluster.silent and cluster.refusal is NotReached else "gone")

    launcher = SimpleNamespace(submit=submit, status=state)
    runs = RunManager(home.runs, launcher, lambda: Machine(threads=4))
    monkeypatch.setattr(open_runs, "open_runs", lambda home: runs)

    async def held():
        return None

    told = []
    spec = sweep_stand_ins.sweep_in(home, population=2, epochs=1)
    member = SimpleNamespace(
        spec=spec, folder=RunFolder.create(tmp_path, "dice"), report=told.append, ending=threading.Event(),
        hold_async=held,
    )  # fmt: skip
    candidate = Candidate(id="c001", values={}, steps=4)
    log = SweepLog(member.folder)
    log.append(Generation(epoch=1, candidates=[candidate]))
    one = Conductor(member, home)

    def measure():
        run_id = one._members.run_id(candidate)
        start = partial(one._members.start, candidate, 1, one._log.standing)
        return anyio.run(one._run_to_end, candidate.id, run_id, start)

    return SimpleNamespace(cluster=cluster, runs=runs, measure=measure, conductor=one, told=told, candidate=candidate)


def test_outage_of_a_cluster_burns_no_member(alone):
    alone.cluster.silent = 2 * conductor._MOST_REFUSALS
    status, why = alone.measure()
    assert (status.state, status.attempt, why) == ("completed", 2, "")
    [waits] = [one.what for one in alone.told if isinstance(one, Warned)]
    assert "waits: Slurm gave no answer." in waits


def test_cluster_that_stays_silent_ends_the_wait_and_a_full_queue_does_not(alone, monkeypatch):
    monkeypatch.setattr(conductor, "_MOST_UNANSWERED", 3)
    alone.cluster.silent = 9
    status, why = alone.measure()
    assert status is None and "may still run" in why
    alone.cluster.silent, alone.cluster.refusal = 9, QueueFull
    status, why = alone.measure()
    assert (status.state, why) == ("completed", "")


def test_member_that_met_an_outage_is_interrupted(alone):
    members, candidate = alone.conductor._members, alone.candidate
    alone.cluster.silent = 1
    with pytest.raises(NotReached, match="is recorded as failed"):
        members.start(candidate, 1, alone.conductor._log.standing)
    assert members.status(members.run_id(candidate)).state == "failed"
    status, why = alone.measure()  # as a conductor does that takes over
    assert (status.state, status.attempt, why) == ("completed", 2, "")


def test_member_at_its_own_cap_does_not_fail_the_sweep(alone, monkeypatch):
    alone.measure()
    folder = alone.runs.folder(alone.conductor._members.run_id(alone.candidate))
    stopped = {"state": "stopped", "reason": "per_run.wall_hours is reached"}
    Status.read(folder).model_copy(update=stopped).write(folder)

    def used_up(*_):
        error = NoRoomWithin("it has used what it may")
        error.limits = limits
        raise error

    monkeypatch.setattr(SweepMembers, "resume", used_up)
    limits = ("per_run.wall_hours", "per_day.cpu_hours")
    with pytest.raises(NoRoomWithin):
        alone.measure()
    limits = ("per_run.wall_hours",)
    alone.conductor._live.add("another")  # whose end would change nothing
    status, why = alone.measure()
    assert status.state == "stopped" and why == "its run stopped: per_run.wall_hours is reached"


def test_sweep_on_a_cluster_is_as_wide_as_its_population(tmp_path):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    spec = sweep_stand_ins.sweep_in(home, population=5)
    spec.config.launcher.threads = 256
    assert SweepMembers(home, spec).parallel_runs() == 1
    spec.config.launcher.kind = "slurm"
    assert SweepMembers(home, spec).parallel_runs() == 5
