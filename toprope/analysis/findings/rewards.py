"""Rules about what the scorer says: errors, rewards that do not vary, tasks that are too hard or too easy.

They stand before the rules about learning: where there is nothing to learn from, no learning rate is at fault.
"""

from __future__ import annotations

from toprope.analysis.findings.rules import MEASURED, Rule, Sign, share
from toprope.analysis.findings.trail import Trail

__all__ = ["REWARDS", "nothing_to_learn"]

_ZERO = "frac_reward_zero_std"
_WRONG, _RIGHT, _OTHER = (f"{_ZERO}/{why}" for why in ("all_wrong", "all_right", "other"))


def scorer_errors(trail: Trail) -> Sign | None:
    """Rollouts that end in an error of the environment get reward 0: the policy learns which tasks crash."""
    errors = trail["errors/share"]
    if not errors.full and trail.rows < 5:
        return None
    now = trail.recent("errors/share")
    if now < 0.05:
        return None
    level = "critical" if now >= 0.25 else "warning"
    return Sign(
        level,
        f"{share(now)} of the rollouts end in an error of the environment and are scored 0.",
        {"errors_share": now, "reward": trail.recent("reward")},
        'read_logs(component="environment") and describe_environment show what it raises; mend the scorer, then '
        "start_training again",
        "high",
    )


def constant_reward(trail: Trail) -> Sign | None:
    """Every rollout gets the same reward, one that is neither wrong nor right."""
    if not _lasting(trail, _OTHER, 0.95) or trail["reward_std"].mean is None:
        return None
    if trail.recent("reward_std") > 1e-9:
        return None
    reward = trail.recent("reward")
    return Sign(
        "critical",
        f"Every rollout is scored {reward:g}: the scorer tells nothing apart, so nothing can be learned.",
        {"reward": reward, "reward_std": 0.0, "zero_std_share": trail.recent(_ZERO)},
        "test_inference shows answers with their scores; mend the environment's score(), then start_training again",
        "high",
    )


def scorer_ignores_answers(trail: Trail) -> Sign | None:
    """Rewards differ between tasks and never between the answers to one: the scorer looks at the task alone."""
    if not _lasting(trail, _OTHER, 0.9) or trail.recent("reward_std") <= 1e-9:
        return None
    return Sign(
        "critical",
        "Answers to the same task always get the same reward, while tasks differ: the scorer does not look at the "
        "answer.",
        {"reward_std": trail.recent("reward_std"), "zero_std_share": trail.recent(_ZERO)},
        "test_inference shows answers with their scores; mend the environment's score(), then start_training again",
        "high",
    )


def all_wrong(trail: Trail) -> Sign | None:
    """No group with a right answer or a difference in reward, from the first step on: no signal."""
    wrong = trail[_WRONG]
    if wrong.start is None or wrong.start < 0.9 or nothing_scored(trail) or _cut(trail) or trail.thrown_off:
        return None
    now = trail.recent(_WRONG)
    if now < 0.9:
        return None
    level = "critical" if trail.rows >= trail.early and now >= 0.99 else "warning"
    return Sign(
        level,
        f"Since the start {share(now)} of the groups hold wrong answers only, all with the same reward: there is "
        "nothing to learn from.",
        {"all_wrong_share": now, "reward": trail.recent("reward"), "success": trail.recent("success")},
        "make the tasks easier (describe_environment lists the knobs), give partial credit, or take a stronger "
        "policy.model; test_inference(group_size=16) shows whether any answer is ever right",
        "high" if trail.rows >= trail.early else "medium",
    )


