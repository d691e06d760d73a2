"""Grows a data set: steps generate, change, score and filter items, round by round, until there are enough.

    pipeline = SynthesisPipeline(SynthesisConfig(target_size=500, min_score=0.5, dedup_threshold=0.9))
    pipeline.add_step(TemplateSynthesiser(["What is {a} + {b}?"], {"a": [1, 2, 3], "b": [4, 5]}))
    pipeline.add_step(score)                       # an (async) function of the items, or a step of one's own
    result = await pipeline.run(seed_data)
    result.generated_count, result.filtered_count, result.filtered   # by reason

Seeds go through the steps in the first round and count as items; generators fill up what is missing. Work on single
items runs beside each other up to `concurrency`, is repeated up to `retries` times where that may help, and an item
that fails all the same is left out and counted. With a state file a pipeline that was interrupted goes on behind its
last round.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from toprope.atomic import append
from toprope.errors import ComponentFailed, Corrupt, InvalidValue
from toprope.records.run.folder import LEFT
from toprope.sdk.errors import WorkerError
from toprope.trajectories.items import TrajectoryItem
from toprope.trajectories.synthesis.near_duplicates import Deduplicator, whole_text

__all__ = [
    "DataSynthesiser",
    "OtherPipeline",
    "PipelineStep",
    "Round",
    "SynthesisConfig",
    "SynthesisPipeline",
    "SynthesisResult",
    "TryAgain",
    "filter_by_score",
    "score_of",
]

_ROUND = 256
"""Items that a round begins with at most: what an interruption costs."""
_IDLE_ROUNDS = 3
"""Rounds without a new item after which nothing more is to be expected."""
_PAUSE_S = 0.2
_STATE_VERSION = 1


class TryAgain(Exception):
    """A step raises this over an item that may succeed at another try."""


class OtherPipeline(InvalidValue):
    """A state file is of a pipeline with other steps, settings or seeds."""


@dataclass(frozen=True)
class SynthesisConfig:
    """What is wanted.

    `min_score`: items below are left out; None: none are. `dedup_threshold`: near duplicates of earlier items from this
    Jaccard index on are; None: none are looked for.
    """

    target_size: int = 100
    min_score: float | None = None
    dedup_threshold: float | None = 0.85
    concurrency: int = 8
    retries: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("target_size", 1), ("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < low:
                raise InvalidValue(f"{name} must be at least {low}, not {getattr(self, name)}.", hint="Mend it.")
        if self.dedup_threshold is not None and not 0 < self.dedup_threshold <= 1:
            raise InvalidValue(
                f"dedup_threshold must be above 0 and at most 1, not {self.dedup_threshold}.", hint="Usual: 0.85."
            )


class Round:
    """What a step is given beside its items."""

    def __init__(self, config: SynthesisConfig, number: int, seeds: Sequence[TrajectoryItem], wanted: int) -> None:
        self.config, self.number, self.seeds, self.wanted = config, number, seeds, wanted
        self.random = random.Random(f"{config.seed}:{number}")
        self.generated = 0
        self.dropped: Counter[str] = Counter()

    async def each(
        self,
        items: Iterable[TrajectoryItem],
        work: Callable[[TrajectoryItem], Awaitable[TrajectoryItem | None]],
        failed: str = "failed",
    ) -> list[TrajectoryItem]:
        """What `work` makes of each item, some at a time, in their order.

        Where it gives None the item is dropped by `failed`; where it raises `TryAgain` or a worker's or endpoint's
        refusal of a single question, it is asked again, with growing pauses, and in the end dropped likewise.
        """
        limit = asyncio.Semaphore(self.config.concurrency)

        async def one(item: TrajectoryItem) -> TrajectoryItem | None:
            async with limit:
                for attempt in range(self.config.retries + 1):
                    if attempt:
                        await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
                    try:
                        return await work(item)
                    except (TryAgain, WorkerError) as error:
                        print(f"{failed}: {str(error)[:300]}", flush=True)
            return None

        tasks = [asyncio.create_task(one(item)) for item in items]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        kept = [item for item in found if item is not None]
        self.dropped[failed] += len(found) - len(kept)
        return kept


class PipelineStep(ABC):
    """A step of one's own."""

    @abstractmethod
    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        """The items after this step. What it leaves out it should count in `at.dropped`, by reason."""


