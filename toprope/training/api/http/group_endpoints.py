"""The endpoints that carry the groups: POST /scored_data, POST /scored_data_list, GET /batch.

They are plain ASGI, without the router and the request objects that the others use: those cost as much again as
everything else but the decoding. What they answer is what is on disk.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from toprope.errors import DiskFull, InvalidValue, NotPossibleNow
from toprope.training.api.http.auth import on_undelivered
from toprope.training.api.http.errors import Refused
from toprope.training.api.intake.validation import Parcel, read_body
from toprope.training.api.intake.version_matching import Matcher
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import Formed, TrajectoryStore

__all__ = ["MAX_WAIT_S", "Hot", "parameters", "refusal_of", "wait_for", "wait_of", "whole"]

MAX_WAIT_S = 60.0
"""The longest that /batch and /room wait; a client that wants to wait longer asks again."""

_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode
_JSON = (b"content-type", b"application/json")


class Hot:
    """The three endpoints over a store.

    Args:
        store: What they serve.
        commit: Makes what is answered last; None where the journal does not need it.
        matcher: Finds the versions of outside environments' groups; None: they have none.
    """

    def __init__(self, store: TrajectoryStore, commit: GroupCommit | None, matcher: Matcher | None) -> None:
        self._store, self._commit, self._matcher = store, commit, matcher
        self._asked: tuple[int, int] | None = None
        """Version and rows of the batch that the trainer waits for, while it does."""
        self.routes = {
            ("POST", "/scored_data"): self.scored_data,
            ("POST", "/scored_data_list"): self.scored_data_list,
            ("GET", "/batch"): self.batch,
        }

    def wanted(self) -> tuple[int, int] | None:
        """The version that the waiting trainer will train, and the rows that its batch lacks; None: it lacks none."""
        if self._asked is None:
            return None
        version, rows = self._asked
        missing = rows - self._store.queue.waiting_rows
        return (version, missing) if missing > 0 else None

    async def durable(self) -> None:
        """Returns when everything so far is on disk, where that is the policy."""
        if self._commit is not None:
            await self._commit.wait()

    async def run(self, endpoint: Callable[..., Any], scope: Scope, receive: Receive, send: Send) -> None:
        """Carries out one of the three; what goes wrong is its answer."""
        try:
            await endpoint(scope, receive, send)
        except (Refused, InvalidValue, NotPossibleNow) as error:
            refusal = refusal_of(error)
            headers = [] if refusal.retry_after is None else [(b"retry-after", str(refusal.retry_after).encode())]
            await _send(send, refusal.body(), refusal.status, headers)
        except ClientDisconnect:
            pass

    async def scored_data(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes one group in."""
        store = self._store
        parcel = store.examine(await read_body(scope, receive, store.limits))
        if parcel.unversioned and self._matcher is not None:
            await self._matcher.match([parcel])
        seq = store.take(parcel)
        answer = b'{"status":"received","sequence_number":%d,"waiting":%d}' % (seq, store.queue.waiting)
        await self._answer_post(scope, send, [seq], [parcel], answer)

    async def scored_data_list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes the valid groups of a list in."""
        store = self._store
        parcels, refused = store.examine_list(await read_body(scope, receive, store.limits))
        if refused and not parcels:
            store.take_list([], refused)
            raise refused[0][1]
        await self._match(parcels)
        numbers = store.take_list(parcels, refused)
        answer: dict[str, Any] = {
            "status": "received",
            "groups_processed": len(numbers),
            "sequence_numbers": numbers,
            "waiting": store.queue.waiting,
        }
        if refused:
            answer["refused"] = [
                {"index": index, "type": error.kind, "message": error.message, "field": error.field}
                for index, error in refused
            ]
        await self._answer_post(scope, send, numbers, parcels, _encode(answer))

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forms and delivers a batch."""
        store = self._store
        query = parameters(scope)
        trainer = store.registry.trainer
        cursor = whole(query, "cursor", None, 0, 2**63 - 1)
        sequences = whole(query, "sequences", trainer.batch_size if trainer else None, 1, 1_048_576)
        version = whole(query, "version", None, 0, 2**63 - 1)
        wait_s = wait_of(query)
        if sequences is None:
            store.registry.started = True
            raise Refused(
                "not_registered",
                "Nobody has said how many sequences a batch has: POST /register first, or ask for ?sequences=N.",
                status=409,
            )
        self._asked = (store.version if version is None else version, sequences)
        store.changed.notify()
        try:
            formed = await wait_for(
                store,
                receive,
                wait_s,
                lambda: store.next_batch(cursor, sequences, version),
                lambda: (
                    store.queue.waiting_rows >= sequences or (cursor is not None and cursor != store.queue.delivered)
                ),
            )
        finally:
            self._asked = None
        await self.durable()
        tail = b"}"
        if cursor is not None:
            tail = b"," + _encode(self._position(formed))[1:]
        if formed is None:
            await _send(send, b'{"batch":null' + tail)
            return
        if cursor is None:
            on_undelivered(scope, lambda: store.take_back(formed))
        await _send_parts(send, formed.bodies, tail)

    def _position(self, formed: Formed | None) -> dict[str, Any]:
        queue = self._store.queue
        numbers = [] if formed is None else [group.seq for group in formed.plan.groups]
        position = {
            "cursor": queue.delivered if formed is None else formed.plan.end,
            "sequence_numbers": numbers,
            "waiting": queue.waiting,
        }
        return position | ({"stale": formed.stale} if formed is not None and formed.stale else {})

    async def _match(self, parcels: Sequence[Parcel]) -> None:
        if self._matcher is not None and (unversioned := [parcel for parcel in parcels if parcel.unversioned]):
            await self._matcher.match(unversioned)

    async def _answer_post(
        self, scope: Scope, send: Send, seqs: list[int], parcels: Sequence[Parcel], answer: bytes
    ) -> None:
        on_undelivered(scope, lambda: self._store.unanswered(seqs, parcels))
        await self.durable()
        await _send(send, answer)
        self._store.answered(seqs)


