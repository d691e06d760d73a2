"""Causes: ranking, what follows from what, one edit for all of them, and nothing against harmless fields."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analysis.findings.test_findings import CASES, FLAT, NOTHING, config, found, healthy
from toprope.analysis.findings import Diagnosis, diagnose
from toprope.analysis.findings.causes import EXPLAINS, Explanation, merged
from toprope.analysis.findings.configured import expected_signal
from toprope.analysis.findings.diagnosis import RULES
from toprope.analysis.findings.standstill import standstill
from toprope.records.run.status import Finding
from toprope.settings.schema import Config


def explained(series: dict[str, Any], differs: dict[str, list[Any]], rows: int = 100, **fields: Any) -> Explanation:
    """Explain an ended run; `fields` are the configuration's."""
    diagnosis = Diagnosis(config(**fields), differs=differs)
    for row in healthy(rows, **series):
        diagnosis.see(row)
    return diagnosis.explain(ended=True)


SABOTAGED: dict[str, list[Any]] = {
    "optimizer.learning_rate": [1e-3, 1e-5],
    "algorithm.beta": [0.0, 5.0],
    "rollout.group_size": [8, 2],
    "logging.save_steps": [500, 100],
    "optimizer.adam_beta2": [0.95, 0.98],
}
FIELDS = {"optimizer__learning_rate": 1e-5, "algorithm__beta": 5.0, "rollout__group_size": 2}


def test_three_faults_are_named_at_once_with_one_edit() -> None:
    series = {**FLAT, "moved": 1e-4, "zero": 0.8, "wrong": 0.75, "kl": 1e-4, "loss": 5e-4}
    found = explained(series, SABOTAGED, **FIELDS)
    assert {name for cause in found.causes[:3] for name in cause.changes} == {
        "optimizer.learning_rate",
        "algorithm.beta",
        "rollout.group_size",
    }
    assert found.changes == {"optimizer.learning_rate": 1e-3, "algorithm.beta": 0.0, "rollout.group_size": 8}


def test_wrong_answers_follow_from_faults_and_advise_nothing() -> None:
    series = {**NOTHING, "wrong": 0.96, "zero": 0.96, "moved": 1e-5, "kl": 1e-4, "loss": 5e-4}
    found = explained(series, SABOTAGED, **FIELDS)
    assert "all_wrong" not in {cause.rule for cause in found.causes}
    below = [one for ones in found.below.values() for one in ones]
    [wrong] = [one for one in below if one.rule == "all_wrong"]
    assert wrong.follows == "group_too_small" and "easier" not in wrong.next and not wrong.changes
    assert {"optimizer.learning_rate", "algorithm.beta", "rollout.group_size"} <= set(found.changes)


def test_live_run_never_hears_of_easier_tasks_if_a_fault_explains_them() -> None:
    series = {**NOTHING, "wrong": 0.96, "zero": 0.96, "moved": 1e-5, "kl": 1e-4, "loss": 5e-4}
    made = config(**FIELDS)
    told = [one for one in diagnose(healthy(**series), made, SABOTAGED) if one.level != "over"]
    assert {"all_wrong", "group_too_small"} <= {one.rule for one in told}
    assert [one.next for one in told if "easier" in one.next] == []


def test_field_that_a_rule_names_is_not_suspected_beside_it() -> None:
    series = {**NOTHING, "wrong": 0.92, "zero": 0.92}
    differs: dict[str, list[Any]] = {"rollout.group_size": [8, 2]}
    told = diagnose(healthy(**series), config(rollout__group_size=2), differs)
    assert [one.rule for one in told if one.changes] == ["group_too_small"]


def test_rate_far_from_preset_explains_wrong_answers_without_signal() -> None:
    differs = {"optimizer.learning_rate": [1e-3, 1e-6]}
    found = explained({**NOTHING, "moved": None}, differs, optimizer__learning_rate=1e-6)
    assert [cause.rule for cause in found.causes] == ["far_from_preset"]
    assert found.changes == {"optimizer.learning_rate": 1e-3}
    alone = explained({**NOTHING, "moved": None}, {})
    assert [cause.rule for cause in alone.causes] == ["all_wrong"] and "easier" in alone.causes[0].next


