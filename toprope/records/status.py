"""A run's life as its folder tells it: the states, the status that carries its own data, and events.

    queued -> validating -> starting -> training -> evaluating -> completed
    any of these -> stopping -> stopped          any of these -> failed | lost
    stopped | failed | lost -> (resume: same run, next attempt) -> queued

A run without a trainer (kind `test`) goes from `starting` to `evaluating`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.errors import Corrupt
from toprope.records.folder import LEFT, RunFolder, misfits, read_json, write_json

__all__ = [
    "ENDED",
    "LIVE",
    "RESUMABLE",
    "TRANSITIONS",
    "CrewMember",
    "Event",
    "EventLog",
    "Failure",
    "State",
    "Status",
    "read_events",
]

State = Literal[
    "queued",
    "validating",
    "starting",
    "training",
    "evaluating",
    "stopping",
    "paused",
    "completed",
    "stopped",
    "failed",
    "lost",
]

ENDED: frozenset[str] = frozenset({"completed", "stopped", "failed", "lost"})
LIVE: frozenset[str] = frozenset({"queued", "validating", "starting", "training", "evaluating", "stopping", "paused"})

RESUMABLE: frozenset[str] = frozenset({"stopped", "failed", "lost"})

TRANSITIONS: dict[str, frozenset[str]] = {
    "queued": frozenset({"validating", "stopping", "failed", "lost"}),
    "validating": frozenset({"starting", "stopping", "failed", "lost"}),
    "starting": frozenset({"training", "evaluating", "stopping", "failed", "lost"}),
    "training": frozenset({"evaluating", "paused", "stopping", "failed", "lost"}),
    "paused": frozenset({"training", "stopping", "failed", "lost"}),
    "evaluating": frozenset({"completed", "stopping", "failed", "lost"}),
    "stopping": frozenset({"stopped", "failed", "lost"}),
    "completed": frozenset(),
    "stopped": frozenset({"queued"}),
    "failed": frozenset({"queued"}),
    "lost": frozenset({"queued"}),
}


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Failure(_Record):
    """Why a run failed: which component, how it ended, what it said last, what may help."""

    component: str
    reason: str
    exit_code: int | None = None
    signal: str | None = None
    excerpt: list[str] = []
    hint: str = ""


class CrewMember(_Record):
    """One component as the keeper sees it now."""

    state: Literal["starting", "ready", "finished", "exited", "stopped"]
    pid: int | None = None
    exit_code: int | None = None
    since: float


class Status(_Record):
    """status.json. Times are seconds since the epoch; `progress` holds the newest numbers, all optional:
    step, total_steps, reward, success, rollouts_per_second, eta_s, what, done, total."""

    version: int = 1
    run_id: str
    kind: str
    environment: str
    state: State
    reason: str = ""
    attempt: int = 1
    created_at: float
    started_at: float | None = None
    training_at: float | None = None
    ended_at: float | None = None
    since: float
    updated_at: float
    progress: dict[str, Any] = {}
    crew: dict[str, CrewMember] = {}
    counts: dict[str, Any] = {}
    evaluations: dict[str, dict[str, Any]] = {}
    checkpoint: dict[str, Any] | None = None
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @classmethod
    def read(cls, folder: RunFolder) -> Status:
        """The status on disk.

        Raises:
            NotFound: The run has none yet.
            Corrupt: It cannot be read.
        """
        try:
            return cls.model_validate(read_json(folder.status))
        except ValidationError as error:
            raise Corrupt(f"{folder.status} is not a status: {misfits(error)}.", hint=LEFT) from None

    def write(self, folder: RunFolder) -> None:
        """Replaces the status on disk. The keeper's right alone while a run lives."""
        write_json(folder.status, self.model_dump(mode="json"))


class Event(_Record):
    """Something that happened to a run. Kinds: state, evaluation, checkpoint, first_step, warning, end."""

    seq: int
    at: float
    kind: str
    data: dict[str, Any] = {}


class EventLog:
    """Appends numbered events to a run's events.jsonl; goes on after the last number found there."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.events
        last = 0
        for event in read_events(self._path):
            last = event.seq
        self._next = last + 1
        self._torn = _torn(self._path)

    def append(self, kind: str, **data: Any) -> Event:
        """Writes one event as one line in one write call."""
        event = Event(seq=self._next, at=time.time(), kind=kind, data=data)
        self._next += 1
        line = (event.model_dump_json() + "\n").encode()
        if self._torn:
            # A full disk cut the last one short; this one must not become its rest.
            line, self._torn = b"\n" + line, False
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        return event


def _torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
    except FileNotFoundError:
        return False


def read_events(path: Path, after: int = 0) -> Iterator[Event]:
    """Events with a number above `after`, oldest first; a torn last line is passed over."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            event = Event.model_validate(json.loads(line))
        except ValueError:
            continue
        if event.seq > after:
            yield event
