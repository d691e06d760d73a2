"""Remarks on an environment: what its splits and the scores of a few probe answers show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.records.journal.groups import Outcome
from toprope.records.worker_messages import Card, SplitSize
from toprope.sdk.checks.observed import copies_counted
from toprope.sdk.checks.scoring import MEASURE_ALONE
from toprope.text_format import plural

EMPTY = "The train split has no tasks."
_JUDGES_ITSELF = (
    "If its scorer asks a model, the policy in training judges itself unless environment.model_roles names a grader."
)


@dataclass(frozen=True)
class Example:
    """A training task with the scores of probe answers that test the scorer."""

    messages: tuple[dict[str, Any], ...]
    reference: Any
    scores: dict[str, Outcome]
    """Outcomes by probe: `reference` (if there is one), `empty`, `junk`, and `near_miss` (one character wrong).

    Each probe is a complete rollout of one answer.
    """


def remarks_on(card: Card, examples: Sequence[Example], sizes: Mapping[str, SplitSize], refused: str) -> list[str]:
    """Return problems of the splits, and of the scorer that the example scores show."""
    remarks = [_JUDGES_ITSELF] if "model-roles" in card.tags else []
    if any(size.shared for size in sizes.values()):
        remarks.append("Its tasks are too few to hold any out: the same serve for training and evaluation.")
    if leaked := sum(size.leaked for size in sizes.values()):
        remarks.append(f"It gives {plural(leaked, 'task')} to two splits; train and validation are without them.")
    if sizes and all(size.exhausted for size in sizes.values()) and (copies := max(s.copies for s in sizes.values())):
        remarks.append(f"{copies_counted(copies)}.")
    if refused:
        remarks.append(refused)
    for label in ("reference", "empty", "junk"):
        outcomes = [example.scores[label] for example in examples if label in example.scores]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            remarks.append(f"Scoring the {label} answer raises: {errors[0]} (such a rollout earns at most 0).")
        elif label == "reference" and not all(outcome.success for outcome in outcomes):
            best = max(outcome.reward for outcome in outcomes)
            alone = f" It scores groups, and {MEASURE_ALONE}." if card.grouped else ""
            remarks.append(f"The reference answer does not succeed everywhere (best reward {best:g}).{alone}")
        elif label != "reference" and any(outcome.success for outcome in outcomes):
            remarks.append(f"An answer that is {label} succeeds: the scorer can be fooled.")
        elif label != "reference" and any(outcome.reward > 0 for outcome in outcomes):
            most = max(outcome.reward for outcome in outcomes)
            remarks.append(f"An answer that is {label} is rewarded with up to {most:g} of {card.max_reward:g}.")
    return remarks
