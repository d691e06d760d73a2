"""Compare fine-tuning on a run's best rollouts before GRPO with GRPO alone: `make bench-sft-then-grpo`.

    python -P -m benchmarks sft_then_grpo [--seeds N] [--steps N] [--source-steps N] [--home FOLDER]

The task is words of five letters, of which the first policy reverses one in a hundred, so rewards are rare and GRPO
starts slowly; four times the steps still raise its accuracy. Seed by seed, a short run of GRPO gives rollouts, and
`build_dataset` takes the best right answer of each task; SFT of that run's policy on its data set, followed by GRPO,
stands against GRPO alone from the first policy. All count: GRPO alone gets as many optimizer steps as source, SFT and
GRPO together (`gain_points`), and in another run as many seconds of training (`gain_points_seconds`), in the median
over seeds. Accuracy is measured on held-out tasks, which no data set holds.

Control: the same with as many wrong answers of the same run must miss the goal, and GRPO alone must not reach the
task's ceiling, near 0.85, where nothing can be gained. Everything goes through the server by the official client.
Estimated time: fifteen minutes; needs nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from toprope_server.cli.demo import ENVIRONMENT, PRESET

from benchmarks.report import is_met, report, wait_until_quiet
from benchmarks.scratch import scratch
from benchmarks.training_agent import Done, TrainingAgent, training_agent
from toprope.analysis.statistics.intervals import mean_interval

__all__ = ["control_failed", "main"]

_LETTERS, _CEILING = 5, 0.8
_GOAL = ">= 5"
_GRPO: dict[str, Any] = {
    "environment.knobs.min_word_len": _LETTERS,
    "environment.knobs.max_word_len": _LETTERS,
    "budget.max_train_seconds": None,
    "evaluation.greedy": False,
    "evaluation.examples": 0,
}
_SFT: dict[str, Any] = {
    "algorithm.name": "sft",
    "sft.epochs": 4,
    "sft.batch_size": 32,
    "sft.learning_rate": 1e-3,
    "sft.max_length": 64,
    "sft.save_epochs": 4,
}
_ITEMS = 600
_SOURCE_SEED = 100


class _Arms:
    """Trains the sides of the comparison, all with the same number of steps."""

    def __init__(self, agent: TrainingAgent, steps: int) -> None:
        self._agent, self._steps = agent, steps

    async def train(self, what: str, seed: int, changes: dict[str, Any]) -> Done:
        return await self._agent.train(what, ENVIRONMENT, PRESET, _GRPO | changes | {"algorithm.seed": seed})

    async def dataset(self, name: str, source: Done, where: dict[str, Any]) -> int:
        """Build a data set of one answer a task; return the number of items."""
        chosen = {"per_task": 1, "limit": _ITEMS, "whole": True} | where
        built = await self._agent.call("build_dataset", name=name, sources=[source.run_id], where=chosen)
        return int(built["items"])

    async def tuned(self, source: Done, dataset: str, seed: int) -> tuple[Done, Done]:
        """Fine-tune the source run's policy, then train it with the steps that are left."""
        start = {"policy.model": f"run:{source.run_id}", "sft.dataset": dataset}
        sft = await self.train(f"SFT on {dataset}, seed {seed}", seed, _SFT | start)
        left = self._steps - source.results["steps"] - sft.results["steps"]
        if left < 1:
            raise SystemExit(f"source and SFT take {self._steps - left} steps, of {self._steps}: raise --steps")
        then = {"policy.model": f"run:{sft.run_id}", "budget.steps": left}
        return sft, await self.train(f"GRPO from it, seed {seed}", seed, then)


