"""Twelve environments of other authors that need no further packages, as they are published, through one worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.foreign.candidates import COLLECTORS
from toprope.sdk.worker.client import WorkerClient
from toprope.workbench.catalog.catalog import Catalog

SUBSET = (
    *("basic_arithmetic", "caesar_cipher", "count_bits", "fraction_simplification", "gcd", "letter_counting"),
    *("number_sorting", "palindrome_generation", "lcm", "simple_equations", "spell_backward"),
    "word_sorting",
)
LIMIT_S = 60.0


def test_a_subset_goes_from_the_list_to_scored_rollouts(tmp_path: Path) -> None:
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
            return {name: await played(link, f"reasoning_gym/{name}") for name in SUBSET}

    assert {f"reasoning_gym/{name}" for name in SUBSET} <= published & entries.keys()
    found = asyncio.run(work())
    assert len(found) == 12
    for name, (right, wrong) in found.items():
        assert right["error"] is None and wrong["error"] is None, name
        assert right["success"] and not wrong["success"] and right["reward"] > wrong["reward"], name
