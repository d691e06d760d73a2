"""Stored evaluations and metrics of a run, for reports and plots."""

from __future__ import annotations

from typing import Any


def sampled(successes: int, tasks: int = 200, **more: Any) -> dict[str, Any]:
    """Return the results of an evaluation's sampled or greedy answers."""
    return {
        "split": "heldout",
        "tasks": tasks,
        "successes": successes,
        "accuracy": successes / tasks,
        "errors": 1,
    } | more


def evaluation(label: str, successes: int, greedy: int | None = None) -> dict[str, Any]:
    """Return the stored form of an evaluation with `successes` sampled and `greedy` greedy ones of 200 tasks."""
    examples = [{"task_id": "b", "prompt": "p", "answer": f"{label} b", "success": label == "after", "reward": 0.5}]
    examples.append({"task_id": f"only {label}", "prompt": "q", "reference": 7, "answer": "c", "success": False})
    return {
        "label": label,
        "policy_version": 4,
        "seconds": 1.5,
        "sampled": sampled(successes, reward_mean=0.4, parts={"exact": 0.2}, truncated=0.1),
        "greedy": None if greedy is None else sampled(greedy),
        "examples": examples,
    }


def rows(count: int) -> list[dict[str, Any]]:
    """Return the metrics of this many steps, whose reward is the step."""
    return [
        {"step": n, "reward": float(n), "success": n / count, "rollouts": n * 64, "rollouts_per_second": 9.0}
        for n in range(1, count + 1)
    ]
