"""Requests to the trajectory API and their answers, for both clients, and the rules for repeating them.

Every request can be repeated without harm: a group has its key, a batch its cursor, and a second commit or drop report
changes nothing. So both clients repeat a request over a broken connection until their patience is over.

The clients use `component.http_client` and http.client, not httpx for both. Measured on two shared cores, httpx takes
1.9 ms of processor time to post a group of 130 KB instead of 0.8 (aiohttp, which takes 0.135 for a small one instead of
0.05), 3.9 ms to read a batch of 16 instead of 1.0 (http.client), and 1.0 ms instead of 0.2 for the smallest round trip,
which is on the path of every training step.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from toprope.errors import ComponentFailed, NotPossibleNow
from toprope.records.journal.groups import Batch, Counts, Group
from toprope.training.api.http.errors import Refused
from toprope.training.component import peer_addresses as peers

PATIENCE_S = peers.PATIENCE_S
"""Seconds for which a request is repeated while the API cannot be reached or cannot store."""

READ_TIMEOUT_S = 30.0
"""Seconds without a byte, beyond the requested wait, after which a connection counts as broken."""

_T = TypeVar("_T")


class RefusedPost(msgspec.Struct):
    """The index of a refused group among those posted together."""

    index: int


class PostAnswer(msgspec.Struct):
    """The answer to a post: how many groups wait including it, and which of several were refused."""

    waiting: int
    refused: list[RefusedPost] = []


class CursorAnswer(msgspec.Struct):
    """The answer of /take_up: the cursor to read from."""

    cursor: int


class RoomAnswer(msgspec.Struct):
    """The answer of /room."""

    room: bool


class MissingRows(msgspec.Struct):
    """The answer of /wanted: rows that the waiting trainer still needs, and the policy version it will train."""

    version: int
    rows: int


BATCH = msgspec.json.Decoder(Batch)
_COUNTS = msgspec.json.Decoder(Counts)
_POST = msgspec.json.Decoder(PostAnswer)
_ROOM = msgspec.json.Decoder(RoomAnswer)
_CURSOR = msgspec.json.Decoder(CursorAnswer)
_MISSING = msgspec.json.Decoder(MissingRows)
_ANY: msgspec.json.Decoder[object] = msgspec.json.Decoder()

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[_T]):
    """One request, and the decoder of its answer."""

    decoder: msgspec.json.Decoder[_T]
    method: str
    path: str
    body: bytes | None = None
    wait_s: float = 0.0
    """Seconds for which the API may keep the request waiting."""

    @property
    def read_timeout_s(self) -> float:
        """Seconds without a byte after which the connection counts as broken."""
        return self.wait_s + READ_TIMEOUT_S

    def decode(self, status: int, body: bytes) -> _T:
        """Decode an answer.

        Raises:
            Refused: The API refused the request; `kind`, `status` and `field` give the reason.
            ComponentFailed: The body is not an answer of the API.
        """
        if status != 200:
            raise Refused.parse(status, body)
        try:
            return self.decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ComponentFailed(f"The trajectory API sent an unexpected answer: {error}.") from error


def headers(secret: str) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {secret}"}


def group_body(group: Group) -> bytes:
    """The body of a group. One without a key gets one, so that the request can be repeated."""
    if group.group_id is None:
        group = msgspec.structs.replace(group, group_id=uuid.uuid4().hex)
    return _encode(group)


def post_groups(bodies: Sequence[bytes]) -> ApiRequest[PostAnswer]:
    """POST /scored_data, or /scored_data_list for several groups."""
    if len(bodies) == 1:
        return ApiRequest(_POST, "POST", "/scored_data", bodies[0])
    return ApiRequest(_POST, "POST", "/scored_data_list", b"[%s]" % b",".join(bodies))


def next_batch(cursor: int, sequences: int, wait_s: float, version: int | None) -> ApiRequest[Batch]:
    """GET /batch after a cursor; `version` is the policy version to train."""
    path = f"/batch?cursor={cursor}&sequences={sequences}&wait_s={wait_s:g}"
    return ApiRequest(BATCH, "GET", path if version is None else f"{path}&version={version}", wait_s=wait_s)


def commit(cursor: int) -> ApiRequest[object]:
    """POST /commit."""
    return ApiRequest(_ANY, "POST", "/commit", _encode({"cursor": cursor}))


def take_up(cursor: int) -> ApiRequest[CursorAnswer]:
    """POST /take_up."""
    return ApiRequest(_CURSOR, "POST", "/take_up", _encode({"cursor": cursor}))


def dropped(items: Iterable[tuple[int, str]]) -> ApiRequest[object]:
    """POST /dropped."""
    rows = [{"sequence_number": number, "reason": reason} for number, reason in items]
    return ApiRequest(_ANY, "POST", "/dropped", _encode({"items": rows}))


def room(below: int, wait_s: float) -> ApiRequest[RoomAnswer]:
    """GET /room."""
    return ApiRequest(_ROOM, "GET", f"/room?below={below}&wait_s={wait_s:g}", wait_s=wait_s)


def missing_rows(wait_s: float) -> ApiRequest[MissingRows]:
    """GET /wanted."""
    return ApiRequest(_MISSING, "GET", f"/wanted?wait_s={wait_s:g}", wait_s=wait_s)


def counts() -> ApiRequest[Counts]:
    """GET /counts."""
    return ApiRequest(_COUNTS, "GET", "/counts")


class Backoff(peers.Backoff):
    """Pauses between attempts of one request to the API."""

    def __init__(self, patience_s: float, away_s: float = peers.AWAY_S) -> None:
        super().__init__("The trajectory API", patience_s, away_s)

    def after_refusal(self, refusal: Refused, now: float) -> float:
        """Seconds to wait after a 503. A client waits without limit for room in a full queue and on a full disk, where
        the run is paused meanwhile.

        Raises:
            Refused: `refusal` itself, if it is permanent.
            NotPossibleNow: The patience is over.
        """
        if refusal.status != 503:
            raise refusal
        if refusal.kind == "queue_full":
            return 0.25
        if refusal.kind != "disk_full" and self.over(now):
            raise NotPossibleNow(refusal.message) from refusal
        return 0.5
