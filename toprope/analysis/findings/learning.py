"""Rules about the optimization: collapse, learning rates too high and too low, numbers that are none, drift.

A single value says little: healthy runs of small policies pass every published limit for entropy or gradient norm now
and then. So these rules look at where a value came from, and most of them only where the reward does not rise.
"""

from __future__ import annotations

import math

from toprope.analysis.findings.rewards import nothing_scored, nothing_to_learn
from toprope.analysis.findings.rules import MEASURED, Rule, Sign, edit, share
from toprope.analysis.findings.trail import Trail

__all__ = ["LEARNING"]

_WRONG = "frac_reward_zero_std/all_wrong"
_CLIP = "clip_ratio/region_mean"
_HEALTHY_MOVE = 0.03
"""Nats a sampled token changes in a step where learning went well: 0.005 to 0.07."""
_NEARLY = 0.8
"""Success from which low entropy is what is wanted: PPO and GRPO have a tenth of the start's there (measured)."""
_LEAST_REACH = 0.2
"""Nats that all planned steps must be able to make, at the largest change so far."""


def nan(trail: Trail) -> Sign | None:
    """A loss or gradient that is no number: the weights after this step are none either."""
    lost = [name for name in ("loss", "grad_norm") if name in trail.row and trail.row[name] is None]
    if not lost:
        return None
    reward = trail.recent("reward")
    rate, dtype = trail.config.optimizer.learning_rate, trail.config.policy.dtype
    if abs(reward) > 1e6:
        change = f"the reward reaches {reward:.2g}: bound it in the environment's score(), then start_training again"
    elif dtype == "float16":
        change = edit("policy.dtype to float32 (float16 overflows)")
    else:
        change = edit(f"optimizer.learning_rate to {rate / 3:.2g} and optimizer.max_grad_norm to 0.5")
    return Sign(
        "critical",
        f"{' and '.join(lost)} at step {trail.step} {'are' if len(lost) > 1 else 'is'} not a number.",
        {"learning_rate": rate, "dtype": dtype, "reward": reward, "step": trail.step},
        change,
        "high",
    )


def collapse(trail: Trail) -> Sign | None:
    """The reward fell by more than half from its best while entropy rose, or all signal that there was is gone."""
    reward = trail["reward"]
    if reward.best is None or nothing_scored(trail):
        return None
    now = trail.recent("reward")
    entropy, before = trail.recent("entropy"), trail.entropy_at_best
    risen = before is not None and entropy > 1.1 * before and _unlearned(trail)
    if not risen and not _signal_lost(trail):
        return None
    rate = trail.config.optimizer.learning_rate
    return Sign(
        "critical",
        f"The reward fell from {reward.best:.3g} to {now:.3g} and {'entropy rose' if risen else 'all signal is gone'}: "
        "the policy has collapsed.",
        {
            "best_reward": reward.best,
            "reward": now,
            "entropy": entropy,
            "entropy_at_best": before or 0.0,
            "all_wrong_share": trail.recent(_WRONG),
            "learning_rate": rate,
        },
        edit(f"optimizer.learning_rate to {rate / 5:.2g}") + "; the checkpoint before the fall is still good",
        "high",
    )


def learning_rate_high(trail: Trail) -> Sign | None:
    """Single steps change the policy beyond recognition, and the reward is not better for it."""
    peak = trail.peak_move
    if peak is None or peak < 0.2 or not trail["reward"].full or trail.gain > trail.noise or nothing_scored(trail):
        return None
    rate, now = trail.config.optimizer.learning_rate, trail.recent("reward")
    return Sign(
        "critical" if peak >= 0.4 or _unlearned(trail) else "warning",
        f"A step changed the log-probability of sampled tokens by {peak:.2g} nats on average, and the reward "
        f"({now:.3g}) is not above where it began: the learning rate is too high.",
        {
            "moved_per_step": peak,
            "learning_rate": rate,
            "reward": now,
            "reward_at_the_start": trail["reward"].start or 0.0,
            "entropy": trail.recent("entropy"),
        },
        edit(f"optimizer.learning_rate to {rate * _HEALTHY_MOVE / peak:.1g}"),
        "high" if peak >= 0.4 else "medium",
    )


