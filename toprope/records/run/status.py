"""The status of a run as its folder records it: states, the status with its data, findings and events.

    queued -> validating -> starting -> training -> evaluating -> completed
    any of these -> stopping -> stopped          any of these -> failed | lost
    starting | training | evaluating <-> paused
    stopped | failed | lost -> (resume: same run, next attempt) -> queued
    lost -> stopped (stopped before it resumes by itself)

A run without a trainer (kind `test`) goes from `starting` to `evaluating`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from toprope.atomic import read_plain, write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, check_version, lines_backwards, open_record, read_json, read_record
from toprope.records.run.full_disk import PatientLines
from toprope.records.run.kinds import RunKind, kind_named
from toprope.text_format import environments

STATUS_VERSION = 1
EVENT_VERSION = 1
"""Newest versions of status.json and of an event known here. They rise when an older reader would be misled."""

_TAIL_BYTES = 1 << 15
_BLANK_BYTES = 1 << 20
_NUMBERED = re.compile(rb'\{"seq":(\d{1,15}),')
"""Beginning of an event's line; lines of known numbers are skipped without decoding them."""

DRIVER_ENDED = "the environment's driver ended"
"""The reason under which groups are given up when their driver ends."""

FindingLevel = Literal["note", "warning", "critical", "over"]
"""`over`: the rule no longer holds."""

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
    "starting": frozenset({"training", "evaluating", "paused", "stopping", "failed", "lost"}),
    "training": frozenset({"evaluating", "paused", "stopping", "failed", "lost"}),
    "paused": frozenset({"starting", "training", "evaluating", "stopping", "failed", "lost"}),
    "evaluating": frozenset({"completed", "paused", "stopping", "failed", "lost"}),
    "stopping": frozenset({"stopped", "failed", "lost"}),
    "completed": frozenset(),
    "stopped": frozenset({"queued"}),
    "failed": frozenset({"queued"}),
    "lost": frozenset({"queued", "stopped"}),
}


class Failure(BaseModel):
    """The failure of a run: its component, how that ended, its last output, and a hint."""

    component: str
    reason: str
    exit_code: int | None = None
    signal: str | None = None
    excerpt: list[str] = []
    hint: str = ""
    kind: str = ""
    """Kind of failure (`toprope.analysis.failures.Kind`); empty if it was not classified."""
    evidence: str = ""
    """The line that shows it."""


class CrewMember(BaseModel):
    """The present state of one component."""

    state: Literal["starting", "ready", "finished", "exited", "stopped"]
    pid: int | None = None
    """Process id on its node."""
    node: str | None = None
    """The node that it runs on, if the crew has several."""
    exit_code: int | None = None
    since: float
    restarts: int = 0
    """Its restarts in this attempt."""
    worker_restarts: int = 0
    """Restarts of the environment's worker."""


class Finding(BaseModel, frozen=True):
    """One diagnosis: a rule, the values that it saw, and the next step. Stored as the data of an event."""

    rule: str
    """The rule's id, such as `collapse`; stable, so that agents and tests can name it."""
    level: FindingLevel
    what: str
    """One sentence that states the problem."""
    observed: dict[str, Any] = {}
    """The values behind it, by name."""
    threshold: str = ""
    """The limit that they were compared with, in words."""
    source: str = ""
    """The source of the threshold."""
    confidence: Literal["low", "medium", "high"] = "medium"
    next: str = ""
    """The recommended call, or the change of a field."""
    changes: dict[str, Any] = {}
    """The fields to change and their new values; empty if no edit mends it."""
    follows: str = ""
    """The rule of an open finding that explains this one."""
    step: int | None = None


class Status(BaseModel):
    """status.json. Times are seconds since the epoch; `progress` holds the newest numbers, all optional:
    step, total_steps, reward and success of the last batch, recent (their means over `steps` steps),
    rollouts_per_second, eta_s, what, done, total."""

    version: int = STATUS_VERSION
    run_id: str
    kind: str
    environment: str
    mixture: list[str] = []
    """Labels of the other environments."""
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
    making: dict[str, Any] = {}
    """The environment's counts of groups over all its lives: `begun`, `posted`, `unanswered` (it ended before the API
    answered the post; the API's counts tell whether it has them), and `given_up` by reason. At the end of the run,
    begun = posted + unanswered + the sum of given_up."""
    evaluations: dict[str, dict[str, Any]] = {}
    curricula: dict[str, dict[str, Any]] = {}
    """Curricula that have moved, by environment: `knob`, `value`, `level` (from 0) of `levels`."""
    checkpoint: dict[str, Any] | None = None
    failure: Failure | None = None
    findings: list[Finding] = []
    """Present findings, the most severe first."""
    results_sha256: str = ""
    """SHA-256 of results.json as the keeper wrote it; empty if it wrote none, or an older version did."""
    resume_at: float | None = None
    """Time at which a lost run may resume by itself."""
    resumed_lost: int = 0
    """Automatic resumptions in a row, without a checkpoint in between."""

    @property
    def environments(self) -> str:
        """All its environments in words."""
        return environments([self.environment, *self.mixture])

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """True if this attempt has ended, and its processes as well."""
        return self.ended and self.ended_at is not None

    @property
    def goes_on(self) -> bool:
        """True if the run was lost and will resume by itself."""
        return self.state == "lost" and self.resume_at is not None

    @property
    def run_kind(self) -> RunKind:
        """The facts about runs of this kind."""
        return kind_named(self.kind)

    @classmethod
    def read(cls, folder: RunFolder) -> Status:
        """The status on disk; what the events tell of it if the file is blank, as a power cut leaves it.

        Raises:
            NotFound: The run has none yet.
            Corrupt: It cannot be read; TooNew if a newer version wrote it.
        """
        try:
            return read_record(folder.status, STATUS_VERSION, cls)
        except Corrupt:
            if (status := _rebuilt(folder)) is None:
                raise
            return status

    def write(self, folder: RunFolder) -> None:
        """Replace the status on disk. While a run lives, only its keeper may."""
        write_json(folder.status, self.model_dump(mode="json"))