def test_short_budget_is_not_suspected_where_nothing_is_ever_right() -> None:
    differs: dict[str, list[Any]] = {"budget.steps": [2400, 500]}
    never = explained({**NOTHING, "wrong": 1.0, "zero": 1.0}, differs)
    assert [cause.rule for cause in never.causes] == ["all_wrong"]
    seldom = {**NOTHING, "wrong": 0.96, "zero": 0.96}
    assert [cause.rule for cause in explained(seldom, differs, 200).causes] == ["far_from_preset"]
    stopped = explained(seldom, differs, 100)
    assert "budget.steps" not in stopped.changes, "it ended long before its limit"
    assert diagnose(healthy(200, **FLAT), config(), differs) == [], "a run that goes on is not short"


def test_budget_is_suspected_last_and_not_for_a_collapse() -> None:
    differs: dict[str, list[Any]] = {"budget.steps": [2400, 200], "optimizer.max_grad_norm": [1.0, 1000.0]}
    loose = {"optimizer__max_grad_norm": 1000.0, "rollout__top_p": 0.3}
    fallen = explained({**CASES["collapse"][0], "grad_norm": 4.0, "success": 0.05}, differs, 200, **loose)
    named = [list(cause.changes) for cause in fallen.causes]
    assert ["optimizer.max_grad_norm"] in named and ["budget.steps"] not in named
    short = explained({**FLAT, "grad_norm": 0.4}, {**differs, "rollout.top_p": [1.0, 0.3]}, 200, **loose)
    assert [list(cause.changes) for cause in short.causes] == [["rollout.top_p"], ["budget.steps"]]


def test_run_whose_curriculum_opened_a_level_has_learned() -> None:
    differs: dict[str, list[Any]] = {"rollout.top_p": [1.0, 0.5]}
    for opened in (False, True):
        diagnosis = Diagnosis(config(rollout__top_p=0.5), differs)
        if opened:
            diagnosis.history.restart()
        for row in healthy(200, **FLAT):
            diagnosis.see(row)
        assert ("far_from_preset" in {finding.rule for finding in diagnosis.open}) is not opened


@pytest.mark.parametrize("scheduled", [True, False])
def test_weights_that_change_on_the_way_hide_no_progress(scheduled: bool) -> None:
    """The reward falls by the schedule of its weights alone, while success rises."""
    series: dict[str, Any] = {
        "reward": lambda row: 0.08 - 0.06 * row / 100,
        "entropy": lambda row: 0.4 if row < 55 else 0.6,
        "moved": 0.3,
    }
    weights = {"environment__reward_weights_end": {"accuracy": 0.3}} if scheduled else {}
    found = explained(series, {"rollout.top_p": [1.0, 0.5]}, rollout__top_p=0.5, **weights)
    assert bool({"collapse", "learning_rate_high"} & {cause.rule for cause in found.causes}) is not scheduled
    assert bool(found.causes) is not scheduled


def test_weights_of_the_reward_are_an_aim_and_no_distance_from_the_preset() -> None:
    differs: dict[str, list[Any]] = {"environment.reward_weights": [{}, {"accuracy": 0.6}]}
    assert explained(FLAT, differs, 200, environment__reward_weights={"accuracy": 0.6}).causes == []


@pytest.mark.parametrize("unknown", [True, False])
def test_longer_answers_are_not_advised_where_the_policy_does_not_know_the_task(unknown: bool) -> None:
    diagnosis = Diagnosis(config(), unknown_task=unknown)
    for row in healthy(**NOTHING, cut=0.99):
        diagnosis.see(row)
    [cut] = diagnosis.explain().causes
    assert cut.rule == "truncated" and ("unknown_task" in cut.what) is unknown and bool(cut.changes) is not unknown
    assert ("fine-tuning" in cut.next) is unknown and len(cut.next) <= 240


SMALL_PART = {**NOTHING, "reward": 0.1, "wrong": 0.0, "other": 1.0}
"""No answer is right, and a small part earns each of them 0.1."""


@pytest.mark.parametrize("unknown, cut", [(True, 0.93), (True, 0.4), (False, 0.93)])
def test_scorer_is_not_accused_while_no_cut_off_answer_is_right(unknown: bool, cut: float) -> None:
    for spread in (0.0, 0.02):  # the part earns every task the same, or some tasks more
        diagnosis = Diagnosis(config(), unknown_task=unknown)
        for row in healthy(**(SMALL_PART | {"reward_std": spread}), cut=cut):
            diagnosis.see(row)
        assert [found.rule for found in diagnosis.explain().causes] == ["truncated"]


