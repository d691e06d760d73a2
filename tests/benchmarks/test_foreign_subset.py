"""Twelve small environments of three ecosystems, as their authors published them, through one worker of each.

Their packages need no data. Those of TextArena and GEM lie in interpreters that `make test-engines` makes.
"""

from __future__ import annotations

import asyncio
import importlib
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
    "textarena": ("GuessTheNumber-v0", "Mastermind-v0", "Minesweeper-v0", "TowerOfHanoi-v0"),
    "gem": (
        "game:GuessTheNumber-v0-easy",
        "game:Mastermind-v0-easy",
        "game:Minesweeper-v0-easy",
        "game:Sudoku-v0-easy",
    ),
}
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
@pytest.mark.parametrize("ecosystem", GAMES)
def test_games_of_other_authors_are_played_to_their_end(ecosystem: str) -> None:
    python = interpreter(ecosystem)
    if python is None:
        pytest.skip(f"{ecosystem} has no interpreter of its own here: `make test-engines` installs one")
    adapter = importlib.import_module(f"toprope.sdk.adapters.{ecosystem}")
    site = site_packages_of(python)
    assert site is not None and set(GAMES[ecosystem]) <= {one.target for one in adapter.installed(site)}

    async def played(link: WorkerClient, target: str) -> dict[str, Any]:
        await link.call("open", timeout=LIMIT_S, source={"adapter": ecosystem, "target": target})
        began = await link.call("begin", timeout=LIMIT_S, split="train", index=0, count=1)
        [handle] = began["rollouts"]
        assert began["messages"][-1]["content"].strip()
        for number in range(_MOST):
            moves = [[handle, f"[{number % 9 + 1}]", False]]
            [turn] = await link.call("advance", timeout=LIMIT_S, moves=moves)
            if turn["done"]:
                return dict(turn["outcome"])
        raise AssertionError(f"{target} has no end")

    async def work() -> dict[str, dict[str, Any]]:
        async with await WorkerClient.start(python, timeout=LIMIT_S) as link:
            return {target: await played(link, target) for target in GAMES[ecosystem]}

    for target, outcome in asyncio.run(work()).items():
        assert outcome["error"] is None and -1.0 <= outcome["reward"] <= 1.0 and outcome["turns"], target
