"""Small environments of three ecosystems, as their authors published them, through one worker of each.

Their packages need no data. Those of reasoning-gym lie beside the tests' own packages; TextArena, some of whose games
cannot run here, and GEM, which pins other versions, in interpreters that `make test-engines` makes.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environments.ecosystem_samples import interpreter
from benchmarks.foreign.candidates import COLLECTORS
from toprope.records.run.manifest import site_packages_of
from toprope.sdk.worker.client import WorkerClient
from toprope.workbench.catalog.catalog import Catalog

SOLVED = ("caesar_cipher", "gcd", "palindrome_generation", "word_sorting")
GAMES = {
    "2048-v0": ["[up]", "[left]"],
    "Bandit-v0": ["[red]", "[blue]"],
    "GuessTheNumber-v0": ["[3]", "[20]"],
    "LightsOut-v0": ["[0 0]", "[1 1]"],
    "Mastermind-v0": ["[1 2 3 4]", "[2 3 4 5]"],
    "Minesweeper-v0": ["[0 0]"],
    "Sokoban-v0": ["[up]", "[left]"],
    "TowerOfHanoi-v0": ["[A C]", "[A B]"],
}
"""Games of TextArena, and moves that they accept in their first task. The second wrong move in a row ends each."""
GAMES_OF_GEM = (
    "game:GuessTheNumber-v0-easy",
    "game:Mastermind-v0-easy",
    "game:Minesweeper-v0-easy",
    "game:Sudoku-v0-easy",
)
LIMIT_S = 60.0
_MOST = 400
"""Answers after which each game must have ended."""


def test_reasoning_gym_s_tasks_score_their_reference_above_junk(tmp_path: Path) -> None:
    published = {candidate.entry for candidate in COLLECTORS["reasoning_gym"](tmp_path)}
    entries = {entry.name: entry for entry in Catalog().entries()}

    async def played(link: WorkerClient, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        source = entries[name].environment.model_dump(include={"adapter", "target"})
        await link.call("open", timeout=LIMIT_S, source=source)
        began = await link.call("begin", timeout=LIMIT_S, split="train", index=0, count=2)
        page = await link.call("tasks", timeout=LIMIT_S, split="train", start=0, count=1)
        answers = [page["tasks"][0]["reference"], "no answer"]
        moves = [[handle, said, False] for handle, said in zip(began["rollouts"], answers, strict=True)]
        right, wrong = await link.call("advance", timeout=LIMIT_S, moves=moves)
        return right["outcome"], wrong["outcome"]

    async def work() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        async with await WorkerClient.start(None, timeout=LIMIT_S) as link:
            return {name: await played(link, f"reasoning_gym/{name}") for name in SOLVED}

    assert {f"reasoning_gym/{name}" for name in SOLVED} <= published & entries.keys()
    for name, (right, wrong) in asyncio.run(work()).items():
        assert right["error"] is None and wrong["error"] is None, name
        assert right["success"] and not wrong["success"] and right["reward"] > wrong["reward"], name


@pytest.mark.engines
def test_games_of_textarena_take_right_moves_and_end_at_wrong_ones() -> None:
    python = interpreter_or_skip("textarena")

    async def work() -> None:
        async with await WorkerClient.start(python, timeout=LIMIT_S) as link:
            for target, moves in GAMES.items():
                seen: list[str] = []
                said = [*moves, "no move", "no move"]
                outcome = await played(link, "textarena", target, said.__getitem__, seen)
                assert (outcome["error"], outcome["turns"]) == (None, len(said)), target
                # The prompt, an answer to each right move, and one to the first wrong move.
                assert len(seen) == len(moves) + 2 and "invalid move" in seen[-1], target
                assert len({*seen}) == len(seen) and not any("invalid move" in text for text in seen[1:-1]), target

    asyncio.run(work())


@pytest.mark.engines
def test_game_of_textarena_that_is_played_right_is_won() -> None:
    python = interpreter_or_skip("textarena")
    moves = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")

    async def won() -> dict[str, Any]:
        async with await WorkerClient.start(python, timeout=LIMIT_S) as link:
            return await played(link, "textarena", "TowerOfHanoi-v0", lambda number: moves[number])

    outcome = asyncio.run(won())
    assert (outcome["error"], outcome["reward"], outcome["success"], outcome["turns"]) == (None, 1.0, True, len(moves))


@pytest.mark.engines
def test_games_of_gem_are_played_to_their_end() -> None:
    expect_ends(interpreter_or_skip("gem"), "gem", GAMES_OF_GEM)


def interpreter_or_skip(ecosystem: str) -> str:
    python = interpreter(ecosystem)
    if python is None:
        pytest.skip(f"{ecosystem} has no interpreter of its own here: `make test-engines` installs one")
    return python


def expect_ends(python: str, ecosystem: str, games: tuple[str, ...]) -> None:
    """Play each game with numbers until it ends, in the given interpreter."""
    adapter = importlib.import_module(f"toprope.sdk.adapters.{ecosystem}")
    site = site_packages_of(python)
    assert site is not None
    playable = {one.target for one in adapter.installed(site) if not one.problem}
    assert set(games) <= playable

    async def work() -> dict[str, dict[str, Any]]:
        async with await WorkerClient.start(python, timeout=LIMIT_S) as link:
            return {target: await played(link, ecosystem, target) for target in games}

    for target, outcome in asyncio.run(work()).items():
        assert outcome["error"] is None and -1.0 <= outcome["reward"] <= 1.0 and outcome["turns"], target


async def played(
    link: WorkerClient,
    ecosystem: str,
    target: str,
    answer: Callable[[int], str] = lambda number: f"[{number % 9 + 1}]",
    seen: list[str] | None = None,
) -> dict[str, Any]:
    """Return the outcome of a game whose n-th answer is `answer(n)`, and add what the game says to `seen`."""
    seen = [] if seen is None else seen
    await link.call("open", timeout=LIMIT_S, source={"adapter": ecosystem, "target": target})
    began = await link.call("begin", timeout=LIMIT_S, split="train", index=0, count=1)
    [handle] = began["rollouts"]
    seen.append(began["messages"][-1]["content"])
    assert seen[0].strip()
    for number in range(_MOST):
        [turn] = await link.call("advance", timeout=LIMIT_S, moves=[[handle, answer(number), False]])
        if turn["done"]:
            return dict(turn["outcome"])
        seen.append(turn["messages"][-1]["content"])
    raise AssertionError(f"{target} has no end")
