"""The runs of `make bench-orchestrator`: tools of different use, and what policies learned to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.orchestrator.means import Measured
from benchmarks.training_agent import Done
from toprope.records.run.folder import RunFolder
from toprope.trajectories.capture.run_reader import RunReader

__all__ = ["ADAPTIVE", "ALL", "FIXED", "GRPO", "GRPO_STEPS", "SFT", "copies", "lend_tools", "measured", "routes"]

_FACTS = 4000
_TOOLS = """\
tools:
  catalog: {python: models.py:catalog, usd: 0.01, seconds: 1.0, watts: 20.0, description: Looks a part up.}
  small: {python: models.py:small, usd: 0.005, seconds: 0.5, watts: 20.0, description: A small model for sums.}
  expert: {python: models.py:expert, usd: 0.06, seconds: 2.0, watts: 20.0, description: A large model.}
"""
_MODELS = f'''\
from toprope.sdk.adapters.orchestrator import made_up_facts
from toprope.sdk.orchestration.calculator import calculate, said

FACTS = made_up_facts({_FACTS})


def catalog(text: str) -> str:
    """Knows the parts of the first half of the alphabet."""
    return FACTS[text] if text in FACTS and text < "part N" else "Nothing was found."


def small(text: str) -> str:
    """Adds and subtracts; guesses products and facts by their size."""
    if text in FACTS:
        return "1000"
    value = calculate(text)
    return said(value) if "*" not in text else said(float(f"{{value:.1g}}"))


def expert(text: str) -> str:
    """Knows everything."""
    return FACTS[text].split()[-2] if text in FACTS else said(calculate(text))
'''
ALL: dict[str, Any] = {
    "environment.knobs.tools": ["calculator", "catalog", "small", "expert", "think"],
    "environment.knobs.compute_with": ["calculator", "small", "expert"],
    "environment.knobs.look_up_with": ["catalog", "expert"],
    "environment.knobs.facts": _FACTS,
    "environment.knobs.thoughts": 0.25,
    "environment.knobs.usd": {"calculator": 0.02, "think": 0.02},
    "environment.knobs.seconds": {"calculator": 1.0, "think": 3.0},
    "environment.knobs.watts": {"calculator": 20.0, "think": 20.0},
    "rollout.max_new_tokens": 80,
    "policy.max_context": 512,
    "sft.max_length": 512,
    "budget.max_train_seconds": None,
    "evaluation.greedy": False,
}
"""The preset's arithmetic (three digits, + - *), and facts. Each tool pays for one kind of question: the small model
for sums, the calculator for products, the catalog for common parts, the dear model for rare ones, which it lacks;
their names begin with other letters. At the last weights a right answer earns 0.3, and a call of the dear model costs
0.20, of the calculator 0.10, of the catalog 0.08, of the small model 0.05. Demonstrations use tools at random. Steps
are counted, not seconds: results do not depend on the machine's load.
"""
SFT: dict[str, Any] = {"algorithm.name": "sft", "sft.tasks": 3000, "sft.traces_per_task": 1, "sft.epochs": 6}
"""Teaches the form of calls and the copying of results; which tool to call is left to learn from reward."""
GRPO: dict[str, Any] = {"optimizer.learning_rate": 5e-4, "algorithm.scale_rewards": "batch"}
GRPO_STEPS = 300
FIXED = {"environment.reward_weights": {"accuracy": 1.0, "cost": 0.0, "energy": 0.0, "latency": 0.0, "power": 0.0}}
ADAPTIVE = {
    "environment.reward_weights": {"accuracy": 0.6, "cost": -0.1, "energy": -0.1, "latency": -0.1, "power": -0.1},
    "environment.reward_weights_end": {"accuracy": 0.3, "cost": -0.15, "energy": -0.2, "latency": -0.15, "power": -0.2},
}
_LATE = 0.8
"""Share of a run's policy versions after which its rollouts show what it learned."""


def lend_tools(home: Path) -> None:
    """Write the owner's settings and models."""
    (home / "config").mkdir(parents=True, exist_ok=True)
    (home / "config" / "settings.yaml").write_text(_TOOLS)
    (home / "config" / "models.py").write_text(_MODELS)


def measured(done: Done, label: str) -> Measured:
    """The result of one evaluation."""
    sampled = done.results["evaluations"][label]["sampled"]
    return Measured(sampled["accuracy"], sampled["low"], sampled["high"], sampled["tasks"], sampled["parts"])


def copies(done: Done, tuned: Done | None = None) -> int:
    """The number of held-out tasks that are copies of training tasks, by the run's own report, or that were
    demonstrated to the run that it continues.

    Raises:
        SystemExit: The report does not say, or there are no demonstrations.
    """
    found = [one for one in done.results.get("integrity") or () if one["name"] == "splits"]
    if not found:
        raise SystemExit(f"the report of {done.run_id} says nothing about its splits")
    known = int(found[0]["observed"]["copies"]["train_heldout"])
    if tuned is None:
        return known
    lines = (json.loads(line) for line in (tuned.folder / "traces.jsonl").read_text().splitlines())
    demonstrated = {line["task_id"] for line in lines if "task_id" in line}
    if not demonstrated:
        raise SystemExit(f"{tuned.run_id} has no demonstrations")
    evaluation = json.loads((tuned.folder / "evaluations" / "after.json").read_text())
    return known + len(demonstrated & set(evaluation["sampled"]["by_task"]["tasks"]))


def routes(done: Done) -> dict[str, dict[str, float]]:
    """The tools that late rollouts of a run call: by kind of question, tool -> share of the rollouts that call it."""
    reader, late = RunReader(RunFolder(done.folder)), _LATE * done.results["steps"]
    calls: dict[str, list[set[str]]] = {"sums": [], "products": [], "common": [], "rare": []}
    for item in reader:
        if (item.metadata.get("version") or 0) < late:
            continue
        question, *rest = item.messages
        text = str(question["content"])
        kind = "products" if "*" in text else "sums"
        if part := re.search(r"part \w+", text):
            kind = "common" if part[0] < "part N" else "rare"
        called = set()
        for message in rest:
            if message["role"] == "assistant":
                called |= {
                    line.removeprefix("TOOL: ").strip()
                    for line in str(message["content"]).splitlines()
                    if line.startswith("TOOL: ")
                }
        calls[kind].append(called)
    return {kind: _shares(every) for kind, every in calls.items()}


def _shares(calls: list[set[str]]) -> dict[str, float]:
    known: Mapping[str, int] = {
        tool: sum(tool in one for one in calls) for tool in ("calculator", "catalog", "small", "expert", "think")
    }
    return {tool: round(count / len(calls), 3) for tool, count in known.items()} if calls else {}
