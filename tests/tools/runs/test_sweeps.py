"""start_sweep and what the other tools say of sweeps, over real folders; the conductor is stood in for by the test."""

from __future__ import annotations

import dataclasses

import pytest
from toprope_server.cli.runs.report import write_report
from toprope_tools.experiments.config_history import fork_config
from toprope_tools.experiments.ledger import get_handoff
from toprope_tools.results.compare import compare_runs
from toprope_tools.results.results import get_results
from toprope_tools.runs.sweeps import start_sweep
from toprope_tools.runs.training import resume_training, start_training, stop_training
from toprope_tools.status.run_list import list_runs, run_row
from toprope_tools.status.status import check_status

from tests.support.tools_house import become, do
from toprope.analysis.plots.run_plots import main as plot
from toprope.errors import InvalidValue, LockedField, NotFound, NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.usage import Usage
from toprope.records.sweep_journal import (
    Candidate,
    Finalist,
    Generation,
    Measured,
    Scored,
    Started,
    Survivors,
    SweepLog,
    read_standing,
)
from toprope.settings.presets import load_preset
from toprope.sweeps.members import SweepMembers
from toprope.workbench.approvals import Approvals
from toprope.workbench.launch import start
from toprope.workbench.launch.budgets.token_costs import TokenCosts
from toprope.workbench.launch.freeze import freeze_again
from toprope.workbench.policies import policy_order

SPACE = {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}


@pytest.fixture
def house(house):
    """A workshop whose home exists."""
    house[0].home.ensure()
    return house


def draft_of(shop):
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    source = EnvironmentSource(name="dice", file="/nowhere.py", attribute="Dice")
    draft, _ = shop.drafts.create(source, preset, [], shop.home.locks())
    return draft.id


def started(shop, **named):
    options = {"steps": 40, "evaluate": "train", **named.pop("options", {})}
    given = {"draft_id": draft_of(shop), "space": SPACE, "strategy": "halving", "population": 4, "epochs": 2}
    return do(start_sweep, shop, **{**given, **named}, options=options)


def decide(folder: RunFolder):
    """A sweep that has ended its second epoch."""
    log = SweepLog(folder)
    first = [Candidate(id=f"c00{n}", values={"optimizer.learning_rate": n / 1000}, steps=40) for n in (1, 2, 3)]
    last = Candidate(
        id="c004", values={"optimizer.learning_rate": 0.002}, steps=40, parent="c002", continues="c002"
    )  # fmt: skip
    log.append(Generation(epoch=1, candidates=first))
    for place, (one, score) in enumerate(zip(first, (0.2, 0.6, None), strict=True), 1):
        log.append(Started(candidate=one.id, epoch=1, run_id=f"{folder.run_id}-m0{place}"))
        measured = Measured(accuracy=score, tasks=64, steps=40)
        log.append(Scored(candidate=one.id, score=score, measured=measured, why="" if score else "it collapsed"))
    log.append(Survivors(epoch=1, ids=["c002"]))
    log.append(Generation(epoch=2, candidates=[last]))
    log.append(Started(candidate="c004", epoch=2, run_id=f"{folder.run_id}-m04"))
    log.append(Scored(candidate="c004", score=0.8, measured=Measured(accuracy=0.8, tasks=64, steps=40)))
    log.append(Survivors(epoch=2, ids=["c004"]))
    final = Measured(accuracy=0.75, tasks=500)
    log.append(Finalist(candidate="c004", run_id=f"{folder.run_id}-final", measured=final))


