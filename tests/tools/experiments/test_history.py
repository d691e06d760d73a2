"""Fork, diff, undo and reproduce, as an agent meets them."""

import json
import time

import pytest
from toprope_tools.experiments.config_history import diff_config, fork_config, reproduce_run, undo_edit
from toprope_tools.planning.config import edit_config, get_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.results.results import get_results
from toprope_tools.runs.inference import test_inference
from toprope_tools.runs.training import start_training

from tests.support.tools_house import become, do
from toprope.atomic import write_json
from toprope.errors import InvalidValue, NotFound, NotPossibleNow
from toprope.records.run.manifest import Manifest
from toprope.records.run.specification import Specification, SweepMember
from toprope.supervisor.capacity.budget_ledger import ledger_lock, read_accounts
from toprope.supervisor.watchers.provenance import collect_manifest


def fields(answer):
    return {one.field: (one.a, one.b) for one in answer.data.fields}


def ended(shop, launcher, run_id, rows=(), state="completed"):
    """The run as its keeper would leave it."""
    folder = shop.runs.folder(run_id)
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    collect_manifest(folder, Specification.read(folder)).write(folder)
    become(folder, state, ended_at=time.time())
    launcher.leave(run_id)
    return folder


def test_drafts_revisions_runs_and_presets_are_compared(house):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    do(edit_config, shop, draft_id=draft, changes={"optimizer.learning_rate": 1e-4, "environment.knobs.longest": 7})
    run = do(start_training, shop, draft_id=draft, name="preset-trial").data.run_id  # its id names no preset
    do(edit_config, shop, draft_id=draft, changes={"budget.steps": 5})
    changed = {"optimizer.learning_rate": (1e-4, 1e-3), "environment.knobs.longest": (7, 5)}
    assert fields(do(diff_config, shop, a=run)) == changed
    assert fields(do(diff_config, shop, a=f"{draft}@2", b=f"{draft}@1")) == changed
    assert fields(do(diff_config, shop, a=draft, b=run)) == {"budget.steps": (5, 2400)}
    assert "equal in every field" in do(diff_config, shop, a=run, b=f"{draft}@2").text
    assert fields(do(diff_config, shop, a="preset cpu-embedded", b=run)) == {
        name: values[::-1] for name, values in changed.items()
    }
    for none, words in (("draft-none", "draft-none"), ("nothing", "list_runs"), ("preset x", "preset")):
        with pytest.raises(NotFound, match=words):
            do(diff_config, shop, a=draft, b=none)
    specification = Specification.read(shop.runs.folder(run))
    assert specification.beside_preset == {"optimizer.learning_rate": [1e-3, 1e-4]}
    undone = do(undo_edit, shop, draft_id=draft, revision=1)
    assert (undone.data.revision, undone.data.back_to) == (4, 1)
    assert fields(do(diff_config, shop, a=draft)) == {}


def test_fork_starts_from_configuration_of_run(house):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    do(edit_config, shop, draft_id=draft, changes={"budget.steps": 15_000, "environment.knobs.longest": 6})
    run = do(start_training, shop, draft_id=draft).data.run_id
    own = "locks:\n  - field: budget.steps\n    max: 100\n    reason: short nights\n"
    (shop.home.configuration / "locks.yaml").write_text(own)
    forked = do(fork_config, shop, run_id=run)
    assert [(one.field, one.a, one.b) for one in forked.data.moved_by_locks] == [("budget.steps", 15_000, 100)]
    assert "budget.steps 15000 -> 100" in forked.text
    made = shop.drafts.get(forked.data.draft_id)
    assert (made.config.environment.knobs["longest"], made.environment.name) == (6, "sort_letters")
    assert shop.drafts.forked_from(made.id) == run
    with shop.index.writing() as db:  # the draft is gone: the environment itself is asked for its knobs
        db.execute("DELETE FROM edits")
        db.execute("DELETE FROM drafts")
    assert shop.drafts.get(do(fork_config, shop, run_id=run).data.draft_id).config == made.config


def test_reproduced_run_is_compared_with_original(house):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    do(edit_config, shop, draft_id=draft, changes={"algorithm.deterministic": True})
    run = do(start_training, shop, draft_id=draft).data.run_id
    with pytest.raises(NotPossibleNow, match="nothing was started"):
        do(reproduce_run, shop, run_id=run)
    rows = [{"step": step, "time": step * 1.5, "reward": 0.1 * step, "loss": 0.5} for step in (1, 2, 3)]
    ended(shop, launcher, run, rows)
    started = do(reproduce_run, shop, run_id=run)
    assert started.data.deterministic and "equal at every step" in started.text
    with pytest.raises(NotPossibleNow, match=started.data.run_id):
        do(reproduce_run, shop, run_id=run)
    again = started.data.run_id
    assert "no step in common" in do(get_results, shop, run_id=again).text
    later = [{**row, "time": row["time"] + 900} for row in rows]
    folder = ended(shop, launcher, again, later)
    result = do(get_results, shop, run_id=again)
    assert f"Same as {run}: 2 metrics equal over all 3 steps. No recorded input differs." in result.text
    assert result.data.results["reproduction"]["same"] is True

    folder.metrics.write_text("".join(json.dumps({**row, "reward": 0.7}) + "\n" for row in later))
    manifest = Manifest.read(folder)
    manifest.libraries["torch"] = "0.0.1"
    manifest.environment.sha256 = "another"
    manifest.write(folder)
    text = do(get_results, shop, run_id=again).text
    assert f"Not the same as {run}: 1 of 2 metrics differ from step 1 on (reward)" in text
    assert "libraries.torch" in text and "0.0.1" in text and "environment.sha256" in text


