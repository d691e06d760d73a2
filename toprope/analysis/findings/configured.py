"""Rules about fields that decide how much a run can learn: group and batch, KL weight, budget, sampling.

Each compares a value with what the run shows. A value that is unusual but does no visible harm is not reported: the
preset's value is used to mend a field, never to accuse it.
"""

from __future__ import annotations

import math
from typing import Any

from toprope.analysis.findings.history import TrainingHistory
from toprope.analysis.findings.rewards import nothing_scored, nothing_to_learn
from toprope.analysis.findings.rules import CHOSEN, MEASURED, Rule, Symptom, mended, share

_ZERO = "frac_reward_zero_std"
_USUAL_GROUP, _USUAL_GROUPS = 8, 8
_FEWEST_ANSWERS = 32
"""Answers in a step below which small groups or few groups are reported."""
_FEWEST_IN_BATCH = 16
_PULL = 0.5
"""Weight of the KL term from which the best policy is 4 nats a token or less from the start (2 / weight)."""
_HEALTHY_REACH = 2.0
"""Change in nats that a run that learns makes at least over its steps."""
LEAST_MOVE = 0.002
"""Change of a sampled token per step, in nats; runs that learn make 0.005 to 0.07."""
_CERTAIN = 0.8
"""Success above which no rule here applies: the run has learned its tasks."""


def rewards_shuffled(history: TrainingHistory) -> Symptom | None:
    """Rewards are shuffled, so that no answer is better than another."""
    if not history.config.algorithm.shuffle_rewards or not history.judged(history.window):
        return None
    return mended(
        "warning",
        "algorithm.shuffle_rewards is on: rewards are shuffled, a control from which nothing can be learned.",
        {"shuffle_rewards": 1},
        {"algorithm.shuffle_rewards": False},
        "high",
    )


def group_too_small(history: TrainingHistory) -> Symptom | None:
    """Groups have too few answers for what the tasks allow: most lack signal, or a step compares few answers."""
    config = history.config
    size, groups = config.rollout.group_size, config.rollout.groups_per_step
    if size >= 4 or config.algorithm.name == "ppo" or not history.judged(history.window) or _fine(history):
        return None
    larger = max(history.towards("rollout.group_size", _USUAL_GROUP), _USUAL_GROUP)
    signal = 1.0 - history.recent(_ZERO)
    expected = expected_signal(size, history.recent("success"), signal, larger)
    if size * groups >= _FEWEST_ANSWERS and expected <= 1.5 * signal:
        return None
    return mended(
        "warning",
        f"Groups of {size}: {share(signal)} of them carry signal"
        + (f", groups of {larger} would: {share(expected)}" if expected > signal else "")
        + f". A step compares {size * groups} answers.",
        {"group_size": size, "signal_share": signal, "expected_at_larger": expected, "answers_per_step": size * groups},
        {"rollout.group_size": larger},
        "high" if expected > 1.5 * signal else "medium",
    )


def batch_too_small(history: TrainingHistory) -> Symptom | None:
    """A step learns from one or two tasks, so its direction is mostly chance."""
    rollout = history.config.rollout
    size, groups = rollout.group_size, rollout.groups_per_step
    if groups > 2 or size * groups >= _FEWEST_IN_BATCH or not history.judged(history.window) or _fine(history):
        return None
    more = max(history.towards("rollout.groups_per_step", _USUAL_GROUPS), 4)
    return mended(
        "warning",
        f"A step learns from {groups} {'group' if groups == 1 else 'groups'} of {size} answers, of which "
        f"{share(1.0 - history.recent(_ZERO))} carry signal: its direction is mostly chance.",
        {"groups_per_step": groups, "answers_per_step": size * groups, "signal_share": 1.0 - history.recent(_ZERO)},
        {"rollout.groups_per_step": more},
    )