def test_sweep_starts_with_plan_and_owners_folders(house):
    shop, launcher = house
    answer = started(shop)
    run_id = answer.data.run_id
    specification = Specification.read(shop.runs.folder(run_id))
    assert specification.kind == answer.data.kind == "sweep" and specification.sweep.population == 4
    assert (specification.sweep.runs, specification.sweep.total_steps) == (4 + 2 + 1, 4 * 40 + 2 * 40)
    assert "8 runs, its own among them, and 240 optimizer steps" in answer.text and "check_status" in answer.text
    places = launcher.variables[run_id]["conductor"]
    assert places == {"TOPROPE_HOME": str(shop.home.path), "TOPROPE_CONFIG": str(shop.home.configuration)}
    # It is told by its key again, and its revision is not started twice.
    draft = specification.draft_id
    with pytest.raises(NotPossibleNow, match="same start_sweep with again=true in its options"):
        do(start_sweep, shop, draft_id=draft, space=SPACE)
    keyed = do(start_sweep, shop, draft_id=draft, space=SPACE, options={"key": "k", "again": True})
    assert do(start_sweep, shop, draft_id=draft, space=SPACE, options={"key": "k"}).data.run_id == keyed.data.run_id


def test_sweep_that_does_not_fit_is_refused(house):
    shop, _ = house
    with pytest.raises(InvalidValue, match="stepps.*Nothing was started"):
        started(shop, options={"stepps": 3})
    with pytest.raises(InvalidValue, match="steps"):
        started(shop, options={"steps": 0})
    (shop.home.configuration / "locks.yaml").write_text(
        "locks: [{field: optimizer.learning_rate, max: 0.001, reason: higher ones collapsed}]"
    )
    with pytest.raises(LockedField, match="higher ones collapsed"):
        started(shop)
    assert not shop.statuses()


def test_preview_of_a_sweep_on_a_cluster_says_what_its_jobs_ask_for(house):
    shop, _ = house
    (shop.home.configuration / "clusters.yaml").write_text("lab: {kind: slurm, partition: gpu}")
    (shop.home.configuration / "locks.yaml").write_text("locks: []")
    draft = draft_of(shop)
    shop.drafts.edit(draft, {"launcher.kind": "slurm"}, shop.home.locks())
    said = do(start_sweep, shop, draft_id=draft, space=SPACE, options={"preview": True}).text
    assert "Its runs would be jobs on the cluster lab. Each asks from Slurm: --nodes=1" in said
    assert "Runs queue for the machine" not in said


def test_limits_count_the_sweep_and_all_its_members(house):
    shop, _ = house
    limits = shop.home.configuration / "limits.yaml"
    limits.write_text("concurrent_runs: 1")
    with pytest.raises(NotPossibleNow, match="concurrent_runs is 1"):
        started(shop)
    limits.write_text("per_day: {runs: 7}")
    with pytest.raises(NotPossibleNow, match="per_day.runs is 7.*members up to 7"):
        started(shop)
    limits.write_text("per_run: {steps: 39}")
    with pytest.raises(NotPossibleNow, match="per_run.steps is 39"):
        started(shop)
    assert not shop.statuses()
    # A day's processor time is the members' to reserve, and not the sweep's.
    limits.write_text("per_run: {wall_hours: 1}\nper_day: {cpu_hours: 20, runs: 8}")
    sweep = Specification.read(shop.runs.folder(started(shop).data.run_id))
    assert sweep.limits.reserved == {} and not sweep.limits.caps, "members have their own hour"


def test_repeated_sweep_is_answered_although_space_is_locked_now(house):
    shop, _ = house
    draft = draft_of(shop)
    first = started(shop, draft_id=draft, options={"key": "k-1"}).data.run_id
    (shop.home.configuration / "locks.yaml").write_text(
        "locks:\n- {field: optimizer.learning_rate, value: 1.0e-4, reason: fixed}\n"
    )
    with pytest.raises(LockedField):
        started(shop, draft_id=draft)
    again = started(shop, draft_id=draft, options={"key": "k-1"})
    assert again.data.run_id == first and "no second one" in again.text


