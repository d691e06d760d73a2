"""Compare learning and speed of bfloat16 with float32 on a CPU: `make bench-precision`.

    python -P -m benchmarks precision [--seeds N] [--steps N]

The demo's task and policy, with the same seeds and number of steps, in both formats of `optimizer.precision`; the sides
alternate. `accuracy_difference` is the mean held-out accuracy of bfloat16 less that of float32, `passes_ratio` the
median time of a step's passes in bfloat16 over that in float32, for that policy of 0.1 million parameters: float32 has
a short pass of its own there. `step_ratio_10m` and `step_ratio_40m` are the same ratio for a step of larger policies,
16 answers of 64 tokens, in processor seconds. Needs a CPU with AMX or AVX512-BF16. Estimated time: eight minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from toprope_server.cli.demo import ENVIRONMENT, PRESET

from benchmarks.performance.decode import processor_seconds
from benchmarks.report import is_met, refuse, report
from benchmarks.scratch import scratch
from benchmarks.training_agent import Done, training_agent
from toprope.training.trainer.step.learner import cpu_computes_bfloat16

__all__ = ["compared", "main"]

_GOALS = {"accuracy_difference": ">= -0.02", "step_ratio_40m": "<= 0.8"}
_FORMATS = ("float32", "bfloat16")
_SIZES = {"10m": 10e6, "40m": 40e6}


def step_seconds(root: Path, size: float, precision: str) -> float:
    """The least processor seconds of three steps of a policy; in a process of its own, as Accelerate has one format."""
    from benchmarks.performance.growth import Engines

    torch.set_num_threads(1)
    engines = Engines(root)
    step = engines.training(size, 2, 64, precision)
    return min(processor_seconds(step) for _ in range(3))


def step_ratios(root: Path, rounds: int = 3) -> dict[str, float]:
    """The median ratio of both formats for each size."""
    ratios = {}
    for name, size in _SIZES.items():
        found = []
        for number in range(rounds):
            seconds = {}
            for precision in _FORMATS[:: 1 if number % 2 else -1]:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    seconds[precision] = process.submit(step_seconds, root, size, precision).result()
            found.append(seconds["bfloat16"] / seconds["float32"])
        ratios[f"step_ratio_{name}"] = round(statistics.median(found), 3)
    return ratios


async def _measure(home: Path, seeds: int, steps: int, console: Console) -> dict[str, Any]:
    """Return the figures."""
    runs: dict[str, list[Done]] = {name: [] for name in _FORMATS}
    base = {"budget.steps": steps, "budget.max_train_seconds": None, "evaluation.greedy": False}
    async with training_agent(home, console) as agent:

        async def train(name: str, seed: int, **more: Any) -> Done:
            changes = base | {"optimizer.precision": name, "algorithm.seed": seed} | more
            return await agent.train(f"{name}, seed {seed}", ENVIRONMENT, PRESET, changes)

        for seed in range(seeds):
            for name in _FORMATS[:: 1 if seed % 2 else -1]:
                runs[name].append(await train(name, seed))
        shuffled = await train("bfloat16", 0, **{"algorithm.shuffle_rewards": True})
    figures = compared(runs["float32"], runs["bfloat16"])
    control = compared(runs["float32"][:1], [shuffled])["accuracy_difference"]
    return figures | {"shuffled_accuracy_difference": control, "seeds": seeds, "steps": steps}


def compared(float32: Sequence[Done], bfloat16: Sequence[Done]) -> dict[str, Any]:
    """Return the accuracies and times of both sides, seed by seed, and their difference and ratio."""
    accuracies = [[one.accuracy("after") for one in side] for side in (float32, bfloat16)]
    passes = [
        [statistics.median(row["time/passes"] for row in one.rows if "time/passes" in row) for one in side]
        for side in (float32, bfloat16)
    ]
    return {
        "accuracy_difference": round(statistics.fmean(accuracies[1]) - statistics.fmean(accuracies[0]), 4),
        "passes_ratio": round(statistics.median(b / a for a, b in zip(*passes, strict=True)), 3),
        "accuracy_float32": accuracies[0],
        "accuracy_bfloat16": accuracies[1],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the figures; exit with 3 on a CPU that would emulate bfloat16."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks precision", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="the noise of one seed is 0.02")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    given = parser.parse_args(arguments)
    if not cpu_computes_bfloat16():
        return refuse("this CPU has neither AMX nor AVX512-BF16, so it would emulate bfloat16")
    with scratch("precision") as home:
        (home / "config").mkdir()
        figures = asyncio.run(_measure(home, given.seeds, given.steps, Console(stderr=True, highlight=False)))
        figures |= step_ratios(home / "models")
    shuffled = figures["shuffled_accuracy_difference"]
    return report(
        "bfloat16 on a CPU",
        figures,
        goals=_GOALS,
        control="a run whose rewards are shuffled within each group must miss the goal for accuracy.",
        control_failed=f"it is {shuffled} off" if is_met(shuffled, _GOALS["accuracy_difference"]) else "",
    )


if __name__ == "__main__":
    sys.exit(main())
