"""Rules about single environments of a mixture, whose trouble the means over all of them hide."""

from __future__ import annotations

import math

from toprope.analysis.findings.history import TrainingHistory
from toprope.analysis.findings.rules import CHOSEN, Rule, Symptom, share
from toprope.settings.sections.environment import members_of

_ERRORS, _FORGOTTEN, _SILENT, _BEHIND = 0.05, 0.5, 0.9, 0.5
_LEAST_FALL = 0.1


def environment_errors(history: TrainingHistory) -> Symptom | None:
    """Rollouts of some environments end in errors, and those of others do not."""
    failing = {
        label: mean
        for label, mean in _means(history, "errors_share").items()
        if mean >= _ERRORS and history.environments[label]["errors_share"].count >= 5
    }
    if not failing or len(failing) == len(history.environments):
        return None  # if all of them fail, scorer_errors says so
    listed = _enumerate(failing)
    return Symptom(
        "critical" if max(failing.values()) >= 0.25 else "warning",
        f"Rollouts that end in an error, by environment: {listed}.",
        {f"errors_share/{label}": mean for label, mean in failing.items()},
        'read_logs(component="environment") and describe_environment show the error; fix it, or take the environment '
        "out of environment.mixture",
        "high",
    )


def environment_silent(history: TrainingHistory) -> Symptom | None:
    """Answers to each task of an environment all score the same, while another environment gives signal."""
    equal = {
        label: series["frac_reward_zero_std"].mean
        for label, series in history.environments.items()
        if series["frac_reward_zero_std"].full
    }
    silent = {label: mean for label, mean in equal.items() if mean is not None and mean >= _SILENT}
    if not silent or len(silent) == len(history.environments):
        return None
    success = _means(history, "success")
    hard = {label: mean for label, mean in silent.items() if success.get(label, 0.0) < 0.5}
    easy = {label: mean for label, mean in silent.items() if label not in hard}
    parts = [f"never solved: {_enumerate(hard)}"] if hard else []
    parts += [f"solved: {_enumerate(easy)}"] if easy else []
    return Symptom(
        "warning" if hard else "note",
        f"Share of groups without signal, in environments that are {'; '.join(parts)}.",
        {f"zero_std_share/{label}": mean for label, mean in silent.items()},
        "change their level (describe_environment lists the knobs) or a curriculum in environment.mixture, or give "
        "their share to the others",
    )


def environment_forgotten(history: TrainingHistory) -> Symptom | None:
    """Success of an environment fell far below its best while the reward over all of them did not fall."""
    fallen: dict[str, float] = {}
    observed: dict[str, float | int | str] = {}
    for label, series in history.environments.items():
        success = series["success"]
        if success.best is None or success.mean is None or not success.full:
            continue
        noise = 3.0 * max(success.spread, success.start_spread) * math.sqrt(2.0 / history.window)
        fall = success.best - success.mean
        if fall >= max(_LEAST_FALL, noise, _FORGOTTEN * success.best):
            fallen[label] = success.mean
            observed |= {f"success/{label}": success.mean, f"best/{label}": success.best}
    if not fallen or len(fallen) == len(history.environments) or history.gain < -history.noise:
        return None
    return Symptom(
        "warning",
        f"Success fell by more than half from its best while the others kept theirs: {_enumerate(fallen)}.",
        observed,
        "raise the weight of these environments in environment.mixture, or lower optimizer.learning_rate",
    )


def environment_behind(history: TrainingHistory) -> Symptom | None:
    """Far fewer groups of an environment are trained than its weight says, because its groups take longer."""
    plans = members_of(history.config.environment)
    weights, minimums = sum(plan.weight for plan in plans), sum(plan.min_share for plan in plans)
    shares, silent = _means(history, "share"), _means(history, "frac_reward_zero_std")
    # Groups without signal are not trained, so the others have their shares.
    wanted = {
        plan.label: min(plan.weight / weights, 1.0 - minimums + plan.min_share) * (1.0 - silent.get(plan.label, 0.0))
        for plan in plans
    }
    total = sum(wanted.values())
    behind: dict[str, float] = {}
    observed: dict[str, float | int | str] = {}
    for plan in plans:
        due = wanted[plan.label] / total if total else 0.0
        mean = shares.get(plan.label)
        if mean is None or not history.environments[plan.label]["share"].full or mean >= _BEHIND * due:
            continue
        if silent.get(plan.label, 0.0) < _SILENT:  # else its groups are dropped, and environment_silent says so
            behind[plan.label] = mean
            observed |= {f"share/{plan.label}": mean, f"expected/{plan.label}": due}
    if not behind:
        return None
    return Symptom(
        "warning",
        f"Share of the trained groups below half of the weight, as of slow environments: {_enumerate(behind)}.",
        observed,
        "start_training again with a min_share for these (environment.min_share, or in environment.mixture): the "
        "others then wait for them",
        "high",
    )


def _means(history: TrainingHistory, name: str) -> dict[str, float]:
    means = {label: series[name].mean for label, series in history.environments.items()}
    return {label: mean for label, mean in means.items() if mean is not None}


def _enumerate(shares: dict[str, float]) -> str:
    return ", ".join(f"{label} ({share(mean)})" for label, mean in list(shares.items())[:8])


MIXTURE = (
    Rule("environment_errors", environment_errors, "5 % of one environment's rollouts, critical 25 %", CHOSEN),
    Rule("environment_silent", environment_silent, "90 % of one environment's groups, not of all", CHOSEN, 10),
    Rule("environment_behind", environment_behind, "half of its weight among the trained groups", CHOSEN, 10),
    Rule("environment_forgotten", environment_forgotten, "success at half of its best, 10 points below", CHOSEN),
)
