"""Evolution over candidates of any kind: objects, prompts, programs. For settings of runs, see `toprope.sdk.evolution`.

    class Prompts:
        def evaluate(self, candidate): return accuracy_of(candidate)          # higher is better; may be async
        def select(self, population, scores): return best_half(population, scores)    # optional
        def mutate(self, candidate): return reword(candidate)                 # may be async

    result = evolve(Prompts(), ["Answer in one word.", "Think first."], EvolutionConfig(epochs=5, population_size=8))
    print(result.best, result.best_score)

`toprope.workbench.rewriter` mutates texts by a model of the owner's.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from toprope.sdk.errors import InvalidRequest

__all__ = ["EvolutionConfig", "EvolutionResult", "Phase", "Strategy", "evolve", "evolve_async"]

Phase = Literal["init", "evaluating", "selecting", "mutating", "complete"]


@dataclass(frozen=True)
class EvolutionConfig:
    """Length and greediness of a search.

    Raises:
        InvalidRequest: A number is out of range.
    """

    epochs: int = 10
    population_size: int = 20
    selection_ratio: float = 0.5
    """Share of the population that `select` keeps if the strategy has none; at least one candidate."""
    mutation_rate: float = 1.0
    """Probability that a copy of a survivor is mutated."""
    seed: int = 0
    concurrency: int = 8
    """Async evaluations and mutations at a time."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.population_size < 1 or self.concurrency < 1:
            raise InvalidRequest("epochs, population_size and concurrency must be at least 1.")
        if not 0 < self.selection_ratio <= 1 or not 0 <= self.mutation_rate <= 1:
            raise InvalidRequest("selection_ratio must be above 0 and at most 1, mutation_rate from 0 to 1.")


@dataclass
class EvolutionResult:
    """The best candidate ever evaluated, and how the search went."""

    best: Any = None
    best_score: float = -math.inf
    """-inf if no candidate could be evaluated."""
    epochs_completed: int = 0
    evaluations: int = 0
    failures: list[str] = field(default_factory=list)
    """Errors of evaluations and mutations. Such a candidate has no score; a failed mutation keeps its parent."""
    history: list[float] = field(default_factory=list)
    """The best score of each epoch."""


class Strategy(Protocol):
    """The methods that `evolve` calls. `select(population, scores)` is optional."""

    def evaluate(self, candidate: Any) -> Any:
        """The score of a candidate, higher is better, or an awaitable for it."""

    def mutate(self, candidate: Any) -> Any:
        """A new candidate derived from one, or an awaitable for it."""


def evolve(
    strategy: Strategy,
    population: Sequence[Any],
    config: EvolutionConfig | None = None,
    *,
    on_phase: Callable[[Phase, int], None] = lambda phase, epoch: None,
    journal: str | os.PathLike[str] | None = None,
) -> EvolutionResult:
    """Search from a first population. Not from a running event loop: `evolve_async` is for those.

    Args:
        strategy: Evaluates, selects and mutates.
        population: The first candidates; mutations of them fill it up to `population_size`.
        config: Defaults if None.
        on_phase: Called at the beginning of each phase with its epoch, from 1.
        journal: File that keeps every population and score as JSON, so that an interrupted search goes on where it was.
            Candidates must be JSON values then.

    Raises:
        InvalidRequest: The population is empty, `select` returned strangers, or the journal is of another search: its
            strategy's class, first population, population_size or seed differ.
    """
    return asyncio.run(evolve_async(strategy, population, config, on_phase=on_phase, journal=journal))


async def evolve_async(
    strategy: Strategy,
    population: Sequence[Any],
    config: EvolutionConfig | None = None,
    *,
    on_phase: Callable[[Phase, int], None] = lambda phase, epoch: None,
    journal: str | os.PathLike[str] | None = None,
) -> EvolutionResult:
    """See `evolve`."""
    config = config or EvolutionConfig()
    if not population:
        raise InvalidRequest("The first population is empty.")
    search = _Search(strategy, config, None if journal is None else Path(journal))
    on_phase("init", 1)
    present = search.resumed(population) or await search.fill(list(population), 1)
    for epoch in range(search.result.epochs_completed + 1, config.epochs + 1):
        on_phase("evaluating", epoch)
        scores = await search.score(present)
        on_phase("selecting", epoch)
        survivors = await search.select(present, scores)
        search.result.epochs_completed = epoch
        if epoch < config.epochs:
            on_phase("mutating", epoch)
            present = await search.fill(survivors, epoch + 1)
        search.record(present)
    on_phase("complete", config.epochs)
    return search.result


