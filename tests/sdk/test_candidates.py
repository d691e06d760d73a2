"""Evolution over candidates of any kind, and rewriting of texts by a model."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass

import pytest

from toprope.sdk.candidates import EvolutionConfig, evolve
from toprope.sdk.errors import InvalidRequest

GOAL = "toprope"


class Letters:
    """Finds a word, letter by letter."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.turn = 0

    def evaluate(self, candidate: str) -> float:
        self.asked.append(candidate)
        return sum(one == other for one, other in zip(candidate, GOAL, strict=True))

    def mutate(self, candidate: str) -> str:
        self.turn += 1
        place = self.turn % len(GOAL)
        letter = "abcdefghijklmnopqrstuvwxyz"[self.turn * 7 % 26]
        return candidate[:place] + letter + candidate[place + 1 :]


def test_texts_evolve_and_survivors_are_not_evaluated_again() -> None:
    phases: list[tuple[str, int]] = []
    strategy = Letters()
    result = evolve(
        strategy, ["aaaaaaa"], EvolutionConfig(epochs=120, population_size=12, selection_ratio=0.25),
        on_phase=lambda phase, epoch: phases.append((phase, epoch)),
    )  # fmt: skip
    assert result.best == GOAL and result.best_score == len(GOAL) and result.epochs_completed == 120
    assert result.history == sorted(result.history), "the best survives"
    assert result.evaluations == len(strategy.asked) < 12 * 120
    assert [phase for phase, _ in phases[:4]] == ["init", "evaluating", "selecting", "mutating"]
    assert phases[-1] == ("complete", 120)


@dataclass(frozen=True)
class Point:
    x: float


class Slow:
    """Async, with its own selection, over objects."""

    def __init__(self) -> None:
        self.at_once = self.most = 0

    async def evaluate(self, candidate: Point) -> float:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        if candidate.x > 3.5:
            raise ValueError("too far")
        return candidate.x

    def select(self, population: list[Point], scores: list[float]) -> list[Point]:
        assert scores == sorted(scores, reverse=True) and len(population) == len(scores)
        return population[:1]

    async def mutate(self, candidate: Point) -> Point:
        return Point(candidate.x + 1.0)


def test_objects_evolve_with_own_selection_and_failures_are_data() -> None:
    strategy = Slow()
    result = evolve(strategy, [Point(0.0)], EvolutionConfig(epochs=6, population_size=4, concurrency=2))
    assert result.best == Point(3.0) and strategy.most == 2
    assert result.failures and result.failures[0] == "evaluate: ValueError: too far"


def test_interrupted_search_goes_on_from_its_journal(tmp_path) -> None:
    journal = tmp_path / "search.jsonl"

    def dies(phase: str, epoch: int) -> None:
        if (phase, epoch) == ("evaluating", 10):
            raise RuntimeError("killed")

    config = EvolutionConfig(epochs=30, population_size=8)
    with pytest.raises(RuntimeError, match="killed"):
        evolve(Letters(), ["aaaaaaa"], config, journal=journal, on_phase=dies)
    done = [json.loads(line) for line in journal.read_text().splitlines()][-1]["result"]
    assert done["epochs_completed"] == 9
    with journal.open("a") as file:
        file.write('{"seed": 0, "resu')
    again = evolve(Letters(), ["aaaaaaa"], config, journal=journal)
    assert again.epochs_completed == len(again.history) == 30 and again.best_score >= done["best_score"]
    assert again.evaluations > done["evaluations"]


def test_journal_of_another_search_is_refused(tmp_path) -> None:
    class Others(Letters):
        pass

    journal, small, first = tmp_path / "search.jsonl", EvolutionConfig(epochs=2, population_size=4), ["a" * 7]
    done = evolve(Letters(), first, small, journal=journal)
    for strategy, population, config in (
        (Others(), first, small),
        (Letters(), ["z" * 7], small),
        (Letters(), first, EvolutionConfig(epochs=2, population_size=5)),
        (Letters(), first, EvolutionConfig(epochs=2, population_size=4, seed=1)),
    ):
        with pytest.raises(InvalidRequest, match="another search"):
            evolve(strategy, population, config, journal=journal)
    assert evolve(Letters(), first, small, journal=journal) == done


def test_search_survives_an_epoch_in_which_every_evaluation_failed() -> None:
    class Interrupted(Letters):
        def evaluate(self, candidate: str) -> float:
            score = super().evaluate(candidate)
            if len(self.asked) <= 4:
                raise TimeoutError("no connection")
            return score

    result = evolve(Interrupted(), ["aaaaaaa"], EvolutionConfig(epochs=10, population_size=4))
    assert len(result.failures) == 4 and result.history[0] == -math.inf
    assert result.best_score >= 0 and min(result.history[1:]) >= 0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="selection_ratio"):
        EvolutionConfig(selection_ratio=0.0)
    with pytest.raises(InvalidRequest, match="empty"):
        evolve(Letters(), [])

    class Stranger(Letters):
        def select(self, population, scores):
            return ["another"]

    with pytest.raises(InvalidRequest, match="select must return"):
        evolve(Stranger(), ["aaaaaaa"])

    class Broken(Letters):
        def evaluate(self, candidate):
            return math.nan

    assert evolve(Broken(), ["aaaaaaa"], EvolutionConfig(epochs=2)).best is None
