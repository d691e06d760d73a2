"""The synthesis pipeline: steps generate, change, score and filter items in rounds until the target size is reached.

    pipeline = SynthesisPipeline(SynthesisConfig(target_size=500, min_score=0.5, dedup_threshold=0.9))
    pipeline.add_step(TemplateSynthesiser(["What is {a} + {b}?"], {"a": [1, 2, 3], "b": [4, 5]}))
    pipeline.add_step(score)                       # an (async) function of the items, or a PipelineStep
    result = await pipeline.run(seed_data)
    result.generated_count, result.filtered        # by reason

Seeds go through the steps in the first round and count as items; generators supply the rest. Items are processed with
up to `concurrency` at a time and up to `retries` repetitions; an item that still fails is dropped and counted. With a
state file, an interrupted pipeline continues after its last complete round.
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
from toprope.records.run.folder import REPAIR_HINT
from toprope.sdk.errors import WorkerError
from toprope.trajectories.items import TrajectoryItem
from toprope.trajectories.synthesis.near_duplicates import Deduplicator, whole_text

ROUND_SIZE = 256
"""Most items at the beginning of a round, which is what an interruption can lose."""
_IDLE_ROUNDS = 3
"""Consecutive rounds without a new item after which the pipeline ends."""
RETRY_PAUSE_S = 0.2
_STATE_VERSION = 2


class TryAgain(Exception):
    """Raised by a step for an item that may succeed at another attempt."""


class OtherPipeline(InvalidValue):
    """The state file belongs to a pipeline with other steps, settings or seeds."""


@dataclass(frozen=True)
class SynthesisConfig:
    """Settings of a pipeline.

    `min_score`: drop items below; None keeps all. `dedup_threshold`: drop near duplicates of earlier items from this
    Jaccard index on; None keeps all.
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
                raise InvalidValue(f"{name} must be at least {low}, not {getattr(self, name)}.", hint="Change it.")
        if self.dedup_threshold is not None and not 0 < self.dedup_threshold <= 1:
            raise InvalidValue(
                f"dedup_threshold must be above 0 and at most 1, not {self.dedup_threshold}.", hint="Usual: 0.85."
            )


class Round:
    """The context of a step."""

    def __init__(self, config: SynthesisConfig, number: int, seeds: Sequence[TrajectoryItem], wanted: int) -> None:
        self.config, self.number, self.seeds, self.wanted = config, number, seeds, wanted
        self.random = random.Random(f"{config.seed}:{number}")
        self.generated = 0
        self.dropped: Counter[str] = Counter()
        self.former: Sequence[TrajectoryItem] = ()
        """For a step that mutates: the items that reached it in this round and those before."""

    async def each(
        self,
        items: Iterable[TrajectoryItem],
        work: Callable[[TrajectoryItem], Awaitable[TrajectoryItem | None]],
        failed: str = "failed",
    ) -> list[TrajectoryItem]:
        """Apply `work` to each item, several at a time, and return the results in order.

        None drops the item under the reason `failed`. `TryAgain`, and an error of worker or endpoint about a single
        item, are retried with growing pauses; then the item is dropped.
        """
        limit = asyncio.Semaphore(self.config.concurrency)

        async def work_on(item: TrajectoryItem) -> TrajectoryItem | None:
            async with limit:
                for attempt in range(self.config.retries + 1):
                    if attempt:
                        await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
                    try:
                        return await work(item)
                    except (TryAgain, WorkerError) as error:
                        print(f"{failed}: {str(error)[:300]}", flush=True)
            return None

        tasks = [asyncio.create_task(work_on(item)) for item in items]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        kept = [item for item in results if item is not None]
        self.dropped[failed] += len(results) - len(kept)
        return kept


class PipelineStep(ABC):
    """Base class of steps."""

    @abstractmethod
    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        """Return the items after this step; count dropped ones in `at.dropped` by reason."""


