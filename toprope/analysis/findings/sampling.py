"""Rules about the way from the sampler to the trainer: answers cut off, groups too old, weights that do not arrive, and
who waits for whom.
"""

from __future__ import annotations

from toprope.analysis.findings.rules import MEASURED, Rule, Sign, edit, share
from toprope.analysis.findings.trail import Trail

__all__ = ["SAMPLING"]

_LOGP = "sampling/sampling_logp_difference/mean"


def truncated(trail: Trail) -> Sign | None:
    """Answers that the limit of length cuts off; they are scored as they stand, mostly 0."""
    cut = trail["completions/clipped_ratio"]
    if not cut.full or trail.thrown_off:
        return None
    now = trail.recent("completions/clipped_ratio")
    if now < 0.15:
        return None
    limit = trail.config.rollout.max_new_tokens
    lost = trail.recent("frac_reward_zero_std/all_wrong") >= 0.9
    observed = {"clipped_ratio": now, "reward": trail.recent("reward"), "success": trail.recent("success")}
    what = f"{share(now)} of the answers are cut off at {limit} tokens"
    more = f"rollout.max_new_tokens to {2 * limit}"
    if now >= 0.9 and lost:
        return Sign("critical", f"{what}, and none is right: the limit is too low.", observed, edit(more), "high")
    if trail.rows < trail.early or now < 0.9 * (cut.start or 0.0):
        return None  # a young policy learns to end its answers
    return Sign("warning", f"{what}.", observed, edit(more), "high" if now >= 0.5 else "medium")


