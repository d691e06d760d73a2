"""The trainer's client of the trajectory API."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar
from urllib.parse import urlsplit

from toprope.errors import DiskFull
from toprope.records.journal.groups import Batch, Counts, Group
from toprope.training.api.clients import requests
from toprope.training.api.http.errors import Refused
from toprope.training.component.peer_addresses import Address, resolver

_T = TypeVar("_T")


class SyncApiClient:
    """Blocking calls over one connection that is kept open, for one thread at a time.

    Arguments and errors are those of `ApiClient`.
    """

    def __init__(self, base_url: Address, secret: str, *, patience_s: float = requests.PATIENCE_S) -> None:
        self._resolve = resolver(base_url)
        self._url = self._prefix = ""
        self._headers = requests.headers(secret)
        self._patience_s = patience_s
        self._connection: http.client.HTTPConnection | None = None
        self.waits: Callable[[], bool] = lambda: True
        """Called if the API's disk is full: True waits for room on it, False raises `DiskFull`."""
        self.policy_version: int | None = None
        """The next version to train; if set, the API drops groups that are too old for it."""

    def __enter__(self) -> SyncApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def post_group(self, group: Group) -> int:
        """See `ApiClient.post_group`."""
        return self._send(requests.post_groups([requests.group_body(group)])).waiting

    def next_batch(self, cursor: int, sequences: int, wait_s: float = 0.0) -> Batch:
        """The groups after `cursor`, `sequences` rows of them. The same cursor gives the same groups again.

        `batch` is None if none could be formed within `wait_s` seconds (up to 60).
        """
        return self._send(requests.next_batch(cursor, sequences, wait_s, self.policy_version))

    def commit(self, cursor: int) -> None:
        """Report that groups up to `cursor` are in a checkpoint."""
        self._send(requests.commit(cursor))

    def take_up(self, cursor: int) -> int:
        """Continue from a checkpoint that was made at `cursor`; returns the cursor to read from.

        It differs if the journal was lost, or if a later checkpoint was committed and lost.
        """
        return self._send(requests.take_up(cursor)).cursor

    def dropped(self, items: Iterable[tuple[int, str]]) -> None:
        """Report delivered groups, as (sequence number, reason), that are not trained on."""
        self._send(requests.dropped(items))

    def counts(self) -> Counts:
        """The account of groups."""
        return self._send(requests.counts())

    def _send(self, request: requests.ApiRequest[_T]) -> _T:
        backoff = requests.Backoff(self._patience_s)
        while True:
            if (url := self._resolve()) is None:
                time.sleep(backoff.after_absence(time.monotonic()))
                continue
            try:
                self._set_url(url)
                return request.decode(*self._exchange(request))
            except (http.client.HTTPException, OSError) as error:
                self.close()
                pause = backoff.after_error(error, time.monotonic(), url)
            except Refused as refusal:
                if refusal.kind == "disk_full" and not self.waits():
                    raise DiskFull(refusal.message) from refusal
                pause = backoff.after_refusal(refusal, time.monotonic())
            time.sleep(pause)

    def _set_url(self, url: str | None) -> None:
        if url is not None and url != self._url:
            self.close()
            self._url, self._prefix = url, urlsplit(url).path

    def _exchange(self, request: requests.ApiRequest[_T]) -> tuple[int, bytes]:
        if self._connection is None:
            parts = urlsplit(self._url)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
        if self._connection.sock is None:
            self._connection.timeout = 5.0
            self._connection.connect()
        self._connection.sock.settimeout(request.read_timeout_s)
        self._connection.request(request.method, self._prefix + request.path, request.body, self._headers)
        with self._connection.getresponse() as answer:
            return answer.status, answer.read()
