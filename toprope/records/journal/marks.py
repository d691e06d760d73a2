"""What a run's journal says besides the groups' bytes: a note for each group, and marks for what became of them.

They are kept apart from the file format so that whoever reads a journal (the trajectory API, a browser, an export) can
name them without it. A reader passes over marks that it does not know: a newer version wrote them.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Committed",
    "Delivered",
    "Disconnected",
    "Dropped",
    "EnvironmentRegistered",
    "GroupNote",
    "LaneState",
    "Lost",
    "Mark",
    "Reset",
    "Rewound",
    "Snapshot",
    "Tallied",
    "TrainerRegistered",
]


class GroupNote(msgspec.Struct, omit_defaults=True):
    """What the queue must know of a group without decoding it."""

    rows: int
    lane: str = ""
    """Which environment it came from: `#<env_id>` for one that registered, else its `environment`."""
    group_id: str | None = None
    equal_score: bool = False
    tokens: int = 0
    oldest_version: int | None = None
    at: float = 0.0
    """When it was accepted, seconds since the epoch."""
    unmatched: bool = False
    """Whether its sampled tokens were looked for at the inference server and not found."""
    posted: str | None = None
    """Digest of the body as it was posted, where the one that is kept differs."""
    open: list[int] = []
    """Earlier groups whose poster is not known to have had its answer: it may post them again."""


class Delivered(msgspec.Struct, tag="delivered", omit_defaults=True):
    """A batch was handed out; `cursor` is the position before it, `sequences` the rows that were asked for."""

    cursor: int
    groups: list[int]
    sequences: int
    passed: str | None = None
    """The lane whose turn it was and that got nothing, for the sake of an exact batch."""
    by_cursor: bool = True
    """Whether the trainer reads with a cursor, and so commits; an Atropos trainer does not."""


class Rewound(msgspec.Struct, tag="rewound"):
    """Deliveries past `cursor` went back to waiting."""

    cursor: int


class Committed(msgspec.Struct, tag="committed"):
    """Deliveries up to `cursor` are in a checkpoint."""

    cursor: int


class Dropped(msgspec.Struct, tag="dropped"):
    """The trainer did not train on these delivered groups."""

    groups: list[int]
    reason: str


class Lost(msgspec.Struct, tag="lost"):
    """A waiting group will never be delivered: it cannot be read, is too old, or is not to be trained on."""

    group: int
    reason: str


class Reset(msgspec.Struct, tag="reset"):
    """Someone emptied the API by POST /reset_data."""


class TrainerRegistered(msgspec.Struct, tag="trainer"):
    """A trainer introduced itself; `values` is the body of its POST /register."""

    values: dict[str, Any]


class EnvironmentRegistered(msgspec.Struct, tag="environment"):
    """An environment introduced itself; `values` is the body of its POST /register-env."""

    env_id: int
    values: dict[str, Any]


class Disconnected(msgspec.Struct, tag="disconnected"):
    """An environment took its leave."""

    env_id: int


class Tallied(msgspec.Struct, tag="tallied", omit_defaults=True):
    """Counts of what was turned away, which leaves no other trace; at most once a second."""

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
    """Everything that the records before it add up to, written before segments are removed: what is behind it needs
    them no more, but for the notes and bodies of the groups that it names."""

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
    """Deliveries past the commit: (group, rows); those that were dropped are in `gone`."""
    gone: list[int] = []
    ends: list[tuple[int, int]] = []
    returned: list[tuple[int, int]] = []
    """Groups to deliver again: (group, rows asked for if it closed its batch, else 0)."""
    waiting: list[int] = []
    """The other groups that wait, in order of acceptance."""
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
        """The groups whose notes it needs."""
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
