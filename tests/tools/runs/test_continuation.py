"""Going on with a completed run, and drafts that begin with a run's weights."""

from __future__ import annotations

import json
import re
import time

import pytest
from toprope_tools.data import export_trajectories
from toprope_tools.experiments.config_history import diff_config, fork_config, reproduce_run
from toprope_tools.experiments.ledger import note_experiment
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.results.compare import compare_runs
from toprope_tools.results.results import get_results
from toprope_tools.results.rollouts import browse_rollouts
from toprope_tools.runs.ask import ask_checkpoint
from toprope_tools.runs.logs import read_logs
from toprope_tools.runs.training import resume_training, stop_training
from toprope_tools.status.status import check_status

from tests.support.tools_house import become, do, start_run
from toprope.atomic import write_json
from toprope.errors import InvalidValue, LockedField, NotFound, NotPossibleNow
from toprope.records.run.checkpoints import seal
from toprope.records.run.digests import measurement_digests
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.untrusted import named


@pytest.fixture
def completed(house):
    """A workshop with a completed run of 120 steps, and its folder."""
    shop, launcher = house
    return shop, launcher, completed_run(shop, launcher, Config())


def completed_run(shop, launcher, config):
    """The folder of a completed run of 120 steps."""
    config.budget.steps, config.optimizer.warmup_steps = 120, 10
    folder = start_run(shop, config=config)
    model = folder.checkpoints / "step-000120" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (model.parent / "state.json").write_text(json.dumps({"step": 120, "cursor": 960, "version": 1}))
    seal(model.parent)
    become(folder, "completed", ended_at=time.time(), counts={"accepted": 960})
    launcher.leave(folder.run_id)
    return folder


def test_completed_run_goes_on_with_more_steps_and_stays_as_it_is(completed):
    shop, launcher, folder = completed
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    answer = do(resume_training, shop, run_id=folder.run_id, steps=80)
    run_id = answer.data.run_id
    assert run_id in launcher.held and answer.data.continues == folder.run_id
    assert "at most 80 steps more" in answer.text and "stays as it is" in answer.text
    made = Specification.read(shop.runs.folder(run_id))
    assert (made.config.budget.steps, made.config.optimizer.warmup_steps) == (80, 0)
    assert made.config.policy.model == str(folder.checkpoints / "step-000120" / "model")
    assert (made.base_run, made.continued_run, made.first_task) == (folder.run_id, folder.run_id, 960)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    with pytest.raises(NotPossibleNow, match=f"being continued already, as {run_id}"):
        do(resume_training, shop, run_id=folder.run_id, seconds=5)


def test_continuation_tells_that_a_falling_rate_goes_back_to_its_peak(house):
    shop, launcher = house
    for schedule in ("constant", "linear"):
        config = Config()
        config.optimizer.learning_rate, config.optimizer.lr_scheduler_type = 1e-3, schedule
        folder = completed_run(shop, launcher, config)
        folder.metrics.write_text(json.dumps({"step": 120, "learning_rate": 8.3e-6}) + "\n")
        answer = do(resume_training, shop, run_id=folder.run_id, steps=80)
        assert ("goes back to 0.001 and falls again (linear)" in answer.text) is (schedule == "linear")
    assert (
        f"{folder.run_id} ended at 8.3e-06" in answer.text and f'fork_config(run_id="{folder.run_id}")' in answer.text
    )
    draft_id = do(fork_config, shop, run_id=folder.run_id).data.draft_id
    changes = json.loads(re.search(r"changes=(\{.*?\})", answer.text)[1])
    edited = do(edit_config, shop, draft_id=draft_id, changes=changes)
    assert "optimizer.learning_rate 0.001 -> 0.0001" in edited.text and f"run:{folder.run_id}" in edited.text


def test_continuation_of_own_trainer_promises_its_weights_alone(house):
    shop, launcher = house
    config = Config()
    config.algorithm.name, config.optimizer.lr_scheduler_type = "custom", "linear"
    answer = do(resume_training, shop, run_id=completed_run(shop, launcher, config).run_id, steps=80)
    assert "with the weights alone of" in answer.text and "learning rate" not in answer.text


def test_continued_run_begins_after_tasks_whose_groups_were_skipped(completed):
    shop, _, folder = completed
    state = {"version": 1, "ended": {"sort_letters": 1900}, "mixer": {}}
    (folder.path / "mixture.json").write_text(json.dumps(state))
    made = Specification.read(shop.runs.folder(do(resume_training, shop, run_id=folder.run_id, steps=80).data.run_id))
    assert (made.first_task, made.first_tasks) == (1900, {"sort_letters": 1900})


def test_two_calls_at_once_start_one_successor(completed, monkeypatch):
    """The moment at which both have found that no other run repeats or continues it."""
    shop, launcher, folder = completed
    monkeypatch.setattr("toprope.workbench.launch.continuation._continued_by", lambda *_: None)
    monkeypatch.setattr("toprope_tools.experiments.config_history._repeats", lambda *_: None)
    for tool, options in ((resume_training, {"steps": 80}), (reproduce_run, {})):
        first = do(tool, shop, run_id=folder.run_id, **options).data.run_id
        with pytest.raises(NotPossibleNow, match=f"already, as {first}"):
            do(tool, shop, run_id=folder.run_id, **options)
        do(stop_training, shop, run_id=first)
        do(stop_training, shop, run_id=do(tool, shop, run_id=folder.run_id, **options).data.run_id)


