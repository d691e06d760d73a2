"""Rules about optimization: collapse, learning rate too high or too low, NaN, drift.

Single values say little: healthy runs of small policies exceed every published limit for entropy or gradient norm at
times. These rules therefore compare a value with its history, and most apply only while the reward does not rise.
"""

from __future__ import annotations

import math
from typing import Any

from toprope.analysis.findings.configured import LEAST_MOVE
from toprope.analysis.findings.history import TrainingHistory
from toprope.analysis.findings.rewards import nothing_scored, nothing_to_learn
from toprope.analysis.findings.rules import MEASURED, Rule, Symptom, edit, mended, said, share

_RATE = "optimizer.learning_rate"
_WRONG = "frac_reward_zero_std/all_wrong"
_CLIP = "clip_ratio/region_mean"
_HEALTHY_MOVE = 0.03
"""Change of a sampled token per step, in nats; 0.005 to 0.07 in runs that learned well."""
_NEARLY = 0.8
"""Success above which low entropy is expected: PPO and GRPO have a tenth of their initial entropy there (measured)."""
_LEAST_REACH = 0.2
"""Change in nats that all planned steps together must be able to make, at the largest change so far."""


def nan(history: TrainingHistory) -> Symptom | None:
    """Loss or gradient is NaN or infinite, so the weights after this step are too."""
    lost = [name for name in ("loss", "grad_norm") if name in history.row and history.row[name] is None]
    if not lost:
        return None
    reward = history.recent("reward")
    section = "sft" if history.config.algorithm.name == "sft" else "optimizer"
    rate, dtype = getattr(history.config, section).learning_rate, history.config.policy.dtype
    changes: dict[str, Any] = {}
    if abs(reward) > 1e6:
        change = f"the reward reaches {reward:.2g}: bound it in the environment's score(), then start_training again"
    elif dtype == "float16" and history.config.policy.lora:  # all weights are trained in float32
        changes = {"policy.dtype": "float32"}
        change = edit("policy.dtype to float32 (float16 overflows)")
    else:
        field = f"{section}.learning_rate"
        changes = {field: _lower(history, rate / 3, field), f"{section}.max_grad_norm": 0.5}
        change = edit(said(changes))
    return Symptom(
        "critical",
        f"{' and '.join(lost)} at step {history.step} {'are' if len(lost) > 1 else 'is'} not a number.",
        {"learning_rate": rate, "dtype": dtype, "reward": reward, "step": history.step},
        change,
        "high",
        changes,
    )


def collapse(history: TrainingHistory) -> Symptom | None:
    """The reward fell by more than half from its best while entropy rose, or all earlier signal is gone."""
    aim = history[history.aim]
    if aim.best is None or nothing_scored(history):
        return None
    recent_aim = history.recent(history.aim)
    entropy, before = history.recent("entropy"), history.entropy_at_best
    risen = before is not None and entropy > 1.1 * before and _unlearned(history)
    if not risen and not _signal_lost(history):
        return None
    rate = history.config.optimizer.learning_rate
    changes = {_RATE: _lower(history, rate / 5)}
    return Symptom(
        "critical",
        f"The {history.aim} fell from {aim.best:.3g} to {recent_aim:.3g} and "
        f"{'entropy rose' if risen else 'all signal is gone'}: the policy has collapsed.",
        {
            f"best_{history.aim}": aim.best,
            history.aim: recent_aim,
            "entropy": entropy,
            "entropy_at_best": before or 0.0,
            "all_wrong_share": history.recent(_WRONG),
            "learning_rate": rate,
        },
        edit(said(changes)) + "; the checkpoint before the fall is still good",
        "high",
        changes,
    )


def learning_rate_high(history: TrainingHistory) -> Symptom | None:
    """Single steps change the policy drastically without a gain in reward."""
    peak = history.peak_move
    if (
        peak is None
        or peak < 0.2
        or not history["reward"].full
        or history.gain > history.noise
        or nothing_scored(history)
    ):
        return None
    rate, recent_reward = history.config.optimizer.learning_rate, history.recent("reward")
    return mended(
        "critical" if peak >= 0.4 or _unlearned(history) else "warning",
        f"A step changed the log-probability of sampled tokens by {peak:.2g} nats on average, and the reward "
        f"({recent_reward:.3g}) is not above its initial value: the learning rate is too high.",
        {
            "moved_per_step": peak,
            "learning_rate": rate,
            "reward": recent_reward,
            "reward_at_the_start": history["reward"].start or 0.0,
            "entropy": history.recent("entropy"),
        },
        {_RATE: _lower(history, float(f"{rate * _HEALTHY_MOVE / peak:.1g}"))},
        "high" if peak >= 0.4 else "medium",
    )


