"""The endpoints that carry groups: POST /scored_data, POST /scored_data_list, GET /batch.

They are plain ASGI. Starlette's router and request objects, which the other endpoints use, would double their cost
apart from decoding. Their answers speak only of what is on disk.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from toprope.errors import InvalidValue, NotPossibleNow
from toprope.training.api.http.auth import on_undelivered
from toprope.training.api.http.errors import Refused, to_refusal
from toprope.training.api.intake.validation import PostedGroup, read_body
from toprope.training.api.intake.version_matching import InferenceMatcher
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import DeliveredBatch, TrajectoryStore

MAX_WAIT_S = 60.0
"""Longest wait of one request; a client that wants to wait longer asks again."""

_WHOLE_BYTES = 1 << 20
"""Batches up to this size are sent as a whole."""

_T = TypeVar("_T")
_Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
_encode = msgspec.json.Encoder().encode
_JSON = (b"content-type", b"application/json")


class GroupEndpoints:
    """The three endpoints over a store.

    Args:
        store: The store they serve.
        commit: Waits for the disk before an answer; None if the journal needs no such wait.
        matcher: Finds the policy versions of groups from outside environments; None: these have no versions.
    """

    def __init__(self, store: TrajectoryStore, commit: GroupCommit | None, matcher: InferenceMatcher | None) -> None:
        self._store, self._commit, self._matcher = store, commit, matcher
        self._requested: tuple[int, int] | None = None
        """Version and rows of the batch that the trainer is waiting for."""
        self.routes: dict[tuple[str, str], _Endpoint] = {
            ("POST", "/scored_data"): self.post_group,
            ("POST", "/scored_data_list"): self.post_groups,
            ("GET", "/batch"): self.get_batch,
        }

    def missing_rows(self) -> tuple[int, int] | None:
        """Policy version and number of rows that the waiting trainer still needs; None if it needs none."""
        if self._requested is None:
            return None
        version, rows = self._requested
        missing = rows - self._store.queue.waiting_rows
        return (version, missing) if missing > 0 else None

    async def wait_until_durable(self) -> None:
        """Return when everything so far is on disk, if the run's configuration asks for that."""
        if self._commit is not None:
            await self._commit.wait()

    async def handle(self, endpoint: _Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an endpoint and turn its errors into answers."""
        try:
            await endpoint(scope, receive, send)
        except (InvalidValue, NotPossibleNow) as error:
            refusal = to_refusal(error)
            headers = [] if refusal.retry_after is None else [(b"retry-after", str(refusal.retry_after).encode())]
            await _send(send, refusal.body(), refusal.status, headers)
        except ClientDisconnect:
            pass

    async def post_group(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /scored_data: accept one group."""
        store = self._store
        post = store.validate(await read_body(scope, receive, store.limits))
        await self._match_versions([post])
        seq = store.accept(post)
        answer = b'{"status":"received","sequence_number":%d,"waiting":%d}' % (seq, store.queue.waiting)
        await self._answer_post(scope, send, [seq], [post], answer)

    async def post_groups(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /scored_data_list: accept the valid groups of a list."""
        store = self._store
        posts, refused = store.validate_list(await read_body(scope, receive, store.limits))
        if refused and not posts:
            store.accept_list([], refused)
            raise refused[0][1]
        await self._match_versions(posts)
        numbers = store.accept_list(posts, refused)
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
        await self._answer_post(scope, send, numbers, posts, _encode(answer))

    async def get_batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /batch: form and deliver a batch."""
        store = self._store
        query = query_parameters(scope)
        trainer = store.registry.trainer
        cursor = integer_parameter(query, "cursor", None, 0, 2**63 - 1)
        sequences = integer_parameter(query, "sequences", trainer.batch_size if trainer else None, 1, 1_048_576)
        version = integer_parameter(query, "version", None, 0, 2**63 - 1)
        wait_s = wait_parameter(query)
        if sequences is None:
            store.registry.started = True
            raise Refused(
                "not_registered",
                "The batch size is unknown: POST /register first, or pass ?sequences=N.",
                status=409,
            )
        self._requested = (store.version if version is None else version, sequences)
        store.changed.notify()
        try:
            batch = await wait_for(
                store,
                receive,
                wait_s,
                lambda: store.next_batch(cursor, sequences, version),
                lambda: (
                    store.queue.waiting_rows >= sequences or (cursor is not None and cursor != store.queue.delivered)
                ),
            )
        finally:
            self._requested = None
        await self.wait_until_durable()
        tail = b"}"
        if cursor is not None:
            tail = b"," + _encode(self._position(batch))[1:]
        if batch is None:
            await _send(send, b'{"batch":null' + tail)
            return
        if cursor is None:
            on_undelivered(scope, lambda: store.return_batch(batch))
        await _send_batch(send, batch.bodies, tail)

    def _position(self, batch: DeliveredBatch | None) -> dict[str, Any]:
        queue = self._store.queue
        position = {
            "cursor": queue.delivered if batch is None else batch.plan.end,
            "sequence_numbers": [] if batch is None else [group.seq for group in batch.plan.groups],
            "waiting": queue.waiting,
        }
        return position | ({"stale": batch.stale} if batch is not None and batch.stale else {})

    async def _match_versions(self, posts: Sequence[PostedGroup]) -> None:
        if self._matcher is not None and (unversioned := [post for post in posts if post.unversioned]):
            await self._matcher.match(unversioned)

    async def _answer_post(
        self, scope: Scope, send: Send, seqs: list[int], posts: Sequence[PostedGroup], answer: bytes
    ) -> None:
        on_undelivered(scope, lambda: self._store.mark_unanswered(seqs, posts))
        await self.wait_until_durable()
        await _send(send, answer)
        self._store.mark_answered(seqs)


async def _send(send: Send, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_batch(send: Send, bodies: list[bytes], tail: bytes) -> None:
    """Send a large batch group by group, so that the whole is never in memory twice; each part wakes the trainer."""
    head = b'{"batch":['
    length = len(head) + sum(map(len, bodies)) + len(bodies) - 1 + 1 + len(tail)
    if length <= _WHOLE_BYTES:
        await _send(send, b"".join([head, b",".join(bodies), b"]", tail]))
        return
    headers = [_JSON, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for body in bodies:
        await send({"type": "http.response.body", "body": head, "more_body": True})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        head = b","
    await send({"type": "http.response.body", "body": b"]" + tail})


def query_parameters(scope: Scope) -> dict[str, str]:
    """The query of a request."""
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def integer_parameter(query: dict[str, str], name: str, default: int | None, low: int, high: int) -> int | None:
    """An integer of a query.

    Raises:
        Refused: The value is not an integer from `low` to `high`.
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


def wait_parameter(query: dict[str, str]) -> float:
    """`wait_s` of a query: seconds, at most `MAX_WAIT_S`.

    Raises:
        Refused: The value is not a number of seconds.
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
    """Call `attempt` now and each time `ready` may have become true; return its first result.

    Returns None after `wait_s` seconds without a result, or when the store's condition is closed.

    Raises:
        ClientDisconnect: The client left in the meantime.
    """
    result = attempt()
    changed = store.changed
    if result is not None or wait_s <= 0 or changed.closed:
        return result
    deadline = time.monotonic() + wait_s
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    waiter: asyncio.Future[None] | None = None
    try:
        while True:
            waiter = changed.add_waiter(ready)
            left = deadline - time.monotonic()
            if waiter.done() and not changed.closed or store.queue.scheduler.has_minimums():
                # Enough rows may wait while an environment's minimum is missing; only time can change that.
                await asyncio.wait({disconnected}, timeout=max(0.0, min(left, 0.25)))
            else:
                await asyncio.wait({waiter, disconnected}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            changed.remove_waiter(waiter)
            if disconnected.done():
                raise ClientDisconnect
            result = attempt()
            if result is not None or changed.closed or time.monotonic() >= deadline:
                return result
    finally:
        disconnected.cancel()
        if waiter is not None:
            changed.remove_waiter(waiter)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