class DataSynthesiser(PipelineStep):
    """A step that generates the items that a round lacks."""

    at: Round
    """The present round, set by the pipeline."""
    random: random.Random = random.Random(0)
    """Set by the pipeline at each round, so that an interrupted pipeline continues identically."""
    seed: int = 0
    """Seeds of the pipeline."""
    place: int = 0
    """Position in an ordered sequence of items; kept in the state file."""
    mutates: bool = False
    """Makes new items from those that reached the step in any round; the state file keeps these."""

    @abstractmethod
    async def generate(self, count: int) -> list[TrajectoryItem]:
        """Return up to `count` new items; fewer or none if no more exist."""

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        missing = at.wanted - len(items)
        if missing <= 0:
            return items
        self.at, self.random, self.seed = at, at.random, at.config.seed
        new_items = await self.generate(missing)
        at.generated += len(new_items)
        return [*items, *new_items]


class _Function(PipelineStep):
    def __init__(self, function: Callable[[list[TrajectoryItem]], Any]) -> None:
        self._function = function
        self._name = getattr(function, "__name__", "a step")

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        output = self._function(items)
        output = list(await output if inspect.isawaitable(output) else output)
        if len(output) < len(items):
            at.dropped[self._name] += len(items) - len(output)
        elif len(output) > len(items):
            at.generated += len(output) - len(items)
        return output


@dataclass
class SynthesisResult:
    """The result of a pipeline."""

    items: list[TrajectoryItem] = field(default_factory=list)
    generated_count: int = 0
    """Number of generated items, without seeds."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Number of dropped items by reason."""
    rounds: int = 0
    complete: bool = False
    """True if the target size was reached."""


def score_of(item: TrajectoryItem) -> float | None:
    """Return the score of an item: that of a scorer, otherwise its reward; None if it was not judged."""
    score = item.metadata.get("score")
    if isinstance(score, int | float) and not isinstance(score, bool):
        return float(score)
    return None if item.metadata.get("unscored") else item.reward


def filter_by_score(items: Iterable[TrajectoryItem], min_score: float) -> list[TrajectoryItem]:
    """Return the items with a score of at least `min_score`; items without a score are dropped."""
    return [item for item in items if (score := score_of(item)) is not None and score >= min_score]