class DataSynthesiser(PipelineStep):
    """Generates items: as a step it fills up what a round lacks."""

    random: random.Random = random.Random(0)
    """Set anew by the pipeline at each round, so that an interrupted pipeline goes on as it would have."""
    seed: int = 0
    """The pipeline's."""
    place: int = 0
    """How far it is through what it can generate, for those that go through it in an order; kept in the state file."""

    @abstractmethod
    async def generate(self, count: int) -> list[TrajectoryItem]:
        """Up to `count` new items; fewer, or none, where there are no more."""

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        missing = at.wanted - len(items)
        if missing <= 0:
            return items
        self.random, self.seed = at.random, at.config.seed
        made = await self.generate(missing)
        at.generated += len(made)
        return [*items, *made]


class _Function(PipelineStep):
    def __init__(self, function: Callable[[list[TrajectoryItem]], Any]) -> None:
        self._function = function
        self._name = getattr(function, "__name__", "a step")

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        made = self._function(items)
        made = list(await made if inspect.isawaitable(made) else made)
        if len(made) < len(items):
            at.dropped[self._name] += len(items) - len(made)
        elif len(made) > len(items):
            at.generated += len(made) - len(items)
        return made


@dataclass
class SynthesisResult:
    """What came of a pipeline."""

    items: list[TrajectoryItem] = field(default_factory=list)
    generated_count: int = 0
    """Items that steps made, seeds not counted."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Items that were left out, by reason."""
    seeds: int = 0
    rounds: int = 0
    complete: bool = False
    """Whether the target size was reached."""

    @property
    def filtered_count(self) -> int:
        return sum(self.filtered.values())


def score_of(item: TrajectoryItem) -> float | None:
    """An item's score: what a scorer set, else its reward; None where nobody judged it."""
    score = item.metadata.get("score")
    if isinstance(score, int | float) and not isinstance(score, bool):
        return float(score)
    return None if item.metadata.get("unscored") else item.reward


def filter_by_score(items: Iterable[TrajectoryItem], min_score: float) -> list[TrajectoryItem]:
    """Those whose score is at least `min_score`; what nobody judged is not."""
    return [item for item in items if (score := score_of(item)) is not None and score >= min_score]


