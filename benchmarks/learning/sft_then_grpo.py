"""Compare fine-tuning on a run's best rollouts before GRPO with GRPO alone: `make bench-sft-then-grpo`.

    python -P -m benchmarks.learning.sft_then_grpo [--seeds N] [--steps N] [--source-steps N] [--home FOLDER]

One run of GRPO gives rollouts; `build_dataset` takes the best right answer of each task. Then, seed by seed: SFT of
that run's policy on its data set followed by GRPO, against GRPO alone from the start. The source run is part of the
first side's cost: GRPO alone gets as many optimizer steps as source, SFT and GRPO together (`gain_points`), and in
another run as many seconds of training (`gain_points_seconds`). Accuracy is measured on held-out tasks, which no data
set holds. Everything goes through the server by the official client: the embedded policy, a CPU, words of three to five
letters. Estimated time: half an hour; needs nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from toprope_server.cli.demo import ENVIRONMENT, PRESET

from benchmarks.report import report
from benchmarks.scratch import scratch
from benchmarks.training_agent import Done, training_agent
from toprope.analysis.statistics.intervals import mean_interval

_GRPO: dict[str, Any] = {"budget.max_train_seconds": None, "evaluation.greedy": False, "evaluation.examples": 0}
_SFT: dict[str, Any] = {
    "algorithm.name": "sft",
    "sft.dataset": "best",
    "sft.epochs": 4,
    "sft.batch_size": 32,
    "sft.learning_rate": 1e-3,
    "sft.max_length": 64,
    "sft.save_epochs": 4,
}
_ITEMS = 600


async def measured(home: Path, seeds: int, steps: int, source_steps: int, console: Console) -> Any:
    """Return the figures."""
    began = time.monotonic()
    async with training_agent(home, console) as agent:

        async def train(what: str, changes: dict[str, Any]) -> Done:
            return await agent.train(what, ENVIRONMENT, PRESET, _GRPO | changes)

        source = await train("the run that gives rollouts", {"budget.steps": source_steps, "algorithm.seed": 100})
        built = await agent.call(
            "build_dataset",
            name="best",
            sources=[source.run_id],
            where={"success": True, "per_task": 1, "limit": _ITEMS, "whole": True},
        )
        wrong = {"name": "worst", "sources": [source.run_id], "where": {"max_reward": 0.5, "limit": _ITEMS}}
        await agent.call("build_dataset", **wrong)
        from_source = {**_SFT, "policy.model": f"run:{source.run_id}"}
        control = await train("SFT on wrong answers", {**from_source, "sft.dataset": "worst", "algorithm.seed": 0})
        tuned, alone, timed, after_sft, spent = [], [], [], [], []
        for seed in range(seeds):
            sft = await train(f"SFT, seed {seed}", {**from_source, "algorithm.seed": seed})
            left = steps - sft.results["steps"]
            if left < 1:
                raise SystemExit(f"SFT alone takes {sft.results['steps']} steps, of {steps}: raise --steps")
            then = {"policy.model": f"run:{sft.run_id}", "budget.steps": left, "algorithm.seed": seed}
            tuned.append(await train(f"GRPO from it, seed {seed}", then))
            seeded = {"algorithm.seed": seed}
            whole = {"budget.steps": steps + source_steps}
            alone.append(await train(f"GRPO alone, equal steps, seed {seed}", seeded | whole))
            seconds = round(sum(one.results["seconds"]["training"] for one in (source, sft, tuned[-1])))
            limit = {"budget.steps": 100 * steps, "budget.max_train_seconds": seconds}
            timed.append(await train(f"GRPO alone, {seconds} s, seed {seed}", seeded | limit))
            after_sft.append(sft.accuracy("after"))
            spent.append(sft.results["steps"])
    return {
        **_gains("gain_points", tuned, alone),
        **_gains("gain_points_seconds", tuned, timed),
        "accuracy_sft_then_grpo": [one.accuracy("after") for one in tuned],
        "accuracy_grpo": [one.accuracy("after") for one in alone],
        "accuracy_grpo_equal_seconds": [one.accuracy("after") for one in timed],
        "accuracy_after_sft": after_sft,
        "accuracy_after_sft_on_wrong_answers": control.accuracy("after"),
        "accuracy_before": alone[0].accuracy("before"),
        "accuracy_source": source.accuracy("after"),
        "dataset_items": built["items"],
        "steps": steps,
        "steps_sft": spent,
        "steps_source": source_steps,
        "seeds": seeds,
        "seconds": round(time.monotonic() - began, 1),
    }


def _gains(name: str, ours: list[Done], theirs: list[Done]) -> dict[str, Any]:
    """Points of held-out accuracy that one side is ahead: mean, interval over seeds, and each seed."""
    gains = [100 * (a.accuracy("after") - b.accuracy("after")) for a, b in zip(ours, theirs, strict=True)]
    figures: dict[str, Any] = {name: round(sum(gains) / len(gains), 2)}
    if len(gains) > 1:
        interval = mean_interval(gains)
        figures |= {f"{name}_low": round(interval.low, 2), f"{name}_high": round(interval.high, 2)}
    return figures | {f"{name}_by_seed": [round(one, 2) for one in gains]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit with 1 if a goal was missed, 2 if the control failed."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.learning.sft_then_grpo", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm (default 3)")
    parser.add_argument("--steps", type=int, default=160, help="steps of each arm in all (default 160)")
    parser.add_argument("--source-steps", type=int, default=80, help="of the run that gives rollouts (default 80)")
    parser.add_argument("--home", type=Path, help="an owner's folder to use and leave, policies made already")
    given = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    with scratch("sft-grpo", given.home) as path:
        work = measured(path, given.seeds, given.steps, given.source_steps, console)
        figures = asyncio.run(work)
    wrong, right = figures["accuracy_after_sft_on_wrong_answers"], min(figures["accuracy_after_sft"])
    return report(
        "SFT on the best rollouts, then GRPO, against GRPO alone",
        figures,
        goals={"gain_points": ">= 5", "gain_points_seconds": ">= 5"},
        control="SFT on the run's wrong answers must teach less than on its right ones.",
        control_failed="" if wrong < right - 0.05 else f"wrong answers taught {wrong:.3f}, right ones {right:.3f}",
    )


if __name__ == "__main__":
    sys.exit(main())
