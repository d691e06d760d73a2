"""The agent's script: a run that collapses, the diagnosis, the corrected rate, and the proof over three seeds.

It uses only tools over standard input and output, through the official client, and takes from answers what an agent
would take: ids, cursors, and the next step that a finding names. Every call is counted. A second client
makes the same waits on the same runs, each cut to that client's limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from mcp import Client
from mcp.types import Implementation

from benchmarks.agent.counts import Exchange, compact
from benchmarks.agent.polls import Poller

__all__ = ["RATE", "Agent", "Failed", "client", "research"]

ENVIRONMENT, PRESET = "reasoning_gym/spell_backward", "cpu-embedded"
RATE = 0.01
"""The most that the locks allow, ten times the preset's."""
_NAMES = frozenset({"learning_rate_high", "collapse"})
_LONG_S = 900
_PATIENCE_S = 1000.0


class Failed(Exception):
    """A tool refused, or an answer lacked what the script needs."""


def client(parameters: Any, name: str) -> Client:
    """Connect to a server of its own, under a client name that implies how long calls may wait."""
    return Client(parameters, client_info=Implementation(name=name, version="1.0"))


class Agent:
    """Calls tools and counts the calls."""

    def __init__(self, connected: Client, say: Callable[[str], None]) -> None:
        self._client, self._say = connected, say
        self.made: list[Exchange] = []

    async def call(self, tool: str, *, wait: bool = False, **arguments: Any) -> tuple[str, dict[str, Any]]:
        """Make one call and return its text and structure.

        Raises:
            Failed: The tool refused.
        """
        answer = await self._client.call_tool(tool, arguments, read_timeout_seconds=_PATIENCE_S)
        text = "\n".join(part.text for part in answer.content if part.type == "text")
        self.made.append(Exchange.of(tool, arguments, text, answer.structured_content, wait=wait))
        told = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        self._say(f"{tool}({told})  [{self.made[-1].text // 4} + {self.made[-1].structure // 4} tokens]")
        for line in text.splitlines():
            self._say(f"    {line[:260]}")
        if answer.is_error:
            raise Failed(text)
        return text, answer.structured_content or {}

    async def wait(self, run_ids: Sequence[str], until: Sequence[str], cursor: str | None = None) -> dict[str, Any]:
        """Wait until one of `until` is met, in as many calls as needed; return the last answer's structure, with the
        last `states` of all runs.

        Raises:
            Failed: Everything has ended and nothing was met.
        """
        asked: dict[str, Any] = {"run_ids": list(run_ids), "wait_s": _LONG_S, "until": list(until)}
        asked |= {"cursor": cursor} if cursor else {}
        states: dict[str, str] = {}
        while True:
            text, found = await self.call("check_status", wait=True, **asked)
            states |= {run["run_id"]: run["state"] for run in found["runs"]}
            if found.get("met"):
                return found | {"states": states}
            # As the answer's last line says: the cursor names the runs that have not ended.
            following = re.search(r'Next: .*cursor="([^"]+)"', text)
            if following is None:
                raise Failed(f"nothing of {until} was met")
            asked = {"wait_s": _LONG_S, "until": list(until), "cursor": following[1]}


async def research(agent: Agent, patient: Agent, poller: Poller, changes: dict[str, Any]) -> dict[str, Any]:
    """Run the script and return the result of compare_runs. `proved`: the gain is above the noise floor.

    Args:
        agent: The client that does the work.
        patient: A client whose calls may wait longer, which waits for the same.
        poller: Polls the same runs.
        changes: The budget, besides the rate.

    Raises:
        Failed: A tool refused, the run was not diagnosed, or another one did not complete.
    """
    _, draft = await agent.call("select_environment", name=ENVIRONMENT, preset=PRESET)
    draft_id = draft["draft_id"]
    await agent.call("edit_config", draft_id=draft_id, changes={"optimizer.learning_rate": RATE} | changes)
    _, sick = await agent.call("start_training", draft_id=draft_id, name="fast")
    poller.follow(sick["run_id"])
    seen = await _together(agent, patient, [sick["run_id"]], ["finding", "end"], f"{sick['run_id']}:0")
    finding = _finding(seen)
    await poller.last()  # another agent would stop it at its next poll
    await agent.call("stop_training", run_id=sick["run_id"])
    rate = finding.get("changes", {}).get("optimizer.learning_rate")
    if rate is None:
        raise Failed(f"the finding does not name a rate: {finding}")

    # Only the rate differs: the comparison shows that it made the difference.
    _, before = await agent.call("start_training", draft_id=draft_id, seeds=3, name="fast")
    await agent.call("edit_config", draft_id=draft_id, changes={"optimizer.learning_rate": rate})
    _, after = await agent.call("start_training", draft_id=draft_id, seeds=3, name="mended")
    poller.follow(*before["run_ids"], *after["run_ids"])
    groups = [before["group_id"], after["group_id"]]
    everyone = [*before["run_ids"], *after["run_ids"]]
    beginning = ",".join(f"{run_id}:0" for run_id in everyone)
    ended = await _together(agent, patient, groups, ["all ended", "failed"], beginning)
    if any(ended["states"].get(run_id) != "completed" for run_id in everyone):
        raise Failed("a run did not complete")
    await poller.last()

    _, compared = await agent.call("compare_runs", a=[groups[0]], b=[groups[1]])
    sampled = compared["sampled"]
    proved = sampled["verdict"] == "b" and sampled["difference"]["value"] > sampled["noise_floor"]
    gained, floor = 100 * sampled["difference"]["value"], 100 * sampled["noise_floor"]
    _, noted = await agent.call(
        "note_experiment",
        hypothesis=f"A learning rate of {rate} instead of {RATE} learns, as the finding {finding['rule']} says.",
        run_ids=groups[1:],
        draft_id=draft_id,
        outcome=f"{gained:+.1f} points on held-out tasks over 3 seeds against {groups[0]}; noise floor {floor:.1f}.",
        decision="keep" if proved else "discard",
    )
    handoff, _ = await agent.call("get_handoff")
    if noted["experiment"]["id"] not in handoff:
        raise Failed("the handoff does not mention the experiment")
    return {
        "proved": proved,
        "finding": finding["rule"],
        "finding_step": finding["step"],
        "rate_after": rate,
        "gain_points": round(gained, 1),
        "noise_floor_points": round(floor, 1),
        "p_tasks": sampled["p_tasks"],
    }


async def _together(
    agent: Agent, patient: Agent, run_ids: Sequence[str], until: Sequence[str], cursor: str | None = None
) -> dict[str, Any]:
    """Let both clients make the same wait; return the answer to the agent."""
    found: dict[str, Any] = {}

    async def own() -> None:
        found.update(await agent.wait(run_ids, until, cursor))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(own)
        tasks.start_soon(patient.wait, run_ids, until, cursor)
    return found


def _finding(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the gravest finding of the answer.

    Raises:
        Failed: No finding names the rate.
    """
    events = [event["data"] for run in seen["runs"] for event in run.get("events", ()) if event["kind"] == "finding"]
    named = [data for data in events if data["rule"] in _NAMES]
    if not named:
        raise Failed(f"no finding names the learning rate: {compact(events).decode()}")
    return max(named, key=lambda data: data["level"] == "critical")
