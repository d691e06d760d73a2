import re

import pytest

from toprope.errors import InvalidValue, LockedField
from toprope.settings.changes import apply_changes
from toprope.settings.fields import all_fields
from toprope.settings.locks import Locks
from toprope.settings.schema import Config
from toprope.shipped import CONFIGS


def locks_of(tmp_path, text):
    path = tmp_path / "locks.yaml"
    path.write_text(text)
    return Locks.read(path)


TWO = """
locks:
  - field: policy.model
    value: embedded
    reason: Nothing is downloaded here.
  - field: optimizer.learning_rate
    min: 1e-6
    max: 0.01
    reason: It collapses above.
  - field: environment.knobs.length
    max: 5
    reason: Longer ones are slow.
"""


def test_edit_refuses_locked_field_with_reason(tmp_path):
    locks = locks_of(tmp_path, TWO)
    with pytest.raises(LockedField, match="Nothing is downloaded here") as refused:
        apply_changes(Config(), {"policy.model": "gpt2"}, locks=locks)
    assert "fixed at 'embedded'" in str(refused.value)
    with pytest.raises(LockedField, match="at least 1e-06 and at most 0.01.*It collapses above"):
        apply_changes(Config(), {"optimizer.learning_rate": "0.02"}, locks=locks)
    config, changed = apply_changes(
        Config(), {"policy.model": "embedded", "optimizer.learning_rate": 0.01}, locks=locks
    )
    assert [one.field for one in changed] == ["optimizer.learning_rate"]


@pytest.mark.parametrize(("most", "allows"), [("1e-5", True), ("9e-6", False)])
def test_null_rate_of_the_value_head_is_allowed_down_to_its_floor(tmp_path, most, allows):
    text = f"locks: [{{field: ppo.value_learning_rate, max: {most}, reason: x}}]"
    assert (locks_of(tmp_path, text).refusal("ppo.value_learning_rate", None) is None) == allows


def test_null_rate_of_the_value_head_is_held_as_training_takes_it(tmp_path):
    text = "locks: [{field: ppo.value_learning_rate, %s, reason: x}]"
    most, least = locks_of(tmp_path, text % "max: 5e-6"), locks_of(tmp_path, text % "min: 5e-6")
    config, fields = Config(), all_fields()
    config.optimizer.learning_rate = 1e-6  # the head would learn at 1e-5
    with pytest.raises(LockedField, match="at most 5e-06"):
        most.enforce(config, fields)
    assert most.adjust(config, fields)[0] == {"ppo.value_learning_rate": 5e-6}
    least.enforce(config, fields)
    assert least.adjust(config, fields) == ({}, [])


def test_enforce_checks_values_however_they_were_set(tmp_path):
    locks, fields = locks_of(tmp_path, TWO), all_fields([{"name": "length", "type": "int", "default": 9}])
    config = Config()
    config.policy.model = "gpt2"
    with pytest.raises(LockedField) as refused:
        locks.enforce(config, fields)
    # The knob was never set: its default counts.
    assert "environment.knobs.length" in str(refused.value)
    allowed, moved = locks.adjust(config, fields)
    assert allowed == {"policy.model": "embedded", "environment.knobs.length": 5.0}
    fixed, _ = apply_changes(config, allowed, [{"name": "length", "type": "int", "default": 9}], locks)
    locks.enforce(fixed, fields)
    assert fixed.environment.knobs == {"length": 5}
    assert {one.field for one in moved} == set(allowed)


def test_lock_on_unknown_knob_is_ignored(tmp_path):
    locks_of(tmp_path, TWO).enforce(Config(), all_fields())


def test_null_is_outside_bounds(tmp_path):
    locks = locks_of(tmp_path, "locks: [{field: budget.max_train_seconds, max: 60, reason: short}]")
    with pytest.raises(LockedField, match="short"):
        locks.enforce(Config(), all_fields())
    assert locks.adjust(Config(), all_fields())[0] == {"budget.max_train_seconds": 60.0}


def test_a_highest_value_excludes_0_where_it_means_no_limit(tmp_path):
    unlimited = [
        name
        for name, field in all_fields().items()
        if re.search(r"\b0: (no limit|never|the partition's|the whole batch|80 %)", field.description)
    ]
    assert len(unlimited) >= 6
    for name in unlimited:
        locks = locks_of(tmp_path, f"locks: [{{field: {name}, max: 60, reason: not for ever}}]")
        assert locks.refusal(name, 0) and locks.refusal(name, 60) is None, name
        config = Config.model_validate({"launcher": {"kind": "slurm"}})
        assert locks.adjust(config, all_fields())[0].get(name, 1) > 0
    limit = "locks: [{field: launcher.time_limit_minutes, max: 60, reason: not for ever}]"
    locks_of(tmp_path, limit).enforce(Config(), all_fields())  # not on a run that is no job
    with pytest.raises(LockedField, match="not for ever"):
        locks_of(tmp_path, limit).enforce(config, all_fields())


def test_true_is_not_one(tmp_path):
    locks = locks_of(tmp_path, "locks: [{field: environment.knobs.n, value: 1, reason: one}]")
    assert locks.refusal("environment.knobs.n", True)
    assert locks.refusal("environment.knobs.n", 1) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("locks: [{field: policy.modle, value: x, reason: r}]", "policy.model"),
        ("lock: []", "Did you mean locks"),
        ("locks: [{field: policy.model, valeu: x, reason: r}]", "Did you mean value"),
        ("locks: [{field: policy.model, value: x}]", "reason is missing"),
        ("locks: [{value: x, reason: r}]", "field is missing"),
        ("locks: [{field: policy.model, reason: r}]", "either value, or min and max"),
        ("locks: [{field: budget.steps, value: 1, max: 2, reason: r}]", "either value, or min and max"),
        ("locks: [{field: policy.model, max: 2, reason: r}]", "no min or max"),
        ("locks: [{field: rollout.group_size, value: 8.5, reason: r}]", "a whole number"),
        ("locks: [{field: rollout.group_size, min: 9, max: 8, reason: r}]", "above max"),
        ("locks: [{field: rollout.group_size, max: many, reason: r}]", "must be numbers"),
        ("locks: [{field: budget.steps, max: 5, reason: r}, {field: budget.steps, min: 1, reason: r}]", "locked twice"),
        ("locks: {a: 1}", "must be a list"),
        ("locks: [1]", "must be a mapping"),
        ("locks: [", "not valid YAML"),
        ("- a", "must hold a mapping"),
        ("locks: []\nlocks: []", "given twice"),
        ("locks: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_wrong_locks_file_is_refused(tmp_path, text, says):
    with pytest.raises(InvalidValue, match=says) as refused:
        locks_of(tmp_path, text)
    assert "locks.yaml" in str(refused.value)


def test_shipped_locks_allow_shipped_presets():
    from toprope.settings.presets import list_presets, load_preset

    locks = Locks.read(CONFIGS / "locks.yaml")
    assert any(lock.fixed for lock in locks)
    assert any(not lock.fixed for lock in locks)
    folder = CONFIGS / "presets"
    assert {"cpu-embedded", "single-gpu"} <= set(list_presets([folder]))
    for name in list_presets([folder]):
        preset = load_preset(name, [folder])
        config = preset.config("x")
        if name == "hermes":  # under the owner's locks it starts with fewer workers
            Locks({}).under(preset.locks).enforce(config, all_fields())
            config.rollout.concurrency = locks.adjust(config, all_fields())[0].pop("rollout.concurrency")
        locks.enforce(config, all_fields())
