"""The rollout driver's client of the trajectory API, for asyncio."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from toprope.records.journal.groups import Counts, Group
from toprope.training.api.clients import requests
from toprope.training.api.http.errors import Refused
from toprope.training.component.http_client import HttpConnections
from toprope.training.component.peer_addresses import Address, resolver

_T = TypeVar("_T")


_BUNDLE_BYTES = 1 << 20
"""Groups of more bytes are posted one by one; a request is a small part of their cost."""


@dataclass(eq=False, slots=True)
class _Post:
    body: bytes
    waiting: int | None = None
    alone: bool = False
    """It was refused in a bundle."""


class ApiClient:
    """Keeps connections open and repeats requests over broken ones. Close it at the end, or use `async with`.

    Every call raises `Refused` if the API refuses it, `ComponentFailed` if the API cannot be reached for `patience_s`,
    and `NotPossibleNow` if the API cannot store for as long. While the API has no address, calls wait.

    Args:
        base_url: The API's address, `http://127.0.0.1:<port>`, or a function that returns the present one.
        patience_s: Seconds for which a call is repeated.
    """

    def __init__(self, base_url: Address, secret: str, *, patience_s: float = requests.PATIENCE_S) -> None:
        self._resolve = resolver(base_url)
        self._connections = HttpConnections(requests.headers(secret))
        self._patience_s = patience_s
        self._posts: list[_Post] = []
        """Posts that have no answer yet."""
        self._posting = asyncio.Lock()

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def post_group(self, group: Group) -> int:
        """Post a group; returns how many groups wait including it. Waits while the queue is full.

        The group is stored once under its `group_id` (or one made for this call), however often the call is repeated.
        Groups that come during a post share the next one.
        """
        post = _Post(requests.group_body(group))
        self._posts.append(post)
        try:
            async with self._posting:
                if post.waiting is None:
                    await self._post(post)
        finally:
            self._posts.remove(post)
        assert post.waiting is not None, "it has an answer"
        return post.waiting

    async def _post(self, own: _Post) -> None:
        posts, size = [own], len(own.body)
        for other in self._posts:
            if other is own or own.alone or other.alone or other.waiting is not None:
                continue
            if (size := size + len(other.body)) <= _BUNDLE_BYTES:
                posts.append(other)
        if len(posts) > 1:
            refused = set(range(len(posts)))
            with suppress(Refused):
                answer = await self._send(requests.post_groups([post.body for post in posts]))
                refused = {refusal.index for refusal in answer.refused}
            for index, post in enumerate(posts):
                post.alone = index in refused
                if not post.alone:
                    post.waiting = answer.waiting
            if own.waiting is not None:
                return
        # Alone, so that a refusal meets the group that it is about.
        own.waiting = (await self._send(requests.post_groups([own.body]))).waiting

    async def wait_for_room(self, below: int, wait_s: float = 0.0) -> bool:
        """Wait at most `wait_s` seconds (up to 60) until fewer than `below` groups wait; returns if they do."""
        return (await self._send(requests.room(below, wait_s))).room

    async def missing_rows(self, wait_s: float = 0.0) -> requests.MissingRows:
        """Rows the waiting trainer still needs; 0 if it needs none within `wait_s` seconds (up to 60)."""
        return await self._send(requests.missing_rows(wait_s))

    async def counts(self) -> Counts:
        """The account of groups."""
        return await self._send(requests.counts())

    async def _send(self, request: requests.ApiRequest[_T]) -> _T:
        backoff = requests.Backoff(self._patience_s)
        while True:
            if (url := self._resolve()) is None:
                await asyncio.sleep(backoff.after_absence(time.monotonic()))
                continue
            try:
                answer = await self._connections.request(
                    request.method, url, request.path, body=request.body, timeout_s=request.read_timeout_s
                )
                return request.decode(answer.status, answer.body)
            except OSError as error:
                pause = backoff.after_error(error, time.monotonic(), url)
            except Refused as refusal:
                pause = backoff.after_refusal(refusal, time.monotonic())
            await asyncio.sleep(pause)
