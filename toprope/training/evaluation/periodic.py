"""Evaluations along the way of a run whose trainer needs no rollouts: on validation tasks, every so many steps.

Where rollouts are made, their policy versions tell how far training is. Here the trainer's own rows do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from toprope.records.run.metrics import last_row

__all__ = ["every_so_many_steps"]

_LOOK_EVERY_S = 0.25


async def every_so_many_steps(metrics: Path, every: int, evaluate: Callable[[str], Awaitable[None]]) -> None:
    """Evaluates whenever `every` steps more are done; ends when it is cancelled.

    Args:
        metrics: The trainer's metrics.jsonl.
        every: Steps; a step that is passed while an evaluation goes on has none of its own.
        evaluate: Given the label, `step-N` with the step at which it began.
    """
    due = every
    while True:
        step = int(last_row(metrics).get("step") or 0)
        if step >= due:
            await evaluate(f"step-{step}")
            due = (step // every + 1) * every
        await asyncio.sleep(_LOOK_EVERY_S)