async def measured(home: Path, seeds: int, steps: int, source_steps: int, console: Console) -> dict[str, Any]:
    """Return the figures."""
    began = time.monotonic()
    async with training_agent(home, console) as agent:
        arms, limit = _Arms(agent, steps), {"budget.steps": source_steps}
        sources, items, tuned, alone, limits, after_sft, spent = [], [], [], [], [], [], []
        for seed in range(seeds):
            # Each seed has its own: the luck of one source would move all gains together, and no interval would tell.
            source = await arms.train(f"the run that gives rollouts, seed {seed}", _SOURCE_SEED + seed, limit)
            items.append(await arms.dataset(f"best-{seed}", source, {"success": True}))
            sft, then = await arms.tuned(source, f"best-{seed}", seed)
            sources.append(source)
            tuned.append(then)
            alone.append(await arms.train(f"GRPO alone, equal steps, seed {seed}", seed, {"budget.steps": steps}))
            seconds = round(sum(one.results["seconds"]["training"] for one in (source, sft, then)))
            limits.append({"budget.steps": 100 * steps, "budget.max_train_seconds": seconds})
            after_sft.append(sft.accuracy("after"))
            spent.append(sft.results["steps"])
        wrong_items = await arms.dataset("wrong", sources[0], {"max_reward": 0.5, "limit": items[0]})
        wrong_sft, wrong = await arms.tuned(sources[0], "wrong", 0)
        # A machine that is busy by now would slow these arms alone.
        quiet = await asyncio.to_thread(wait_until_quiet)
        timed = [
            await arms.train(f"GRPO alone, {equal['budget.max_train_seconds']} s, seed {seed}", seed, equal)
            for seed, equal in enumerate(limits)
        ]
    return {
        "quiet": quiet,
        **_gains("gain_points", tuned, alone),
        **_gains("gain_points_seconds", tuned, timed),
        "control_gain_points": _gains("control", [wrong], alone[:1])["control"],
        "accuracy_sft_then_grpo": [one.accuracy("after") for one in tuned],
        "accuracy_grpo": [one.accuracy("after") for one in alone],
        "accuracy_grpo_at_equal_time": [one.accuracy("after") for one in timed],
        "accuracy_after_sft": after_sft,
        "accuracy_after_sft_on_wrong_answers": wrong_sft.accuracy("after"),
        "accuracy_wrong_sft_then_grpo": wrong.accuracy("after"),
        "accuracy_before": alone[0].accuracy("before"),
        "accuracy_source": [one.accuracy("after") for one in sources],
        "dataset_items": items,
        "dataset_items_wrong": wrong_items,
        "steps": steps,
        "steps_sft": spent,
        "steps_source": source_steps,
        "steps_at_equal_time": [one.results["steps"] for one in timed],
        "seeds": seeds,
        "seconds": round(time.monotonic() - began, 1),
    }


def _gains(name: str, ours: list[Done], theirs: list[Done]) -> dict[str, Any]:
    """Points of held-out accuracy that one side is ahead: median, interval of the mean, and each seed.

    Not the mean, which one run that collapses would decide.
    """
    gains = [100 * (a.accuracy("after") - b.accuracy("after")) for a, b in zip(ours, theirs, strict=True)]
    figures: dict[str, Any] = {name: round(statistics.median(gains), 2)}
    if len(gains) > 1:
        interval = mean_interval(gains)
        figures |= {f"{name}_low": round(interval.low, 2), f"{name}_high": round(interval.high, 2)}
    return figures | {f"{name}_by_seed": [round(one, 2) for one in gains]}


def control_failed(figures: dict[str, Any]) -> str:
    """Say why the figures prove nothing; empty if they do."""
    failed = []
    if is_met(gain := figures["control_gain_points"], _GOAL):
        failed.append(f"SFT on wrong answers gained {gain} points")
    if (items := figures["dataset_items_wrong"]) != figures["dataset_items"][0]:
        failed.append(f"there were only {items} wrong answers")
    if (highest := max(figures["accuracy_grpo"])) >= _CEILING:
        failed.append(f"GRPO alone reached {highest:.3f}, near the ceiling of the task")
    return "; ".join(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit with 1 if a goal was missed, 2 if the control failed."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks sft_then_grpo", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each arm (default 5)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each arm in all (default 200)")
    parser.add_argument("--source-steps", type=int, default=60, help="of the run that gives rollouts (default 60)")
    parser.add_argument("--home", type=Path, help="an owner's folder to use and leave, policies made already")
    given = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    quiet = wait_until_quiet()
    with scratch("sft-grpo", given.home) as path:
        work = measured(path, given.seeds, given.steps, given.source_steps, console)
        figures = asyncio.run(work)
        quiet = figures.pop("quiet") and quiet
    return report(
        "SFT on the best rollouts, then GRPO, against GRPO alone",
        figures,
        goals={"gain_points": _GOAL, "gain_points_seconds": _GOAL},
        control="the same with wrong answers must miss the goal, and GRPO alone must stay below the task's ceiling.",
        control_failed=control_failed(figures),
        quiet=quiet,
    )


if __name__ == "__main__":
    sys.exit(main())