def test_longer_training_keeps_steps_and_obeys_locks_and_limits(completed):
    shop, _, folder = completed
    (shop.home.configuration / "locks.yaml").write_text(
        "locks: [{field: budget.steps, max: 200, reason: Short runs.}, "
        "{field: policy.model, value: embedded, reason: No downloads.}]"
    )
    with pytest.raises(LockedField, match="Short runs"):
        do(resume_training, shop, run_id=folder.run_id, steps=201)
    (shop.home.configuration / "limits.yaml").write_text("per_run: {steps: {max: 100, reason: A day.}}")
    with pytest.raises(NotPossibleNow, match="A day"):
        do(resume_training, shop, run_id=folder.run_id, steps=120)
    (shop.home.configuration / "limits.yaml").unlink()
    answer = do(resume_training, shop, run_id=folder.run_id, seconds=90)
    assert "at most 120 steps or 90 s of training more" in answer.text
    do(stop_training, shop, run_id=answer.data.run_id)


def test_budget_for_other_runs_is_refused_with_the_next_call(completed):
    shop, launcher, folder = completed
    with pytest.raises(NotPossibleNow, match=rf'resume_training\(run_id="{folder.run_id}", steps=N\)'):
        do(resume_training, shop, run_id=folder.run_id)
    stopped = start_run(shop)
    do(stop_training, shop, run_id=stopped.run_id)
    with pytest.raises(NotPossibleNow, match="of a completed run"):
        do(resume_training, shop, run_id=stopped.run_id, steps=5)
    tuned = start_run(shop, kind="sft")
    become(tuned, "completed", ended_at=time.time())
    launcher.leave(tuned.run_id)
    with pytest.raises(InvalidValue, match=f"no steps.*run:{tuned.run_id}"):
        do(resume_training, shop, run_id=tuned.run_id, steps=5)
    with pytest.raises(NotFound, match=f"Did you mean {folder.run_id}"):
        do(resume_training, shop, run_id=f"{folder.run_id}x", steps=5)


def test_policy_of_a_draft_may_be_a_run(completed):
    shop, _, folder = completed
    draft_id = do(select_environment, shop, name="sort_letters").data.draft_id
    edited = do(edit_config, shop, draft_id=draft_id, changes={"policy.model": folder.run_id})
    assert f"embedded -> run:{folder.run_id}" in edited.text
    for wrong in (f"run:{folder.run_id[:-2]}", f"run: {folder.run_id}s"):
        with pytest.raises(NotFound, match=f"Did you mean run:{folder.run_id}"):
            do(edit_config, shop, draft_id=draft_id, changes={"policy.model": wrong})
    with pytest.raises(NotFound, match="There is no run 'sort-letters-261122-1405-k7f3'"):
        do(edit_config, shop, draft_id=draft_id, changes={"policy.model": "sort-letters-261122-1405-k7f3"})
    for model in ("gpt2", "org/name", "/a/folder", "embedded-large"):
        do(edit_config, shop, draft_id=draft_id, changes={"policy.model": model})
        assert shop.drafts.get(draft_id).config.policy.model == model


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (ask_checkpoint, {"run_id": "ID", "prompts": ["a"]}),
        (browse_rollouts, {"run_id": "ID"}),
        (check_status, {"run_ids": ["ID"]}),
        (compare_runs, {"a": ["ID"], "b": ["ID"]}),
        (diff_config, {"a": "ID"}),
        (export_trajectories, {"sources": ["ID"]}),
        (fork_config, {"run_id": "ID"}),
        (get_results, {"run_id": "ID"}),
        (note_experiment, {"hypothesis": "a", "run_ids": ["ID"]}),
        (read_logs, {"run_id": "ID", "component": "trainer"}),
        (reproduce_run, {"run_id": "ID"}),
        (resume_training, {"run_id": "ID"}),
        (stop_training, {"run_id": "ID"}),
    ],
)
def test_every_tool_that_takes_a_run_offers_the_nearest_ids(house, tool, arguments):
    shop, _ = house
    run_id = start_run(shop).run_id
    for wrong in (f"{run_id}x", run_id[:6]):
        given = {key: wrong if one == "ID" else [wrong] if one == ["ID"] else one for key, one in arguments.items()}
        with pytest.raises(NotFound, match=f"Did you mean {run_id}"):
            do(tool, shop, **given)


def test_resume_names_code_that_changed_since_it_measured(house, tmp_path):
    shop, launcher = house
    file, folder = tmp_path / "mine.py", start_run(shop)
    file.write_text("score = 1\n")
    source = EnvironmentSource(name="mine", file=str(file), attribute="Mine")
    Specification.read(folder).model_copy(update={"environment": source}).write(folder)

    def resumed():
        launcher.leave(folder.run_id)
        become(folder, "stopped", ended_at=time.time())
        return do(resume_training, shop, run_id=folder.run_id).text

    assert "Warning" not in resumed(), "nothing was measured"
    folder.evaluation("before").parent.mkdir(exist_ok=True)
    write_json(folder.evaluation("before"), {"version": 1, "evaluator": {"loaded": measurement_digests(source)}})
    assert "Warning" not in resumed()
    file.write_text("score = 2\n")
    assert f"Warning: changed since the evaluation before training: {named(file, 4096)}. The one after" in resumed()