class _Search:
    def __init__(self, strategy: Strategy, config: EvolutionConfig, journal: Path | None) -> None:
        self._strategy, self._config, self._journal = strategy, config, journal
        self._limit = asyncio.Semaphore(config.concurrency)
        self.result = EvolutionResult()
        self._known: list[tuple[Any, float]] = []
        """Candidates of the last population with their scores: survivors are not evaluated again. Failures are not
        kept, because the next attempt may succeed."""
        self._identity: dict[str, Any] = {}
        """The fields of the journal that distinguish searches."""

    def resumed(self, first: Sequence[Any]) -> list[Any]:
        """The population to go on with; empty if there is no journal yet."""
        if self._journal is None:
            return []
        self._identity = {
            "strategy": type(self._strategy).__qualname__,
            "seed": self._config.seed,
            "population_size": self._config.population_size,
            "first_population": hashlib.sha256(json.dumps(list(first), sort_keys=True).encode()).hexdigest(),
        }
        if not self._journal.exists():
            return []
        state: dict[str, Any] | None = None
        for line in self._journal.read_text(encoding="utf-8").splitlines():
            try:
                state = json.loads(line)
            except ValueError:
                continue  # torn by a kill
        if state is None:
            return []
        for name, value in self._identity.items():
            if state.get(name, value) != value:  # older journals have the seed only
                raise InvalidRequest(
                    f"{self._journal} is of another search: {name} {state[name]}, here {value}. Give each its own file."
                )
        result = state["result"]
        best_score = -math.inf if result["best_score"] is None else result["best_score"]
        self.result = EvolutionResult(**{**result, "best_score": best_score})
        self._known = [(candidate, score) for candidate, score in state["known"] if score is not None]
        return list(state["population"])

    def record(self, population: list[Any]) -> None:
        """Append the state after an epoch."""
        if self._journal is None:
            return
        result = vars(self.result) | {
            "best_score": self.result.best_score if math.isfinite(self.result.best_score) else None
        }
        state = self._identity | {"result": result, "known": self._known, "population": population}
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(state) + "\n")
            file.flush()
            os.fsync(file.fileno())

    async def score(self, population: list[Any]) -> list[float | None]:
        """Scores of a population; None where the evaluation failed."""

        async def score_of(candidate: Any) -> float | None:
            scored = next((pair for pair in self._known if pair[0] == candidate), None)
            if scored is not None:
                return scored[1]
            self.result.evaluations += 1
            try:
                score = float(await self._call(self._strategy.evaluate, candidate))
            except Exception as error:  # a user's code may raise anything
                self.result.failures.append(f"evaluate: {type(error).__name__}: {error}"[:300])
                return None
            return score if math.isfinite(score) else None

        scores = list(await asyncio.gather(*(score_of(candidate) for candidate in population)))
        self._known = [
            (candidate, score) for candidate, score in zip(population, scores, strict=True) if score is not None
        ]
        for candidate, score in self._known:
            if score > self.result.best_score:
                self.result.best, self.result.best_score = candidate, score
        valid_scores = [score for score in scores if score is not None]
        self.result.history.append(max(valid_scores, default=-math.inf))
        return scores

    async def select(self, population: list[Any], scores: list[float | None]) -> list[Any]:
        """Survivors; the best by score if the strategy does not select."""
        ranked = [pair for pair in zip(population, scores, strict=True) if pair[1] is not None]
        ranked.sort(key=lambda pair: pair[1] or 0.0, reverse=True)
        alive = [candidate for candidate, _ in ranked]
        if not alive:
            return population
        select = getattr(self._strategy, "select", None)
        if select is None:
            return alive[: max(1, round(self._config.selection_ratio * len(population)))]
        survivors = list(await self._call(select, alive, [score for _, score in ranked]))
        if not survivors or any(candidate not in alive for candidate in survivors):
            raise InvalidRequest("select must return some of the candidates that it was given.")
        return survivors

    async def fill(self, survivors: list[Any], epoch: int) -> list[Any]:
        """Survivors with mutations of each in turn, up to the size of the population."""
        missing = self._config.population_size - len(survivors)
        chance = random.Random(f"{self._config.seed}:{epoch}")
        parents = [survivors[number % len(survivors)] for number in range(max(missing, 0))]
        changed = [chance.random() < self._config.mutation_rate for _ in parents]

        async def child(parent: Any) -> Any:
            try:
                return await self._call(self._strategy.mutate, parent)
            except Exception as error:  # as above
                self.result.failures.append(f"mutate: {type(error).__name__}: {error}"[:300])
                return parent

        mutations = await asyncio.gather(
            *(child(parent) for parent, moved in zip(parents, changed, strict=True) if moved)
        )
        children = iter(mutations)
        return [
            *survivors,
            *(next(children) if moved else parent for parent, moved in zip(parents, changed, strict=True)),
        ]

    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        async with self._limit:
            result = call(*arguments)
            return await result if inspect.isawaitable(result) else result
