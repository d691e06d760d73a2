"""The trajectory API for asyncio programs: the rollout driver posts groups and waits for room through this."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec

from toprope.records.journal.groups import Batch, Counts, Group
from toprope.training.api.clients import requests as wire
from toprope.training.api.http.errors import Refused
from toprope.training.component.peer_addresses import Address, resolver

__all__ = ["ApiClient"]

_T = TypeVar("_T")


class ApiClient:
    """Keeps connections open and tries again when one breaks; close it at the end (or use `async with`).

    Every call raises `Refused` where the API turns it away, `ComponentFailed` when it cannot be reached for
    `patience_s`, and `NotPossibleNow` when it could not store for as long.

    Args:
        base_url: The API's address, `http://127.0.0.1:<port>`, or what gives the present one.
        secret: The run's secret.
        patience_s: Seconds for which a call is repeated. While the API has no address it is waited for.
    """

    def __init__(self, base_url: Address, secret: str, *, patience_s: float = wire.PATIENCE_S) -> None:
        self._where = resolver(base_url)
        self._headers = wire.headers(secret)
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post_group(self, group: Group) -> int:
        """Posts a group, waiting while the queue is full, and returns how many groups wait with it. Under its
        `group_id` (or one that is made for this call) it is stored once, however often this has to be repeated."""
        return (await self._call(wire.POSTED, "POST", "/scored_data", wire.group_body(group))).waiting

    async def next_batch(self, cursor: int, sequences: int, wait_s: float = 0.0) -> Batch:
        """The groups behind `cursor`, `sequences` rows of them; `batch` is None when none could be formed within
        `wait_s` seconds (at most 60). The same cursor gives the same groups again."""
        return await self._call(wire.BATCH, "GET", wire.batch_path(cursor, sequences, wait_s), wait_s=wait_s)

    async def commit(self, cursor: int) -> None:
        """Groups up to `cursor` are in a checkpoint."""
        await self._call(wire.ANYTHING, "POST", "/commit", wire.commit_body(cursor))

    async def dropped(self, items: Iterable[tuple[int, str]]) -> None:
        """Delivered groups, as (sequence number, reason), that are not trained on."""
        await self._call(wire.ANYTHING, "POST", "/dropped", wire.dropped_body(items))

    async def wait_for_room(self, below: int, wait_s: float = 0.0) -> bool:
        """Whether fewer than `below` groups wait, at the latest after `wait_s` seconds (at most 60)."""
        return (await self._call(wire.ROOM, "GET", wire.room_path(below, wait_s), wait_s=wait_s)).room

    async def wanted(self, wait_s: float = 0.0) -> wire.Wanted:
        """What the waiting trainer lacks for its next batch; no rows where it still lacked none after `wait_s` seconds
        (at most 60)."""
        return await self._call(wire.WANTED, "GET", wire.wanted_path(wait_s), wait_s=wait_s)

    async def counts(self) -> Counts:
        """The account of groups."""
        return await self._call(wire.COUNTS, "GET", "/counts")

    async def _call(
        self, decoder: msgspec.json.Decoder[_T], method: str, path: str, body: bytes | None = None, wait_s: float = 0.0
    ) -> _T:
        backoff = wire.Backoff(self._patience_s)
        while True:
            if (url := self._where()) is None:
                await asyncio.sleep(backoff.after_absence(time.monotonic()))
                continue
            try:
                timeout = self._timeout(wait_s)
                async with self._open().request(method, url + path, data=body, timeout=timeout) as answer:
                    return wire.decode(decoder, answer.status, await answer.read())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                pause: float | None = backoff.after_error(error, time.monotonic(), url)
            except Refused as refusal:
                pause = backoff.after_refusal(refusal, time.monotonic())
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    def _timeout(self, wait_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=wait_s + wire.READ_TIMEOUT_S)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session
