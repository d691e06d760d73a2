"""The runs of `make bench-findings`, with the labels that they got before they were ever run, and their two halves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "RIGHT", "STEPS", "Case", "heldout"]

STEPS = 200
"""Optimizer steps of every run: 10 to 15 seconds of training on two quiet cores."""

RIGHT: dict[str, frozenset[str]] = {
    "healthy": frozenset(),
    "learning rate too high": frozenset({"learning_rate_high", "collapse"}),
    "learning rate too low": frozenset({"learning_rate_low"}),
    "broken scorer": frozenset({"scorer_errors", "constant_reward", "scorer_ignores_answers"}),
    "all wrong": frozenset({"all_wrong"}),
    "all right": frozenset({"all_right"}),
    "truncated": frozenset({"truncated"}),
    "stale": frozenset({"staleness", "dropped_stale"}),
    "NaN": frozenset({"nan"}),
    "stalled": frozenset({"stall"}),
}
"""By label, the rules that name the fault. A collapse names the learning rate: its next action lowers it."""


@dataclass(frozen=True)
class Case:
    """One run. `environment` is a class in `environments.py` beside this file, or one that ships: `spell_backward`,
    `sort_letters`.
    """

    name: str
    label: str
    environment: str = "Letters"
    knobs: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration that differ from the preset cpu-embedded."""
    freeze: tuple[str, int] | None = None
    """A member that gets SIGSTOP at a step."""


def _lr(rate: float, seed: int, **more: Any) -> dict[str, Any]:
    return {"optimizer.learning_rate": rate, "algorithm.seed": seed} | {
        name.replace("__", "."): value for name, value in more.items()
    }


_SHORT = {"shortest": 3, "longest": 3}
_LONG = {"shortest": 4, "longest": 5}

