"""Train a tiny policy to use tools well and cheaply, and attack the sandbox: `make bench-orchestrator`.

    python -P -m benchmarks.orchestrator.orchestrator [--only sft|cost|hostile] [--seeds N] [--steps N]

    sft       supervised fine-tuning, cut short, then GRPO from it, on arithmetic that the policy cannot do without the
              calculator; accuracy is of held-out tasks
    cost      GRPO from the same checkpoint with weights that move from accuracy to economy, against weights that
              reward accuracy alone, seed by seed
    hostile   programs that try to break out of the tool `code_interpreter`

All training goes through the server by the official client. Estimated time: twenty minutes; `hostile` needs Linux.
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

from benchmarks.orchestrator.hostile import tried
from benchmarks.orchestrator.means import compared
from benchmarks.orchestrator.runs import ADAPTIVE, FIXED, GRPO, GRPO_STEPS, SFT, Agent, Done, shared_tasks
from benchmarks.report import report
from benchmarks.scratch import scratch


async def _learned(home: Path, seeds: int, steps: int, console: Console) -> dict[str, Any]:
    """Return the figures of the runs; with no seeds, those of fine-tuning and one run of GRPO from it."""
    agent, began = Agent(home, console), time.monotonic()
    sft = await agent.train("supervised fine-tuning, cut short", SFT)

    async def grpo(weights: dict[str, Any], seed: int, what: str) -> Done:
        changes = {
            "policy.model": f"run:{sft.run_id}",
            "budget.steps": steps,
            "algorithm.seed": seed,
            **GRPO,
        }
        return await agent.train(f"GRPO from it, {what}, seed {seed}", changes | weights)

    first = await grpo(ADAPTIVE, 0, "weights that move")
    shared, copies = shared_tasks(sft), first.copies
    if shared or copies:
        raise SystemExit(f"held-out tasks were trained on: {shared} were demonstrated, {copies} are copies")
    before, tuned, after = sft.measured("before"), sft.measured("after"), first.measured("after")
    figures: dict[str, Any] = {}
    for name, one in (("before", before), ("sft", tuned), ("grpo", after)):
        figures |= {
            f"accuracy_{name}": one.accuracy,
            f"accuracy_{name}_low": one.low,
            f"accuracy_{name}_high": one.high,
        }
    figures |= {
        "heldout_tasks": after.tasks,
        "heldout_shared_with_training": shared + copies,
        "steps_sft": sft.results["steps"],
        "steps_grpo": steps,
        "seconds_sft": round(sft.seconds, 1),
        "seconds_grpo": round(first.seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    if seeds:
        adaptive = [first, *[await grpo(ADAPTIVE, seed, "weights that move") for seed in range(1, seeds)]]
        fixed = [await grpo(FIXED, seed, "accuracy alone") for seed in range(seeds)]
        figures |= compared([one.measured("after") for one in fixed], [one.measured("after") for one in adaptive])
        figures |= {"seeds": seeds, "seconds_cost": round(time.monotonic() - began - figures["seconds"], 1)}
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit with 1 if a program broke out or a held-out task was trained on."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.orchestrator.orchestrator", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", choices=("sft", "cost", "hostile"), help="one part; cost needs sft, and does it")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (default 3)")
    parser.add_argument("--steps", type=int, default=GRPO_STEPS, help=f"steps of GRPO (default {GRPO_STEPS})")
    given = parser.parse_args(arguments)
    console, figures = Console(highlight=False), {}
    with scratch("orchestrator") as path:
        if given.only in (None, "hostile"):
            (path / "canaries").mkdir()
            figures |= tried(path / "canaries")
        if given.only != "hostile":
            seeds = 0 if given.only == "sft" else given.seeds
            figures |= asyncio.run(_learned(path / "home", seeds, given.steps, console))
    goals = {name: "== 0" for name in ("hostile_escapes",) if name in figures}
    unseen = figures.get("hostile_controls_unseen")
    return report(
        "Orchestrator",
        figures,
        goals=goals,
        control="each hostile program must be seen to break out of an unconfined copy.",
        control_failed=f"{unseen} programs did not break out of the unconfined copy" if unseen else "",
    )


if __name__ == "__main__":
    sys.exit(main())
