"""Rules about rewards: scorer errors, rewards that do not vary, tasks that are too hard or too easy.

They come before the rules about learning: without signal the learning rate is not at fault.
"""

from __future__ import annotations

from toprope.analysis.findings.history import TrainingHistory
from toprope.analysis.findings.rules import FINE_TUNE_FIRST, MEASURED, Grade, Rule, Symptom, share

_ZERO = "frac_reward_zero_std"
_CERTAIN_NATS, _ALIKE = 0.01, 0.9
_WRONG, _RIGHT, _OTHER = (f"{_ZERO}/{why}" for why in ("all_wrong", "all_right", "other"))


def scorer_errors(history: TrainingHistory) -> Symptom | None:
    """Rollouts end in environment errors and get reward 0, so the policy learns which tasks crash."""
    errors = history["errors/share"]
    if not errors.full and history.rows < 5:
        return None
    errors_share = history.recent("errors/share")
    if errors_share < 0.05:
        return None
    level: Grade = "critical" if errors_share >= 0.25 else "warning"
    return Symptom(
        level,
        f"{share(errors_share)} of the rollouts end in an error of the environment and are scored 0.",
        {"errors_share": errors_share, "reward": history.recent("reward")},
        'read_logs(component="environment") and describe_environment show the error; fix the scorer, then '
        "start_training again",
        "high",
    )


def constant_reward(history: TrainingHistory) -> Symptom | None:
    """Every rollout gets the same reward, neither that of a wrong nor of a right answer."""
    if not _all_equal(history) or _answers_alike(history) or lost_to_limit(history):
        return None
    reward = history.recent("reward")
    if _differed(history):
        return _no_longer(history, f"every rollout is scored {reward:g} by now")
    observed = {"reward": reward, "reward_std": 0.0, "zero_std_share": history.recent(_ZERO)}
    if history.unknown_task and none_right(history):
        return Symptom(
            "critical",
            f"Every rollout is scored {reward:g} and none is right: the policy does not know this task (unknown_task "
            "at the start), or the scorer does not distinguish answers.",
            observed,
            FINE_TUNE_FIRST,
            "medium",
        )
    return Symptom(
        "critical",
        f"Every rollout is scored {reward:g}: the scorer does not distinguish answers, so nothing can be learned.",
        observed,
        "test_inference shows answers with their scores; fix the environment's score(), then start_training again",
        "high",
    )


def scorer_ignores_answers(history: TrainingHistory) -> Symptom | None:
    """Rewards differ between tasks but never within a group: the scorer looks at the task alone."""
    if not _equal_by_task(history) or _answers_alike(history) or lost_to_limit(history):
        return None
    if _differed(history):
        return _no_longer(history, "answers to the same task always get the same reward by now")
    return Symptom(
        "critical",
        "Answers to the same task always get the same reward, while tasks differ: the scorer ignores the answer.",
        {"reward_std": history.recent("reward_std"), "zero_std_share": history.recent(_ZERO)},
        "test_inference shows answers with their scores; fix the environment's score(), then start_training again",
        "high",
    )


def _all_equal(history: TrainingHistory) -> bool:
    """Return True if all rewards of the window are equal, and neither those of wrong nor of right answers."""
    spread = history["reward_std"].mean
    return _mostly_other(history, 0.95) and spread is not None and max(spread, history["reward"].spread) <= 1e-9


def _equal_by_task(history: TrainingHistory) -> bool:
    """Return True if rewards differ between tasks, of one step or of several, but not within groups."""
    return _mostly_other(history, 0.9) and max(history.recent("reward_std"), history["reward"].spread) > 1e-9


def _answers_alike(history: TrainingHistory) -> bool:
    """Return True if the policy is certain of every token, so that equal rewards say nothing of the scorer."""
    entropy = history["entropy"].mean
    return entropy is not None and entropy < _CERTAIN_NATS


def _differed(history: TrainingHistory) -> bool:
    """Return True if rewards differed within groups at the start, so that the scorer does look at answers."""
    start = history[_ZERO].start
    return start is not None and start < _ALIKE


def _no_longer(history: TrainingHistory, observation: str) -> Symptom:
    return Symptom(
        "warning",
        f"Rewards differed within groups at the start, but {observation}: there is nothing left to learn from.",
        {"reward": history.recent("reward"), "zero_std_share": history.recent(_ZERO)},
        "test_inference(group_size=16) shows whether answers still differ; reward partial progress, make the tasks "
        "easier, or raise rollout.temperature",
        "medium",
    )


def all_wrong(history: TrainingHistory) -> Symptom | None:
    """No group has had a right answer or a difference in reward since the first step."""
    wrong = history[_WRONG]
    if wrong.start is None or wrong.start < 0.9 or nothing_scored(history) or _cut(history) or history.thrown_off:
        return None
    if history.restarted:  # it has learned easier tasks
        return None
    wrong_share = history.recent(_WRONG)
    if wrong_share < 0.9:
        return None
    level: Grade = "critical" if history.rows >= history.early and wrong_share >= 0.99 else "warning"
    return Symptom(
        level,
        f"Since the start {share(wrong_share)} of the groups hold wrong answers only, all with the same reward: there "
        "is nothing to learn from.",
        {"all_wrong_share": wrong_share, "reward": history.recent("reward"), "success": history.recent("success")},
        "make the tasks easier (describe_environment lists the knobs), give partial credit, or take a stronger "
        "policy.model; test_inference(group_size=16) shows whether any answer is ever right",
        "high" if history.rows >= history.early else "medium",
    )


