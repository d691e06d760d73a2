"""Diagnosis: rules on generated and recorded metrics, and how findings begin and end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from toprope.analysis.failures import Kind
from toprope.analysis.findings import RULES, Diagnosis, diagnose, headline
from toprope.analysis.findings import diagnosis as diagnosis_module
from toprope.analysis.findings.rules import Rule, Symptom
from toprope.records.run.status import Finding
from toprope.settings.schema import Config

Row = dict[str, Any]
RECORDED = Path(__file__).resolve().parents[2] / "data" / "findings"


def config(steps: int = 200, **changes: Any) -> Config:
    made = Config()
    made.budget.steps = steps
    made.optimizer.learning_rate = 1e-3
    made.rollout.queue_groups = 12
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(getattr(made, section), field, value)
    return made


def healthy(rows: int = 100, **series: Callable[[int], Any] | float | None) -> Iterator[Row]:
    """Yield the metrics of a learning run, some replaced: by a number or a function of the row; None omits a metric."""
    dice = random.Random(0)
    lost = 0.0
    for row in range(rows):
        reward = 0.1 + 0.8 * row / rows + dice.uniform(-0.03, 0.03)
        numbers: Row = {
            "step": row + 1,
            "loss": dice.uniform(-0.01, 0.01),
            "reward": reward,
            "reward_std": 0.3,
            "success": reward,
            "entropy": 0.6 - 0.4 * row / rows,
            "grad_norm": dice.uniform(0.8, 1.4),
            "frac_reward_zero_std": 0.4,
            "frac_reward_zero_std/all_wrong": max(0.4 - row / rows, 0.0),
            "frac_reward_zero_std/all_right": min(0.4, row / rows),
            "frac_reward_zero_std/other": 0.0,
            "errors/share": 0.0,
            "completions/clipped_ratio": 0.0,
            "clip_ratio/region_mean": 0.02,
            "policy/moved": 0.06,
            "policy/moved_versions": 2.8,
            "staleness/mean": 2.8,
            "staleness/min": 2.0,
            "groups/delivered": 8.0,
            "groups/waiting": 6.0,
            "time/step": 0.05,
            "time/wait": 0.01,
        }
        for name, value in series.items():
            value = value(row) if callable(value) else value
            if name == "stale_each":
                lost += value
                numbers["dropped/stale"] = lost
            elif name == "nan":
                numbers["loss"] = None if value else numbers["loss"]
            elif value is None:
                numbers.pop(_metric(name), None)
            else:
                numbers[_metric(name)] = value
        yield numbers


_SHORT = {
    "wrong": "frac_reward_zero_std/all_wrong",
    "right": "frac_reward_zero_std/all_right",
    "other": "frac_reward_zero_std/other",
    "zero": "frac_reward_zero_std",
    "errors": "errors/share",
    "cut": "completions/clipped_ratio",
    "clip": "clip_ratio/region_mean",
    "moved": "policy/moved",
    "age": "staleness/mean",
    "newest": "staleness/min",
    "wait": "time/wait",
    "waiting": "groups/waiting",
    "gap": "sampling/sampling_logp_difference/mean",
}


def _metric(name: str) -> str:
    return _SHORT.get(name, name)


FLAT = {"reward": 0.2, "success": 0.2, "entropy": 0.6}
FEW = {"zero": 0.7, "reward": 0.2, "success": 0.2}
NOTHING = {"reward": 0.0, "success": 0.0, "reward_std": 0.0, "zero": 1.0, "wrong": 1.0}

# Rule: metrics that trigger it, its level, and metrics that almost do.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "nan": ({"nan": lambda row: row > 40}, "critical", {"grad_norm": 40.0}),
    "scorer_errors": ({"errors": lambda row: 0.3 if row > 20 else 0.0}, "critical", {"errors": 0.02}),
    "environment_errors": (
        {"environments/a/errors_share": 0.3, "environments/b/errors_share": 0.0},
        "critical",
        {"environments/a/errors_share": 0.02, "environments/b/errors_share": 0.0},
    ),
    "environment_silent": (
        {
            "environments/a/c/frac_reward_zero_std": 1.0,
            "environments/a/c/success": 0.0,
            "environments/b/frac_reward_zero_std": 0.3,
            "environments/b/success": 0.5,
        },
        "warning",
        {"environments/a/c/frac_reward_zero_std": 0.6, "environments/b/frac_reward_zero_std": 0.3},
    ),
    "environment_behind": ({"environments/b/share": 0.1}, "warning", {"environments/b/share": 0.3}),
    "environment_forgotten": (
        {"environments/a/success": lambda row: 0.8 if row < 50 else 0.1, "environments/b/success": 0.5},
        "warning",
        {"environments/a/success": lambda row: 0.8 if row < 50 else 0.6, "environments/b/success": 0.5},
    ),
    "constant_reward": (
        {"reward": 0.5, "reward_std": 0.0, "zero": 1.0, "other": 1.0, "wrong": 0.0, "right": 0.0},
        "critical",
        {"reward": 0.5, "reward_std": 0.2, "zero": 0.6, "other": 0.6},
    ),
    "scorer_ignores_answers": (
        {"reward": 0.5, "reward_std": 0.2, "zero": 1.0, "other": 1.0, "wrong": 0.0, "right": 0.0},
        "critical",
        {"reward_std": 0.2, "zero": 0.7, "other": 0.5},
    ),
    "all_wrong": (NOTHING, "critical", {"wrong": lambda row: max(0.85 - row / 50, 0), "zero": 0.8}),
    "all_right": ({"reward": 1.0, "right": 0.97, "zero": 0.97}, "warning", {"right": lambda row: min(0.85, row / 80)}),
    "parse_failures": (
        {"parse_failures": 0.5, **FLAT},
        "warning",
        {"parse_failures": lambda row: max(0.8 - row / 30, 0)},
    ),
    "reward_without_success": (
        {"success": lambda row: 0.4 - 0.39 * row / 100},
        "warning",
        {"success": lambda row: 0.1 + 0.5 * row / 100},
    ),
    "learning_rate_high": ({"moved": 3.0, **FLAT}, "critical", {"moved": 0.3, **FLAT}),
    "learning_rate_low": ({"moved": 0.0001, **FLAT}, "warning", {"moved": 0.0001}),
    "collapse": (
        {
            "reward": lambda row: 0.1 + 0.01 * min(row, 50) if row < 60 else 0.05,
            "entropy": lambda row: 0.4 if row < 55 else 1.2,
        },
        "critical",
        {"reward": lambda row: 0.5 if row < 60 else 0.3, "entropy": lambda row: 0.4 if row < 55 else 1.2},
    ),
    "clip_fraction": ({"clip": 0.3}, "warning", {"clip": lambda row: 0.3 if row < 10 else 0.05}),
    "kl": ({"kl": 3.0, **FLAT}, "critical", {"kl": 0.2}),
    "entropy_gone": (
        {"reward": 0.3, "success": 0.3, "entropy": lambda row: 0.6 if row < 10 else 0.01},
        "warning",
        {"success": 0.95, "entropy": lambda row: 0.6 if row < 10 else 0.01},
    ),
    "gradient_spikes": (
        {"grad_norm": lambda row: 9.0 if row > 40 and row % 3 == 0 else 1.0, **FLAT},
        "warning",
        {"grad_norm": lambda row: 9.0 if row % 20 == 0 else 1.0, **FLAT},
    ),
    "truncated": ({"cut": 0.5}, "warning", {"cut": lambda row: max(0.9 - row / 40, 0.0)}),
    "staleness": ({"age": 9.0, "clip": 0.15}, "warning", {"age": 3.5}),
    "dropped_stale": ({"stale_each": 8.0}, "warning", {"stale_each": 0.5}),
    "logprob_gap": (
        {"gap": lambda row: 1e-6 if row < 30 else 0.2},
        "warning",
        {"gap": lambda row: 1e-6 if row < 30 else 0.01},
    ),
    "served_version": (
        {"newest": lambda row: max(2.0, row - 20.0), "age": lambda row: max(2.0, row - 20.0)},
        "critical",
        {"newest": lambda row: 4.0 + row % 2},
    ),
    "rewards_shuffled": (FLAT, "warning", {}),
    "group_too_small": ({**FEW, **FLAT}, "warning", FEW),
    "batch_too_small": ({**FEW, **FLAT}, "warning", FEW),
    "kl_weight": ({**FLAT, "kl": 0.02, "loss": 0.02}, "warning", {**FLAT, "kl": 0.001, "loss": 0.05}),
    "budget_short": ({**FLAT, "moved": 0.008}, "warning", {**FLAT, "moved": 0.02}),
    "warmup_long": (FLAT, "warning", FLAT),
    "sampling_extreme": (FLAT, "warning", FLAT),
    "weight_decay": (FLAT, "warning", {}),
    "far_from_preset": (FLAT, "warning", {}),
    "trainer_waits": ({"wait": 0.04}, "note", {"wait": 0.02}),
    "sampler_waits": ({"waiting": 13.0, "wait": 0.001}, "note", {"waiting": 5.0, "wait": 0.001}),
}


# Rules about fields: values that are reported, and near misses.
CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rewards_shuffled": ({"algorithm__shuffle_rewards": True}, {}),
    "environment_behind": ({"environment__mixture": [{"name": "b"}]},) * 2,
    "group_too_small": ({"rollout__group_size": 2}, {"rollout__group_size": 4}),
    "batch_too_small": ({"rollout__groups_per_step": 1}, {"rollout__groups_per_step": 2}),
    "kl_weight": ({"algorithm__beta": 1.0}, {"algorithm__beta": 0.2}),
    "warmup_long": ({"optimizer__warmup_steps": 1000}, {"optimizer__warmup_steps": 40}),
    "sampling_extreme": ({"rollout__temperature": 3.0}, {"rollout__temperature": 1.4}),
    "weight_decay": ({"optimizer__weight_decay": 1.0, "optimizer__learning_rate": 0.01}, {}),
    "far_from_preset": ({"rollout__top_p": 0.5}, {"rollout__top_p": 0.9}),
}
DIFFERS = {"far_from_preset": {"rollout.top_p": [1.0, 0.5]}}


def of_case(rule: str, near_miss: bool) -> list[Finding]:
    fields, series = CONFIGURED.get(rule, ({}, {}))[near_miss], CASES[rule][2 if near_miss else 0]
    differs = {} if near_miss else DIFFERS.get(rule, {})
    return [one for one in diagnose(healthy(**series), config(**fields), differs) if one.rule == rule]


def test_every_rule_has_cases() -> None:
    assert {rule.id for rule in RULES} == set(CASES)


def test_findings_page_names_every_rule_and_failure_kind() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "findings.md").read_text(encoding="utf-8")
    assert [name for name in (*CASES, "no_signal", *get_args(Kind)) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("rule", CASES)
def test_rule_reports_its_symptom(rule: str) -> None:
    level, reported = CASES[rule][1], of_case(rule, near_miss=False)
    assert reported, "not reported"
    assert max(reported, key=lambda one: ["over", "note", "warning", "critical"].index(one.level)).level == level
    first = reported[0]
    assert first.what and first.next and first.threshold and first.source and first.observed and first.step
    # check_status cuts these texts at this length.
    assert len(first.what) <= 240 and len(first.next) <= 240, (len(first.what), len(first.next))


@pytest.mark.parametrize(
    ("busy", "what", "remedy"),
    [(0.95, "the sampler works 95% of it and is the side to widen", "launcher.inference_gpus"),
     (0.3, "the sampler works only 30% of it", "rollout.concurrency to")],
)  # fmt: skip
def test_waiting_trainer_is_told_which_side_to_widen(busy: float, what: str, remedy: str) -> None:
    rows = [row | {"utilization/sampler": busy} for row in healthy(wait=0.04)]
    found = next(one for one in diagnose(rows, config(), {}) if one.rule == "trainer_waits")
    assert what in found.what.replace(" %", "%") and remedy in found.next
    assert found.observed["sampler_works"] == pytest.approx(busy) and len(found.next) <= 240


@pytest.mark.parametrize("rule", CASES)
def test_rule_is_silent_on_near_miss(rule: str) -> None:
    assert of_case(rule, near_miss=True) == []


def test_healthy_run_has_no_findings() -> None:
    assert diagnose(healthy(200), config()) == []
    assert diagnose(healthy(2000), config(2000)) == []


def test_headline_prefers_cause_to_consequence() -> None:
    thrown_off = {"moved": lambda row: 3.0 if row < 10 else 1e-6, "cut": 1.0, **NOTHING}
    found = headline(diagnose(healthy(**thrown_off), config()))
    assert found is not None and found.rule == "learning_rate_high"
    errors = headline(diagnose(healthy(errors=1.0, **NOTHING), config()))
    assert errors is not None and errors.rule == "scorer_errors"
    cut = headline(diagnose(healthy(cut=1.0, **NOTHING), config()))
    assert cut is not None and (cut.rule, cut.level) == ("truncated", "critical")


def test_learning_rate_advice_follows_policy_movement() -> None:
    [high] = [one for one in diagnose(healthy(moved=2.8, **FLAT), config()) if one.rule == "learning_rate_high"]
    assert "optimizer.learning_rate to 3e-05" in high.next  # a step moved the policy by 1 nat instead of 0.03
    [low] = [one for one in diagnose(healthy(moved=2.8e-5, **FLAT), config()) if one.rule == "learning_rate_low"]
    assert "optimizer.learning_rate to 0.01" in low.next


def test_flat_entropy_reveals_low_learning_rate() -> None:
    still = {"policy/moved": None, **FLAT, "entropy": lambda row: 0.6 + 0.005 * (row % 2)}
    [low] = [one for one in diagnose(healthy(200, **still), config()) if one.rule == "learning_rate_low"]
    assert low.confidence == "low" and low.step and low.step <= 100
    moving = {"policy/moved": None, **FLAT, "entropy": lambda row: 0.6 - 0.001 * row}
    assert diagnose(healthy(200, **moving), config()) == []


# Beginning and end of findings


def rule_of(levels: dict[int, str]) -> Rule:
    """Return a rule that reports these levels, each from its row on ('' for none)."""

    def look(history: Any) -> Symptom | None:
        level = levels[max(row for row in levels if row <= history.rows)]
        return Symptom(level, f"row {history.rows}") if level else None  # type: ignore[arg-type]

    return Rule("made_up", look, "none", "nowhere", patience=3)


def reported_by(levels: dict[int, str], rows: int = 400) -> list[tuple[str, int | None]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis_module, "RULES", (rule_of(levels),))
        reported = diagnose(healthy(rows), config())
    return [(finding.level, finding.step) for finding in reported]


def test_finding_is_reported_at_start_worsening_and_end() -> None:
    levels = {0: "", 10: "warning", 40: "critical", 70: "warning", 100: ""}
    assert reported_by(levels) == [("warning", 12), ("critical", 42), ("over", 119)]


def test_brief_symptom_is_not_reported() -> None:
    assert reported_by({row: "critical" if row % 3 else "" for row in range(400)}) == []


def test_recurring_symptom_is_reported_ever_more_rarely() -> None:
    reported = reported_by({row: "warning" if row % 40 < 10 else "" for row in range(2000)}, 2000)
    assert 2 < len(reported) < 12
    assert reported[-1][1] is not None and reported[-1][1] < 1000


def test_open_findings_are_ranked_and_notes_make_no_headline() -> None:
    diagnosis = Diagnosis(config())
    for row in healthy(age=9.0, clip=0.15, wait=0.04, errors=1.0):
        diagnosis.see(row)
    assert [(one.rule, one.level) for one in diagnosis.open] == [
        ("scorer_errors", "critical"),
        ("staleness", "warning"),
    ]
    assert headline(diagnose(healthy(wait=0.04), config())) is None


def test_diagnosis_bounds_memory_and_survives_odd_rows() -> None:
    diagnosis = Diagnosis(config(100_000))
    sizes = []
    for row in healthy(3000):
        diagnosis.see(row)
        sizes.append(sum(len(diagnosis.history[name].values) for name in ("reward", "entropy", "time/step")))
    assert max(sizes) == sizes[-1] == 60
    for row in ({}, {"step": 7}, {"step": 8, "reward": float("nan")}, {"step": 9, "unheard": 1.0, "reward": None}):
        assert all(finding.rule != "nan" for finding in diagnosis.see(row))


# Recorded runs: every second or fourth row, three digits


def recorded(name: str) -> tuple[list[Row], Config]:
    kept = json.loads((RECORDED / f"{name}.json").read_text())
    columns = {
        metric: values if isinstance(values, list) else [values] * kept["steps"]
        for metric, values in kept["columns"].items()
    }
    rows = [
        {"step": row + 1, **{metric: column[row] for metric, column in columns.items()}} for row in range(kept["steps"])
    ]
    return rows, config(kept["planned"], **{name.replace(".", "__"): one for name, one in kept["config"].items()})


REAL = {
    "high-copy": "learning_rate_high",
    "collapse": "collapse",
    "low-spell": "learning_rate_low",
    "raises": "scorer_errors",
    "constant": "constant_reward",
    "by-task": "scorer_ignores_answers",
    "impossible": "all_wrong",
    "easy-short": "all_right",
    "cut": "truncated",
    "crowd": "staleness",
    "dropping-small": "dropped_stale",
    "half": "nan",
    "hack": "reward_without_success",
    "unread": "parse_failures",
    "kl": "kl",
    "stuck": "served_version",
    "slow": "trainer_waits",
    "old-groups": "clip_fraction",
}
"""Recorded runs and the rule that must report each. `hack` rewards vowels, `stuck` had a trainer that published no
weights, `slow` a scorer that sleeps."""
HEADLINES = {"collapse": "learning_rate_high", "kl": "learning_rate_high", "old-groups": "staleness"}


@pytest.mark.parametrize("name", REAL)
def test_recorded_sick_run_is_named(name: str) -> None:
    rows, made = recorded(name)
    reported = [one for one in diagnose(rows, made) if one.level != "over"]
    assert REAL[name] in {one.rule for one in reported}
    found = headline(reported)
    expected = None if name == "slow" else HEADLINES.get(name, REAL[name])
    assert (found and found.rule) == expected


@pytest.mark.parametrize("name", ["template", "sort-places", "ppo-spell"])
def test_recorded_healthy_run_has_no_critical_finding(name: str) -> None:
    assert [finding for finding in diagnose(*recorded(name)) if finding.level == "critical"] == []


def test_learning_ppo_run_has_no_warning() -> None:
    """It rose from 0.03 to 0.92; its value loss, several passes per batch and low final entropy are usual."""
    rows, made = recorded("ppo-spell")
    assert rows[-1]["success"] > 0.85 and made.algorithm.name == "ppo"
    assert [one.rule for one in diagnose(rows, made) if one.level in ("warning", "critical")] == []


def test_low_entropy_is_fine_if_nearly_all_is_right() -> None:
    def rules(success: float) -> set[str]:
        rows = healthy(reward=success, success=success, entropy=lambda row: 0.6 if row < 10 else 0.03)
        return {one.rule for one in diagnose(rows, config())}

    assert "entropy_gone" in rules(0.7) and "entropy_gone" not in rules(0.87)


def test_kl_advice_for_ppo_names_ppo_field() -> None:
    made = config(algorithm__name="ppo", ppo__kl_coef=0.02)
    [reported] = [
        one for one in diagnose(healthy(kl=lambda row: 0.9), made) if one.rule == "kl" and one.level != "over"
    ][:1]
    assert "ppo.kl_coef to 0.04" in reported.next


def found(rule: str, settings: Config, **series: Callable[[int], Any] | float | None) -> list[Finding]:
    return [one for one in diagnose(healthy(**series), settings) if one.rule == rule]


def certain_later(row: int) -> float:
    return 0.5 if row < 40 else 0.001


@pytest.mark.parametrize("rule, spread", [("constant_reward", 0.0), ("scorer_ignores_answers", 0.2)])
def test_scorer_that_told_answers_apart_is_not_accused(rule: str, spread: float) -> None:
    def since(first: int) -> dict[str, Callable[[int], Any]]:
        alike = {"zero": (0.4, 1.0), "other": (0.0, 1.0), "reward_std": (0.3, spread), "reward": (0.05, 0.1)}
        return {name: lambda row, pair=pair: pair[row >= first] for name, pair in alike.items()}  # type: ignore[misc]

    assert [one.level for one in found(rule, config(), **since(0))] == ["critical"]
    [later] = found(rule, config(), **since(40))
    assert later.level == "warning" and "at the start" in later.what and "fix" not in later.next
    assert found(rule, config(), **since(0), entropy=0.001) == []
    assert [one.level for one in found(rule, config(), **since(0), entropy=certain_later)] == ["critical"], "it lasts"


def test_fields_are_not_blamed_where_no_task_is_ever_solved() -> None:
    assert found("group_too_small", config(rollout__group_size=2, rollout__groups_per_step=16), **NOTHING) == []
    [small] = found("group_too_small", config(rollout__group_size=2, rollout__groups_per_step=4), **NOTHING)
    assert small.what == "Groups of 2: 0 % of them carry signal. A step compares 8 answers."
    still = {**NOTHING, "kl": 0.001, "loss": 0.001}
    assert found("kl_weight", config(algorithm__beta=1.0), **still) == []