def test_a_key_starts_either_a_sweep_or_training(house):
    shop, _ = house
    draft = draft_of(shop)
    group = do(start_training, shop, draft_id=draft, seeds=2, key="k-1").data
    with pytest.raises(InvalidValue, match=f"{group.run_id} with start_training; .* with start_sweep"):
        started(shop, draft_id=draft, options={"key": "k-1"})
    sweep = started(shop, draft_id=draft, options={"key": "k-2"}).data.run_id
    with pytest.raises(InvalidValue, match=f"{sweep} with start_sweep"):
        do(start_training, shop, draft_id=draft, key="k-2")
    assert {status.run_id for status in shop.statuses()} == {*group.run_ids, sweep}


def test_confirmation_is_bound_to_whole_sweep(house):
    shop, _ = house
    (shop.home.configuration / "limits.yaml").write_text("confirm: {above: {steps: 100}}")
    draft = draft_of(shop)
    shown = started(shop, draft_id=draft, options={"preview": True})
    assert shown.data.run_id is None and shown.data.preview["steps"] == 240 and not shop.statuses()
    assert "runs of 240 steps in all at most would take" in shown.text
    agreed = shown.data.preview["hash"]
    with pytest.raises(NotPossibleNow, match=agreed):
        started(shop, draft_id=draft)
    with pytest.raises(NotPossibleNow, match="something else"):
        started(shop, draft_id=draft, population=5, options={"confirm": agreed})
    with pytest.raises(NotPossibleNow, match="confirmed"):
        started(shop, draft_id=draft, options={"confirm": agreed})
    [asked] = Approvals(shop.home).pending()
    assert asked.text.startswith("a sweep of 8 runs, its own among them, environment dice")
    assert "What 8 runs of 240 steps in all at most would take, the sweep's own among them" in shown.text
    assert shown.data.preview["runs"] == asked.details["runs"] == 8, "as per_day.runs counts"
    Approvals(shop.home).approve(agreed)
    answer = started(shop, draft_id=draft, options={"confirm": agreed})
    assert answer.data.run_id and "at most 8 runs, its own among them" in answer.text


def test_members_are_frozen_as_the_journal_says(house, monkeypatch):
    shop, _ = house
    (shop.home.configuration / "locks.yaml").write_text(
        "locks: [{field: evaluation.heldout_tasks, min: 100, reason: reports count}]"
    )
    folder = shop.runs.folder(started(shop).data.run_id)
    monkeypatch.setattr("toprope.workbench.launch.open_runs.open_runs", lambda home: shop.runs)
    members, log = SweepMembers(shop.home, Specification.read(folder)), SweepLog(folder)
    one = Candidate(id="c002", values={"optimizer.learning_rate": 0.002}, steps=3)
    log.append(Generation(epoch=1, candidates=[one]))
    for _ in range(2):  # somebody who came back starts it once
        members.start(one, 1, log.standing)
    made = Specification.read(shop.runs.folder(f"{folder.run_id}-m02"))
    config = made.config
    assert made.kind == "train" and (made.member.sweep, made.member.candidate) == (folder.run_id, "c002")
    assert config.optimizer.learning_rate == 0.002 and config.budget.steps == 3 and config.optimizer.warmup_steps == 3
    assert made.limits is not None and config.evaluation.heldout_tasks >= 100
    assert "candidate c002 of the sweep" in run_row(shop.runs.status(made.run_id), shop.home.runs)
    assert "It is candidate c002" in do(get_results, shop, run_id=made.run_id).text
    again = freeze_again(made, shop.home.locks(), shop.home.runs)
    shop.starter.start_frozen([again])
    assert "It is None" not in do(get_results, shop, run_id=again.run_id).text


