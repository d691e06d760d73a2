import re

import pytest

from toprope.errors import InvalidValue, LockedField
from toprope.records.run.folder import RUN_ID
from toprope.records.run.specification import EnvironmentSource, TestPlan, TrainPlan, training_plan
from toprope.settings.locks import Lock, Locks
from toprope.settings.presets import Preset
from toprope.workbench.launch.freeze import freeze, new_run_id

SOURCE = EnvironmentSource(name="reasoning_gym/spell_backward", adapter="reasoning_gym", target="spell_backward")
KNOBS = [{"name": "length", "type": "int", "default": 3, "ge": 1, "le": 9}]
NONE = Locks({})


@pytest.fixture
def draft(drafts):
    return drafts.create(SOURCE, Preset("p", "", {}, {}), KNOBS, NONE)[0]


def test_freeze_copies_draft_and_records_locks(draft):
    locks = Locks({"budget.steps": Lock("budget.steps", "a day", max=20000)})
    specification = freeze(draft, locks, TrainPlan(), policy_cache="/cache")
    assert specification.config == draft.config
    assert specification.config is not draft.config
    assert (specification.draft_id, specification.draft_revision, specification.preset) == (draft.id, 1, "p")
    assert specification.locks == {"budget.steps": {"max": 20000, "reason": "a day"}}
    assert specification.environment == SOURCE
    assert RUN_ID.fullmatch(specification.run_id)
    assert re.fullmatch(r"spell-backward-\d{6}-\d{4}-[a-z0-9]{4}", specification.run_id)


def test_freeze_refuses_values_against_any_lock(draft):
    # Set directly, as by somebody who touched the database, or before the lock existed.
    draft.config.budget.steps = 50_000
    draft.config.policy.model = "gpt2"
    draft.config.environment.knobs["length"] = 8
    locks = Locks(
        {
            "budget.steps": Lock("budget.steps", "a day at most", max=20000),
            "policy.model": Lock("policy.model", "no downloads", True, "embedded"),
            "environment.knobs.length": Lock("environment.knobs.length", "short words", max=5),
        }
    )
    with pytest.raises(LockedField) as refused:
        freeze(draft, locks, TrainPlan(), policy_cache="")
    for reason in ("a day at most", "no downloads", "short words"):
        assert reason in str(refused.value)


def test_freeze_refuses_invalid_configuration(draft):
    draft.config.rollout.max_new_tokens = 100_000
    draft.config.environment.knobs |= {"length": 10, "colour": 1}
    with pytest.raises(InvalidValue) as refused:
        freeze(draft, NONE, TrainPlan(), policy_cache="")
    for part in ("leaves no room", "environment.knobs.length: 10", "environment.knobs.colour"):
        assert part in str(refused.value)


def test_freeze_takes_run_kind_from_plan(draft):
    plan = TestPlan(tasks=4, group_size=2)
    test = freeze(draft, NONE, plan, policy_cache="")
    assert (test.kind, test.test, test.sweep) == ("test", plan, None)
    training = freeze(draft, NONE, training_plan(draft.config), policy_cache="")
    assert (training.kind, training.test) == ("train", None)
    draft.config.algorithm.name = "sft"
    assert freeze(draft, NONE, training_plan(draft.config), policy_cache="").kind == "sft"


@pytest.mark.parametrize("name", ["", "../..", "ÄÖÜ", "a" * 200, "My Run!", "x/y/z", "-", "--flag", "a\x00b", "9"])
def test_new_run_id_is_valid_for_any_name(name):
    run_id = new_run_id(name)
    assert RUN_ID.fullmatch(run_id)
    assert new_run_id(name) != run_id
