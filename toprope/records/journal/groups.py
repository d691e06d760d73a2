"""Wire types of scored groups: an environment posts them, the API journals them, the trainer consumes them.

The first block of fields is Atropos's ScoredData, name by name, so its environments and trainers work with our API. The
second block is ours and optional. A row is one token sequence; a rollout has one row, or several rows (segments) that
share its score if its turns do not extend each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

MASKED = -100
"""Value in `masks` at positions without loss (the prompt, tokens of the environment)."""

PROMPT_LOGPROB = 1.0
"""Value in `inference_logprobs` at positions that were not sampled; no log-probability is positive."""


JUDGE_FAILED = "JudgeFailed"
"""Kind of the error of a rollout whose answer a judge could not judge."""


class Outcome(msgspec.Struct, omit_defaults=True):
    """The result of one rollout of a group."""

    reward: float
    parts: dict[str, float] = {}
    success: bool = False
    turns: int = 1
    truncated: bool = False
    error: str | None = None
    seat: str = ""
    """The player's seat in a game of several; rollouts are compared with those of their own seat."""
    verdicts: dict[str, str] = {}
    """Raw answers of judges by the name of their reward part, shortened; none for held-out tasks."""

    @property
    def unjudged(self) -> bool:
        """True if its judge failed: the reward says nothing about the answer, so nothing is learned from it."""
        return (self.error or "").startswith((f"{JUDGE_FAILED}:", f"{JUDGE_FAILED} ("))  # the latter: a sealed text


def outcomes_of(outcomes: list[Outcome] | None, scores: Iterable[float]) -> list[Outcome]:
    """Return the outcomes of a group; of one that has none, those that its scores tell: 1 and more are successes."""
    return outcomes or [Outcome(score, success=score >= 1) for score in scores]


def comparisons(outcomes: Sequence[Outcome]) -> list[tuple[list[int], list[int]]]:
    """Return the rollouts of a group by the rollouts that their rewards are compared with: numbers of both.

    Those are the rollouts in the same seat, because the first player of a game may win more often, whatever it plays.
    Rollouts without a seat, or alone in theirs, are compared with the whole group. Unjudged ones are with none, and
    leave theirs to the others in it.
    """
    seats: dict[str, list[int]] = {}
    for number, outcome in enumerate(outcomes):
        seats.setdefault(outcome.seat, []).append(number)

    def judged(numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if not outcomes[number].unjudged]

    by_seat = [judged(numbers) for seat, numbers in seats.items() if seat and len(numbers) > 1]
    alone = [number for seat, numbers in seats.items() if not seat or len(numbers) == 1 for number in numbers]
    pairs = [*((numbers, numbers) for numbers in by_seat), (judged(sorted(alone)), judged(range(len(outcomes))))]
    return [(members, peers) for members, peers in pairs if members]


class Group(msgspec.Struct, omit_defaults=True):
    """The rollouts of one task, scored together.

    Shapes: R rows, row r of length T_r. `tokens`, `masks`, `inference_logprobs`: R lists of T_r. `scores`: R.
    `masks[r][t]` is MASKED or the token's id; `inference_logprobs[r][t]` is the natural log-probability under the
    policy and temperature that sampled the token, PROMPT_LOGPROB elsewhere.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    messages: list[Any] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: Any | None = None
    distill_logprobs: Any | None = None

    group_id: str | None = None
    """Idempotency key: a second post with the same key is answered but not stored."""
    environment: str | None = None
    task_id: str | None = None
    rollouts: list[int] | None = None
    """For each row, the index of its rollout in `outcomes`; absent if every row is a rollout of its own."""
    outcomes: list[Outcome] | None = None
    versions: list[list[tuple[int, int]]] | None = None
    """For each row, runs of (policy version, count) over its sampled tokens, in order."""
    prompt: str | None = None
    """The task's question as text for people: cut, and not used for training."""
    answers: list[str] | None = None
    """For each outcome, the answer in all turns, likewise."""
    seconds: float | None = None
    """Wall time from the request of the first token to the score."""
    variant: str | None = None
    """The curriculum level that the task is of, as `level-0`; absent without a curriculum, and in earlier versions."""

    def outcome_of(self, row: int) -> int:
        """Index of the rollout that row `row` belongs to."""
        return row if self.rollouts is None else self.rollouts[row]

    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this group; None if unknown."""
        if self.versions is None:
            return None
        return min((version for row in self.versions for version, _ in row), default=None)


class Batch(msgspec.Struct, omit_defaults=True):
    """The answer of GET /batch to a trainer that sent a cursor.

    `batch` is None if none could be formed within the wait. `cursor` is the position after this batch; the trainer
    sends it with the next request and stores it in a checkpoint. `sequence_numbers` name the groups for drop reports.
    """

    batch: list[Group] | None
    cursor: int = 0
    sequence_numbers: list[int] = []
    waiting: int = 0
    stale: int = 0
    """Groups that the API dropped for this answer because their policy version is too old."""


class Counts(msgspec.Struct):
    """Counts of groups; accepted = waiting + delivered + committed + sum(dropped) at every moment.

    `delivered` counts groups that the trainer has and that are neither committed nor dropped.
    """

    accepted: int = 0
    waiting: int = 0
    delivered: int = 0
    committed: int = 0
    dropped: dict[str, int] = {}
    refused: dict[str, int] = {}
    """Refused posts, by reason; never part of `accepted`."""
    duplicates: int = 0
    equal_score: int = 0
    """Accepted groups whose scores are all equal; they carry no signal for group-relative advantages."""
    unmatched: int = 0
    """Accepted groups of external environments whose tokens the inference server did not recognise."""

    def balanced(self) -> bool:
        """Return True if the counts add up."""
        return self.accepted == self.waiting + self.delivered + self.committed + sum(self.dropped.values())