def test_scores_of_unequal_conditions_are_told_and_training_candidates_are_measured_alike(house, monkeypatch):
    shop, _ = house
    space = {"rollout.temperature": [0.5, 2.0]}
    tested = started(shop, space=space, strategy="random", options={"evaluate": "test"})
    said = "Each candidate is measured under its own rollout.temperature: a higher score can mean easier conditions."
    assert said in tested.text and said in do(get_results, shop, run_id=tested.data.run_id).text
    trains = started(shop, space=space)
    assert said not in trains.text
    monkeypatch.setattr("toprope.workbench.launch.open_runs.open_runs", lambda home: shop.runs)
    measured = {}
    for name, run_id in (("test", tested.data.run_id), ("train", trains.data.run_id)):
        folder = shop.runs.folder(run_id)
        members, log = SweepMembers(shop.home, Specification.read(folder)), SweepLog(folder)
        one = Candidate(id="c001", values={"rollout.temperature": 2.0}, steps=3)
        log.append(Generation(epoch=1, candidates=[one]))
        members.start(one, 1, log.standing)
        made = Specification.read(shop.runs.folder(f"{run_id}-m01"))
        assert made.config.rollout.temperature == 2.0
        measured[name] = made.member.sampling
    assert measured["test"] == {} and measured["train"]["temperature"] == 1.0


def test_members_were_agreed_to_with_their_sweep(house, monkeypatch):
    shop, _ = house
    (shop.home.configuration / "limits.yaml").write_text("confirm: always")
    monkeypatch.setattr(start, "token_costs", lambda _: TokenCosts(1.0))  # as with a judge at an endpoint
    draft = draft_of(shop)
    with pytest.raises(NotPossibleNow, match="confirmed"):
        started(shop, draft_id=draft)
    Approvals(shop.home).approve(Approvals(shop.home).pending()[0].hash)
    folder = shop.runs.folder(started(shop, draft_id=draft).data.run_id)
    monkeypatch.setattr("toprope.workbench.launch.open_runs.open_runs", lambda home: shop.runs)
    members, log = SweepMembers(shop.home, Specification.read(folder)), SweepLog(folder)
    one = Candidate(id="c001", values={"optimizer.learning_rate": 0.002}, steps=3)
    log.append(Generation(epoch=1, candidates=[one]))
    members.start(one, 1, log.standing)
    made = Specification.read(shop.runs.folder(f"{folder.run_id}-m01"))
    with pytest.raises(NotPossibleNow, match="confirmed"):
        shop.starter.start_frozen([freeze_again(made, shop.home.locks(), shop.home.runs)])


def test_results_show_candidates_lineage_and_held_out_figure(house, tmp_path):
    shop, launcher = house
    folder = shop.runs.folder(started(shop).data.run_id)
    with pytest.raises(InvalidValue, match="no candidate with a score"):
        do(fork_config, shop, run_id=folder.run_id)
    decide(folder)
    summary = {"accuracy": 0.75, "split": "heldout", "tasks": 500}
    become(folder, "completed", evaluations={"epoch-1": {"score": 0.6}, "heldout": summary}, ended_at=1.0)
    launcher.leave(folder.run_id)
    answer = do(get_results, shop, run_id=folder.run_id)
    assert "Best: c004" in answer.text and "c004 < c002^, epoch 2: score 0.8 after 80 steps" in answer.text
    assert "accuracy 80.0% [68.6%, 88.0%] on 64 validation tasks" in answer.text
    rivals = "Not told apart from c002: their scores are equal or their intervals overlap."
    assert f"\n{rivals}\n" in answer.text
    assert "Held out, measured once" in answer.text and "75.0% [71.0%, 78.6%] on 500" in answer.text
    assert "no score («it collapsed»)" in answer.text and "fork_config" in answer.text
    found = answer.data.results["sweep"]
    assert found["best"]["id"] == "c004" and found["best"]["line_steps"] == 80 and found["epochs_completed"] == 2
    assert [one["id"] for one in found["candidates"]] == ["c004", "c002", "c001", "c003"]
    assert found["heldout"]["accuracy"] == 0.75
    told = "winner: held-out accuracy (sampled) 75.0% [71.0%, 78.6%] on 500 tasks"
    assert told in do(list_runs, shop).text and told in do(get_handoff, shop).text
    [page] = write_report(shop, folder.run_id, tmp_path / "sweep.html")
    text = page.read_text()
    assert "The winner is c004" in text and rivals in text and "75.0% [71.0%, 78.6%] on 500 tasks" in text
    assert "it collapsed" in text and "c002^" in text and "data:image/svg+xml" in text
    assert plot([str(folder.path)]) == 0 and folder.plot.read_bytes().startswith(b"\x89PNG")
    assert do(get_results, shop, run_id=folder.run_id, plot=True).picture == folder.plot.read_bytes()


