"""The rule that suspects fields far from the preset's values where a run shows nothing else.

A difference from the preset is a prior, not a verdict. Only fields that can prevent learning are compared, only large
differences count, and a field is left out if the run shows that it does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from toprope.analysis.findings.causes import BUDGET
from toprope.analysis.findings.configured import LEAST_MOVE
from toprope.analysis.findings.history import TrainingHistory
from toprope.analysis.findings.rewards import nothing_scored
from toprope.analysis.findings.rules import Rule, Symptom, mended
from toprope.settings.schema import Config
from toprope.text_format import value


def _less(factor: float) -> Callable[[Any, Any], bool]:
    return lambda now, usual: bool(usual) and now * factor <= usual


def _more(least: float, factor: float) -> Callable[[Any, Any], bool]:
    return lambda now, usual: now >= least and now >= factor * usual


_FAR: dict[str, Callable[[Any, Any], bool]] = {
    "optimizer.learning_rate": lambda now, usual: max(now / usual, usual / now) >= 9.0,
    "algorithm.beta": _more(0.1, 5.0),
    "ppo.kl_coef": _more(0.1, 5.0),
    "rollout.group_size": _less(3),
    "rollout.groups_per_step": _less(4),
    "rollout.max_new_tokens": _less(2),
    "rollout.temperature": lambda now, usual: abs(now - usual) >= 0.6,
    "rollout.top_p": _less(2),
    "rollout.max_staleness": _less(4),
    "policy.max_context": _less(2),
    "optimizer.warmup_steps": _more(50, 10.0),
    "optimizer.weight_decay": _more(0.3, 5.0),
    "optimizer.max_grad_norm": lambda now, usual: bool(usual) and (now * 1000 <= usual or now >= 100 * usual),
    "algorithm.epsilon": _less(10),
    "algorithm.epsilon_high": _less(10),
    "algorithm.shuffle_rewards": lambda now, usual: now and not usual,
    "budget.steps": _less(4),
    "budget.max_train_seconds": lambda now, usual: now is not None and (usual is None or now * 4 <= usual),
}
"""Field -> True if a value is so far from the usual one that it can prevent learning."""


def far_fields(config: Config, preset: Mapping[str, Any]) -> list[str]:
    """Return the fields whose values are far from the preset's, in the order of suspicion."""
    fields = []
    for field, far in _FAR.items():
        run_value = attrgetter(field)(config)
        if field in preset and run_value is not None and (preset[field] is not None or field.startswith("budget.")):
            if far(run_value, preset[field]):
                fields.append(field)
    return fields


def far_from_preset(history: TrainingHistory) -> Symptom | None:
    """The reward has not risen, and fields are far from the preset's values."""
    wrong = history["frac_reward_zero_std/all_wrong"]
    if history.restarted:  # a curriculum opened a level, so the run learned, whatever the reward does since
        return None
    stuck = wrong.start is not None and wrong.start >= 0.9 and history.recent("frac_reward_zero_std/all_wrong") >= 0.9
    if not stuck and not history.judged(4 * history.early):
        return None
    if history.gain > history.noise or history.recent("success") >= 0.8 or nothing_scored(history):
        return None
    cleared = _cleared(history)
    fields = [field for field in far_fields(history.config, history.preset) if field not in cleared]
    if not fields:
        return None
    present = {field: attrgetter(field)(history.config) for field in fields}
    changes = {field: history.preset[field] for field in fields}
    return mended(
        "warning",
        "The reward has not risen, and far from the preset are "
        + ", ".join(f"{field} {value(present[field])} ({value(changes[field])})" for field in fields[:4])
        + ".",
        {field: value(present[field]) for field in fields},
        changes,
        "low",
    )


def _cleared(history: TrainingHistory) -> set[str]:
    """Return fields that the run itself shows to be harmless."""
    cleared, move = set(), history.peak_move
    if move is not None and LEAST_MOVE <= move < 0.2:
        cleared.add("optimizer.learning_rate")
    if history["completions/clipped_ratio"].full and history.recent("completions/clipped_ratio") < 0.15:
        cleared |= {"rollout.max_new_tokens", "policy.max_context"}
    if len(history.dropped) > history.window and history.stale_share < 0.2:
        cleared.add("rollout.max_staleness")
    norm, usual_norm = history["grad_norm"], history.preset.get("optimizer.max_grad_norm")
    if usual_norm and norm.best is not None and norm.best <= usual_norm < history.config.optimizer.max_grad_norm:
        cleared.add("optimizer.max_grad_norm")  # the preset's limit would not have shortened these gradients
    wrong = history["frac_reward_zero_std/all_wrong"]
    never_right = wrong.start == 1.0 and history.recent("frac_reward_zero_std/all_wrong") == 1.0
    fell = history.gain < -history.noise
    if never_right or fell or not history.over or history.step < 0.9 * history.planned_steps:
        cleared |= BUDGET  # only a run that used its budget up without a loss can lack steps
    return cleared


FAR_FROM_PRESET = Rule(
    "far_from_preset",
    far_from_preset,
    "a rate 10 times, a group 3 times, a budget 4 times away, and the like; the reward has not risen",
    "the preset, as a prior",
)