def test_long_values_are_cut_and_the_answer_says_so(house):
    shop, _ = house
    shop.home.configuration.mkdir(exist_ok=True)
    shop.home.settings_file.write_text("models: {model: {base_url: http://127.0.0.1:9/v1, model: model}}")
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    for values in (
        {"policy.model": "m" * 100_000},
        {"environment.model_roles": {f"k{n}": "model" for n in range(9999)}},
    ):
        [field] = values
        told = do(edit_config, shop, draft_id=draft, changes=values).data.changed
        assert [one.field for one in told] == [field] and "[cut; " in told[0].after
    assert fields(do(diff_config, shop, a=draft))["policy.model"][0].endswith("[cut; 100002 characters]")
    read = do(get_config, shop, draft_id=draft)
    assert read.text.count("\n  revision ") == 2 and "Edits (2)" in read.text
    for number in range(11):
        do(edit_config, shop, draft_id=draft, changes={"policy.model": str(number) * 3000})
    read = do(get_config, shop, draft_id=draft)
    assert "  revision 14: " in read.text and "Edits (13)" in read.text
    do(edit_config, shop, draft_id=draft, changes={"policy.model": "org/model", "budget.steps": 7})
    assert do(get_config, shop, draft_id=draft).data.values["budget.steps"] == 7
    assert shop.drafts.get(draft).config.environment.model_roles["k9998"] == "model"


def test_reproduced_test_is_compared_by_task(house):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    run = do(test_inference, shop, draft_id=draft).data.run_id
    again = None
    for right in (50, 90):
        folder = ended(shop, launcher, again or run)
        write_json(folder.evaluation("test"), {"sampled": {"split": "validation", "tasks": 100, "successes": right}})
        if again is None:
            again = do(reproduce_run, shop, run_id=run).data.run_id
            early = do(get_results, shop, run_id=again)
            assert "Nothing to compare" in early.text and early.data.results["reproduction"]["same"] is False
    result = do(get_results, shop, run_id=again)
    assert f"Beside {run}: accuracy on validation tasks 50.0% and 90.0%, further apart than" in result.text
    assert result.data.results["reproduction"]["same"] is False


def test_reproduce_reserves_budget_and_releases_ledger_lock(house, monkeypatch):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    run = do(start_training, shop, draft_id=draft).data.run_id
    ended(shop, launcher, run)
    start, seen = shop.runs.start, []

    def starting(specification, variables):
        with ledger_lock(shop.home.runs):
            seen.extend(account.run_id for account in read_accounts(shop.home.runs) if account.live)
        return start(specification, variables)

    monkeypatch.setattr(shop.runs, "start", starting)
    monkeypatch.setattr("toprope.supervisor.capacity.budget_ledger.LOCK_WITHIN_S", 0.2)
    assert seen == [] and do(reproduce_run, shop, run_id=run).data.run_id in seen


def test_reproduction_keeps_the_owners_limits(house):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    run = do(start_training, shop, draft_id=draft).data.run_id
    ended(shop, launcher, run)
    limits = shop.home.configuration / "limits.yaml"
    limits.parent.mkdir(parents=True, exist_ok=True)
    for text, words in (("confirm: always\n", "confirmed"), ("per_run:\n  steps: 3\n", "steps")):
        limits.write_text(text)
        with pytest.raises(NotPossibleNow, match=words) as caught:
            do(reproduce_run, shop, run_id=run)
        assert "othing was started" in str(caught.value)
    assert [status.run_id for status in shop.statuses()] == [run]
    limits.unlink()
    assert do(reproduce_run, shop, run_id=run).data.reproduces == run


def test_reproduce_of_sweep_member_needs_confirmation(house):
    shop, launcher = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    run = do(start_training, shop, draft_id=draft).data.run_id
    ended(shop, launcher, run)
    folder = shop.runs.folder(run)
    member = SweepMember(sweep="sweep-1", candidate="c001", epoch=1)
    Specification.read(folder).model_copy(update={"member": member}).write(folder)
    (shop.home.configuration / "limits.yaml").write_text("confirm: always\n")
    with pytest.raises(NotPossibleNow, match="confirmed"):
        do(reproduce_run, shop, run_id=run)
    assert [status.run_id for status in shop.statuses()] == [run]


def test_runs_of_kind_ask_are_neither_forked_nor_reproduced(house):
    shop, _ = house
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    run = do(start_training, shop, draft_id=draft).data.run_id
    folder = shop.runs.folder(run)
    specification = json.loads(folder.spec.read_text())
    specification |= {"kind": "ask", "ask": {"conversations": [], "max_new_tokens": 3, "asked": "x"}}
    folder.spec.write_text(json.dumps(specification))
    with pytest.raises(InvalidValue, match="only asked"):
        do(fork_config, shop, run_id=run)