def close_counts(making: dict[str, Any]) -> dict[str, Any]:
    """Return `Status.making` after the end of the drivers: groups in progress are given up."""
    given_up = dict(making.get("given_up", {}))
    unfinished = making.get("begun", 0) - making.get("posted", 0) - making.get("unanswered", 0) - sum(given_up.values())
    if unfinished > 0:
        given_up[DRIVER_ENDED] = given_up.get(DRIVER_ENDED, 0) + unfinished
    return {**making, "given_up": given_up} if making else making


class Event(msgspec.Struct):
    """An event of a run; kinds: state, evaluation, checkpoint, first_step, finding, warning,
    restart, curriculum, end. Servers hold thousands of them, which as pydantic models would take three times as much.
    """

    seq: int
    at: float
    kind: str
    data: dict[str, Any] = {}
    version: int = EVENT_VERSION


def _rebuilt(folder: RunFolder) -> Status | None:
    """Return the status as far as specification and events tell it; None if its file is not blank, or they do not."""
    try:
        if read_plain(folder.status, _BLANK_BYTES, links=True).strip(b"\0"):
            return None
        specification = read_json(folder.spec)
        at, environment = specification["created_at"], specification["environment"]["name"]
        status = Status(
            run_id=folder.run_id, kind=specification["kind"], environment=environment, state="queued",
            created_at=at, since=at, updated_at=at,
        )  # fmt: skip
        for event in read_events(folder.events):
            match event.kind:
                case "state":
                    status.state, status.reason = event.data["to"], event.data.get("reason", "")
                    status.since, status.ended_at = event.at, None
                    status.attempt += status.state == "queued"
                    if status.state == "validating":
                        status.started_at = event.at
                case "first_step":
                    status.training_at = event.at
                case "checkpoint":
                    status.checkpoint = event.data | {"at": event.at}
                case "evaluation":
                    status.evaluations[event.data["label"]] = event.data["summary"]
                case "end":
                    status.ended_at = event.at
            status.updated_at = event.at
        return Status.model_validate(status.model_dump(warnings=False))
    except (Corrupt, NotFound, OSError, LookupError, TypeError, ValueError):
        return None


_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Event).decode


class EventLog:
    """Appends numbered events to a run's events.jsonl, continuing after the last number in it.

    Events without room on the disk wait, and are written before the next event or by `catch_up`.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._next = _last_number(folder.events) + 1
        self._lines = PatientLines(folder.events)

    @property
    def behind(self) -> int:
        """Number of waiting events."""
        return self._lines.behind

    def append(self, kind: str, **data: Any) -> Event:
        """Write one event as one line, later if the disk is full.

        Raises:
            OSError: It cannot be written, for another reason than lack of room.
        """
        event = Event(seq=self._next, at=time.time(), kind=kind, data=data)
        self._next += 1
        self._lines.append(_encode(event) + b"\n")
        return event

    def catch_up(self) -> bool:
        """Write the waiting events; return whether none is left. Raises: see `append`."""
        return self._lines.catch_up()


def read_events(path: Path, after: int = 0, kinds: Collection[str] | None = None) -> Iterator[Event]:
    """Events with a number above `after`, oldest first; a torn last line is skipped.

    Args:
        path: events.jsonl. Only its end is read if `after` is near the last number.
        after: The last known number.
        kinds: Only events of these kinds; None: all.

    Raises:
        TooNew: A newer version wrote one of them.
        Corrupt: The file cannot be read.
    """
    marks = None if kinds is None else [f'"kind":"{kind}"'.encode() for kind in kinds]
    for line in _lines_after(path, after):
        if marks is not None and not any(mark in line for mark in marks):
            continue
        if (numbered := _NUMBERED.match(line)) is not None and int(numbered[1]) <= after:
            continue
        try:
            event = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        check_version(path, {"version": event.version}, EVENT_VERSION)
        if event.seq > after and (kinds is None or event.kind in kinds):
            yield event


def _lines_after(path: Path, after: int) -> Iterator[bytes]:
    """Whole lines of the file, at least those of events above `after`, whose numbers ascend."""
    try:
        with open_record(path) as file:
            if after <= 0:
                yield from (line for line in file if line.endswith(b"\n"))
                return
            newer = []
            for line in lines_backwards(file, _TAIL_BYTES):
                if (number := _number(line)) is not None and number <= after:
                    break
                newer.append(line)
            yield from reversed(newer[1:])  # without a torn one
    except FileNotFoundError:
        return


def _last_number(path: Path) -> int:
    try:
        with open_record(path) as file:
            numbers = map(_number, lines_backwards(file, _TAIL_BYTES))
            return next((number for number in numbers if number is not None), 0)
    except FileNotFoundError:
        return 0


def _number(line: bytes) -> int | None:
    if (numbered := _NUMBERED.match(line)) is not None and line.endswith((b"}\n", b"}")):
        return int(numbered[1])
    try:
        return _decode(line).seq
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
