"""What both clients of the trajectory API share: requests, answers, and when to try again.

Every call can be repeated without harm: a group has its key, a batch its cursor, commits and drop reports change
nothing the second time. So a broken connection is tried again until the patience is over.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from toprope.errors import ComponentFailed, NotPossibleNow
from toprope.records.journal.groups import Batch, Counts, Group
from toprope.training.api.http.errors import Refused
from toprope.training.component import peer_addresses as peers

__all__ = [
    "BATCH",
    "COUNTS",
    "PATIENCE_S",
    "POSITION",
    "POSTED",
    "READ_TIMEOUT_S",
    "ROOM",
    "WANTED",
    "ANYTHING",
    "Backoff",
    "Position",
    "Posted",
    "Room",
    "Wanted",
    "batch_path",
    "commit_body",
    "decode",
    "dropped_body",
    "group_body",
    "headers",
    "room_path",
    "wanted_path",
]

PATIENCE_S = peers.PATIENCE_S
"""Seconds for which a call is repeated while the API cannot be reached or cannot store."""

READ_TIMEOUT_S = 30.0
"""Seconds without a byte, beyond the wait that was asked for, after which a connection counts as broken."""

_T = TypeVar("_T")


class Posted(msgspec.Struct):
    """The answer to a post: the group's number, and how many groups wait with it."""

    sequence_number: int
    waiting: int


class Position(msgspec.Struct):
    """The answer of /take_up: the cursor to read from."""

    cursor: int


class Room(msgspec.Struct):
    """The answer of /room."""

    room: bool
    waiting: int


class Wanted(msgspec.Struct):
    """The answer of /wanted: rows that the trainer's next batch lacks, to be trained at this policy version."""

    version: int
    rows: int


POSTED = msgspec.json.Decoder(Posted)
BATCH = msgspec.json.Decoder(Batch)
COUNTS = msgspec.json.Decoder(Counts)
ROOM = msgspec.json.Decoder(Room)
POSITION = msgspec.json.Decoder(Position)
WANTED = msgspec.json.Decoder(Wanted)
ANYTHING = msgspec.json.Decoder()

_encode = msgspec.json.Encoder().encode


def headers(secret: str) -> dict[str, str]:
    """What every request carries."""
    return {"Authorization": f"Bearer {secret}"}


def group_body(group: Group) -> bytes:
    """The body of POST /scored_data; a group without a key gets one, so that it can be posted again."""
    if group.group_id is None:
        group = msgspec.structs.replace(group, group_id=uuid.uuid4().hex)
    return _encode(group)


def batch_path(cursor: int, sequences: int, wait_s: float, version: int | None = None) -> str:
    """GET /batch behind a cursor; `version` is the policy version that will be trained."""
    path = f"/batch?cursor={cursor}&sequences={sequences}&wait_s={wait_s:g}"
    return path if version is None else f"{path}&version={version}"


def room_path(below: int, wait_s: float) -> str:
    """GET /room."""
    return f"/room?below={below}&wait_s={wait_s:g}"


def wanted_path(wait_s: float) -> str:
    """GET /wanted."""
    return f"/wanted?wait_s={wait_s:g}"


def commit_body(cursor: int) -> bytes:
    """The body of POST /commit."""
    return _encode({"cursor": cursor})


def dropped_body(items: Iterable[tuple[int, str]]) -> bytes:
    """The body of POST /dropped."""
    return _encode({"items": [{"sequence_number": number, "reason": reason} for number, reason in items]})


def decode(decoder: msgspec.json.Decoder[_T], status: int, body: bytes) -> _T:
    """The answer in a response of status 200.

    Raises:
        Refused: The API turned the request away; `kind`, `status` and `field` say why.
        ComponentFailed: The answer is not one of the API's.
    """
    if status != 200:
        raise Refused.parse(status, body)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ComponentFailed(f"The trajectory API answered something else than was asked for: {error}.") from error


class Backoff(peers.Backoff):
    """When to try a call of the API again."""

    def __init__(self, patience_s: float, away_s: float = peers.AWAY_S) -> None:
        super().__init__("The trajectory API", patience_s, away_s)

    def after_refusal(self, refusal: Refused, now: float) -> float | None:
        """Seconds to wait after a 503, None for a refusal that will stay one. A full queue is waited for without end:
        that is what it is for.

        Raises:
            NotPossibleNow: The patience is over.
        """
        if refusal.status != 503:
            return None
        if refusal.kind == "queue_full":
            return 0.25
        if self.over(now):
            raise NotPossibleNow(refusal.message) from refusal
        return 0.5
