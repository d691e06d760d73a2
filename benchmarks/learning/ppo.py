"""Measure PPO beside GRPO on the same crew: `make bench-ppo`.

    python -P -m benchmarks.learning.ppo [--only reference|demo|grpo|turns] [--seeds N] [--steps N]

    reference   the loss and its gradients against a second implementation in plain loops
    demo        PPO on the demo's task through the server, one run per seed; accuracy of held-out words
    grpo        the demo's GRPO with as many steps on as many rollouts, for time and memory beside it
    turns       PPO on a task of up to three turns, before and after

Control: the reference must differ from a loss with another clip range, and with the rewards of each step shuffled,
`demo` and `turns` must miss their accuracies.

Steps are counted, not seconds: results do not depend on the machine's load; times do. Estimated time: half an hour;
needs nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from toprope_server.cli.demo import ENVIRONMENT, PRESET

from benchmarks.learning.ppo_reference import largest_error
from benchmarks.report import is_met, report
from benchmarks.scratch import scratch
from benchmarks.training_agent import Done, TrainingAgent, training_agent
from toprope.settings.schema import PpoSection

STEPS, TURNS_STEPS = 1500, 700
PPO: dict[str, Any] = {"algorithm.name": "ppo", "optimizer.learning_rate": 5e-4}
"""The preset is the demo's; PPO goes over each batch twice, so its steps are half as long."""
_SHUFFLED = {"algorithm.shuffle_rewards": True}
GOALS = {
    "reference_max_error": "<= 1e-4",
    "ppo_accuracy": ">= 0.6",
    "turns_accuracy_after": ">= 0.6",
    "turns_rose": "== true",
}
_COUNTED: dict[str, Any] = {"budget.max_train_seconds": None, "evaluation.examples": 2}
_ENDED = ("completed", "failed", "lost", "stopped")
_MB = 1 << 20


class Agent:
    """Start runs with tools only, and sample their trainers' memory meanwhile."""

    def __init__(self, agent: TrainingAgent, home: Path) -> None:
        self._agent, self._runs = agent, home / "runs"
        (home / "config" / "environments").mkdir(parents=True, exist_ok=True)
        source = Path(__file__).with_name("ppo_environment.py")
        (home / "config" / "environments" / "hinted_spelling.py").write_text(source.read_text())

    async def train(self, what: str, environment: str, changes: dict[str, Any]) -> Done:
        """See `TrainingAgent.train`; observed are memory and processor time of the trainer, see `_look`."""
        done = await self._agent.train(
            what, environment, PRESET, _COUNTED | changes, lambda run_id: _look(self._runs / run_id)
        )
        lines = (done.folder / "events.jsonl").read_text().splitlines()
        found = [event["data"] for event in map(json.loads, lines) if event["kind"] == "finding"]
        if sick := sorted({one["rule"] for one in found if one["level"] == "critical"}):
            print(f"  critical findings: {', '.join(sick)}")
        return done


