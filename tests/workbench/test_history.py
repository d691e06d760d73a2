"""Revisions of a draft, forks of a run, and differences between configurations."""

import time
from pathlib import Path

import pytest

from toprope.errors import LockedField, NotFound
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.changes import Change
from toprope.settings.locks import Lock, Locks
from toprope.settings.presets import Preset
from toprope.settings.schema import Config
from toprope.workbench.history import beside_preset, difference
from toprope.workbench.launch.freeze import freeze_again

SOURCE = EnvironmentSource(name="words", file="/words.py", attribute="Words")
KNOBS = [{"name": "length", "type": "int", "default": 3, "ge": 1}, {"name": "easy", "type": "bool", "default": True}]
NONE = Locks({})


def edited(drafts):
    draft, _ = drafts.create(SOURCE, Preset("p", "", {"budget.steps": 7}, {}), KNOBS, NONE)
    drafts.edit(draft.id, {"budget.steps": 9, "environment.knobs.length": 5}, NONE)
    drafts.edit(draft.id, {"budget.steps": 20, "optimizer.learning_rate": 0.1}, NONE)
    return draft.id


def run_of(config, **fields):
    return Specification(
        run_id="words-1", kind="train", created_at=time.time(), toprope_version="0", environment=SOURCE, preset="p",
        config=config, policy_cache="/nowhere", **fields,
    )  # fmt: skip


def test_draft_returns_every_revision(drafts):
    draft_id = edited(drafts)
    assert [drafts.at(draft_id, number).budget.steps for number in (1, 2, 3)] == [7, 9, 20]
    assert drafts.at(draft_id, 1).environment.knobs == {"length": 3, "easy": True}
    assert drafts.at(draft_id, 3) == drafts.get(draft_id).config
    for none in (0, 4):
        with pytest.raises(NotFound, match="1 to 3"):
            drafts.at(draft_id, none)


def test_revert_adds_a_revision(drafts):
    draft_id = edited(drafts)
    back, changed, moved = drafts.revert(draft_id, 2, NONE)
    assert (back.revision, back.config.budget.steps, moved) == (4, 9, [])
    assert {one.field for one in changed} == {"budget.steps", "optimizer.learning_rate"}
    assert [edit.revision for edit in drafts.history(draft_id)] == [2, 3, 4]
    again, _, _ = drafts.revert(draft_id, 3, NONE)
    assert again.config.budget.steps == 20
    same, changed, _ = drafts.revert(draft_id, again.revision, NONE)
    assert (same.revision, changed) == (again.revision, [])


def test_revert_over_another_algorithm_restores_its_fields(drafts):
    draft, _ = drafts.create(SOURCE, Preset("p", "", {"algorithm.epsilon_high": 0.2}, {}), KNOBS, NONE)
    first = draft.config
    for name in ("sft", "rloo"):
        changed, _ = drafts.edit(draft.id, {"algorithm.name": name}, NONE)
    assert changed.config != first and drafts.at(draft.id, 1) == first
    assert drafts.revert(draft.id, 1, NONE)[0].config == first


def test_revert_applies_newer_lock(drafts):
    draft_id = edited(drafts)
    locks = Locks({"budget.steps": Lock("budget.steps", "short", max=8)})
    back, _, moved = drafts.revert(draft_id, 2, locks)
    assert back.config.budget.steps == 8
    assert moved == [Change("budget.steps", 9, 8)]


def test_fork_copies_run_configuration_under_current_locks(drafts):
    config = Config()
    config.budget.steps, config.environment.knobs = 50, {"length": 4, "gone": 1}
    locks = Locks({"budget.steps": Lock("budget.steps", "short", max=30)})
    draft, moved, gone = drafts.fork(run_of(config), SOURCE, KNOBS, locks)
    assert (draft.config.budget.steps, draft.preset, draft.revision) == (30, "p", 1)
    assert draft.config.environment.knobs == {"length": 4, "easy": True}
    assert moved == [Change("budget.steps", 50, 30)]
    assert gone == ["environment.knobs.gone"]
    assert drafts.forked_from(draft.id) == "words-1"
    assert drafts.forked_from("draft-none") is None


def test_difference_names_fields_and_knobs_of_both_sides():
    a, b = Config(), Config()
    a.environment.knobs, b.environment.knobs = {"x": 1, "only": 2}, {"x": 2}
    b.optimizer.learning_rate = 0.5
    assert {one.field: (one.before, one.after) for one in difference(a, b)} == {
        "optimizer.learning_rate": (a.optimizer.learning_rate, 0.5),
        "environment.knobs.x": (1, 2),
        "environment.knobs.only": (2, None),
    }
    assert difference(a, a) == []


def test_beside_preset_returns_changed_fields():
    preset = Preset("p", "", {"budget.steps": 7}, {"words": {"length": 5}})
    config = preset.config("words")
    config.environment.knobs = {"length": 6, "easy": True}
    config.budget.steps = 8
    assert beside_preset(config, preset, "words") == {"budget.steps": [7, 8], "environment.knobs.length": [5, 6]}
    assert beside_preset(config, None, "words") == {}


def test_freeze_again_applies_current_locks():
    run = run_of(Config())
    again = freeze_again(run, NONE, Path("/nowhere"))
    assert again.reproduces == run.run_id and again.run_id != run.run_id
    assert again.config == run.config and again.config is not run.config
    with pytest.raises(LockedField, match="too long"):
        freeze_again(run, Locks({"budget.steps": Lock("budget.steps", "too long", max=3)}), Path("/nowhere"))
