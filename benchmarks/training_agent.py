"""Runs that benchmarks start as an agent does: with the tools of a server, through the official client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client
from rich.console import Console
from toprope_server.cli.demo import server_parameters

from toprope.records.run.metrics import read_rows

__all__ = ["Done", "TrainingAgent", "training_agent"]

_WAIT_S = 45
_ENDED = ("completed", "failed", "lost", "stopped")


@dataclass(frozen=True)
class Done:
    """A run that completed."""

    run_id: str
    folder: Path
    results: dict[str, Any]
    seconds: float
    """Seconds from the call of start_training to the report."""
    observed: Any = None
    """The result of `observe`."""

    def accuracy(self, label: str, kind: str = "sampled") -> float:
        return float(self.results["evaluations"][label][kind]["accuracy"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_rows(self.folder / "metrics.jsonl")


class TrainingAgent:
    """Starts runs over one server.

    Args:
        client: Connected to it.
        home: The owner's folder.
        console: Where to print progress.
    """

    def __init__(self, client: Client, home: Path, console: Console) -> None:
        self._client, self._home, self._console = client, home, console

    async def train(
        self,
        what: str,
        environment: str,
        preset: str,
        changes: dict[str, Any],
        observe: Callable[[str], Awaitable[Any]] | None = None,
    ) -> Done:
        """Select, edit, start, wait, and read the report.

        Args:
            what: The run in words.
            observe: Gets the run's id and looks at the run while it trains.

        Raises:
            SystemExit: A tool refused, or the run did not complete.
        """
        began = time.monotonic()
        run_id = await self.start(environment, preset, changes)
        looking = asyncio.ensure_future(observe(run_id)) if observe is not None else None
        run = await self.ended(run_id)
        observed = await looking if looking is not None else None
        if run["state"] != "completed":
            raise SystemExit(f"{what}: {run_id} is {run['state']}: {json.dumps(run)[:1500]}")
        results = (await self.call("get_results", run_id=run_id, detail="detailed"))["results"]
        done = Done(run_id, self._home / "runs" / run_id, results, time.monotonic() - began, observed)
        measured = " -> ".join(f"{done.accuracy(label):.3f}" for label in ("before", "after"))
        self._console.print(f"{what}: {results['steps']} steps, accuracy {measured}, {done.seconds:.0f} s", style="dim")
        return done

    async def ended(self, run_id: str) -> dict[str, Any]:
        """Wait for the end of a run; return its status."""
        run: dict[str, Any] = {"state": ""}
        while run["state"] not in _ENDED:
            [run] = (await self.call("check_status", run_ids=[run_id], wait_s=_WAIT_S, until="end"))["runs"]
        return run

    async def start(self, environment: str, preset: str, changes: dict[str, Any]) -> str:
        """Select, edit and start; return the run's id.

        Raises:
            SystemExit: A tool refused.
        """
        draft = await self.call("select_environment", name=environment, preset=preset)
        await self.call("edit_config", draft_id=draft["draft_id"], changes=changes)
        return str((await self.call("start_training", draft_id=draft["draft_id"]))["run_id"])

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool and return its structure.

        Raises:
            SystemExit: It refused.
        """
        answer = await self._client.call_tool(tool, arguments, read_timeout_seconds=120)
        if answer.is_error:
            raise SystemExit(f"{tool}: {answer.content[0].text}")
        return answer.structured_content or {}


@asynccontextmanager
async def training_agent(home: Path, console: Console, **variables: str) -> AsyncIterator[TrainingAgent]:
    """An agent with a server of its own, whose owner's folders are `home` and `home/config`.

    Args:
        home: See above.
        console: Where to print progress.
        variables: More environment variables of the server.
    """
    variables |= {"TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(home / "config")}
    async with Client(server_parameters(variables)) as client:
        yield TrainingAgent(client, home, console)