def staleness(trail: Trail) -> Sign | None:
    """Groups that are trained on many versions after they were sampled: the gradient is another policy's."""
    age = trail["staleness/mean"]
    if not age.full:
        return None
    now = trail.recent("staleness/mean")
    if now <= 4.0:
        return None
    rollout = trail.config.rollout
    fewer = max(rollout.groups_per_step, rollout.queue_groups // 4)
    observed = {
        "staleness_mean": now,
        "max_staleness": rollout.max_staleness,
        "queue_groups": rollout.queue_groups,
        "concurrency": rollout.concurrency,
        "clip_fraction": trail.recent("clip_ratio/region_mean"),
    }
    level = "critical" if now > 16.0 and trail.recent("clip_ratio/region_mean") > 0.2 else "warning"
    changes = []
    if fewer < rollout.queue_groups:
        changes.append(f"rollout.queue_groups to {fewer}")
    if rollout.concurrency > 2 * rollout.groups_per_step:
        changes.append(f"rollout.concurrency to {max(2 * rollout.groups_per_step, rollout.concurrency // 4)}")
    return Sign(
        level,
        f"Groups are {now:.1f} versions old on average when they are trained on: the policy has moved on since.",
        observed,
        edit(" and ".join(changes) or "rollout.groups_per_step higher"),
        "high",
    )


def dropped_stale(trail: Trail) -> Sign | None:
    """Groups that were sampled, scored, and thrown away because they came too late."""
    if len(trail.dropped) <= trail.window:
        return None
    lost = trail.stale_share
    if lost < 0.2:
        return None
    rollout = trail.config.rollout
    fewer = max(rollout.groups_per_step, rollout.queue_groups // 2)
    changes = f"rollout.max_staleness to {max(4, 2 * rollout.max_staleness)}"
    if rollout.queue_groups > rollout.groups_per_step:
        changes = f"rollout.queue_groups to {fewer}, or {changes}"
    return Sign(
        "critical" if lost >= 0.9 else "warning",
        f"{share(lost)} of the groups are dropped because they are more than {rollout.max_staleness} versions old: "
        "sampling works for nothing.",
        {"dropped_share": lost, "max_staleness": rollout.max_staleness, "queue_groups": rollout.queue_groups},
        edit(changes),
        "high",
    )


def logprob_gap(trail: Trail) -> Sign | None:
    """Sampler and trainer compute different probabilities from the same weights."""
    gap = trail[_LOGP]
    last = trail.row.get(_LOGP)
    if last is None or gap.first is None:
        return None
    limit = max(0.05, 5.0 * gap.first)
    now = trail.recent(_LOGP)
    if now <= limit:
        return None
    return Sign(
        "warning",
        f"At equal weights, sampler and trainer differ by {now:.3g} nats a token; it was {gap.first:.3g} at the start.",
        {"logp_difference": now, "at_the_start": gap.first},
        "look whether both use the same policy.dtype, temperature and chat template: read_logs of inference and "
        "trainer; a fork with policy.dtype float32 tells whether it is rounding",
        "medium",
    )


def served_version(trail: Trail) -> Sign | None:
    """Even the newest groups were sampled by an old version: weights do not reach inference."""
    newest = trail["staleness/min"]
    if not newest.full:
        return None
    behind, at_first = trail.recent("staleness/min"), newest.start or 0.0
    rollout = trail.config.rollout
    # What queues and is in the making explains so many versions; more are the weights' own delay.
    explained = (rollout.queue_groups + rollout.concurrency) / max(rollout.groups_per_step, 1) + 2
    values = newest.values
    climbing = values[-1] - values[0] >= 0.9 * (len(values) - 1)
    if behind <= 2 * explained or not climbing:
        return None
    return Sign(
        "critical",
        f"The newest groups were sampled {behind:.0f} versions ago and fall further behind at every step: new weights "
        "do not reach inference.",
        {"newest_group_age": behind, "at_the_start": at_first, "explained_by_queues": explained},
        'read_logs(component="inference") and read_logs(component="trainer") show the hand-over; stop_training and '
        "resume_training start both anew",
        "high",
    )


def trainer_waits(trail: Trail) -> Sign | None:
    """The trainer's time goes into waiting for groups: sampling is the bottleneck."""
    waiting = _shares(trail)
    if waiting is None or waiting < 0.5 or trail.stale_share >= 0.2:  # sampling more would only be dropped
        return None
    rollout = trail.config.rollout
    return Sign(
        "note",
        f"The trainer waits {share(waiting)} of the time: sampling is the bottleneck.",
        {"trainer_waits": waiting, "step_seconds": trail.recent("time/step"), "concurrency": rollout.concurrency},
        f"a next run may sample more at once (edit_config rollout.concurrency to {2 * rollout.concurrency}), give it "
        "shorter answers (rollout.max_new_tokens), or look whether scoring is slow: read_logs(component="
        '"environment")',
        "medium",
    )


def sampler_waits(trail: Trail) -> Sign | None:
    """The queue is full and the trainer never waits: the optimizer step is the bottleneck."""
    waiting, rollout = _shares(trail), trail.config.rollout
    if waiting is None or waiting > 0.2 or not trail["groups/waiting"].full:
        return None
    full = [value >= rollout.queue_groups for value in trail["groups/waiting"].values]
    if sum(full) < 0.8 * len(full):
        return None
    return Sign(
        "note",
        f"The queue is full and the trainer waits {share(waiting)} of the time: training is the bottleneck, sampling "
        "pauses.",
        {"trainer_waits": waiting, "groups_waiting": trail.recent("groups/waiting")},
        "nothing is wrong; a next run may take more groups a step (edit_config rollout.groups_per_step), or a smaller "
        "rollout.concurrency for fresher groups",
        "medium",
    )


def _shares(trail: Trail) -> float | None:
    """The share of the trainer's time that it waits for groups; None before it is known."""
    if not trail["time/step"].full or trail.rows < trail.early:
        return None
    step = trail.recent("time/step")
    return min(1.0, trail.recent("time/wait") / step) if step > 0 else None


SAMPLING: tuple[Rule, ...] = (
    Rule(
        "truncated",
        truncated,
        "15 % and no fewer than at the start: warning; 90 % and all wrong: critical",
        "rldoctor (0.05, 0.15); trl#5697",
    ),
    Rule(
        "served_version",
        served_version,
        "twice the versions that queues explain, and one more at every step",
        "trl#6797",
    ),
    Rule(
        "staleness",
        staleness,
        "mean age above 4 versions; critical above 16 with a clip fraction above 0.2",
        "TRL's AsyncGRPOTrainer allows 4 by default",
    ),
    Rule("dropped_stale", dropped_stale, "20 % of groups dropped for their age; critical: 90 %", MEASURED),
    Rule("logprob_gap", logprob_gap, "0.05 nats a token, and five times the first step's", "trl#4772"),
    Rule("trainer_waits", trainer_waits, "half of the time", MEASURED, 10),
    Rule("sampler_waits", sampler_waits, "queue full in 80 % of steps, waiting below 20 % of the time", MEASURED, 10),
)
