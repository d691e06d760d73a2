"""The trajectory API for synchronous programs: the trainer reads its batches through this."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from toprope.errors import DiskFull
from toprope.records.journal.groups import Batch, Counts, Group
from toprope.training.api.clients import requests as wire
from toprope.training.api.http.errors import Refused
from toprope.training.component.peer_addresses import Address, resolver

__all__ = ["SyncApiClient"]

_T = TypeVar("_T")


class SyncApiClient:
    """`ApiClient`'s calls, blocking, over one connection that is kept open. For one thread at a time.

    Args:
        base_url: The API's address, `http://127.0.0.1:<port>`, or what gives the present one.
        secret: The run's secret.
        patience_s: Seconds for which a call is repeated when the API cannot be reached. While it has no address it is
            waited for.
    """

    def __init__(self, base_url: Address, secret: str, *, patience_s: float = wire.PATIENCE_S) -> None:
        self._where = resolver(base_url)
        self._url = self._prefix = ""
        self._headers = wire.headers(secret)
        self._patience_s = patience_s
        self._connection: http.client.HTTPConnection | None = None
        self._turn_to(self._where())
        self.waits: Callable[[], bool] = lambda: True
        """Whether to wait for room on the API's disk; else `DiskFull` is raised."""
        self.policy_version: int | None = None
        """The version that will be trained next, if the API is to pass over groups that are too old for it."""

    def __enter__(self) -> SyncApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def post_group(self, group: Group) -> int:
        """See `ApiClient.post_group`."""
        return self._call(wire.POSTED, "POST", "/scored_data", wire.group_body(group)).waiting

    def next_batch(self, cursor: int, sequences: int, wait_s: float = 0.0) -> Batch:
        """See `ApiClient.next_batch`."""
        path = wire.batch_path(cursor, sequences, wait_s, self.policy_version)
        return self._call(wire.BATCH, "GET", path, wait_s=wait_s)

    def commit(self, cursor: int) -> None:
        """See `ApiClient.commit`."""
        self._call(wire.ANYTHING, "POST", "/commit", wire.commit_body(cursor))

    def take_up(self, cursor: int) -> int:
        """Goes on from a checkpoint that was made at `cursor`; returns the cursor to read from, which is another one
        where the journal was lost, or where a later checkpoint was committed and lost."""
        return self._call(wire.POSITION, "POST", "/take_up", wire.commit_body(cursor)).cursor

    def dropped(self, items: Iterable[tuple[int, str]]) -> None:
        """See `ApiClient.dropped`."""
        self._call(wire.ANYTHING, "POST", "/dropped", wire.dropped_body(items))

    def wait_for_room(self, below: int, wait_s: float = 0.0) -> bool:
        """See `ApiClient.wait_for_room`."""
        return self._call(wire.ROOM, "GET", wire.room_path(below, wait_s), wait_s=wait_s).room

    def counts(self) -> Counts:
        """See `ApiClient.counts`."""
        return self._call(wire.COUNTS, "GET", "/counts")

    def _call(
        self, decoder: msgspec.json.Decoder[_T], method: str, path: str, body: bytes | None = None, wait_s: float = 0.0
    ) -> _T:
        backoff = wire.Backoff(self._patience_s)
        while True:
            if (url := self._where()) is None:
                time.sleep(backoff.after_absence(time.monotonic()))
                continue
            try:
                self._turn_to(url)
                return wire.decode(decoder, *self._request(method, path, body, wait_s))
            except (http.client.HTTPException, OSError) as error:
                self.close()
                pause: float | None = backoff.after_error(error, time.monotonic(), url)
            except Refused as refusal:
                if refusal.kind == "disk_full" and not self.waits():
                    raise DiskFull(refusal.message) from refusal
                pause = backoff.after_refusal(refusal, time.monotonic())
                if pause is None:
                    raise
            time.sleep(pause)

    def _turn_to(self, url: str | None) -> None:
        if url is not None and url != self._url:
            self.close()
            self._url, self._prefix = url, urlsplit(url).path

    def _request(self, method: str, path: str, body: bytes | None, wait_s: float) -> tuple[int, bytes]:
        if self._connection is None:
            parts = urlsplit(self._url)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
        if self._connection.sock is None:
            self._connection.timeout = 5.0
            self._connection.connect()
        self._connection.sock.settimeout(wait_s + wire.READ_TIMEOUT_S)
        self._connection.request(method, self._prefix + path, body, self._headers)
        with self._connection.getresponse() as answer:
            return answer.status, answer.read()
