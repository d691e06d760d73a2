"""The runs of `make bench-orchestrator`, as an agent would start them: through the server, with the official client."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client
from rich.console import Console
from toprope_server.cli.demo import server_parameters

from benchmarks.orchestrator.means import Measured

__all__ = ["ADAPTIVE", "FIXED", "GRPO", "GRPO_STEPS", "SFT", "Agent", "Done", "shared_tasks"]

_WAIT_S = 45
_ENDED = ("completed", "failed", "lost", "stopped")

_TOOLS = """\
tools:
  expert: {python: expert.py:answer, usd: 0.06, seconds: 3.0, watts: 40.0, description: Computes an expression.}
"""
_EXPERT = """\
from toprope.sdk.orchestration.calculator import calculate, said


def answer(text: str) -> str:
    return said(calculate(text))
"""
_ALL: dict[str, Any] = {
    "environment.knobs.tools": ["calculator", "expert", "think"],
    "environment.knobs.compute_with": ["calculator", "expert"],
    "environment.knobs.thoughts": 0.25,
    "environment.knobs.digits": 2,
    "environment.knobs.operators": "+-",
    "budget.max_train_seconds": None,
    "evaluation.greedy": False,
}
"""Two tools that can do the same, one at three times the price (the preset has the other's), and a useless one. Steps
are counted, not seconds: results do not depend on the machine's load.
"""

SFT: dict[str, Any] = {"algorithm.name": "sft", "sft.tasks": 900, "sft.traces_per_task": 1, "sft.epochs": 6}
"""Shorter than it should be, so that something is left to learn from reward."""

GRPO: dict[str, Any] = {"optimizer.learning_rate": 5e-4, "algorithm.scale_rewards": "batch"}
GRPO_STEPS = 150
FIXED = {"environment.reward_weights": {"accuracy": 1.0, "cost": 0.0, "energy": 0.0, "latency": 0.0, "power": 0.0}}
ADAPTIVE = {
    "environment.reward_weights": {"accuracy": 0.6, "cost": -0.1, "energy": -0.1, "latency": -0.1, "power": -0.1},
    "environment.reward_weights_end": {"accuracy": 0.3, "cost": -0.15, "energy": -0.2, "latency": -0.15, "power": -0.2},
}


@dataclass(frozen=True)
class Done:
    """A run that completed."""

    run_id: str
    folder: Path
    results: dict[str, Any]
    seconds: float
    """Seconds from the call of start_training to the report."""

    def measured(self, label: str) -> Measured:
        """The result of one evaluation."""
        sampled = self.results["evaluations"][label]["sampled"]
        return Measured(sampled["accuracy"], sampled["low"], sampled["high"], sampled["tasks"], sampled["parts"])

    @property
    def copies(self) -> int:
        """Return the number of held-out tasks that are copies of training tasks, by the run's own report.

        Raises:
            SystemExit: The report does not say.
        """
        for check in self.results.get("integrity") or ():
            if check["name"] == "splits":
                return int(check["observed"]["copies"]["train_heldout"])
        raise SystemExit(f"the report of {self.run_id} says nothing about its splits")


class Agent:
    """Start runs with tools only.

    Args:
        home: The owner's folder; may be empty.
        console: Where to print progress.
    """

    def __init__(self, home: Path, console: Console) -> None:
        self._variables = {"TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(home / "config")}
        self._home, self._console = home, console
        (home / "config").mkdir(parents=True, exist_ok=True)
        (home / "config" / "settings.yaml").write_text(_TOOLS)
        (home / "config" / "expert.py").write_text(_EXPERT)

    async def train(self, what: str, changes: dict[str, Any]) -> Done:
        """Select, edit, start, wait, and read the report.

        Raises:
            SystemExit: A tool refused, or the run did not complete.
        """
        self._console.print(f"[bold]{what}[/]")
        async with Client(server_parameters(self._variables)) as client:
            draft = await _call(client, "select_environment", name="orchestrator", preset="orchestrator-cpu")
            await _call(client, "edit_config", draft_id=draft["draft_id"], changes=_ALL | changes)
            began = time.monotonic()
            run_id = (await _call(client, "start_training", draft_id=draft["draft_id"]))["run_id"]
            state = ""
            while state not in _ENDED:
                answer = await _call(client, "check_status", run_ids=[run_id], wait_s=_WAIT_S)
                [run] = answer["runs"]
                state = run["state"]
            seconds = time.monotonic() - began
            answer = await _call(client, "get_results", run_id=run_id, detail="detailed")
        if state != "completed":
            raise SystemExit(f"{what}: {run_id} is {state}: {json.dumps(run)[:1000]}")
        done = Done(run_id, self._home / "runs" / run_id, answer["results"], seconds)
        for label in ("before", "after"):
            self._console.print(f"  {label}: {done.measured(label)}", style="dim", soft_wrap=True)
        return done


async def _call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments, read_timeout_seconds=120)
    if answer.is_error:
        raise SystemExit(f"{tool}: {answer.content[0].text}")
    return answer.structured_content or {}


def shared_tasks(done: Done) -> int:
    """Return the number of held-out tasks that were demonstrated; both are identified by a hash of their contents."""
    evaluation = json.loads((done.folder / "evaluations" / "after.json").read_text())
    lines = (json.loads(line) for line in (done.folder / "traces.jsonl").read_text().splitlines())
    demonstrated = {line["task_id"] for line in lines if "task_id" in line}
    if not demonstrated:
        raise SystemExit(f"{done.run_id} has no demonstrations")
    return len(demonstrated & set(evaluation["sampled"]["by_task"]["tasks"]))