def learning_rate_low(history: TrainingHistory) -> Symptom | None:
    """Neither policy nor reward has moved although there is signal."""
    reward = history["reward"]
    if not history.judged(2 * history.early) or reward.start is None or history.gain > history.noise:
        return None
    if nothing_to_learn(history) or _done(history):
        return None
    if history.peak_move is None:
        return _unmoved(history)
    planned = history.planned_steps
    reach = history.peak_move * planned
    if reach > _LEAST_REACH or history.peak_move >= LEAST_MOVE:  # else the budget is short, not the rate low
        return None
    rate = history.config.optimizer.learning_rate
    # Adam's steps are proportional to the rate: choose one at which the planned steps change a few nats.
    wanted = rate * min(max(10 * _LEAST_REACH / max(reach, 1e-9), 3.0), 3000.0)
    return mended(
        "warning",
        f"In {history.rows} steps neither reward ({history.recent('reward'):.3g}) nor policy has moved: at {rate:g} a "
        f"step changes sampled tokens by {history.peak_move:.1g} nats, so {_said_steps(history)} cannot change much.",
        {
            "moved_per_step": history.peak_move,
            "reward": history.recent("reward"),
            "reward_at_the_start": reward.start,
            "entropy": history.recent("entropy"),
            "entropy_at_the_start": history["entropy"].start or 0.0,
            "grad_norm": history.recent("grad_norm"),
            "learning_rate": rate,
            "planned_steps": planned,
        },
        {_RATE: history.towards(_RATE, float(f"{min(0.01, wanted):.1g}"))},
        "high" if reach < 0.02 else "medium",
    )


def _unmoved(history: TrainingHistory) -> Symptom | None:
    """Detect a low learning rate if every group is of the newest version, so that tokens do not show movement."""
    entropy, rate = history["entropy"], history.config.optimizer.learning_rate
    if history.rows < 4 * history.early or not entropy.start or not history["grad_norm"].full:
        return None
    recent_entropy = history.recent("entropy")
    if abs(recent_entropy / entropy.start - 1) > 0.03 or history.recent("frac_reward_zero_std") > 0.8:
        return None  # It moves, or there is too little signal for any rate to have moved it yet.
    return mended(
        "warning",
        f"In {history.rows} steps neither reward ({history.recent('reward'):.3g}) nor entropy ({recent_entropy:.3g}) "
        "has moved: the learning rate seems too low.",
        {
            "reward": history.recent("reward"),
            "entropy": recent_entropy,
            "entropy_at_the_start": entropy.start,
            "grad_norm": history.recent("grad_norm"),
            "learning_rate": rate,
        },
        {_RATE: history.towards(_RATE, float(f"{min(0.01, 10 * rate):.1g}"))},
        "low",
    )


