"""Judge a test of a policy: is there signal to train on for this group size, and what to change if not."""

from __future__ import annotations

from toprope.analysis.findings.configured import expected_signal
from toprope.analysis.findings.rules import longer_answers, said
from toprope.analysis.reports.results import Accuracy
from toprope.settings.schema import EMBEDDED, Config
from toprope.text_format import percent
from toprope.untrusted import marked

_ENOUGH, _LITTLE = 0.25, 0.05
"""Shares of groups with signal: enough to train on, and too little to begin."""
_CUT, _UNREADABLE = 0.5, 0.3
_FEW_RIGHT = 0.02
_LONGEST_ERROR = 300
_KNOWS_LITTLE = 0.9
"""Share of groups without a right answer from which the start's warning of an unknown task stands."""
_LARGER = 2
"""Factor to a larger group whose signal is estimated."""


def judge_test(test: Accuracy, config: Config, unknown_task: str = "") -> list[str]:
    """Return the verdict on a test and the edits that would help, in one to three lines.

    Args:
        config: The tested configuration.
        unknown_task: The start's warning that the policy does not know the task; empty without one.
    """
    if test.all_wrong_share is not None and test.all_wrong_share < _KNOWS_LITTLE:
        unknown_task = ""
    if unknown_task:
        return [f"Warning (unknown_task): {unknown_task}", *_judge(test, config, known=False)]
    return _judge(test, config, known=True)


def _judge(test: Accuracy, config: Config, *, known: bool) -> list[str]:
    tried = test.rollouts or test.tasks
    if test.errors and test.errors >= tried:
        return [
            "Verdict: the environment does not work with this configuration; every answer ended in an error"
            f"{_most_frequent(test) or '. describe_environment shows the error of the scorer'}."
        ]
    if test.all_right_share == 1.0:
        return ["Verdict: every answer is right, so there is nothing to learn; make the tasks harder."]
    signal, size = signal_of(test), max(round(tried / test.tasks), 1)
    if signal is None or size < 2:
        return ["Verdict: one answer per task shows no signal; test with group_size=8."]
    groups_with_signal = f"{percent(signal)} of the groups of {size} have answers that differ in reward"
    if not known:
        verdict = f"Verdict: the policy does not know the task: {groups_with_signal}."
    elif signal >= _ENOUGH:
        verdict = f"Verdict: there is signal to train on: {groups_with_signal}."
    elif signal >= _LITTLE:
        verdict = f"Verdict: there is little signal: {groups_with_signal}; the others teach nothing."
    else:
        verdict = f"Verdict: there is no signal to train on: {groups_with_signal}."
    remedies = _remedies(test, config, signal, size, known=known)
    return [verdict, f"To change: {'; '.join(remedies)}."] if remedies else [verdict]


def teaches(test: Accuracy) -> bool:
    """True if a test shows enough signal to train on."""
    return (signal_of(test) or 0.0) >= _ENOUGH and test.all_right_share != 1.0 and (test.rollouts or 0) > test.tasks


def _most_frequent(test: Accuracy) -> str:
    """Return the error of most rollouts, marked; empty if none is known."""
    if not test.error_kinds:
        return ""
    text = max(test.error_kinds, key=lambda kind: test.error_kinds[kind])
    return f", such as {marked(text, _LONGEST_ERROR)}"


def signal_of(test: Accuracy) -> float | None:
    """Return the share of groups that teach; None if it was not measured."""
    if test.signal_share is not None:
        return test.signal_share
    if test.all_wrong_share is None or test.all_right_share is None:
        return None
    return max(1.0 - test.all_wrong_share - test.all_right_share, 0.0)


def _remedies(test: Accuracy, config: Config, signal: float, size: int, *, known: bool) -> list[str]:
    """Return what to change, the likeliest first."""
    remedies, limit = [], config.rollout.max_new_tokens
    if test.errors > 0.05 * (test.rollouts or test.tasks):
        remedies.append(
            f"mend what fails{_most_frequent(test) or ': describe_environment shows the error of the scorer'}"
        )
    if not known:  # what else a test shows of such a policy follows from it
        return remedies
    if (test.truncated or 0.0) >= _CUT:
        changes = said(longer_answers(config, 2 * limit))
        remedies.append(
            f"{percent(test.truncated)} of the answers are cut off at {limit} tokens: edit_config {changes}"
        )
    elif (test.parse_failures or 0.0) >= _UNREADABLE:
        remedies.append(f"{percent(test.parse_failures)} of the answers cannot be read: show the form in the prompt")
    if test.accuracy > 0 and signal < _ENOUGH:
        expected = expected_signal(size, test.accuracy, signal, _LARGER * size)
        if expected > 1.3 * signal:
            remedies.append(f"rollout.group_size {_LARGER * size} would give about {percent(expected)}")
    if test.accuracy < _FEW_RIGHT and signal < _ENOUGH:
        rate = ", sft.learning_rate 0.002" if config.policy.model in EMBEDDED else ""
        remedies.append(f"supervised fine-tuning first (algorithm.name sft{rate}) shows it right answers")
        remedies.append("or easier tasks (describe_environment lists the knobs), or partial credit")
    return remedies
