"""Changes of the preset cpu-embedded that `make bench-findings` draws from, and the drafts drawn by a seed.

A change may be harmful or harmless only in an environment where that was measured: `harm.json` has the measurements,
made by `measure.py` before any draft was drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENTS", "HARMFUL", "HARMLESS", "Draft", "draw", "read_harm"]

ENVIRONMENTS = ("reasoning_gym/spell_backward", "sorted_letters", "rotated_letters")
HARM_FILE = Path(__file__).with_name("harm.json")
_HARMFUL_PER_DRAFT, _HARMLESS_PER_DRAFT = (1, 2, 3), 4

HARMFUL: tuple[tuple[str, Any], ...] = (
    ("optimizer.learning_rate", 1e-5),
    ("algorithm.beta", 5.0),
    ("rollout.group_size", 2),
    ("rollout.max_new_tokens", 3),
    ("budget.steps", 20),
    ("rollout.temperature", 3.0),
    ("algorithm.shuffle_rewards", True),
    ("rollout.top_p", 0.1),
    ("rollout.groups_per_step", 1),
    ("optimizer.learning_rate", 0.01),
    ("rollout.temperature", 0.1),
    ("optimizer.weight_decay", 1.0),
    ("algorithm.beta", 1.0),
)
"""Candidates for harmful changes: field and value."""

HARMLESS: tuple[dict[str, Any], ...] = (
    {
        "policy.max_context": 96,
        "algorithm.loss_type": "grpo",
        "algorithm.epsilon": 0.25,
        "algorithm.epsilon_high": 0.4,
        "algorithm.seed": 7,
        "optimizer.adam_beta1": 0.85,
        "optimizer.adam_beta2": 0.98,
        "optimizer.weight_decay": 0.01,
        "optimizer.max_grad_norm": 2.0,
        "optimizer.warmup_steps": 10,
        "rollout.max_new_tokens": 8,
        "rollout.temperature": 0.95,
        "rollout.top_p": 0.98,
        "rollout.max_staleness": 16,
        "rollout.queue_groups": 16,
        "rollout.concurrency": 24,
    },
    {"optimizer.learning_rate": 0.0012, "rollout.group_size": 10, "algorithm.beta": 0.001},
)
"""Candidates for harmless changes, in bundles that are measured together: if all of them at once cost nothing, no
single one does, unless another one of the same bundle makes up for it."""


@dataclass(frozen=True)
class Draft:
    """A draft of an environment with its harmful and harmless changes, by field."""

    name: str
    environment: str
    harmful: dict[str, Any]
    harmless: dict[str, Any]

    @property
    def changes(self) -> dict[str, Any]:
        return self.harmful | self.harmless


def read_harm() -> dict[str, Any]:
    """Return the content of `harm.json`."""
    found: dict[str, Any] = json.loads(HARM_FILE.read_text())
    return found


def draw(seed: int, sick: int, healthy: int, harm: dict[str, Any]) -> list[Draft]:
    """Draw drafts: `sick` with one to three harmful and four harmless changes, `healthy` with four harmless ones.

    Environments and numbers of harmful changes take turns; a field is changed at most once in a draft.

    Args:
        harm: The content of `harm.json`; environments without enough measurements are left out.

    Raises:
        SystemExit: Too little was measured.
    """
    known = [name for name in ENVIRONMENTS if _is_measured(harm["environments"].get(name))]
    if not known:
        raise SystemExit(
            f"{HARM_FILE} lacks measurements: no environment has {max(_HARMFUL_PER_DRAFT)} harmful fields and "
            f"{_HARMLESS_PER_DRAFT} harmless ones. python -P -m benchmarks.findings.measure makes them."
        )
    chance = random.Random(seed)
    drafts = []
    for number in range(sick + healthy):
        environment = known[number % len(known)]
        count = _HARMFUL_PER_DRAFT[number // len(known) % 3] if number < sick else 0
        of_kind = harm["environments"][environment]
        harmful = _take(of_kind["harmful"], count, (), chance)
        harmless = _take(of_kind["harmless"], _HARMLESS_PER_DRAFT, tuple(harmful), chance)
        name = f"{'sick' if number < sick else 'healthy'}-{number + 1}"
        drafts.append(Draft(name, environment, harmful, harmless))
    return drafts


def _is_measured(of_kind: dict[str, Any] | None) -> bool:
    """Return True if a draft with the most harmful changes can be drawn."""
    if of_kind is None:
        return False
    harmful = {field for row in of_kind["harmful"] for field in row["changes"]}
    harmless = {field for row in of_kind["harmless"] for field in row["changes"]}
    return len(harmful) >= max(_HARMFUL_PER_DRAFT) and len(harmless - harmful) >= _HARMLESS_PER_DRAFT


def _take(rows: Sequence[dict[str, Any]], count: int, without: Sequence[str], chance: random.Random) -> dict[str, Any]:
    """Draw fields first, then one of the values of each, so that fields with many values are not drawn more often."""
    by_field: dict[str, list[Any]] = {}
    for row in rows:
        for field, value in row["changes"].items():
            if field not in without:
                by_field.setdefault(field, []).append(value)
    return {field: chance.choice(by_field[field]) for field in chance.sample(sorted(by_field), count)}
