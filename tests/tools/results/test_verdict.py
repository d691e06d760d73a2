"""The verdict on a test: signal for the group size, and what to change."""

from __future__ import annotations

from typing import Any

from toprope_tools.results.verdict import judge_test

from toprope.analysis.reports.results import Accuracy
from toprope.settings.schema import Config


def verdict(**fields: Any) -> str:
    given: dict[str, Any] = {"accuracy": 0.2, "low": 0.1, "high": 0.3, "tasks": 64, "rollouts": 512}
    given |= {"all_wrong_share": 0.3, "all_right_share": 0.0, "signal_share": 0.7} | fields
    return " ".join(judge_test(Accuracy(**given), Config()))


def test_signal_is_reported_with_share_of_groups() -> None:
    assert (
        verdict()
        == "Verdict: there is signal to train on: 70.0% of the groups of 8 have answers that differ in reward."
    )


def test_cut_off_answers_without_success_are_no_signal() -> None:
    said = verdict(accuracy=0.0, all_wrong_share=1.0, signal_share=0.01, truncated=0.949)
    assert "no signal to train on" in said and "94.9% of the answers are cut off at 256 tokens" in said
    assert "rollout.max_new_tokens to 512 and policy.max_context to 768" in said
    assert "supervised fine-tuning first (algorithm.name sft, sft.learning_rate 0.002)" in said
    assert "works" not in said


def test_unknown_task_is_named_before_all_that_follows_from_it() -> None:
    cut = {"accuracy": 0.0, "low": 0.0, "high": 0.05, "tasks": 64, "rollouts": 512, "signal_share": 0.594}
    wrong = Accuracy(**cut, all_wrong_share=1.0, all_right_share=0.0, truncated=0.996)
    warned, said = judge_test(wrong, Config(), "It knows nothing of this task.")
    assert warned == "Warning (unknown_task): It knows nothing of this task."
    assert said.startswith("Verdict: the policy does not know the task: 59.4% of the groups of 8") and "cut" not in said
    often_right = wrong.model_copy(update={"all_wrong_share": 0.3})
    assert "max_new_tokens" in judge_test(often_right, Config(), "It knows nothing of this task.")[-1]


def test_little_signal_estimates_larger_group() -> None:
    said = verdict(accuracy=0.02, all_wrong_share=0.87, signal_share=0.13)
    assert "little signal: 13.0%" in said and "rollout.group_size 16 would give about 2" in said


def test_easy_single_and_failing_tests_are_told_apart() -> None:
    assert "nothing to learn" in verdict(accuracy=1.0, all_right_share=1.0, all_wrong_share=0.0, signal_share=0.0)
    assert "group_size=8" in verdict(rollouts=64)
    assert "does not work" in verdict(errors=512)
    assert "mend what fails" in verdict(errors=100)
    kinds = {"rare": 1, "no grade\nfound": 511}
    assert "every answer ended in an error, such as «no grade found»." in verdict(errors=512, error_kinds=kinds)
    assert "mend what fails, such as «no grade found»" in verdict(errors=100, error_kinds=kinds)