def _mean(done: Done, name: str) -> float:
    """Means over the later half of the steps."""
    rows = done.rows
    values = [row[name] for row in rows[len(rows) // 2 :] if row.get(name) is not None]
    return statistics.fmean(values) if values else float("nan")


async def _look(folder: Path) -> tuple[float, float, float]:
    """Return the peak resident size of a run's trainer in MB, and its processor seconds until it was ready and
    from there to the last sample while it trained. They hardly depend on the machine's load.
    """
    status, highest, ready, last = folder / "status.json", 0.0, float("nan"), float("nan")
    while True:
        with suppress(FileNotFoundError, psutil.Error, KeyError, ValueError):
            found = json.loads(status.read_text())
            if found["state"] in _ENDED:
                return highest, ready, last - ready
            member = found["crew"]["trainer"]
            process = psutil.Process(member["pid"])
            highest = max(highest, process.memory_info().rss / _MB)
            times = process.cpu_times()
            if member["state"] == "ready":
                last = times.user + times.system
                ready = last if ready != ready else ready
        await asyncio.sleep(0.25)


def reference_error() -> float:
    """Compare over settings that reach every branch of the loss."""
    sections = (
        PpoSection(),
        PpoSection(gamma=0.9, gae_lambda=0.5, kl_coef=0.2, entropy_coef=0.05),
        PpoSection(gae_lambda=1.0, value_clip_range=0.0, whiten_advantages=False, value_coef=1.0),
        PpoSection(gae_lambda=0.0, clip_range=0.05, value_clip_range=0.05, kl_coef=0.05),
    )
    return max(largest_error(seed, section) for section in sections for seed in range(3))


async def _trained(home: Path, only: str | None, seeds: int, steps: int, console: Console) -> dict[str, Any]:
    async with training_agent(home, console) as agent:
        return await _figures(Agent(agent, home), only, seeds, steps)


async def _figures(agent: Agent, only: str | None, seeds: int, steps: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if only in (None, "demo"):
        runs = [
            await agent.train(f"PPO, seed {seed}", ENVIRONMENT, PPO | {"algorithm.seed": seed, "budget.steps": steps})
            for seed in range(seeds)
        ]
        changes = PPO | _SHUFFLED | {"algorithm.seed": 0, "budget.steps": steps}
        shuffled = await agent.train("PPO, shuffled rewards", ENVIRONMENT, changes)
        after = [one.accuracy("after") for one in runs]
        figures |= {
            "ppo_accuracy": min(after),
            "ppo_accuracy_by_seed": after,
            "control_ppo_accuracy": shuffled.accuracy("after"),
            "ppo_accuracy_before": [one.accuracy("before") for one in runs],
            "ppo_greedy_by_seed": [one.accuracy("after", "greedy") for one in runs],
            "heldout_tasks": runs[0].results["evaluations"]["after"]["sampled"]["tasks"],
            "steps": steps,
            "ppo_clip_ratio": _mean(runs[0], "clip_ratio/all_epochs"),
            "ppo_value_explained": statistics.median(row.get("value/explained_variance", 0.0) for row in runs[0].rows),
        } | _cost("ppo", runs[0])
    if only in (None, "grpo"):
        grpo = await agent.train("GRPO beside it", ENVIRONMENT, {"algorithm.seed": 0, "budget.steps": steps})
        figures |= {"grpo_accuracy": grpo.accuracy("after")} | _cost("grpo", grpo)
    if only in (None, "turns"):
        changes = PPO | {"budget.steps": min(steps, TURNS_STEPS)}
        turns = await agent.train("PPO, up to three turns", "hinted_spelling", changes)
        shuffled = await agent.train("PPO, turns, shuffled rewards", "hinted_spelling", changes | _SHUFFLED)
        late, early = turns.rows[-50:], turns.rows[:50]
        figures |= {
            "turns_accuracy_before": turns.accuracy("before"),
            "turns_accuracy_after": turns.accuracy("after"),
            "turns_rose": turns.results["rose"],
            "control_turns_accuracy_after": shuffled.accuracy("after"),
            "turns_mean_before": statistics.fmean(row["turns/mean"] for row in early),
            "turns_mean_after": statistics.fmean(row["turns/mean"] for row in late),
        }
    return figures


def _cost(name: str, done: Done) -> dict[str, float]:
    memory_mb, start_cpu_s, cpu_s = done.observed
    return {
        f"{name}_training_seconds": done.results["seconds"]["training"],
        f"{name}_step_ms": 1e3 * _mean(done, "time/step"),
        f"{name}_passes_ms": 1e3 * (_mean(done, "time/passes") + _mean(done, "time/prepare")),
        f"{name}_trainer_mb": memory_mb,
        f"{name}_trainer_start_cpu_seconds": start_cpu_s,
        f"{name}_trainer_cpu_ms_a_step": 1e3 * cpu_s / max(done.results["steps"], 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks.learning.ppo", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("reference", "demo", "grpo", "turns"))
    parser.add_argument("--seeds", type=int, default=3, help="runs of PPO on the demo's task (default 3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run (default {STEPS})")
    given = parser.parse_args(arguments)
    console, began, figures = Console(highlight=False), time.monotonic(), {}
    if given.only in (None, "reference"):
        figures["reference_max_error"] = reference_error()
    if given.only != "reference":
        with scratch("ppo") as path:
            figures |= asyncio.run(_trained(path, given.only, given.seeds, given.steps, console))
    figures["seconds"] = round(time.monotonic() - began, 1)
    wrong = largest_error(0, PpoSection(), against=PpoSection(clip_range=0.05))
    return report(
        "PPO",
        figures,
        goals={name: goal for name, goal in GOALS.items() if name in figures},
        control="another clip range must give another loss; shuffled rewards must miss the accuracies.",
        control_failed=control_failed(figures, wrong),
    )


def control_failed(figures: dict[str, Any], wrong: float) -> str:
    """Say why the figures prove nothing; empty if they do. `wrong`: the error of a loss with another clip range."""
    failed = [] if wrong > 1e-3 else [f"another clip range gives the same loss ({wrong:.2g})"]
    controls = {name: figures.get(f"control_{name}") for name in GOALS}
    failed += [f"shuffled rewards reach {name} {won}" for name, won in controls.items() if is_met(won, GOALS[name])]
    return "; ".join(failed)


if __name__ == "__main__":
    sys.exit(main())
