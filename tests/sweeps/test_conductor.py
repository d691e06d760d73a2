"""Sweeps with a real keeper, conductor and keepers of members; the crews of members are stand-ins."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from types import SimpleNamespace

import anyio
import psutil
import pytest

from tests.support import records, sweep_stand_ins
from tests.support.run_harness import eventually
from toprope.atomic import write_json
from toprope.errors import Corrupt, NotPossibleNow
from toprope.records.messages import Evaluated
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import AcceptedFile, Specification
from toprope.records.run.status import read_events
from toprope.records.sweep_journal import (
    Candidate,
    Finalist,
    Generation,
    Measured,
    Scored,
    Started,
    Survivors,
    SweepLog,
    final_id,
    members_in,
    read_standing,
)
from toprope.records.used_tasks import USED_TASKS_VERSION, used_tasks_file
from toprope.settings.owner import Home
from toprope.supervisor.environment_variables import component_variables
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.lock import is_held
from toprope.sweeps import conductor
from toprope.sweeps.conductor import Conductor
from toprope.sweeps.members import SweepMembers
from toprope.sweeps.planning import create_strategy
from toprope.workbench.launch import open_runs
from toprope.workbench.launch.accepted_code import CodeChanged
from toprope.workbench.launch.budgets.reserve_budget import NoRoomWithin
from toprope.workbench.launch.start import RunStarter

LIMIT_S = 90.0


class SweepHarness:
    """A home whose runs have stand-ins as crews. `close` kills the processes that a failed test left."""

    def __init__(self, path):
        self.home = Home(path / "home", path / "config").ensure()
        self.home.configuration.mkdir()
        self.path, self.token, self.runs = path, f"token-{uuid.uuid4().hex}", None

    def start(self, behaviours=None, **plan):
        self.runs = sweep_stand_ins.runs_in(
            self.home, sweep_stand_ins.table_in(self.path, behaviours or {}, self.token)
        )
        specification = sweep_stand_ins.sweep_in(self.home, **plan)
        RunStarter(self.home, self.runs).start_frozen([specification])
        return self.runs.folder(specification.run_id)

    def ended(self, folder):
        status = anyio.run(self.runs.wait_end, folder.run_id, LIMIT_S)
        assert status.ended_at is not None, (status.state, status.reason, status.progress)
        return status

    def conductor(self, folder):
        def found():
            member = self.runs.status(folder.run_id).crew.get("conductor")
            return member.pid if member and member.state == "ready" and psutil.pid_exists(member.pid) else None

        return psutil.Process(eventually(found, LIMIT_S))

    def processes(self):
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                if self.token in words or str(self.home.runs) in words:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self):
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def harness(tmp_path):
    one = SweepHarness(tmp_path)
    yield one
    one.close()


def undisturbed(plan):
    """Return the decisions of a conductor without interruptions, from the scores of the stand-ins."""
    strategy, known, population, history = create_strategy(plan), {}, [], []
    scores, survivors, lines = {}, {}, {}
    for epoch in range(1, plan.epochs + 1):
        kept = [known[one] for one in survivors.get(epoch - 1, [])]
        population = []
        for one in strategy.start() if epoch == 1 else strategy.advance(epoch, kept, history):
            if one.get("id") not in known:
                one = {**one, "id": f"c{len(known) + 1:03d}"}
                known[one["id"]] = one
                lines[one["id"]] = one["steps"] + (lines[one["continues"]] if one["continues"] else 0)
                rate = one["values"]["optimizer.learning_rate"]
                scores[one["id"]] = sweep_stand_ins.accuracy_of(rate, lines[one["id"]])
                history.append({**one, "score": scores[one["id"]]})
            population.append(one)
        survivors[epoch] = [one["id"] for one in strategy.select(population, [scores[one["id"]] for one in population])]
    return {"candidates": known, "scores": scores, "survivors": survivors}


def decided(folder):
    """Return the decisions in a journal, which must not depend on interruptions."""
    standing = read_standing(folder)
    return {
        "candidates": {name: one.model_dump() for name, one in standing.candidates.items()},
        "scores": {name: one.score for name, one in standing.scores.items()},
        "survivors": standing.survivors,
    }


def lines_of(folder, what):
    path = folder.path / "sweep.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["what"] == what]


def test_sweep_measures_best_candidate_on_heldout_tasks(harness):
    folder = harness.start(population=2, selection_ratio=0.5)
    status = harness.ended(folder)
    assert status.state == "completed", (status.reason, status.failure)
    standing = read_standing(folder)
    assert len(standing.candidates) == 3 and standing.epochs_completed == 2  # one of two survives, one is new
    accuracies = {
        name: sweep_stand_ins.accuracy_of(one.values["optimizer.learning_rate"], 4)
        for name, one in standing.candidates.items()
    }
    assert {name: one.score for name, one in standing.scores.items()} == accuracies
    assert standing.best.score == max(accuracies.values())
    assert standing.final.run_id == final_id(folder.run_id) and standing.final.measured.tasks == 100
    members = members_in(harness.home.runs, folder.run_id)
    assert len(members) == 4 and members[-1] == standing.final.run_id
    for run_id in members:
        assert harness.runs.status(run_id).state == "completed"
        member = Specification.read(RunFolder(harness.home.runs / run_id)).member
        assert member.sweep == folder.run_id and member.final == (run_id == members[-1])
    # The survivor is not measured again, and the new candidate names its parent.
    assert [one.parent for one in standing.candidates.values()] == [None] * 2 + standing.survivors[1]
    told = {event.data["label"]: event.data["summary"] for event in read_events(folder.events, kinds=["evaluation"])}
    assert list(told) == ["epoch-1", "epoch-2", "heldout"] and told["heldout"]["split"] == "heldout"
    assert status.progress["what"] == "complete" and status.progress["best"] == standing.best.score
    eventually(lambda: not harness.processes(), 20.0)


def test_sweep_killed_three_times_has_same_result(harness):
    folder = harness.start({"environment": {"slow": 0.4}}, strategy="halving", population=2, selection_ratio=0.5)
    harness.conductor(folder).kill()
    # In the second epoch kill the keeper: the sweep is lost, its member lives on, and a look resumes the sweep.
    eventually(lambda: len(lines_of(folder, "generation")) == 2, LIMIT_S)
    psutil.Process(json.loads(folder.lock.read_text())["pid"]).kill()
    eventually(lambda: harness.runs.status(folder.run_id).attempt == 2, LIMIT_S)
    harness.conductor(folder).kill()
    status = harness.ended(folder)
    assert status.state == "completed", (status.reason, status.failure)
    assert decided(folder) == undisturbed(Specification.read(folder).sweep)
    standing = read_standing(folder)
    assert standing.final.measured is not None, standing.final.why
    assert standing.final.candidate == standing.best.candidate and standing.final.measured.accuracy > 0
    assert len(lines_of(folder, "final")) == 2  # the decision to measure, and the result
    members = members_in(harness.home.runs, folder.run_id)
    assert len(members) == 2 + 1 + 1 and len(lines_of(folder, "started")) == 3
    assert all(harness.runs.status(run_id).state == "completed" for run_id in members)
    eventually(lambda: not harness.processes(), 20.0)


def test_run_without_keeper_is_resumed(harness, monkeypatch):
    """A conductor that is killed while it starts a run leaves a folder without a keeper."""
    folder = harness.start({"environment": {"slow": 1.0}}, population=2, epochs=1, evaluate="test")
    eventually(lambda: lines_of(folder, "started"), LIMIT_S)
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: None)
    monkeypatch.setattr(open_runs, "open_runs", lambda home: harness.runs)
    standing = read_standing(folder)
    SweepMembers(harness.home, Specification.read(folder)).start_final(standing.candidates["c001"], standing)
    monkeypatch.undo()
    assert harness.runs.status(final_id(folder.run_id)).state == "lost"
    status = harness.ended(folder)
    assert status.state == "completed", (status.reason, status.failure)
    final = read_standing(folder).final
    assert final.measured is not None, final.why
    assert harness.runs.status(final_id(folder.run_id)).attempt == 2


def test_stopped_sweep_resumes_its_members(harness):
    folder = harness.start({"environment": {"slow": 30.0}}, population=2, epochs=1)
    first = f"{folder.run_id}-m01"
    eventually(lambda: is_held(harness.home.runs / first / "keeper.lock"), LIMIT_S)
    harness.runs.stop(folder.run_id)
    assert harness.ended(folder).state == "stopped"
    eventually(lambda: not harness.processes(), LIMIT_S)
    known = lines_of(folder, "generation")
    for table in harness.path.glob("programs-*.json"):
        table.write_text(table.read_text().replace("30.0", "0.0"))
    harness.runs.resume(folder.run_id, open_runs.variables_of(Specification.read(folder), harness.home))
    status = harness.ended(folder)
    assert status.state == "completed", (status.reason, status.failure)
    assert lines_of(folder, "generation") == known
    standing, plan = read_standing(folder), Specification.read(folder).sweep
    assert {name: one.score for name, one in standing.scores.items()} == undisturbed(plan)["scores"]
    assert harness.runs.status(first).attempt == 2 and standing.final.measured is not None


def test_sweep_stays_within_owner_limits(harness):
    (harness.home.configuration / "limits.yaml").write_text("concurrent_runs: 2\n")
    folder = harness.start(population=2, epochs=1)
    most = 0

    def over():
        nonlocal most
        live = [
            one
            for one in members_in(harness.home.runs, folder.run_id)
            if is_held(harness.home.runs / one / "keeper.lock")
        ]
        most = max(most, len(live))
        return harness.runs.status(folder.run_id).ended_at is not None

    eventually(over, LIMIT_S)
    assert harness.runs.status(folder.run_id).state == "completed" and most == 1
    (harness.home.configuration / "limits.yaml").write_text("per_day: {runs: 6}\n")
    refused = harness.start(population=2, epochs=1)
    status = harness.ended(refused)
    # Four and the sweep itself count for today: one member fits, the next does not.
    assert status.state == "failed" and "per_day.runs is 6" in status.failure.reason
    assert len(members_in(harness.home.runs, refused.run_id)) == 1


def test_resumed_conductor_repeats_reports_of_epochs(tmp_path):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    folder = RunFolder.create(tmp_path, "dice")
    spec = sweep_stand_ins.sweep_in(home, population=2, epochs=2)
    log = SweepLog(folder)
    for epoch, name, score in ((1, "c001", 0.25), (2, "c002", 0.75)):
        log.append(Generation(epoch=epoch, candidates=[Candidate(id=name, values={}, steps=4)]))
        log.append(Started(candidate=name, epoch=epoch, run_id=f"dice-{name}"))
        log.append(Scored(candidate=name, score=score, measured=Measured(accuracy=score, tasks=100, steps=4)))
        log.append(Survivors(epoch=epoch, ids=[name]))
    log.append(Finalist(candidate="c002", why="evaluation.heldout_tasks is 0"))
    told = []
    member = SimpleNamespace(spec=spec, folder=folder, report=told.append, ending=threading.Event())
    anyio.run(Conductor(member, home).run)
    evaluated = {one.label: one.summary for one in told if isinstance(one, Evaluated)}
    assert [(one["score"], one["steps"], one["best"]) for one in evaluated.values()] == [
        (0.25, 4, "dice-c001"), (0.75, 8, "dice-c002"),
    ]  # fmt: skip


def test_torn_journal_line_is_ignored(tmp_path):
    folder = RunFolder.create(tmp_path, "dice")
    log = SweepLog(folder)
    log.append(Survivors(epoch=1, ids=["c001"]))
    whole = (folder.path / "sweep.jsonl").read_bytes()
    (folder.path / "sweep.jsonl").write_bytes(whole + b'{"version":1,"what":"surv')
    assert read_standing(folder).survivors == SweepLog(folder).standing.survivors == {1: ["c001"]}
    assert (folder.path / "sweep.jsonl").read_bytes() == whole
    (folder.path / "sweep.jsonl").write_bytes(whole + b'{"version":1,"what":"dice"}\n')
    with pytest.raises(Corrupt, match="line 2"):
        read_standing(folder)


def test_member_waits_while_another_one_is_being_started(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "_RETRY_START_EVERY_S", 0.01)
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    full = NoRoomWithin("all of today's cost is reserved")
    full.limits = ("per_day.cost_usd",)
    begun, refused = threading.Event(), threading.Event()

    async def held():
        return None

    member = SimpleNamespace(
        spec=sweep_stand_ins.sweep_in(home, population=2, epochs=1), folder=RunFolder.create(tmp_path, "dice"),
        report=lambda _: None, ending=threading.Event(), hold_async=held,
    )  # fmt: skip

    def slow():
        begun.set()
        assert refused.wait(30)

    def second():
        assert begun.wait(30)
        if not refused.is_set():
            refused.set()
            raise full

    def never():
        raise full

    busy = iter([NotPossibleNow("Another front end has been starting a run for 20 s.")] * 3)

    def at_last():
        if (refusal := next(busy, None)) is not None:
            raise refusal

    async def both():
        await Conductor(member, home)._start("d", at_last)
        one = Conductor(member, home)
        await asyncio.gather(one._start("a", slow), one._start("b", second))
        with pytest.raises(NoRoomWithin):
            await Conductor(member, home)._start("c", never)

    anyio.run(both)


def test_sweep_whose_code_changed_fails_without_scores(tmp_path, monkeypatch):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    file = tmp_path / "dice.py"
    file.write_text("replaced = True")
    spec = sweep_stand_ins.sweep_in(home, population=2, epochs=1)
    source = spec.environment.model_copy(update={"file": str(file)})
    accepted = [AcceptedFile(file=str(file), sha256="0" * 64)]
    spec = spec.model_copy(update={"environment": source, "code": accepted})

    async def held():
        return None

    folder = RunFolder.create(tmp_path, "dice")
    member = SimpleNamespace(
        spec=spec, folder=folder, report=lambda _: None, ending=threading.Event(), hold_async=held
    )  # fmt: skip
    for interrupted in (False, True):
        monkeypatch.setattr(SweepMembers, "was_interrupted", lambda *_, found=interrupted: found)
        monkeypatch.setattr(SweepMembers, "is_over", lambda *_: True)
        monkeypatch.setattr(SweepMembers, "status", lambda *_: None)
        with pytest.raises(CodeChanged, match="changed after its start was confirmed") as refused:
            anyio.run(Conductor(member, home).run)
        assert f"toprope resume {spec.run_id}" in refused.value.hint and not lines_of(folder, "scored")


def test_conductor_reaches_the_slurm_of_its_front_end(tmp_path, monkeypatch):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    monkeypatch.setenv("SLURM_CONF", "/site/slurm.conf")
    monkeypatch.delenv("KRB5CCNAME", raising=False)
    spec = sweep_stand_ins.sweep_in(home)
    variables = component_variables(
        "conductor", folder=tmp_path, specification=spec, attempt=1, secret="s",
        owners=open_runs.variables_of(spec, home), surroundings={},
    )  # fmt: skip
    assert variables["SLURM_CONF"] == "/site/slurm.conf" and "KRB5CCNAME" not in variables


def test_strategies_are_told_how_many_answers_were_errors(tmp_path):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    spec = sweep_stand_ins.sweep_in(home)
    spec.write(RunFolder.create(home.runs, spec.run_id))
    after = {"accuracy": 0.0, "tasks": 4, "successes": 0, "reward_mean": None, "errors": 4}
    status = records.status(spec.run_id, "completed", evaluations={"after": after})
    measured = SweepMembers(home, spec).read_result(status)
    assert measured.model_dump(include=set(after)) == after


def test_member_that_continues_begins_each_environment_where_it_was(tmp_path, monkeypatch):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    spec = sweep_stand_ins.sweep_in(home)
    before = RunFolder.create(home.runs, f"{spec.run_id}-m01")
    write_json(used_tasks_file(before, 1), {"version": USED_TASKS_VERSION, "ended": {"a": 70, "b": 5}})
    measured = Measured(accuracy=0.5, tasks=4, successes=2, reward_mean=0.5, errors=0, steps=5, groups=75, state="x")
    standing = SimpleNamespace(runs={"c1": before.run_id}, scores={"c1": SimpleNamespace(measured=measured)})
    begun = []
    monkeypatch.setattr("toprope.sweeps.members.base_of", lambda *_: (before.run_id, "weights"))
    monkeypatch.setattr(SweepMembers, "_launch", lambda self, run_id, changes, member, test, base: begun.append(member))
    SweepMembers(home, spec).start(Candidate(id="c2", values={}, steps=5, continues="c1"), 2, standing)
    run = spec.model_copy(update={"member": begun[0]})
    assert (run.first_task, run.first_tasks) == (75, {"a": 70, "b": 5})