def kl_weight(history: TrainingHistory) -> Symptom | None:
    """The KL term holds the policy at its start: it outweighs what the reward can pull."""
    config = history.config
    ppo = config.algorithm.name == "ppo"
    field = "ppo.kl_coef" if ppo else "algorithm.beta"
    weight = config.ppo.kl_coef if ppo else config.algorithm.beta
    if weight < 0.1 or not history.judged(history.window) or _fine(history) or nothing_to_learn(history):
        return None  # without advantages the KL term is all of the loss, however small it is
    distance, loss = history.recent("kl"), history.recent("loss")
    part = weight * distance / max(weight * distance + abs(loss - weight * distance), 1e-9)
    if weight < _PULL and (part < 0.5 or history.gain > history.noise or not history.judged(4 * history.early)):
        return None
    return mended(
        "warning",
        f"{field} {weight:g}: the KL term is {share(part)} of the loss and holds the policy {distance:.2g} nats a "
        f"token from its start, while the reward changed by {history.gain:+.2g}.",
        {"weight": weight, "share_of_loss": part, "kl": distance, "reward_gain": history.gain},
        {field: history.towards(field, 0.0)},
        "high" if weight >= _PULL else "medium",
    )


def budget_short(history: TrainingHistory) -> Symptom | None:
    """The run's steps, or those that its time allows, end before the policy can have changed enough."""
    move, planned = history.peak_move, history.planned_steps
    if move is None or move < LEAST_MOVE or not history.judged(2 * history.early) or _fine(history):
        return None
    reach = move * planned
    if reach >= _HEALTHY_REACH / 2 or (history.gain > history.noise and not history.over):
        return None
    budget, changes = history.config.budget, dict[str, Any]()
    wanted = math.ceil(_HEALTHY_REACH / move)
    if planned < budget.steps and budget.max_train_seconds is not None:
        field, seconds = "budget.max_train_seconds", budget.max_train_seconds
        changes[field] = history.towards(field, float(f"{seconds * wanted / planned:.2g}"))
        limit = f"{seconds:g} s allow {planned} of {budget.steps} steps"
    else:
        changes["budget.steps"] = history.towards("budget.steps", wanted)
        limit = f"budget.steps is {budget.steps}"
    return mended(
        "warning",
        f"{limit}: at {move:.2g} nats a step these change a token by {reach:.2g} nats; runs that learn change it by "
        f"{_HEALTHY_REACH:g} or more.",
        {"planned_steps": planned, "moved_per_step": move, "reach": reach},
        changes,
    )