def learning_rate_low(trail: Trail) -> Sign | None:
    """Neither the policy nor the reward has moved, though there is signal."""
    reward = trail["reward"]
    if trail.rows < 2 * trail.early or reward.start is None or trail.gain > trail.noise:
        return None
    if nothing_to_learn(trail) or _done(trail):
        return None
    if trail.peak_move is None:
        return _unmoved(trail)
    reach = trail.peak_move * trail.steps
    if reach > _LEAST_REACH:
        return None
    rate = trail.config.optimizer.learning_rate
    # Adam's steps are in proportion to the rate: the one at which the planned steps make a few nats.
    wanted = rate * min(max(10 * _LEAST_REACH / max(reach, 1e-9), 3.0), 3000.0)
    return Sign(
        "warning",
        f"In {trail.rows} steps neither reward ({trail.recent('reward'):.3g}) nor policy has moved: at {rate:g} a step "
        f"changes sampled tokens by {trail.peak_move:.1g} nats, so all {trail.steps} steps cannot change much.",
        {
            "moved_per_step": trail.peak_move,
            "reward": trail.recent("reward"),
            "reward_at_the_start": reward.start,
            "entropy": trail.recent("entropy"),
            "entropy_at_the_start": trail["entropy"].start or 0.0,
            "grad_norm": trail.recent("grad_norm"),
            "learning_rate": rate,
        },
        edit(f"optimizer.learning_rate to {min(0.01, wanted):.1g}"),
        "high" if reach < 0.02 else "medium",
    )


def _unmoved(trail: Trail) -> Sign | None:
    """The same where every group is of the newest version, so that movement cannot be read off its tokens."""
    entropy, rate = trail["entropy"], trail.config.optimizer.learning_rate
    if trail.rows < 4 * trail.early or not entropy.start or not trail["grad_norm"].full:
        return None
    now = trail.recent("entropy")
    if abs(now / entropy.start - 1) > 0.03 or trail.recent("frac_reward_zero_std") > 0.8:
        return None  # it moves, or there is so little signal that no rate would have moved it yet
    return Sign(
        "warning",
        f"In {trail.rows} steps neither reward ({trail.recent('reward'):.3g}) nor entropy ({now:.3g}) has moved: the "
        "learning rate seems too low.",
        {
            "reward": trail.recent("reward"),
            "entropy": now,
            "entropy_at_the_start": entropy.start,
            "grad_norm": trail.recent("grad_norm"),
            "learning_rate": rate,
        },
        edit(f"optimizer.learning_rate to {min(0.01, 10 * rate):.1g}"),
        "low",
    )


def clip_fraction(trail: Trail) -> Sign | None:
    """Many tokens outside the clip range: steps are too large for the data, or the data too old."""
    clip = trail[_CLIP]
    if not clip.full or nothing_to_learn(trail):
        return None
    now = trail.recent(_CLIP)
    if now < 0.2 or trail.rows < trail.early:
        return None
    old = trail.recent("staleness/mean") > 4
    advice = (
        "rollout.queue_groups lower (groups are old)"
        if old
        else f"optimizer.learning_rate to {trail.config.optimizer.learning_rate / 3:.2g}"
    )
    return Sign(
        "warning",
        f"{share(now)} of the tokens are clipped.",
        {"clip_fraction": now, "staleness_mean": trail.recent("staleness/mean")},
        edit(advice),
        "high" if now >= 0.4 else "medium",
    )