class SynthesisPipeline:
    """See the module.

    Args:
        config: Settings.
        state: State file, written after each round; that of another pipeline is refused.
        progress: Called after every round with the result so far.
        identity: Further inputs of the pipeline, for the state file.
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
        """Add a `PipelineStep` or an (async) function of a list of items; return the pipeline."""
        if not isinstance(step, PipelineStep) and not callable(step):
            raise InvalidValue(
                f"{step!r} is not a step.", hint="Give a PipelineStep, or a function of a list of items."
            )
        self._steps.append(step if isinstance(step, PipelineStep) else _Function(step))
        return self

    async def run(self, seed_data: Sequence[TrajectoryItem] = ()) -> SynthesisResult:
        """Run rounds until there are `target_size` items or no new ones.

        Raises:
            TopropeError: A step cannot continue (a teacher's key is refused, a user's code fails).
        """
        seeds, result = list(seed_data), SynthesisResult()
        threshold = self.config.dedup_threshold
        deduplicator = None if threshold is None else Deduplicator(threshold)
        former: list[list[TrajectoryItem]] = [[] for _ in self._steps]
        fed = self._resume(seeds, result, deduplicator, former)
        generators = any(isinstance(step, DataSynthesiser | _Function) for step in self._steps)
        idle = 0
        while len(result.items) < self.config.target_size and idle < _IDLE_ROUNDS:
            begun, fed_from = seeds[fed : fed + ROUND_SIZE], fed
            fed += len(begun)
            if not begun and not generators:
                break
            wanted = min(ROUND_SIZE, max(len(begun), self.config.target_size - len(result.items)))
            wanted = len(begun) if fed < len(seeds) else wanted
            at = Round(self.config, result.rounds, seeds, wanted)
            items, reached = list(begun), []
            for step, former_items in zip(self._steps, former, strict=True):
                reached.append(list(items) if isinstance(step, DataSynthesiser) and step.mutates else [])
                former_items += reached[-1]
                at.former = former_items
                items = await step.apply(items, at)
            new_items = self._select(items, at, deduplicator)[: self.config.target_size - len(result.items)]
            idle = 0 if new_items or fed > fed_from else idle + 1
            self._count(result, at, new_items)
            self._write(at, new_items, fed, reached)
            self._progress(result)
        result.complete = len(result.items) >= self.config.target_size
        return result

    def _select(
        self, items: list[TrajectoryItem], at: Round, deduplicator: Deduplicator | None
    ) -> list[TrajectoryItem]:
        least = self.config.min_score
        if least is not None:
            unscored = sum(score_of(item) is None for item in items)
            well_scored = filter_by_score(items, least)
            at.dropped["unscored"] += unscored
            at.dropped["below min_score"] += len(items) - len(well_scored) - unscored
            items = well_scored
        if deduplicator is not None:
            near = deduplicator.add([whole_text(item) for item in items])
            at.dropped["near duplicate"] += sum(duplicate_of is not None for duplicate_of in near)
            items = [item for item, duplicate_of in zip(items, near, strict=True) if duplicate_of is None]
        return items

    def _count(self, result: SynthesisResult, at: Round, new_items: list[TrajectoryItem]) -> None:
        result.rounds += 1
        result.items += new_items
        result.generated_count += at.generated
        for reason, count in at.dropped.items():
            if count:
                result.filtered[reason] = result.filtered.get(reason, 0) + count

    def _digest(self, seeds: Sequence[TrajectoryItem]) -> str:
        digest = hashlib.sha256(f"{_STATE_VERSION}\0{self.config}\0{self._identity}\0{len(self._steps)}".encode())
        for seed in seeds:
            digest.update(seed.id.encode())
        return digest.hexdigest()

    def _resume(
        self,
        seeds: Sequence[TrajectoryItem],
        result: SynthesisResult,
        deduplicator: Deduplicator | None,
        former: Sequence[list[TrajectoryItem]],
    ) -> int:
        """Load the state file; return the number of seeds already processed."""
        if self._state is None:
            return 0
        digest, fed = self._digest(seeds), 0
        try:
            lines = self._state.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        if len(lines) < 2:  # not even the first line is complete
            self._state.unlink(missing_ok=True)
            _append(self._state, {"version": _STATE_VERSION, "digest": digest})
            return 0
        try:
            head = json.loads(lines[0])
            if head["version"] > _STATE_VERSION:
                raise Corrupt(f"{self._state} was written by a newer version of Toprope.", hint="Update Toprope.")
            if head["digest"] != digest:
                raise OtherPipeline(
                    f"{self._state} belongs to a pipeline with other steps, settings or seeds.",
                    hint="Use another file.",
                )
        except (ValueError, KeyError, TypeError):
            raise Corrupt(f"{self._state} is not a pipeline state.", hint=REPAIR_HINT) from None
        for line in lines[1:]:
            try:
                done = msgspec.json.decode(line, type=_Done)
            except msgspec.DecodeError:
                continue  # a torn line: repeat that round
            result.rounds = done.round + 1
            result.items += done.items
            result.generated_count += done.generated
            for reason, count in done.dropped.items():
                result.filtered[reason] = result.filtered.get(reason, 0) + count
            fed = done.fed
            for step, place in zip(self._steps, done.places, strict=True):
                if isinstance(step, DataSynthesiser):
                    step.place = place
            for items, reached in zip(former, done.reached, strict=True):
                items += reached
            if deduplicator is not None:
                deduplicator.restore([whole_text(item) for item in done.items])
        return fed

    def _write(self, at: Round, new_items: list[TrajectoryItem], fed: int, reached: list[list[TrajectoryItem]]) -> None:
        if self._state is not None:
            places = [step.place if isinstance(step, DataSynthesiser) else 0 for step in self._steps]
            dropped = {why: n for why, n in at.dropped.items() if n}
            done = _Done(at.number, at.generated, dropped, fed, places, new_items, reached)
            _append(self._state, msgspec.to_builtins(done))


class _Done(msgspec.Struct):
    round: int
    generated: int
    dropped: dict[str, int]
    fed: int
    places: list[int]
    items: list[TrajectoryItem]
    reached: list[list[TrajectoryItem]]
    """By step that mutates: the items that reached it."""


def _append(path: Path, value: Any) -> None:
    try:
        append(path, msgspec.json.encode(value) + b"\n")
    except OSError as error:
        raise ComponentFailed(f"{path} cannot be written: {error.strerror or error}.", hint="Make room.") from None