def clip_fraction(history: TrainingHistory) -> Symptom | None:
    """Many tokens are outside the clip range: steps are too large, or the data is too old."""
    clip = history[_CLIP]
    if not clip.full or nothing_to_learn(history):
        return None
    clipped_share = history.recent(_CLIP)
    if clipped_share < 0.2 or history.rows < history.early:
        return None
    is_stale = history.recent("staleness/mean") > 4
    rollout = history.config.rollout
    changes = (
        {"rollout.queue_groups": max(rollout.groups_per_step, rollout.queue_groups // 4)}
        if is_stale
        else {_RATE: _lower(history, history.config.optimizer.learning_rate / 3)}
    )
    return mended(
        "warning",
        f"{share(clipped_share)} of the tokens are clipped.",
        {"clip_fraction": clipped_share, "staleness_mean": history.recent("staleness/mean")},
        changes,
        "high" if clipped_share >= 0.4 else "medium",
    )


def kl(history: TrainingHistory) -> Symptom | None:
    """The policy is far from its start; applies only if the configuration has a KL term."""
    if not history["kl"].full:
        return None
    recent_kl = history.recent("kl")
    if recent_kl < 0.5:
        return None
    rising = history.gain > history.noise
    ppo = history.config.algorithm.name == "ppo"
    field, weight = (
        ("ppo.kl_coef", history.config.ppo.kl_coef) if ppo else ("algorithm.beta", history.config.algorithm.beta)
    )
    # A weight of 0.1 or more holds the policy already; then its steps are too large.
    changes: dict[str, Any] = (
        {field: float(f"{max(0.01, 2 * weight):.2g}")}
        if weight < 0.1
        else {_RATE: _lower(history, history.config.optimizer.learning_rate / 3)}
    )
    return Symptom(
        "critical" if recent_kl >= 2.0 and not rising and history.rows >= 4 * history.early else "warning",
        f"The policy is {recent_kl:.2g} nats a token from its start"
        f"{'' if rising else ', and the reward has not risen'}.",
        {"kl": recent_kl, "beta": weight, "reward": history.recent("reward")},
        edit(said(changes) + (" or a lower optimizer.learning_rate" if field in changes else "")),
        "low" if rising else "medium",
        changes,
    )


def entropy_gone(history: TrainingHistory) -> Symptom | None:
    """The policy stopped exploring below its target: entropy is gone and the reward stagnates."""
    entropy, aim = history["entropy"], history[history.aim]
    if not entropy.start or aim.best is None or history.rows < history.early or _done(history):
        return None
    if history.thrown_off:
        return None
    recent_entropy = history.recent("entropy")
    still = history.rows - aim.best_at >= history.window
    if recent_entropy > 0.1 * entropy.start or not still:
        return None
    if history.recent("success") >= _NEARLY:
        return None  # A policy that is nearly always right has low entropy under any algorithm.
    changes: dict[str, Any] = (
        {"rollout.temperature": history.towards("rollout.temperature", 1.0)}
        if history.config.rollout.temperature < 1.0
        else {_RATE: _lower(history, history.config.optimizer.learning_rate / 3)}
    )
    return Symptom(
        "warning",
        f"Entropy fell to {share(recent_entropy / entropy.start)} of its start and the reward stands at "
        f"{history.recent('reward'):.3g}: the policy no longer explores.",
        {"entropy": recent_entropy, "at_the_start": entropy.start, "reward": history.recent("reward")},
        edit(said(changes)),
        "medium",
        changes,
    )


def gradient_spikes(history: TrainingHistory) -> Symptom | None:
    """Gradient norms are repeatedly far above the initial ones while the reward does not rise."""
    norm = history["grad_norm"]
    if norm.start is None or history.rows < 2 * history.early or history.gain > history.noise:
        return None
    if not history["reward"].count:  # fine-tuning on demonstrations has no reward that could fail to rise
        return None
    if (history["frac_reward_zero_std"].start or 0.0) >= 0.5:
        return None  # With so little signal the start gives no baseline.
    limit = max(norm.start + 3.0 * norm.start_spread, 3.0 * norm.start)
    rate = _lower(history, history.config.optimizer.learning_rate / 3)
    high = sum(value > limit for value in norm.values)
    if high < max(2, len(norm.values) // 4):
        return None
    return Symptom(
        "warning",
        f"In {high} of the last {len(norm.values)} steps the gradient's norm was above {limit:.3g}, three times what "
        "it was at the start, and the reward does not rise.",
        {"grad_norm": history.recent("grad_norm"), "at_the_start": norm.start},
        edit(f"{said({_RATE: rate})} or a lower optimizer.max_grad_norm"),
        "low",
        {_RATE: rate},
    )


def _lower(history: TrainingHistory, rate: float, field: str = _RATE) -> float:
    """Return the learning rate to advise in place of a too high one, in two digits."""
    return float(history.towards(field, float(f"{rate:.2g}")))


def _said_steps(history: TrainingHistory) -> str:
    planned, seconds = history.planned_steps, history.config.budget.max_train_seconds
    return f"{planned} steps" if planned >= history.steps else f"the {planned} steps that {seconds:g} s allow"


def _unlearned(history: TrainingHistory) -> bool:
    """Return True if more than half of the best gain is lost, beyond chance."""
    aim = history[history.aim]
    if aim.best is None or aim.lowest is None or aim.mean is None:
        return False
    floor = min(0.0, aim.lowest)
    fall = aim.best - aim.mean
    return fall > 0.5 * (aim.best - floor) and fall > history.noise


def _signal_lost(history: TrainingHistory) -> bool:
    """Return True if every group of a window is wrong; at the initial share that has a chance below 1 in 1,000."""
    wrong = history[_WRONG]
    if wrong.start is None or wrong.start <= 0.0 or min(wrong.values) < 0.99:
        return wrong.start == 0.0 and wrong.full and min(wrong.values) >= 0.99
    groups = history.recent("groups/delivered") * len(wrong.values)
    return groups * math.log(wrong.start) < -math.log(1000)


def _done(history: TrainingHistory) -> bool:
    return history.recent("success") >= 0.9 or history.recent("frac_reward_zero_std/all_right") >= 0.75


LEARNING: tuple[Rule, ...] = (
    Rule("nan", nan, "any", "rlwatch", 1),
    Rule(
        "learning_rate_high",
        learning_rate_high,
        "0.2 nats a token and step (healthy: below 0.07) and no gain in reward; 0.4: critical",
        MEASURED,
        3,
    ),
    Rule(
        "learning_rate_low",
        learning_rate_low,
        "all planned steps at the largest change so far make less than 0.2 nats a token, and no gain in reward",
        MEASURED,
        10,
    ),
    Rule(
        "collapse",
        collapse,
        "reward down by half from its best window and entropy up by 10 %, or every group all wrong",
        MEASURED,
    ),
    Rule("clip_fraction", clip_fraction, "0.2; high confidence from 0.4", "rldoctor"),
    Rule(
        "kl",
        kl,
        "0.5: warning; 2 without a gain after four tenths of the run: critical",
        "rldoctor; Axolotl's page on training stability",
    ),
    Rule("entropy_gone", entropy_gone, "a tenth of its start, success below 80 %, the reward stands", MEASURED, 10),
    Rule("gradient_spikes", gradient_spikes, "three deviations and three times a frozen baseline", "rlwatch", 5),
)