async def _send(send: Send, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_parts(send: Send, bodies: list[bytes], tail: bytes) -> None:
    """A batch, group by group: nothing as large as the whole is ever put together."""
    head = b'{"batch":['
    length = len(head) + sum(map(len, bodies)) + len(bodies) - 1 + 1 + len(tail)
    headers = [_JSON, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for body in bodies:
        await send({"type": "http.response.body", "body": head, "more_body": True})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        head = b","
    await send({"type": "http.response.body", "body": b"]" + tail})


def refusal_of(error: InvalidValue | NotPossibleNow) -> Refused:
    """The refusal that an error of ours is answered with."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, DiskFull):
        return Refused("disk_full", str(error), status=503, retry_after=5)
    if isinstance(error, NotPossibleNow):
        return Refused("storage", str(error), status=503, retry_after=5)
    return Refused("invalid_value", str(error))


def parameters(scope: Scope) -> dict[str, str]:
    """The query of a request."""
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def whole(query: dict[str, str], name: str, default: int | None, low: int, high: int) -> int | None:
    """A whole number of a query.

    Raises:
        Refused: It is not one from `low` to `high`.
    """
    text = query.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise Refused("bad_parameter", f"{name} must be a whole number from {low} to {high}.", status=400, field=name)
    return value


def wait_of(query: dict[str, str]) -> float:
    """The seconds that a client wants to wait, at most `MAX_WAIT_S`.

    Raises:
        Refused: It is no number of seconds.
    """
    try:
        value = float(query.get("wait_s", "0"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise Refused("bad_parameter", "wait_s must be a number of seconds.", status=400, field="wait_s")
    return min(value, MAX_WAIT_S)


async def wait_for(
    store: TrajectoryStore,
    receive: Receive,
    wait_s: float,
    attempt: Callable[[], _T | None],
    ready: Callable[[], bool],
) -> _T | None:
    """What `attempt` returns, tried now and whenever `ready` may have come true, until `wait_s` are over.

    Raises:
        ClientDisconnect: The client went meanwhile.
    """
    result = attempt()
    changed = store.changed
    if result is not None or wait_s <= 0 or changed.closed:
        return result
    deadline = time.monotonic() + wait_s
    gone = asyncio.ensure_future(_hung_up(receive))
    waiter: asyncio.Future[None] | None = None
    try:
        while True:
            waiter = changed.waiter(ready)
            left = deadline - time.monotonic()
            if waiter.done() and not changed.closed or store.queue.lanes.waits_for_minimum():
                # Rows there may be, but an environment's minimum is waited for: time alone can change that.
                await asyncio.wait({gone}, timeout=max(0.0, min(left, 0.25)))
            else:
                await asyncio.wait({waiter, gone}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            changed.forget(waiter)
            if gone.done():
                raise ClientDisconnect
            result = attempt()
            if result is not None or changed.closed or time.monotonic() >= deadline:
                return result
    finally:
        gone.cancel()
        if waiter is not None:
            changed.forget(waiter)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