class SynthesisPipeline:
    """See the module.

    Args:
        config: What is wanted.
        state: File that keeps what was done, by round; one of another pipeline is refused.
        progress: Told after every round how it stands.
        identity: What the pipeline depends on beside its configuration, for the state file.
    """

    def __init__(
        self,
        config: SynthesisConfig | None = None,
        *,
        state: Path | None = None,
        progress: Callable[[SynthesisResult], None] = lambda result: None,
        identity: str = "",
    ) -> None:
        self.config = config or SynthesisConfig()
        self._steps: list[PipelineStep] = []
        self._state, self._progress, self._identity = state, progress, identity

    def add_step(self, step: PipelineStep | Callable[[list[TrajectoryItem]], Any]) -> SynthesisPipeline:
        """Adds a step: a `PipelineStep`, or an (async) function of a list of items. Returns the pipeline."""
        if not isinstance(step, PipelineStep) and not callable(step):
            raise InvalidValue(f"{step!r} is no step.", hint="A PipelineStep, or a function of a list of items.")
        self._steps.append(step if isinstance(step, PipelineStep) else _Function(step))
        return self

    async def run(self, seed_data: Sequence[TrajectoryItem] = ()) -> SynthesisResult:
        """Runs rounds until there are `target_size` items or no more come.

        Raises:
            TopropeError: A step cannot go on (a teacher's key is refused, a user's code fails).
        """
        seeds, result = list(seed_data), SynthesisResult(seeds=len(seed_data))
        threshold = self.config.dedup_threshold
        known = None if threshold is None else Deduplicator(threshold)
        fed = self._resume(seeds, result, known)
        generators = any(isinstance(step, DataSynthesiser | _Function) for step in self._steps)
        idle = 0
        while len(result.items) < self.config.target_size and idle < _IDLE_ROUNDS:
            begun, fed_from = seeds[fed : fed + _ROUND], fed
            fed += len(begun)
            if not begun and not generators:
                break
            wanted = min(_ROUND, max(len(begun), self.config.target_size - len(result.items)))
            wanted = len(begun) if fed < len(seeds) else wanted
            at = Round(self.config, result.rounds, seeds, wanted)
            items = list(begun)
            for step in self._steps:
                items = await step.apply(items, at)
            made = self._judged(items, at, known)[: self.config.target_size - len(result.items)]
            idle = 0 if made or fed > fed_from else idle + 1
            self._count(result, at, made)
            self._write(at, made, fed)
            self._progress(result)
        result.complete = len(result.items) >= self.config.target_size
        return result

    def _judged(self, items: list[TrajectoryItem], at: Round, known: Deduplicator | None) -> list[TrajectoryItem]:
        least = self.config.min_score
        if least is not None:
            unscored = sum(score_of(item) is None for item in items)
            kept = filter_by_score(items, least)
            at.dropped["unscored"] += unscored
            at.dropped["below min_score"] += len(items) - len(kept) - unscored
            items = kept
        if known is not None:
            near = known.add([whole_text(item) for item in items])
            at.dropped["near duplicate"] += sum(one is not None for one in near)
            items = [item for item, one in zip(items, near, strict=True) if one is None]
        return items

    def _count(self, result: SynthesisResult, at: Round, made: list[TrajectoryItem]) -> None:
        result.rounds += 1
        result.items += made
        result.generated_count += at.generated
        for reason, count in at.dropped.items():
            if count:
                result.filtered[reason] = result.filtered.get(reason, 0) + count

    def _digest(self, seeds: Sequence[TrajectoryItem]) -> str:
        digest = hashlib.sha256(f"{self.config}\0{self._identity}\0{len(self._steps)}".encode())
        for seed in seeds:
            digest.update(seed.id.encode())
        return digest.hexdigest()

    def _resume(self, seeds: Sequence[TrajectoryItem], result: SynthesisResult, known: Deduplicator | None) -> int:
        """Takes up what a state file has; returns how many seeds have gone through."""
        if self._state is None:
            return 0
        digest, fed = self._digest(seeds), 0
        try:
            lines = self._state.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        if len(lines) < 2:  # not even its first line was finished
            self._state.unlink(missing_ok=True)
            _append(self._state, {"version": _STATE_VERSION, "digest": digest})
            return 0
        try:
            head = json.loads(lines[0])
            if head["version"] > _STATE_VERSION:
                raise Corrupt(f"{self._state} was written by a newer version of Toprope.", hint="Update Toprope.")
            if head["digest"] != digest:
                raise OtherPipeline(
                    f"{self._state} is of a pipeline with other steps, settings or seeds.", hint="Use another file."
                )
        except (ValueError, KeyError, TypeError):
            raise Corrupt(f"{self._state} is no state of a pipeline.", hint=LEFT) from None
        for line in lines[1:]:
            try:
                done = msgspec.json.decode(line, type=_Done)
            except msgspec.DecodeError:
                continue  # torn: that round is done again
            result.rounds = done.round + 1
            result.items += done.items
            result.generated_count += done.generated
            for reason, count in done.dropped.items():
                result.filtered[reason] = result.filtered.get(reason, 0) + count
            fed = done.fed
            for step, place in zip(self._steps, done.places, strict=True):
                if isinstance(step, DataSynthesiser):
                    step.place = place
            if known is not None:
                known.add([whole_text(item) for item in done.items])
        return fed

    def _write(self, at: Round, made: list[TrajectoryItem], fed: int) -> None:
        if self._state is not None:
            places = [step.place if isinstance(step, DataSynthesiser) else 0 for step in self._steps]
            done = _Done(at.number, at.generated, {why: n for why, n in at.dropped.items() if n}, fed, places, made)
            _append(self._state, msgspec.to_builtins(done))


class _Done(msgspec.Struct):
    round: int
    generated: int
    dropped: dict[str, int]
    fed: int
    places: list[int]
    items: list[TrajectoryItem]


def _append(path: Path, value: Any) -> None:
    try:
        append(path, msgspec.json.encode(value) + b"\n")
    except OSError as error:
        raise ComponentFailed(f"{path} cannot be written: {error.strerror or error}.", hint="Make room.") from None
