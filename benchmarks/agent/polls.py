"""Measure an agent that cannot wait: a full status of each live run every 30 seconds.

Agents follow runs this way if a status tool has no wait: one run a call, with everything there is. The status is
assembled from the run's folder at that moment: status.json whole (state, numbers, crew with exits, counts, evaluations,
findings), the newest row of metrics, the last twenty events, and the last twenty lines of each component's log. Nothing
is invented, and each thing is counted once. get_results(detailed), which is called for real, is another full status.

Queued runs are not polled: this is the fewest polls that such an agent needs. The first poll comes 30 seconds after a
run left the queue, the last one is the first after its end.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio

from benchmarks.agent.counts import EVERY_S, Poll, compact
from toprope.errors import TopropeError
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.metrics import last_row
from toprope.records.run.status import Status, read_events
from toprope.supervisor.keeper.logs import read_page

__all__ = ["Poller", "full_status"]

_EVENTS, _LINES = 20, 20
_COMPONENTS = ("keeper", "policy", "api", "inference", "trainer", "environment")


def full_status(folder: RunFolder) -> dict[str, bytes]:
    """Return the full status of a run by part, as it would be sent.

    Raises:
        TopropeError: The run has no readable status.
    """
    logs = {}
    for name in _COMPONENTS:
        if folder.log(name).is_file():
            logs[name] = list(read_page(folder.log(name), lines=_LINES, before=None, secrets=()).lines)
    events = [event.model_dump(mode="json") for event in read_events(folder.events)]
    return {
        "status": compact(read_json(folder.status)),
        "numbers": compact(last_row(folder.metrics)),
        "events": compact(events[-_EVENTS:]),
        "logs": compact(logs),
    }


class Poller:
    """Poll the runs given to `follow`; `polls` holds the results so far."""

    def __init__(self, runs: Path, detailed: Callable[[str], Awaitable[int]] | None = None) -> None:
        """Return the bytes of get_results(detailed) of a run."""
        self._runs, self._detailed = runs, detailed
        self._due: dict[str, float | None] = {}
        """The time of a run's next poll; None while it is queued."""
        self._one_at_a_time = anyio.Lock()
        self.polls: list[Poll] = []
        self.lives: dict[str, float] = {}
        """Seconds at work of each run that was polled to its end."""

    def follow(self, *run_ids: str) -> None:
        """Poll these runs, too, from now on."""
        self._due.update(dict.fromkeys(run_ids))

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.turn(time.time())
            await anyio.sleep(0.5)

    async def turn(self, now: float) -> None:
        """Make the polls that are due."""
        async with self._one_at_a_time:
            await self._turn(now)

    async def _turn(self, now: float) -> None:
        for run_id, due in list(self._due.items()):
            folder = RunFolder(self._runs / run_id)
            try:
                status = Status.read(folder)
            except TopropeError:
                continue  # it is being created
            if status.started_at is None:
                continue
            if due is None:
                self._due[run_id] = due = status.started_at + EVERY_S
            if now >= due:
                await self._poll(folder, status)

    async def last_of(self, run_id: str) -> None:
        """Make the poll whose result the agent acts on before it stops the run, and poll the run no more."""
        async with self._one_at_a_time:
            folder = RunFolder(self._runs / run_id)
            status = Status.read(folder)
            life = time.time() - (status.started_at or time.time())
            await self._poll(folder, status)
            self.lives[run_id] = life
            self._due.pop(run_id, None)

    async def rest_of(self, run_ids: Sequence[str]) -> None:
        """Make the polls that see the end of runs that have ended."""
        async with self._one_at_a_time:
            for run_id in run_ids:
                folder = RunFolder(self._runs / run_id)
                status = Status.read(folder)
                while run_id in self._due:
                    await self._poll(folder, status)

    async def _poll(self, folder: RunFolder, status: Status) -> None:
        run_id = folder.run_id
        parts = {name: len(part) for name, part in full_status(folder).items()}
        request = compact({"name": "check_status", "arguments": {"run_id": run_id}})
        detailed = await self._detailed(run_id) if self._detailed is not None else 0
        self.polls.append(Poll(run_id, len(request), parts, detailed))
        began, due = status.started_at or 0.0, self._due.get(run_id)
        if status.ended_at is not None and (due is None or due >= status.ended_at):
            self.lives[run_id] = status.ended_at - began
            self._due.pop(run_id, None)
        else:
            self._due[run_id] = (due or began) + EVERY_S
