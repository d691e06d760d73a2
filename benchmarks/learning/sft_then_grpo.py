"""Compare fine-tuning on a run's best rollouts before GRPO with GRPO alone: `make bench-sft-then-grpo`.

    python -P -m benchmarks.learning.sft_then_grpo [--seeds N] [--steps N] [--source-steps N] [--home FOLDER]

One run of GRPO gives rollouts; `build_dataset` takes the best right answer of each task. Then, seed by seed, from the
same starting policy: SFT on that data set followed by GRPO, against GRPO alone. The source run is part of the first
side's cost: GRPO alone gets as many optimizer steps as source, SFT and GRPO together (`gain_points`), and in another
run as many seconds of training (`gain_points_seconds`). Accuracy is measured on held-out tasks, which no data set
holds. Everything goes through the server by the official client: the embedded policy, a CPU, words of three to five
letters. Estimated time: half an hour; needs nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client
from rich.console import Console
from toprope_server.cli.demo import ENVIRONMENT, PRESET, server_parameters

from benchmarks.report import report
from benchmarks.scratch import scratch
from toprope.analysis.statistics.intervals import mean_interval

_WAIT_S = 45
_ENDED = ("completed", "failed", "lost", "stopped")
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


@dataclass(frozen=True)
class Done:
    """A run that completed."""

    run_id: str
    steps: int
    accuracy: dict[str, float]
    """Held-out accuracy, before and after."""
    seconds: float
    training_s: float
    """Seconds of training alone."""


class Agent:
    """Start runs with tools only, over one server.

    Args:
        client: Connected to it.
        console: Where to print progress.
    """

    def __init__(self, client: Client, console: Console) -> None:
        self._client, self._console = client, console

    async def train(self, what: str, changes: dict[str, Any]) -> Done:
        """Select, edit, start, wait, and read the report.

        Raises:
            SystemExit: A tool refused, or the run did not complete.
        """
        began = time.monotonic()
        draft = await self.call("select_environment", name=ENVIRONMENT, preset=PRESET)
        await self.call("edit_config", draft_id=draft["draft_id"], changes=_GRPO | changes)
        run_id = (await self.call("start_training", draft_id=draft["draft_id"]))["run_id"]
        state: Any = ""
        while state not in _ENDED:
            answer = await self.call("check_status", run_ids=[run_id], wait_s=_WAIT_S, until="end")
            [run] = answer["runs"]
            state = run["state"]
        if state != "completed":
            raise SystemExit(f"{what}: {run_id} is {state}: {json.dumps(run)[:1000]}")
        results = (await self.call("get_results", run_id=run_id, detail="detailed"))["results"]
        measured = {label: one["sampled"]["accuracy"] for label, one in results["evaluations"].items()}
        done = Done(run_id, results["steps"], measured, time.monotonic() - began, results["seconds"]["training"])
        self._console.print(
            f"{what}: {done.steps} steps, accuracy {measured['before']:.3f} -> {measured['after']:.3f}, "
            f"{done.seconds:.0f} s",
            highlight=False,
        )
        return done

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool and return its structure.

        Raises:
            SystemExit: It refused.
        """
        answer = await self._client.call_tool(tool, arguments, read_timeout_seconds=120)
        if answer.is_error:
            raise SystemExit(f"{tool}: {answer.content[0].text}")
        return answer.structured_content or {}


async def measured(home: Path, seeds: int, steps: int, source_steps: int, console: Console) -> Any:
    """Return the figures."""
    variables = {"TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(home / "config")}
    began = time.monotonic()
    async with Client(server_parameters(variables)) as client:
        agent = Agent(client, console)
        source = await agent.train("the run that gives rollouts", {"budget.steps": source_steps, "algorithm.seed": 100})
        built = await agent.call(
            "build_dataset",
            name="best",
            sources=[source.run_id],
            where={"success": True, "per_task": 1, "limit": _ITEMS, "whole": True},
        )
        tuned, alone, timed, after_sft, spent = [], [], [], [], []
        for seed in range(seeds):
            sft = await agent.train(f"SFT, seed {seed}", {**_SFT, "algorithm.seed": seed})
            left = steps - sft.steps
            if left < 1:
                raise SystemExit(f"SFT alone takes {sft.steps} steps, of {steps}: raise --steps")
            then = {"policy.model": f"run:{sft.run_id}", "budget.steps": left, "algorithm.seed": seed}
            tuned.append(await agent.train(f"GRPO from it, seed {seed}", then))
            seeded = {"algorithm.seed": seed}
            whole = {"budget.steps": steps + source_steps}
            alone.append(await agent.train(f"GRPO alone, equal steps, seed {seed}", seeded | whole))
            seconds = round(source.training_s + sft.training_s + tuned[-1].training_s)
            limit = {"budget.steps": 100 * steps, "budget.max_train_seconds": seconds}
            timed.append(await agent.train(f"GRPO alone, {seconds} s, seed {seed}", seeded | limit))
            after_sft.append(sft.accuracy["after"])
            spent.append(sft.steps)
    return {
        **_gains("gain_points", tuned, alone),
        **_gains("gain_points_seconds", tuned, timed),
        "accuracy_sft_then_grpo": [one.accuracy["after"] for one in tuned],
        "accuracy_grpo": [one.accuracy["after"] for one in alone],
        "accuracy_grpo_equal_seconds": [one.accuracy["after"] for one in timed],
        "accuracy_after_sft": after_sft,
        "accuracy_before": alone[0].accuracy["before"],
        "accuracy_source": source.accuracy["after"],
        "dataset_items": built["items"],
        "steps": steps,
        "steps_sft": spent,
        "steps_source": source_steps,
        "seeds": seeds,
        "seconds": round(time.monotonic() - began, 1),
    }


def _gains(name: str, ours: list[Done], theirs: list[Done]) -> dict[str, Any]:
    """Points of held-out accuracy that one side is ahead: mean, interval over seeds, and each seed."""
    gains = [100 * (a.accuracy["after"] - b.accuracy["after"]) for a, b in zip(ours, theirs, strict=True)]
    figures: dict[str, Any] = {name: round(sum(gains) / len(gains), 2)}
    if len(gains) > 1:
        interval = mean_interval(gains)
        figures |= {f"{name}_low": round(interval.low, 2), f"{name}_high": round(interval.high, 2)}
    return figures | {f"{name}_by_seed": [round(one, 2) for one in gains]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
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
    return report("SFT on the best rollouts, then GRPO, against GRPO alone", figures)


if __name__ == "__main__":
    sys.exit(main())
