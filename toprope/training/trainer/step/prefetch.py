"""Fetches the groups of the next step while the present one is trained.

Groups that were fetched count as delivered to the API. The position that a checkpoint stores is the one after the batch
that was handed out last, so groups that were only fetched are delivered again after a crash.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from queue import SimpleQueue

from toprope.training.trainer.batch_source import BatchSource, EndOfTraining, GroupBatch

_POLL_S = 1.0


class PrefetchingSource:
    """A `BatchSource` that works ahead in a thread.

    Args:
        source: Used by one thread at a time, with a client of its own.
        is_ending: Tells whether the run is ending; asked about once a second while a batch is awaited.
        wants_more: Tells whether there will be another step after the one whose batch is handed out.
    """

    def __init__(
        self, source: BatchSource, is_ending: Callable[[], bool], wants_more: Callable[[], bool] = lambda: True
    ) -> None:
        self._source, self._is_ending, self._wants_more = source, is_ending, wants_more
        self._awaited = False
        tell = source.tell
        # What it leaves out for the next step is no news, and no sign of life, while the present one is trained.
        source.tell = lambda skipping: tell(skipping) if self._awaited else None
        self._ahead: Future[GroupBatch] | None = None
        self._requests: SimpleQueue[tuple[int, Future[GroupBatch]]] = SimpleQueue()
        threading.Thread(target=self._work, name="prefetch", daemon=True).start()
        self.cursor, self.rollouts, self.dropped = source.cursor, source.rollouts, dict(source.dropped)
        """Position, rollouts and dropped groups after the last batch that was handed out."""

    def next(self, version: int) -> GroupBatch:
        """See `BatchSource.next`. Groups fetched ahead are measured against the version that will train on them."""
        began = time.monotonic()
        ahead, self._ahead = self._ahead or self._fetch(version), None
        self._awaited = True
        try:
            while True:
                try:
                    batch = ahead.result(_POLL_S)
                    break
                except NotYet:
                    if self._is_ending():
                        raise EndOfTraining from None
        finally:
            self._awaited = False
        batch.metrics["wait_seconds"] = round(time.monotonic() - began, 4)
        self.cursor, self.rollouts, self.dropped = batch.cursor, batch.rollouts, batch.dropped
        if self._wants_more():
            self._ahead = self._fetch(version + 1)
        return batch

    def _fetch(self, version: int) -> Future[GroupBatch]:
        future: Future[GroupBatch] = Future()
        self._requests.put((version, future))
        return future

    def _work(self) -> None:
        while True:
            version, future = self._requests.get()
            try:
                future.set_result(self._source.next(version))
            except BaseException as error:  # it belongs to the thread that waits for the batch
                future.set_exception(error)