def all_right(trail: Trail) -> Sign | None:
    """Nearly every group is right throughout: done, or too easy from the start."""
    right = trail[_RIGHT]
    if not right.full or trail.recent(_RIGHT) < 0.9:
        return None
    now = trail.recent(_RIGHT)
    easy = (right.start or 0.0) >= 0.75
    observed = {"all_right_share": now, "success": trail.recent("success"), "reward": trail.recent("reward")}
    if easy:
        return Sign(
            "warning",
            f"{share(now)} of the groups are right throughout, and were at the start: these tasks teach nothing.",
            observed,
            "make the tasks harder (describe_environment lists the knobs), or look with test_inference whether the "
            "scorer is too generous, then start_training again",
            "high",
        )
    return Sign(
        "note",
        f"{share(now)} of the groups are right throughout by now: the policy has learned these tasks.",
        observed,
        "stop_training keeps a checkpoint; go on with harder tasks from there",
        "high",
    )


def parse_failures(trail: Trail) -> Sign | None:
    """Answers that the environment cannot read: the format is missed, not the task."""
    unread = trail["parse_failures"]
    if not unread.full:
        return None
    now = trail.recent("parse_failures")
    if now < 0.3 or trail.rows < trail.early or now < 0.8 * (unread.start or 1.0):
        return None
    return Sign(
        "warning",
        f"{share(now)} of the answers cannot be read by the environment, and it does not get better.",
        {"parse_failures": now, "at_the_start": unread.start or 0.0, "reward": trail.recent("reward")},
        "show the wanted format in the prompt, reward it as a part of its own, or raise rollout.max_new_tokens",
        "medium",
    )


def reward_without_success(trail: Trail) -> Sign | None:
    """The reward rises while success falls: the policy found what the scorer pays for, and it is not the task."""
    success = trail["success"]
    if success.start is None or success.best is None or trail.rows < trail.early or trail.gain <= trail.noise:
        return None
    now = trail.recent("success")
    noise = 3.0 * max(success.spread, success.start_spread) * (2.0 / trail.window) ** 0.5
    if success.best - now <= max(noise, 0.3 * success.best, 0.02) or now > success.start:
        return None
    return Sign(
        "warning",
        f"The reward rose to {trail.recent('reward'):.3g} while success fell from {share(success.best)} to "
        f"{share(now)}: the reward pays for something other than the task.",
        {"reward": trail.recent("reward"), "success": now, "best_success": success.best},
        'get_results(detail="detailed") shows answers; weigh the parts with environment.reward_weights, or score '
        "exactly",
        "medium",
    )


def nothing_scored(trail: Trail) -> bool:
    """Whether errors of the environment are why rewards are 0."""
    return trail.recent("errors/share") >= 0.5


def nothing_to_learn(trail: Trail) -> bool:
    """Whether hardly any group carries signal, so that no rate could make a difference."""
    return trail.recent(_ZERO) >= 0.95


def _cut(trail: Trail) -> bool:
    return trail.recent("completions/clipped_ratio") >= 0.9


def _lasting(trail: Trail, name: str, limit: float) -> bool:
    """Whether the whole last window is above a limit."""
    series = trail[name]
    return series.full and min(series.values) >= limit


_RLDOCTOR = "rldoctor's limits for zero-std groups (0.5, 0.75), raised to what healthy runs never reach"

REWARDS: tuple[Rule, ...] = (
    Rule("scorer_errors", scorer_errors, "errors in 5 % of rollouts: warning, 25 %: critical", MEASURED),
    Rule("constant_reward", constant_reward, "all rewards equal over a whole window, neither 0 nor right", MEASURED),
    Rule(
        "scorer_ignores_answers",
        scorer_ignores_answers,
        "90 % of groups without spread in every row of a window, rewards of tasks differ",
        MEASURED,
    ),
    Rule("all_wrong", all_wrong, "90 % of groups all wrong from the first window on; critical: 99 %", _RLDOCTOR),
    Rule("all_right", all_right, "90 % of groups all right; a warning where 75 % were at the start", _RLDOCTOR),
    Rule("parse_failures", parse_failures, "30 % unreadable, and no better than at the start", MEASURED, 10),
    Rule(
        "reward_without_success",
        reward_without_success,
        "reward up by three standard errors, success 30 % below its best and not above its start",
        MEASURED,
        10,
    ),
)