def kl(trail: Trail) -> Sign | None:
    """The policy is far from where it started; only where the configuration asks for the KL term."""
    if not trail["kl"].full:
        return None
    now = trail.recent("kl")
    if now < 0.5:
        return None
    rising = trail.gain > trail.noise
    ppo = trail.config.algorithm.name == "ppo"
    field, weight = (
        ("ppo.kl_coef", trail.config.ppo.kl_coef) if ppo else ("algorithm.beta", trail.config.algorithm.beta)
    )
    return Sign(
        "critical" if now >= 2.0 and not rising and trail.rows >= 4 * trail.early else "warning",
        f"The policy is {now:.2g} nats a token from its start{'' if rising else ', and the reward has not risen'}.",
        {"kl": now, "beta": weight, "reward": trail.recent("reward")},
        edit(f"{field} to {max(0.01, 2 * weight):.2g} or a lower optimizer.learning_rate"),
        "low" if rising else "medium",
    )


def entropy_gone(trail: Trail) -> Sign | None:
    """The policy has stopped exploring below its target: answers are certain, and the reward stands still."""
    entropy, reward = trail["entropy"], trail["reward"]
    if not entropy.start or reward.best is None or trail.rows < trail.early or _done(trail):
        return None
    if trail.thrown_off:
        return None
    now = trail.recent("entropy")
    still = trail.rows - reward.best_at >= trail.window
    if now > 0.1 * entropy.start or not still:
        return None
    if trail.recent("success") >= _NEARLY:
        return None  # what is nearly always right is certain of it, whatever algorithm taught it
    return Sign(
        "warning",
        f"Entropy fell to {share(now / entropy.start)} of its start and the reward stands at "
        f"{trail.recent('reward'):.3g}: the policy no longer explores.",
        {"entropy": now, "at_the_start": entropy.start, "reward": trail.recent("reward")},
        edit("rollout.temperature higher or optimizer.learning_rate lower"),
        "medium",
    )


def gradient_spikes(trail: Trail) -> Sign | None:
    """Gradients far above those of the beginning, again and again, without the reward rising."""
    norm = trail["grad_norm"]
    if norm.start is None or trail.rows < 2 * trail.early or trail.gain > trail.noise:
        return None
    if (trail["frac_reward_zero_std"].start or 0.0) >= 0.5:
        return None  # with so little signal the beginning is no baseline
    limit = max(norm.start + 3.0 * norm.start_spread, 3.0 * norm.start)
    high = sum(value > limit for value in norm.values)
    if high < max(2, len(norm.values) // 4):
        return None
    return Sign(
        "warning",
        f"In {high} of the last {len(norm.values)} steps the gradient's norm was above {limit:.3g}, three times what "
        "it was at the start, and the reward does not rise.",
        {"grad_norm": trail.recent("grad_norm"), "at_the_start": norm.start},
        edit(
            f"optimizer.learning_rate to {trail.config.optimizer.learning_rate / 3:.2g} or a lower "
            "optimizer.max_grad_norm"
        ),
        "low",
    )


def _unlearned(trail: Trail) -> bool:
    """Whether the reward is less than half as far above the lowest as at its best, beyond chance."""
    reward = trail["reward"]
    if reward.best is None or reward.lowest is None or reward.mean is None:
        return False
    floor = min(0.0, reward.lowest)
    fall = reward.best - reward.mean
    return fall > 0.5 * (reward.best - floor) and fall > trail.noise


def _signal_lost(trail: Trail) -> bool:
    """Whether every group of a whole window is wrong, which at the beginning's share would be one chance in 1,000."""
    wrong = trail[_WRONG]
    if wrong.start is None or wrong.start <= 0.0 or min(wrong.values) < 0.99:
        return wrong.start == 0.0 and wrong.full and min(wrong.values) >= 0.99
    groups = trail.recent("groups/delivered") * len(wrong.values)
    return groups * math.log(wrong.start) < -math.log(1000)


def _done(trail: Trail) -> bool:
    return trail.recent("success") >= 0.9 or trail.recent("frac_reward_zero_std/all_right") >= 0.75


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
