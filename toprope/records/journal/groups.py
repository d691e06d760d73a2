"""The wire types of scored groups: what an environment posts, the API journals and the trainer consumes.

The first block of fields is Atropos's ScoredData, name by name, so that its environments and trainers can talk to our
API. The second block is ours and optional. One row is one token sequence; a rollout has one row, or several when its
turns do not extend each other (segments), which then share the rollout's score.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["MASKED", "PROMPT_LOGPROB", "Batch", "Counts", "Group", "Outcome"]

MASKED = -100
"""What `masks` holds at positions that are not trained on (the prompt, an environment's tokens)."""

PROMPT_LOGPROB = 1.0
"""What `inference_logprobs` holds where nothing was sampled: no log-probability is positive."""


class Outcome(msgspec.Struct, omit_defaults=True):
    """How one rollout of a group ended."""

    reward: float
    parts: dict[str, float] = {}
    success: bool = False
    turns: int = 1
    truncated: bool = False
    error: str | None = None


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
    """Idempotency key: a second post under the same key is answered and not stored."""
    environment: str | None = None
    task_id: str | None = None
    rollouts: list[int] | None = None
    """For each row the index of its rollout in `outcomes`; absent when every row is a rollout of its own."""
    outcomes: list[Outcome] | None = None
    versions: list[list[tuple[int, int]]] | None = None
    """For each row, runs of (policy version, count) over its sampled tokens, in order."""
    prompt: str | None = None
    """What the task asked, as text for people: cut, and no part of what is trained on."""
    answers: list[str] | None = None
    """For each outcome what was answered, all turns of it, likewise."""
    seconds: float | None = None
    """Wall time from asking for the first token to the score."""

    def outcome_of(self, row: int) -> int:
        """Index of the rollout that row `row` belongs to."""
        return row if self.rollouts is None else self.rollouts[row]

    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this group, None where unknown."""
        if self.versions is None:
            return None
        return min((version for row in self.versions for version, _ in row), default=None)


class Batch(msgspec.Struct, omit_defaults=True):
    """What GET /batch answers to a trainer that sent a cursor.

    `batch` is None when nothing could be formed within the wait. `cursor` is the position after this batch, to be
    sent with the next request and stored in a checkpoint; `sequence_numbers` name the groups for drop reports.
    """

    batch: list[Group] | None
    cursor: int = 0
    sequence_numbers: list[int] = []
    waiting: int = 0
    stale: int = 0
    """Groups that the API dropped for this answer, because their policy version is too old."""


class Counts(msgspec.Struct):
    """The account of groups: accepted = waiting + delivered + committed + sum(dropped), at every moment.

    `delivered` counts groups that were handed out and neither committed nor dropped.
    """

    accepted: int = 0
    waiting: int = 0
    delivered: int = 0
    committed: int = 0
    dropped: dict[str, int] = {}
    refused: dict[str, int] = {}
    """Posts turned away at the door, by reason; never part of `accepted`."""
    duplicates: int = 0
    equal_score: int = 0
    """Accepted groups whose scores are all equal: they carry no signal for group-relative advantages."""
    unmatched: int = 0
    """Accepted groups of outside environments whose tokens the inference server did not recognise."""

    def balanced(self) -> bool:
        """Whether the account adds up."""
        return self.accepted == self.waiting + self.delivered + self.committed + sum(self.dropped.values())
