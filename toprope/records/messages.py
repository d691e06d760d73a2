"""What a keeper and the members of its crew say to each other: JSON lines, one tagged object a line.

A member reads orders on its standard input and writes reports to the descriptor named by TOPROPE_REPORT_FD. End of
file on standard input means that the keeper is gone: the member ends. Unknown tags are ignored by both sides, so that
an older keeper and a newer member understand each other.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Beat",
    "Checked",
    "Checkpointed",
    "CountsReport",
    "Evaluate",
    "Evaluated",
    "Failed",
    "Finished",
    "Leveled",
    "Making",
    "NoRoom",
    "Order",
    "Pause",
    "Peers",
    "Proceed",
    "Progress",
    "Ready",
    "Renewed",
    "Report",
    "Stepped",
    "Stop",
    "Warned",
    "Without",
    "decode_order",
    "decode_report",
    "encode_line",
]

COMPONENTS = ("policy", "api", "inference", "trainer", "environment")
"""The members a crew can have. `policy` is a program that ends: it puts the policy's folder in place."""

ENV_FOLDER = "TOPROPE_RUN_FOLDER"
ENV_COMPONENT = "TOPROPE_COMPONENT"
ENV_ATTEMPT = "TOPROPE_ATTEMPT"
ENV_SECRET = "TOPROPE_RUN_SECRET"
ENV_REPORT_FD = "TOPROPE_REPORT_FD"
ENV_LISTENER_FD = "TOPROPE_LISTENER_FD"
"""A listening socket that a member serves on instead of one of its own: whoever keeps it open across a restart spares
clients that know one address every refused connection."""
ENV_LIFE = "TOPROPE_LIFE"
"""How often this member was started in this attempt before: 0 the first time."""
ENV_CHECKPOINT = "TOPROPE_CHECKPOINT"
"""Path of the checkpoint that this attempt goes on from; not set where it starts at step 0."""


class Ready(msgspec.Struct, tag="ready"):
    """The member serves. `address` is its URL, or the policy's folder for `policy`; empty for those without one."""

    address: str = ""
    detail: dict[str, Any] = {}


class Checked(msgspec.Struct, tag="checked"):
    """The environment loaded and scored the reference answer to its first task: {"tasks": {split: n that were found},
    "reference_outcome": {...}, "versions": {package: version}}."""

    detail: dict[str, Any] = {}


class Progress(msgspec.Struct, tag="progress"):
    """Work that has no steps of training: making the policy, evaluating, testing. Shown, not kept."""

    what: str
    done: int
    total: int
    values: dict[str, float] = {}


class Stepped(msgspec.Struct, tag="stepped"):
    """The trainer finished an optimizer step; `values` is the row that it appended to metrics.jsonl."""

    step: int
    total: int
    values: dict[str, float | None] = {}


class Evaluated(msgspec.Struct, tag="evaluated"):
    """An evaluation is complete and lies in evaluations/<label>.json of the run folder."""

    label: str
    summary: dict[str, Any] = {}


class Checkpointed(msgspec.Struct, tag="checkpointed"):
    """A checkpoint is complete on disk; `path` is relative to the run folder."""

    step: int
    path: str
    cursor: int


class CountsReport(msgspec.Struct, tag="counts"):
    """The API's account (records.groups.Counts as a dict), sent when it changed, at most once a second."""

    counts: dict[str, Any]


class Finished(msgspec.Struct, tag="finished"):
    """The member's work is done as planned; it exits 0 next."""

    detail: dict[str, Any] = {}


class Failed(msgspec.Struct, tag="failed"):
    """The member knows why it cannot go on; it exits non-zero next."""

    reason: str
    hint: str = ""
    again: bool = False
    """Whether the cause may have gone by itself: starting the member again can help."""


class Beat(msgspec.Struct, tag="beat"):
    """The member's own thread of work goes on; sent about once a second from the loop that would hang."""


class Making(msgspec.Struct, tag="making"):
    """The environment's account of groups since it was started: `begun` of them, of which `posted` are with the API,
    `posting` wait for its answer, `given_up` by reason came to nothing, and the others are being made."""

    begun: int
    posting: int
    posted: int
    given_up: dict[str, int] = {}
    rollouts: int = 0
    """Rollouts of groups that were played to their end."""
    errors: dict[str, int] = {}
    """How many of them ended in an error of the environment, by its kind."""


class Renewed(msgspec.Struct, tag="renewed"):
    """The member started a process of its own again, for the `number`th time within the window."""

    what: str
    reason: str
    number: int
    limit: int


class Leveled(msgspec.Struct, tag="leveled"):
    """An environment's curriculum opened number `level` (from 0, of `levels`), where its knob has `value`: `successes`
    of `tasks` validation tasks of the level before were solved after `step` steps."""

    environment: str
    knob: str
    level: int
    levels: int
    value: Any
    successes: int
    tasks: int
    step: int


class Warned(msgspec.Struct, tag="warned"):
    """Something that whoever follows the run should know, and that does not end it."""

    what: str


class NoRoom(msgspec.Struct, tag="no_room"):
    """The member could not write something for lack of room on the disk, and goes on; it tries again later."""

    what: str


Report = (
    Ready
    | Checked
    | Progress
    | Stepped
    | Evaluated
    | Checkpointed
    | CountsReport
    | Finished
    | Failed
    | Warned
    | NoRoom
    | Beat
    | Making
    | Renewed
    | Leveled
)


class Peers(msgspec.Struct, tag="peers"):
    """Addresses of the members that are ready, complete at every change."""

    addresses: dict[str, str]


class Evaluate(msgspec.Struct, tag="evaluate"):
    """To the environment: evaluate the policy as it is now, under this label (`after`, `step-100`)."""

    label: str


class Stop(msgspec.Struct, tag="stop"):
    """End in order: the trainer writes a checkpoint if it has steps that are in none."""

    grace_s: float = 5.0


class Without(msgspec.Struct, tag="without"):
    """To the environment: this member failed and will not come; the run goes on with what needs it not."""

    component: str
    reason: str


class Pause(msgspec.Struct, tag="pause"):
    """Do no more work than what is at hand, until `Proceed`: no new rollout, no new step."""

    reason: str = ""


class Proceed(msgspec.Struct, tag="proceed"):
    """Go on after a `Pause`."""


Order = Peers | Evaluate | Stop | Without | Pause | Proceed

_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def encode_line(message: Report | Order) -> bytes:
    """One line of JSON with its newline."""
    return msgspec.json.encode(message) + b"\n"


def decode_report(line: bytes) -> Report | None:
    """The report in a line, or None where this version does not know its tag or it is not one."""
    try:
        return _reports.decode(line)
    except msgspec.DecodeError:
        return None


def decode_order(line: bytes) -> Order | None:
    """The order in a line, or None where this version does not know its tag or it is not one."""
    try:
        return _orders.decode(line)
    except msgspec.DecodeError:
        return None