CASES: tuple[Case, ...] = (
    # Healthy, in many shapes: slow and fast learners, sparse and dense reward, every part of the recipe varied.
    Case("spell", "healthy", "spell_backward", {}, _lr(1e-3, 1)),
    Case("spell-calm", "healthy", "spell_backward", {}, _lr(3e-4, 2)),
    Case("short", "healthy", "Letters", {"order": "reverse", **_SHORT}, _lr(1e-3, 3)),
    Case("sort-places", "healthy", "Letters", {"order": "sort", "places": True}, _lr(1e-3, 4)),
    Case("copy", "healthy", "Letters", {"order": "copy"}, _lr(1e-3, 5)),
    Case("copy-fast", "healthy", "Letters", {"order": "copy", **_SHORT}, _lr(2e-3, 6)),
    Case("rotate-kl", "healthy", "Letters", {"order": "rotate"}, _lr(1e-3, 7, algorithm__beta=0.02)),
    Case(
        "swap-cispo",
        "healthy",
        "Letters",
        {"order": "swap", "places": True},
        _lr(1e-3, 8, algorithm__loss_type="cispo", algorithm__epsilon_high=5.0),
    ),
    Case("sparse", "healthy", "Letters", {"order": "reverse", **_LONG}, _lr(1e-3, 9, algorithm__drop_zero_signal=True)),
    Case(
        "large-groups",
        "healthy",
        "Letters",
        {"order": "reverse", "places": True, **_LONG},
        _lr(1e-3, 10, rollout__group_size=16, rollout__groups_per_step=4),
    ),
    Case("template", "healthy", "sort_letters", {}, _lr(1e-3, 11, policy__max_context=96)),
    Case(
        "dr-grpo",
        "healthy",
        "Letters",
        {"order": "reverse", **_SHORT},
        _lr(1e-3, 12, algorithm__loss_type="dr_grpo", algorithm__scale_rewards="none"),
    ),
    Case("places-calm", "healthy", "Letters", {"order": "rotate", "places": True}, _lr(5e-4, 13)),
    Case(
        "constant-rate",
        "healthy",
        "Letters",
        {"order": "sort"},
        _lr(5e-4, 14, optimizer__lr_scheduler_type="constant_with_warmup", rollout__temperature=0.9),
    ),
    # The learning rate.
    Case("high-spell", "learning rate too high", "spell_backward", {}, _lr(0.05, 21)),
    Case("high-short", "learning rate too high", "Letters", _SHORT, _lr(0.1, 22)),
    Case("high-places", "learning rate too high", "Letters", {"order": "sort", "places": True}, _lr(0.03, 23)),
    Case("high-copy", "learning rate too high", "Letters", {"order": "copy"}, _lr(0.2, 24)),
    Case(
        "high-constant",
        "learning rate too high",
        "Letters",
        {"order": "rotate", "places": True},
        _lr(0.05, 25, optimizer__lr_scheduler_type="constant"),
    ),
    Case("high-grpo", "learning rate too high", "Letters", _SHORT, _lr(0.03, 26, algorithm__loss_type="grpo")),
    Case("low-spell", "learning rate too low", "spell_backward", {}, _lr(1e-6, 31)),
    Case("low-short", "learning rate too low", "Letters", _SHORT, _lr(3e-6, 32)),
    Case("low-places", "learning rate too low", "Letters", {"order": "sort", "places": True}, _lr(1e-6, 33)),
    Case("low-copy", "learning rate too low", "Letters", {"order": "copy"}, _lr(1e-7, 34)),
    # Scorers.
    Case("raises", "broken scorer", "Raises", {}, _lr(1e-3, 41)),
    Case("raises-later", "broken scorer", "Raises", {"after": 3000, **_SHORT}, _lr(1e-3, 42)),
    Case("not-a-number", "broken scorer", "NotANumber", {}, _lr(1e-3, 43)),
    Case("constant", "broken scorer", "Constant", {}, _lr(1e-3, 44)),
    Case("constant-later", "broken scorer", "Constant", {"after": 3000, "places": True}, _lr(1e-3, 45)),
    Case("by-task", "broken scorer", "ByTask", {}, _lr(1e-3, 46)),
    # Tasks.
    Case("impossible", "all wrong", "Impossible", {}, _lr(1e-3, 51)),
    Case(
        "too-long", "all wrong", "Letters", {"shortest": 11, "longest": 12}, _lr(1e-3, 52, rollout__max_new_tokens=20)
    ),
    Case("impossible-drops", "all wrong", "Impossible", _SHORT, _lr(3e-4, 53, algorithm__drop_zero_signal=True)),
    Case("impossible-groups", "all wrong", "Impossible", _LONG, _lr(1e-3, 54, rollout__group_size=16)),
    Case("everything", "all right", "Everything", {}, _lr(1e-3, 61)),
    Case("easy", "all right", "Easy", {}, _lr(1e-3, 62)),
    Case("everything-groups", "all right", "Everything", _LONG, _lr(3e-4, 63, rollout__group_size=4)),
    Case("easy-short", "all right", "Easy", _SHORT, _lr(1e-3, 64, algorithm__loss_type="grpo")),
    # Answers that are cut off.
    Case("cut", "truncated", "Letters", {}, _lr(1e-3, 71, rollout__max_new_tokens=2)),
    Case("cut-places", "truncated", "Letters", {"places": True, **_LONG}, _lr(1e-3, 72, rollout__max_new_tokens=3)),
    Case("cut-spell", "truncated", "spell_backward", {}, _lr(1e-3, 73, rollout__max_new_tokens=3)),
    Case(
        "cut-masked",
        "truncated",
        "Letters",
        {"places": True},
        _lr(1e-3, 74, rollout__max_new_tokens=3, algorithm__mask_truncated_completions=True),
    ),
    # Old groups.
    Case(
        "queue",
        "stale",
        "Letters",
        {"places": True},
        _lr(1e-3, 81, rollout__queue_groups=96, rollout__max_staleness=1000, rollout__groups_per_step=2),
    ),
    Case(
        "crowd",
        "stale",
        "Letters",
        {},
        _lr(
            1e-3,
            82,
            rollout__queue_groups=48,
            rollout__concurrency=64,
            rollout__groups_per_step=2,
            rollout__max_staleness=1000,
        ),
    ),
    Case(
        "dropping",
        "stale",
        "Letters",
        {},
        _lr(1e-3, 83, rollout__queue_groups=32, rollout__concurrency=64, rollout__max_staleness=1),
    ),
    Case(
        "dropping-small",
        "stale",
        "Letters",
        {"places": True},
        _lr(1e-3, 84, rollout__queue_groups=32, rollout__groups_per_step=2, rollout__max_staleness=2),
    ),
    # Invalid numbers.
    Case("explodes", "NaN", "Explodes", _SHORT, _lr(1e-3, 91, algorithm__scale_rewards="none")),
    Case(
        "explodes-later",
        "NaN",
        "Explodes",
        {"places": True},
        _lr(1e-3, 92, algorithm__scale_rewards="none", algorithm__loss_type="dr_grpo"),
    ),
    Case("half", "NaN", "Letters", {}, _lr(1e-3, 93, policy__dtype="float16")),
    Case("half-places", "NaN", "Letters", {"places": True}, _lr(3e-3, 94, policy__dtype="float16")),
    # Standstills.
    Case("hangs", "stalled", "Hangs", {"after": 3000}, _lr(1e-3, 101, environment__call_timeout_s=3600.0)),
    Case(
        "hangs-places",
        "stalled",
        "Hangs",
        {"after": 2000, "places": True},
        _lr(1e-3, 102, environment__call_timeout_s=3600.0),
    ),
    Case("frozen-inference", "stalled", "Letters", {}, _lr(1e-3, 103), ("inference", 40)),
    Case("frozen-trainer", "stalled", "Letters", {"places": True}, _lr(1e-3, 104), ("trainer", 60)),
)


def heldout() -> frozenset[str]:
    """Names of the cases that stay unseen while rules are tuned: half of each label's, by a fixed seed."""
    dice, names = random.Random("findings-1"), []
    for label in RIGHT:
        own = [case.name for case in CASES if case.label == label]
        names += dice.sample(own, len(own) // 2)
    return frozenset(names)