@pytest.mark.parametrize("unknown, cut, success", [(False, 0.4, 0.0), (False, 0.93, 0.5), (True, 0.0, 0.0)])
def test_constant_scorer_is_named_where_answers_say_something_of_it(unknown: bool, cut: float, success: float) -> None:
    diagnosis = Diagnosis(config(), unknown_task=unknown)
    for row in healthy(**(SMALL_PART | {"success": success}), cut=cut):
        diagnosis.see(row)
    first = diagnosis.explain().causes[0]
    assert first.rule == "constant_reward" and first.level == "critical"
    assert ("unknown_task" in first.what) is ("fine-tuning" in first.next) is unknown
    assert ("score()" in first.next) is not unknown


def test_pace_is_noted_only_where_a_faster_run_helps() -> None:
    def rules(settings: Config, **series: Any) -> set[str]:
        diagnosis = Diagnosis(settings)
        for row in healthy(wait=0.04, **series):
            diagnosis.see(row)
        return {finding.rule for finding in diagnosis.open}

    assert "trainer_waits" in rules(config())
    assert rules(config(algorithm__deterministic=True)) == rules(config(steps=40)) == set()
    assert "trainer_waits" not in rules(config(), errors=1.0)


def test_harmless_differences_are_never_causes() -> None:
    differs: dict[str, list[Any]] = {
        "optimizer.learning_rate": [1e-3, 8e-4],
        "rollout.group_size": [8, 10],
        "algorithm.epsilon": [0.2, 0.25],
        "rollout.temperature": [1.0, 0.95],
        "optimizer.weight_decay": [0.0, 0.01],
    }
    fields = {"optimizer__learning_rate": 8e-4, "rollout__group_size": 10, "optimizer__weight_decay": 0.01}
    for series in ({}, FLAT):
        found = explained(series, differs, 200, **fields)
        assert not {name for cause in found.causes for name in cause.changes} & set(differs), found.causes
    assert explained({}, differs, 200, **fields).causes == []


def test_fine_tuning_is_not_judged_by_settings_of_sampling() -> None:
    diagnosis = Diagnosis(config(**FIELDS), differs=SABOTAGED)
    for step in range(100):
        diagnosis.see({"step": step + 1, "loss": 2.0 / (step + 1), "grad_norm": 1.0, "entropy": 1.0})
    assert diagnosis.explain(ended=True).causes == []


def test_short_time_is_blamed_for_few_steps() -> None:
    made = config(steps=2000, budget__max_train_seconds=5.0)
    diagnosis = Diagnosis(made, differs={"budget.max_train_seconds": [75.0, 5.0]})
    for row in healthy(40, **FLAT, moved=0.03, train_seconds=lambda row: (row + 1) * 5 / 40):
        diagnosis.see(row)
    assert diagnosis.history.planned_steps == 40
    [cause] = diagnosis.explain(ended=True).causes
    assert cause.rule == "budget_short" and cause.changes == {"budget.max_train_seconds": 75.0}
    assert "40 of 2000 steps" in cause.what


def test_edits_of_causes_never_contradict_each_other() -> None:
    first = Finding(rule="a", level="warning", what="", changes={"optimizer.learning_rate": 1e-3})
    second = Finding(rule="b", level="warning", what="", changes={"optimizer.learning_rate": 1e-5, "algorithm.beta": 0})
    assert merged([first, second]) == {"optimizer.learning_rate": 1e-3, "algorithm.beta": 0}
    known = {rule.id for rule in RULES} | {"no_signal", "groups_given_up"}
    assert set(EXPLAINS) <= known and {rule for rules in EXPLAINS.values() for rule in rules} <= known
    # An effect never explains its cause: explanations go down the list only, or back to a rule that is a cause alone.
    assert all(rule not in rules for rule, rules in EXPLAINS.items())


def test_signal_of_larger_groups_is_estimated_from_smaller_ones() -> None:
    # Tasks of equal difficulty: a share p solved gives 1 - p^n - (1-p)^n.
    exact = 1 - 0.2**8 - 0.8**8
    assert expected_signal(2, 0.2, 0.32, 8) == pytest.approx(exact, abs=1e-3)
    # Tasks that are always or never solved have no signal at any size.
    assert expected_signal(2, 0.2, 0.0, 8) < 0.02
    assert 0.3 < expected_signal(2, 0.2, 0.2, 8) < exact


