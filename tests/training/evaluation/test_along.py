"""Evaluations along the way of a run that makes no rollouts: at which steps, and that they end with the training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from toprope.training.evaluation.evaluator import evaluate_repeatedly


def step(metrics: Path, number: int) -> None:
    with metrics.open("a") as file:
        file.write(json.dumps({"step": number, "loss": 0.5}) + "\n")


def test_every_so_many_steps_and_not_again_for_the_same(tmp_path: Path) -> None:
    metrics, seen = tmp_path / "metrics.jsonl", asyncio.Queue()

    async def work() -> None:
        task = asyncio.create_task(evaluate_repeatedly(metrics, 5, seen.put))
        for number in range(1, 5):
            step(metrics, number)
        await asyncio.sleep(0.6)
        assert seen.empty()
        step(metrics, 5)
        assert await asyncio.wait_for(seen.get(), 60) == "step-5"
        step(metrics, 9)
        await asyncio.sleep(0.6)
        assert seen.empty(), "it is not due before step 10"
        step(metrics, 23)  # as steps that come faster than evaluations end
        assert await asyncio.wait_for(seen.get(), 60) == "step-23"
        step(metrics, 25)
        assert await asyncio.wait_for(seen.get(), 60) == "step-25"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_what_an_evaluation_raises_is_not_lost(tmp_path: Path) -> None:
    step(tmp_path / "metrics.jsonl", 1)

    async def fails(label: str) -> None:
        raise RuntimeError(label)

    with pytest.raises(RuntimeError, match="step-1"):
        asyncio.run(asyncio.wait_for(evaluate_repeatedly(tmp_path / "metrics.jsonl", 1, fails), 60))