def test_a_sweep_names_the_runs_that_have_weights_and_answers(house):
    shop, launcher = house
    folder = shop.runs.folder(started(shop).data.run_id)
    with pytest.raises(NotFound, match="It has no best run yet"):
        policy_order(shop.home, folder.run_id)
    decide(folder)
    become(folder, "completed", ended_at=1.0)
    launcher.leave(folder.run_id)
    best = read_standing(folder).runs["c004"]
    with pytest.raises(NotFound, match=f'Its best run has one: export_policy\\(run_id="{best}"\\)'):
        policy_order(shop.home, folder.run_id)
    Usage(cpu_s=2, peak_memory_bytes=5, usd=1.0).write(folder)
    for ending, cpu_s in (("m01", 30), ("final", 4.5)):
        member = RunFolder.create(shop.home.runs, f"{folder.run_id}-{ending}")
        Usage(cpu_s=cpu_s, peak_memory_bytes=9, usd=1.0).write(member)
    shown = do(get_results, shop, run_id=folder.run_id)
    assert "Taken, with its 2 runs: " in shown.text and "36.5 CPU-seconds" in shown.text and "3 USD" in shown.text
    with pytest.raises(NotPossibleNow, match=f"is a sweep.*{folder.run_id}-final or {folder.run_id}-m01"):
        do(compare_runs, shop, a=[folder.run_id], b=[best])


def test_best_values_become_draft(house, monkeypatch):
    shop, _ = house
    folder = shop.runs.folder(started(shop).data.run_id)
    decide(folder)
    entry = dataclasses.make_dataclass("Entry", ["name", "environment"])
    source = Specification.read(folder).environment
    monkeypatch.setattr(type(shop.catalog), "find", lambda self, name: entry(name, source))
    draft = shop.drafts.get(do(fork_config, shop, run_id=folder.run_id).data.draft_id)
    assert draft.config.optimizer.learning_rate == 0.002
    base = Specification.read(folder).config
    assert draft.config.budget == base.budget and draft.config.policy == base.policy


def test_stop_reaches_members_of_lost_keeper(house, monkeypatch):
    shop, launcher = house
    folder = shop.runs.folder(started(shop).data.run_id)
    monkeypatch.setattr("toprope.workbench.launch.open_runs.open_runs", lambda home: shop.runs)
    log = SweepLog(folder)
    one = Candidate(id="c001", values={"optimizer.learning_rate": 0.002}, steps=3)
    log.append(Generation(epoch=1, candidates=[one]))
    SweepMembers(shop.home, Specification.read(folder)).start(one, 1, log.standing)
    answer = do(stop_training, shop, run_id=folder.run_id)
    assert answer.data.state == "stopped" and "none of its runs is live" in answer.text
    assert shop.runs.status(f"{folder.run_id}-m01").state == "stopped" and not launcher.held
    again = do(resume_training, shop, run_id=folder.run_id)
    assert "what was measured so far" in again.text and again.data.attempt == 2


def test_wait_reports_phase_and_best(house):
    shop, _ = house
    folder = shop.runs.folder(started(shop).data.run_id)
    progress = {"what": "evaluating (epoch 1 of 2)", "done": 80, "total": 240, "best": 0.61, "epoch": 1.0}
    become(folder, "evaluating", progress=progress, started_at=1.0)
    answer = do(check_status, shop, run_ids=[folder.run_id])
    assert "evaluating (epoch 1 of 2) 80/240, best 0.61" in answer.text
