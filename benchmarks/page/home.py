"""A home with one real thing of each kind, made by an agent's calls of the MCP server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

ENDED = ("completed", "stopped", "failed", "lost")
HOSTILE = 'A <img src=x onerror="window.owned = 1"> rate\u202e of <script>window.owned = 1</script> 0.01 is faster. '
HOSTILE += "W" * 120
"""A text of an agent: markup that must stay text, a character that reorders what is read, and a word without an end."""
_LIMITS = """\
concurrent_runs: 4
disk_gb: 100
per_run: {wall_hours: 12, steps: 20000}
per_day: {runs: 20, cost_usd: {max: 5, reason: The month's budget is 150 USD.}}
prices: {cpu_hour_usd: 0.04}
confirm: {above: {wall_hours: 0.5}}
"""
_SHORT = {
    "algorithm.seed": 1,
    "budget.steps": 300,
    "budget.max_train_seconds": 120,
    "evaluation.every_steps": 100,
    "evaluation.heldout_tasks": 200,
    "evaluation.validation_tasks": 64,
    "logging.save_steps": 100,
    "rollout.max_new_tokens": 12,
}


@dataclass
class PageHome:
    """The content of the home.

    Attributes:
        folder: Holds the folders `home` and `config`.
        ids: Run ids by their role: `good`, `hot`, `sft`, `sweep`, `live`.
    """

    folder: Path
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its owner's programs."""
        return {"TOPROPE_HOME": str(self.folder / "home"), "TOPROPE_CONFIG": str(self.folder / "config")}

    def server(self) -> StdioServerParameters:
        """The MCP server of this home."""
        kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
        command = ["-P", "-m", "toprope_server.cli", "serve"]
        return StdioServerParameters(command=sys.executable, args=command, env=kept | self.variables)

    def heldout_texts(self) -> list[str]:
        """Prompts of held-out tasks, as the evaluations on disk have them."""
        found: set[str] = set()
        for path in (self.folder / "home" / "runs").glob("*/evaluations/*.json"):
            evaluation = json.loads(path.read_text())
            if any((evaluation.get(kind) or {}).get("split") == "heldout" for kind in ("sampled", "greedy")):
                found |= {example["prompt"] for example in evaluation.get("examples") or [] if example.get("prompt")}
        return sorted(found)


class _Agent:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = await self._client.call_tool(tool, arguments, read_timeout_seconds=300)
        if answer.is_error:
            raise RuntimeError(answer.content[0].text)  # type: ignore[union-attr]
        return answer.structured_content or {}

    async def until_end(self, run_id: str) -> None:
        while True:
            told = await self("check_status", run_ids=[run_id], wait_s=45, until=["end"])
            if told["runs"][0]["state"] in ENDED:
                return

    async def draft(self, preset: str = "cpu-embedded") -> str:
        made = await self("select_environment", name="reasoning_gym/spell_backward", preset=preset)
        return str(made["draft_id"])


def make_home(folder: Path, *, sweep: bool = True, live: bool = True) -> PageHome:
    """Train, fine-tune, search, note and ask; two to three minutes on two cores.

    Args:
        folder: An empty folder.
        sweep: Also a fine-tuning run, a sweep and a data set.
        live: Leave a run that trains for minutes; the caller stops it.
    """
    home = PageHome(folder)
    for name in ("home", "config"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    anyio.run(_fill, home, sweep, live)
    return home


async def _fill(home: PageHome, sweep: bool, live: bool) -> None:
    async with Client(home.server()) as client:
        agent = _Agent(client)
        good = await agent.draft()
        await agent("edit_config", draft_id=good, changes=_SHORT)
        home.ids["good"] = (await agent("start_training", draft_id=good))["run_id"]
        await agent(
            "note_experiment",
            run_ids=[home.ids["good"]],
            hypothesis="A small policy learns to spell backward from reward alone.",
            goal="0.9 on words of five letters",
        )
        await agent.until_end(home.ids["good"])
        hot = (await agent("fork_config", run_id=home.ids["good"]))["draft_id"]
        hotter = {
            "optimizer.learning_rate": 0.01,
            "optimizer.warmup_steps": 0,
            "algorithm.seed": 2,
            "budget.steps": 120,
        }
        await agent("edit_config", draft_id=hot, changes=hotter)
        home.ids["hot"] = (await agent("start_training", draft_id=hot))["run_id"]
        await agent.until_end(home.ids["hot"])
        await agent(
            "note_experiment", run_ids=[home.ids["hot"]], hypothesis=HOSTILE, outcome="It is not.", decision="discard"
        )
        if sweep:
            await _search(home, agent)
        if live:
            await _stay_live(home, agent)
        (home.folder / "config" / "limits.yaml").write_text(_LIMITS)
        for steps in (12_000, 9_000):
            await _ask(home, client, agent, steps)


async def _search(home: PageHome, agent: _Agent) -> None:
    tuned = await agent.draft("cpu-sft")
    await agent("edit_config", draft_id=tuned, changes={"budget.steps": 100, "evaluation.heldout_tasks": 100})
    home.ids["sft"] = (await agent("start_training", draft_id=tuned))["run_id"]
    await agent.until_end(home.ids["sft"])
    searched = (await agent("fork_config", run_id=home.ids["good"]))["draft_id"]
    small = {"evaluation.every_steps": 0, "evaluation.heldout_tasks": 64, "evaluation.validation_tasks": 32}
    await agent("edit_config", draft_id=searched, changes={"budget.steps": 40, "budget.max_train_seconds": 60, **small})
    space = {"optimizer.learning_rate": {"min": 1e-4, "max": 5e-3, "log": True}}
    started = await agent(
        "start_sweep", draft_id=searched, space=space, population=2, epochs=2, options={"steps": 20, "name": "search"}
    )
    home.ids["sweep"] = started["run_id"]
    await agent.until_end(home.ids["sweep"])
    await agent("build_dataset", name="good", sources=[home.ids["good"]])


async def _stay_live(home: PageHome, agent: _Agent) -> None:
    long = (await agent("fork_config", run_id=home.ids["good"]))["draft_id"]
    budget = {"budget.steps": 20_000, "budget.max_train_seconds": 1_500}
    await agent("edit_config", draft_id=long, changes={**budget, "evaluation.every_steps": 0})
    home.ids["live"] = (await agent("start_training", draft_id=long))["run_id"]
    await agent("check_status", run_ids=[home.ids["live"]], wait_s=45, until=["step>=20"])


async def _ask(home: PageHome, client: Client, agent: _Agent, steps: int) -> None:
    """Ask for a start that the owner wants to confirm."""
    asked = (await agent("fork_config", run_id=home.ids["good"]))["draft_id"]
    larger = {"budget.steps": steps, "rollout.groups_per_step": 16, "budget.max_train_seconds": 7_200}
    await agent("edit_config", draft_id=asked, changes=larger)
    answer = await client.call_tool("start_training", {"draft_id": asked, "seeds": 3}, read_timeout_seconds=60)
    if not answer.is_error:
        raise RuntimeError("the start was not refused")


def train_on(home: PageHome) -> None:
    """Resume the live run if somebody stopped it, and wait until it trains."""

    async def resume() -> None:
        async with Client(home.server()) as client:
            run = {"run_id": home.ids["live"]}
            await client.call_tool("resume_training", run, read_timeout_seconds=60)
            waits = {"run_ids": [home.ids["live"]], "wait_s": 45, "until": ["step>=20"]}
            await client.call_tool("check_status", waits, read_timeout_seconds=90)

    anyio.run(resume)


@contextmanager
def without_live(home: PageHome) -> Iterator[PageHome]:
    """Stop the live run at the end of the block, if it is still there."""

    async def stop() -> None:
        async with Client(home.server()) as client:
            await client.call_tool("stop_training", {"run_id": home.ids["live"]}, read_timeout_seconds=60)

    try:
        yield home
    finally:
        if "live" in home.ids:
            anyio.run(stop)