def warmup_long(history: TrainingHistory) -> Symptom | None:
    """The learning rate rises for more than half of the run, so that the run never trains at it."""
    optimizer, planned = history.config.optimizer, history.planned_steps
    if optimizer.lr_scheduler_type == "constant" or optimizer.warmup_steps < max(planned / 2, 10):
        return None
    if not history.judged(history.window) or _fine(history):
        return None
    reached = min(planned / (optimizer.warmup_steps + 1), 1.0) * optimizer.learning_rate
    field = "optimizer.warmup_steps"
    shortened = optimizer.warmup_steps < history.preset.get("budget.steps", 0) / 2
    return mended(
        "note" if shortened else "warning",  # a shortened run lacks steps, not warmup
        f"The learning rate rises over {optimizer.warmup_steps} steps, and the run makes {planned}: it ends at "
        f"{reached:.2g} instead of {optimizer.learning_rate:g}.",
        {"warmup_steps": optimizer.warmup_steps, "planned_steps": planned, "rate_at_the_end": reached},
        {field: history.towards(field, max(planned // 20, 1))},
        "high",
    )


def sampling_extreme(history: TrainingHistory) -> Symptom | None:
    """Temperature or top_p make answers random, or leave nothing to choose between."""
    rollout, changes = history.config.rollout, dict[str, Any]()
    if not history.judged(history.window) or _fine(history):
        return None
    if rollout.temperature > 1.5 or rollout.temperature < 0.4:
        changes["rollout.temperature"] = history.towards("rollout.temperature", 1.0)
    if rollout.top_p < 0.5:
        changes["rollout.top_p"] = history.towards("rollout.top_p", 1.0)
    if not changes:
        return None
    hot = rollout.temperature > 1.5
    return mended(
        "warning",
        f"Answers are sampled at temperature {rollout.temperature:g} and top_p {rollout.top_p:g}: "
        + (
            "nearly at random, far from the policy's own choice."
            if hot
            else f"they hardly differ, and {share(1.0 - history.recent(_ZERO))} of the groups carry signal."
        ),
        {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "entropy": history.recent("entropy"),
            "signal_share": 1.0 - history.recent(_ZERO),
        },
        changes,
    )


def weight_decay(history: TrainingHistory) -> Symptom | None:
    """Weight decay shrinks the weights by a large part over the run."""
    optimizer = history.config.optimizer
    shrunk = 1.0 - math.exp(-optimizer.learning_rate * optimizer.weight_decay * history.planned_steps / 2)
    if shrunk < 0.2 or not history.judged(history.window) or _fine(history) or history.gain > history.noise:
        return None
    field = "optimizer.weight_decay"
    return mended(
        "warning",
        f"{field} {optimizer.weight_decay:g} at a rate of {optimizer.learning_rate:g} shrinks the weights by about "
        f"{share(shrunk)} over {history.planned_steps} steps, and the reward does not rise.",
        {"weight_decay": optimizer.weight_decay, "shrunk": shrunk, "learning_rate": optimizer.learning_rate},
        {field: history.towards(field, 0.0)},
    )


def expected_signal(size: int, success: float, signal: float, larger: int) -> float:
    """Return the share of groups with signal that larger groups on the same tasks would have.

    The success of a task is taken as beta distributed with mean `success`; its spread is chosen so that groups of
    `size` have the observed signal. If rewards differ more often than such successes can, because of partial credit,
    any two answers are taken to differ equally often.

    Args:
        size, larger: Answers in a group.
        success: Mean success of an answer.
        signal: Share of groups of `size` whose rewards differ.
    """
    apart = 1.0 - success**size - (1.0 - success) ** size
    if signal > 1.05 * apart:
        alike = (1.0 - signal) ** (1.0 / (size - 1)) if signal < 1.0 else 0.0
        return 1.0 - alike ** (larger - 1)
    low, high = 1e-3, 1e4  # sum of the two parameters: small if tasks are always or never solved
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _mixed(size, success, middle) < signal else (low, middle)
    return max(_mixed(larger, success, low), signal)


def _mixed(size: int, success: float, total: float) -> float:
    """Return the chance that `size` answers to a task are neither all right nor all wrong (beta-binomial)."""
    right = wrong = 1.0
    for place in range(size):
        right *= (success * total + place) / (total + place)
        wrong *= ((1.0 - success) * total + place) / (total + place)
    return 1.0 - right - wrong


def _fine(history: TrainingHistory) -> bool:
    return history.recent("success") >= _CERTAIN or nothing_scored(history)


CONFIGURED: tuple[Rule, ...] = (
    Rule("rewards_shuffled", rewards_shuffled, "on", "the field's description", 1),
    Rule(
        "group_too_small",
        group_too_small,
        "below 4 answers, with 1.5 times the signal at 8 or fewer than 32 answers a step",
        MEASURED,
    ),
    Rule("batch_too_small", batch_too_small, "at most 2 groups and fewer than 16 answers a step", CHOSEN),
    Rule(
        "kl_weight",
        kl_weight,
        "0.5; from 0.1 if the KL term is half of the loss and the reward does not rise",
        "KL-regularised optimum: log-ratio = advantage / weight (Korbak et al., arXiv:2205.11275); measured",
    ),
    Rule("budget_short", budget_short, "all planned steps change a token by less than 1 nat", MEASURED),
    Rule("warmup_long", warmup_long, "half of the steps that the run makes", CHOSEN),
    Rule("sampling_extreme", sampling_extreme, "temperature outside 0.4 to 1.5, top_p below 0.5", CHOSEN),
    Rule("weight_decay", weight_decay, "a fifth of the weights, and no gain in reward", CHOSEN),
)