def test_standstill_of_small_groups_advises_larger_groups() -> None:
    found = standstill({"zero_signal": 200}, config(rollout__group_size=2), accuracy=0.0)
    assert found is not None and found.rule == "group_too_small" and found.changes == {"rollout.group_size": 8}
    usual = standstill({"zero_signal": 200}, config(), accuracy=0.0)
    assert usual is not None and usual.rule == "all_wrong"


def test_standstill_of_masked_answers_advises_longer_ones() -> None:
    found = standstill({"empty": 200}, config(algorithm__mask_truncated_completions=True))
    assert found is not None and "cut off" in found.what and "rollout.max_new_tokens to 512" in found.next


def test_old_groups_are_no_cause_while_few_tokens_are_clipped() -> None:
    crowded = {"rollout.concurrency": [16, 64]}
    assert not explained({"age": 9.0, "clip": 0.01}, crowded, rollout__concurrency=64).causes
    for series, fields in (
        ({"age": 9.0, "clip": 0.15}, {}),
        ({"age": 20.0, "clip": 0.01}, {}),
        ({"age": 9.0, "clip": 0.0}, {"algorithm__importance_sampling_mode": "token_truncate"}),
    ):
        [cause] = explained(series, crowded, rollout__concurrency=64, **fields).causes
        assert cause.rule == "staleness"


def test_shortened_run_lacks_steps_and_not_warmup() -> None:
    short = {"budget.steps": [300, 20], "optimizer.warmup_steps": [5, 10]}
    made = explained(FLAT, short, rows=20, steps=20, optimizer__warmup_steps=10)
    assert [field for cause in made.causes for field in cause.changes] == ["budget.steps"]
    long = {"optimizer.warmup_steps": [5, 10]}
    made = explained(FLAT, long, rows=20, steps=20, optimizer__warmup_steps=10)
    assert "optimizer.warmup_steps" in {field for cause in made.causes for field in cause.changes}


def test_dropped_groups_follow_from_steps_of_one_group() -> None:
    series = {**FLAT, "age": 6.0, "stale_each": 0.5, "groups/delivered": 1.0}
    found = explained(series, {"rollout.groups_per_step": [8, 1]}, rollout__groups_per_step=1)
    assert [cause.rule for cause in found.causes] == ["batch_too_small"]
    assert "dropped_stale" in {one.rule for one in found.below["batch_too_small"]}


def test_collapse_under_shuffled_rewards_does_not_accuse_the_learning_rate() -> None:
    rates = {"optimizer.learning_rate": [1e-3, 1.2e-3]}
    fallen = CASES["collapse"][0]
    alone = explained(fallen, rates, optimizer__learning_rate=1.2e-3)
    assert ["optimizer.learning_rate"] in [list(cause.changes) for cause in alone.causes]
    both = rates | {"algorithm.shuffle_rewards": [False, True]}
    found = explained(fallen, both, optimizer__learning_rate=1.2e-3, algorithm__shuffle_rewards=True)
    assert [list(cause.changes) for cause in found.causes] == [["algorithm.shuffle_rewards"]]


def test_collapse_by_a_high_learning_rate_is_told_below_it() -> None:
    """The field is named once, so that other causes stay among the first three."""
    fallen = CASES["collapse"][0] | {"moved": 3.0}
    found = explained(fallen, {"optimizer.learning_rate": [1e-3, 1e-2]}, optimizer__learning_rate=1e-2)
    named = [name for cause in found.causes for name in cause.changes]
    assert named.count("optimizer.learning_rate") == 1
    assert "collapse" in {one.rule for one in found.below["learning_rate_high"]}


def test_tasks_that_differ_from_step_to_step_alone_are_told_apart() -> None:
    """With one group a step, the rewards of a step are equal."""
    alike = {"zero": 1.0, "other": 1.0, "wrong": 0.0, "right": 0.0, "reward_std": 0.0}
    assert not found("constant_reward", config(), **alike, reward=lambda row: row % 3 / 10)
    [symptom] = found("scorer_ignores_answers", config(), **alike, reward=lambda row: row % 3 / 10)
    assert "while tasks differ" in symptom.what