def all_right(history: TrainingHistory) -> Symptom | None:
    """Nearly every group is entirely right: the tasks are learned, or were too easy from the start."""
    right = history[_RIGHT]
    if not right.full or history.recent(_RIGHT) < 0.9:
        return None
    right_share = history.recent(_RIGHT)
    easy = (right.start or 0.0) >= 0.75 and not history.restarted
    observed = {
        "all_right_share": right_share,
        "success": history.recent("success"),
        "reward": history.recent("reward"),
    }
    if easy:
        return Symptom(
            "warning",
            f"{share(right_share)} of the groups are entirely right, and were at the start: these tasks teach nothing.",
            observed,
            "make the tasks harder (describe_environment lists the knobs), or look with test_inference whether the "
            "scorer is too generous, then start_training again",
            "high",
        )
    return Symptom(
        "note",
        f"{share(right_share)} of the groups are entirely right by now: the policy has learned these tasks.",
        observed,
        "stop_training keeps a checkpoint; continue from it with harder tasks",
        "high",
    )


def parse_failures(history: TrainingHistory) -> Symptom | None:
    """The environment cannot parse answers: the policy misses the format, not the task."""
    unread = history["parse_failures"]
    if not unread.full:
        return None
    unread_share = history.recent("parse_failures")
    if unread_share < 0.3 or history.rows < history.early or unread_share < 0.8 * (unread.start or 1.0):
        return None
    return Symptom(
        "warning",
        f"{share(unread_share)} of the answers cannot be parsed by the environment, and the share does not fall.",
        {"parse_failures": unread_share, "at_the_start": unread.start or 0.0, "reward": history.recent("reward")},
        "show the format in the prompt, reward it as a separate part, or raise rollout.max_new_tokens",
        "medium",
    )


def reward_without_success(history: TrainingHistory) -> Symptom | None:
    """The reward rises while success falls: the policy exploits the scorer instead of solving the task."""
    success = history["success"]
    if success.start is None or success.best is None or history.rows < history.early or history.gain <= history.noise:
        return None
    recent_success = history.recent("success")
    noise = 3.0 * max(success.spread, success.start_spread) * (2.0 / history.window) ** 0.5
    if success.best - recent_success <= max(noise, 0.3 * success.best, 0.02) or recent_success > success.start:
        return None
    return Symptom(
        "warning",
        f"The reward rose to {history.recent('reward'):.3g} while success fell from {share(success.best)} to "
        f"{share(recent_success)}: the reward pays for something other than the task.",
        {"reward": history.recent("reward"), "success": recent_success, "best_success": success.best},
        'get_results(detail="detailed") shows answers; weigh the parts with environment.reward_weights, or score '
        "exactly",
        "medium",
    )


def nothing_scored(history: TrainingHistory) -> bool:
    """Return True if environment errors explain rewards of 0."""
    return history.recent("errors/share") >= 0.5


def nothing_to_learn(history: TrainingHistory) -> bool:
    """Return True if too few groups carry signal for any learning rate to matter."""
    return history.recent(_ZERO) >= 0.95


def none_right(history: TrainingHistory) -> bool:
    """Return True if nearly every group holds wrong answers of equal reward, be it 0 or that of a small part."""
    success = history["success"].mean
    nothing = success is not None and success <= 1e-9
    return history.recent(_WRONG) >= 0.9 or (nothing and history.recent(_ZERO) >= 0.9)


def lost_to_limit(history: TrainingHistory) -> bool:
    """Return True if answers are cut off and none is right, so that equal rewards say nothing of the scorer."""
    cut_share = history.recent("completions/clipped_ratio")
    return cut_share >= (0.15 if history.unknown_task else 0.9) and none_right(history)


def _cut(history: TrainingHistory) -> bool:
    return history.recent("completions/clipped_ratio") >= 0.9


def _mostly_other(history: TrainingHistory, limit: float) -> bool:
    """Return True if equal groups that are neither all wrong nor all right take this share throughout the window."""
    series = history[_OTHER]
    return series.full and min(series.values) >= limit


_RLDOCTOR = "rldoctor's limits for zero-std groups (0.5, 0.75), raised to what healthy runs never reach"

REWARDS: tuple[Rule, ...] = (
    Rule("scorer_errors", scorer_errors, "errors in 5 % of rollouts: warning, 25 %: critical", MEASURED),
    Rule(
        "constant_reward",
        constant_reward,
        "all rewards equal over a whole window, neither 0 nor right",
        MEASURED,
        lasts=_all_equal,
    ),
    Rule(
        "scorer_ignores_answers",
        scorer_ignores_answers,
        "90 % of groups without spread in every row of a window, rewards of tasks differ",
        MEASURED,
        lasts=_equal_by_task,
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
