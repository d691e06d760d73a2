"""What was seen of an environment while it was tried: values only, no judgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Again", "Ended", "Observed", "Scored", "SplitSeen", "TaskSeen"]


@dataclass(frozen=True)
class TaskSeen:
    """A task as the worker tells it."""

    id: str
    prompt: str
    reference: str | None
    """The right answer as a text; None where none is known."""


@dataclass(frozen=True)
class SplitSeen:
    """What was found of a split."""

    tasks: tuple[TaskSeen, ...]
    known: int
    """Distinct tasks that were found."""
    exhausted: bool
    """Whether `known` is all there is."""
    leaked: int = 0
    """Tasks that the environment itself gave to this split and that another one has; they were left out."""


@dataclass(frozen=True)
class Scored:
    """An answer and what the environment made of it."""

    task: int
    """Which of the tasks that were tried."""
    kind: str
    """See toprope.sdk.checks.answers; `solver`: played by the environment's own `solve`."""
    reward: float
    success: bool = False
    error: str | None = None
    seconds: float = 0.0
    again: float | None = None
    """The reward when the same answer was scored once more; None where it was not."""


@dataclass(frozen=True)
class Ended:
    """An end of the worker."""

    doing: str
    """What it was asked for: `tasks`, `score junk`."""
    hung: bool
    """Whether it gave no answer in time; else it ended by itself."""
    said: str


@dataclass(frozen=True)
class Again:
    """Another process, held against the first one."""

    hash_seed: str
    tasks: int
    """Tasks that both made."""
    other_tasks: int
    """How many of them differ."""
    scores: int = 0
    other_scores: int = 0
    first: str = ""
    """Where they first differ, in words."""


@dataclass
class Observed:
    """Everything that was seen."""

    max_reward: float = 1.0
    min_reward: float = 0.0
    max_turns: int = 1
    own_loop: bool = False
    guessed: bool = False
    """Whether the references are a guess."""
    versions: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    load_s: float = 0.0
    splits: dict[str, SplitSeen] = field(default_factory=dict)
    tasks_raised: str = ""
    """What `tasks` raised, where it did."""
    tasks_s: float | None = None
    """Seconds to make a task, on average over those that were made."""
    tasks_made: int = 0
    slowest_task_s: float = 0.0
    scores: list[Scored] = field(default_factory=list)
    tried: int = 0
    """Tasks of the training split to which answers were tried."""
    ended: list[Ended] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)
    printed_bytes: int = 0
    left_processes: int = 0
    """Processes that the environment had started and left when its worker was gone."""
    left_files: tuple[str, ...] = ()
    """Names of what it wrote into the folder that it was started in."""
    children: int = 0
    """Processes that it had running when all answers were scored, beyond those after loading."""
    memory_mb: float = 0.0
    """Of the worker and what it started, once loaded and tried."""
    grown_mb: float = 0.0
    """How much that grew over `grown_calls` further answers."""
    grown_calls: int = 0
    skipped: list[str] = field(default_factory=list)
    """What there was no time for."""

    def of(self, *kinds: str) -> list[Scored]:
        """The scores of answers of these kinds."""
        return [score for score in self.scores if score.kind in kinds]

    def share(self, reward: float) -> float:
        """A reward as a share of the highest, 0 for none; of an environment that only takes away, of its range."""
        if self.max_reward > 0:
            return reward / self.max_reward
        width = self.max_reward - self.min_reward
        return (reward - self.min_reward) / width if width > 0 else 0.0
