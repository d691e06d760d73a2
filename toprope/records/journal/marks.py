"""Notes and marks in a run's journal: a note for each group, and marks for deliveries, drops and registrations.

They are independent of the file format, so the readers of a journal (the trajectory API, a browser, an export) can use
them without it. A reader skips marks that it does not know; a newer version wrote them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class GroupNote(msgspec.Struct, omit_defaults=True):
    """The facts about a group that the queue needs without decoding it."""

    rows: int
    lane: str = ""
    """Its environment: `#<env_id>` if that registered, else the group's `environment`."""
    group_id: str | None = None
    equal_score: bool = False
    tokens: int = 0
    oldest_version: int | None = None
    at: float = 0.0
    """Time of acceptance, seconds since the epoch."""
    unmatched: bool = False
    """True if the inference server was asked for its sampled tokens and did not know them."""
    posted: str | None = None
    """Digest of the posted body, if the stored one differs."""
    open: list[int] = []
    """Earlier groups whose poster may not have received the answer and may post them again."""


class Delivered(msgspec.Struct, tag="delivered", omit_defaults=True):
    """A batch was delivered; `cursor` is the position before it, `sequences` the number of requested rows."""

    cursor: int
    groups: list[int]
    sequences: int
    passed: str | None = None
    """The lane that was next but was skipped to make the batch exact."""
    by_cursor: bool = True
    """True if the trainer reads with a cursor and therefore commits; an Atropos trainer does not."""


class Rewound(msgspec.Struct, tag="rewound"):
    """Deliveries after `cursor` are waiting again."""

    cursor: int


class Committed(msgspec.Struct, tag="committed"):
    """Deliveries up to `cursor` are in a checkpoint."""

    cursor: int


class Dropped(msgspec.Struct, tag="dropped"):
    """The trainer did not train on these delivered groups."""

    groups: list[int]
    reason: str


class Lost(msgspec.Struct, tag="lost"):
    """A waiting group will never be delivered: it cannot be read, is too old, or must not be trained on."""

    group: int
    reason: str


class Reset(msgspec.Struct, tag="reset"):
    """POST /reset_data emptied the API."""


class TrainerRegistered(msgspec.Struct, tag="trainer"):
    """A trainer registered; `values` is the body of its POST /register."""

    values: dict[str, Any]


class EnvironmentRegistered(msgspec.Struct, tag="environment"):
    """An environment registered; `values` is the body of its POST /register-env."""

    env_id: int
    values: dict[str, Any]


class Disconnected(msgspec.Struct, tag="disconnected"):
    """An environment disconnected."""

    env_id: int


class Tallied(msgspec.Struct, tag="tallied", omit_defaults=True):
    """Counts of refused posts, which leave no other trace; at most once a second."""

    duplicates: int = 0
    refused: dict[str, int] = {}


class LaneState(msgspec.Struct, omit_defaults=True):
    """One environment's lane in a snapshot; see `toprope.training.api.queue.fair_scheduler.Lane`."""

    name: str
    weight: float = 1.0
    minimum: float = 0.0
    connected: bool = True
    largest: int = 1
    virtual: float = 0.0
    passed: int = 0


class Snapshot(msgspec.Struct, tag="snapshot", omit_defaults=True):
    """The sum of all records before it, written before segments are removed.

    Later records need the earlier ones only for the notes and bodies of the groups that it names.
    """

    accepted: int = 0
    committed_groups: int = 0
    duplicates: int = 0
    equal_score: int = 0
    unmatched: int = 0
    dropped: dict[str, int] = {}
    refused: dict[str, int] = {}
    committed: int = 0
    steps_committed: int = 0
    log: list[tuple[int, int]] = []
    """Deliveries after the commit: (group, rows); the dropped ones are in `gone`."""
    gone: list[int] = []
    ends: list[tuple[int, int]] = []
    stale_at: list[int] = []
    returned: list[tuple[int, int]] = []
    """Groups to deliver again: (group, rows requested if it closed its batch, else 0)."""
    waiting: list[int] = []
    """The other waiting groups, in order of acceptance."""
    keys: dict[str, int] = {}
    lanes: list[LaneState] = []
    lanes_now: float = 0.0
    trainer: dict[str, Any] | None = None
    environments: list[dict[str, Any]] = []
    started: bool = False
    step_offset: int = 0
    by_cursor: bool | None = None
    last: int = 0

    def at_stake(self) -> set[int]:
        """The groups whose notes are still needed."""
        logged = {seq for seq, _ in self.log} - set(self.gone)
        return logged | {seq for seq, _ in self.returned} | set(self.waiting)


Mark = (
    Delivered
    | Rewound
    | Committed
    | Dropped
    | Lost
    | Reset
    | TrainerRegistered
    | EnvironmentRegistered
    | Disconnected
    | Tallied
    | Snapshot
)

Keep = Literal["all", "sample", "none"]
"""Groups to keep once a checkpoint has passed them; a sample is every sixteenth."""


class Record(NamedTuple):
    """One entry of a journal: a group's note or a mark. `seq` is the number of the group, or of the last one."""

    seq: int
    note: GroupNote | Mark
    size: int
    """Bytes of the group's body; 0 for a mark."""
