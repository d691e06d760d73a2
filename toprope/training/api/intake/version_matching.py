"""The policy versions of groups that outside environments post: asked of the inference server that sampled them.

An environment of Atropos knows nothing of versions, and its log-probabilities are optional. But what it trains on was
sampled by our inference server, which keeps what it samples under keys of outside environments. A row is looked up by
its sampled ids and what stood before them. A group counts as matched when all its rows are found; else it is marked,
and the owner's setting says whether it is trained on.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB, Group
from toprope.training.api.intake.validation import Parcel
from toprope.training.inference.samples import MATCH_PATH, MatchAnswer, Matched, MatchRequest, Sought

__all__ = ["InferenceMatcher", "Matcher", "spans_of"]

_TIMEOUT_S = 5.0
_PAUSE_S = 5.0
"""After a failure the server is left alone for so long: posts must not wait for one that is gone."""

_group = msgspec.json.Decoder(Group)
_answer = msgspec.json.Decoder(MatchAnswer)
_encode = msgspec.json.Encoder().encode


class Matcher(Protocol):
    """Finds the versions of what was sampled."""

    async def match(self, parcels: Sequence[Parcel]) -> None:
        """Adds versions (and log-probabilities, where they are missing) to groups that have none; marks the groups of
        which a row is not found as unmatched. Never fails."""
        ...


class InferenceMatcher:
    """Asks an inference server, whose address may come later (`connect`): until then nothing is marked.

    Args:
        secret: The run's secret.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._address: tuple[str, int] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="matching")
        self._connection: http.client.HTTPConnection | None = None
        self._not_before = 0.0

    def connect(self, url: str) -> None:
        """The server's address."""
        parts = urlsplit(url)
        self._address, self._not_before = (parts.hostname or "", parts.port or 80), 0.0

    def close(self) -> None:
        """Ends the thread after its request, and closes the connection."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def match(self, parcels: Sequence[Parcel]) -> None:
        address = self._address
        if address is None:
            return
        groups = [_group.decode(parcel.body) for parcel in parcels]
        rows = [
            Sought(tokens, spans_of(masks))
            for group in groups
            for tokens, masks in zip(group.tokens, group.masks, strict=True)
        ]
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, address, rows)
        for parcel, group in zip(parcels, groups, strict=True):
            own, found = found[: len(group.tokens)], found[len(group.tokens) :]
            _merge(parcel, group, own)

    def _ask(self, address: tuple[str, int], rows: list[Sought]) -> list[Matched | None]:
        nothing: list[Matched | None] = [None] * len(rows)
        if time.monotonic() < self._not_before:
            return nothing
        body = _encode(MatchRequest(rows))
        for attempt in (1, 2):  # a kept connection may have been closed meanwhile
            try:
                if self._connection is None or (self._connection.host, self._connection.port) != address:
                    self._connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
                headers = {"Authorization": f"Bearer {self._secret}", "Content-Type": "application/json"}
                self._connection.request("POST", MATCH_PATH, body, headers)
                response = self._connection.getresponse()
                data = response.read()
                answer = _answer.decode(data) if response.status == 200 else None
                if answer is not None and len(answer.rows) == len(rows):
                    return answer.rows
                break
            except (OSError, http.client.HTTPException, msgspec.DecodeError):
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                if attempt == 2:
                    self._not_before = time.monotonic() + _PAUSE_S
        return nothing


def spans_of(masks: list[int]) -> list[tuple[int, int]]:
    """Where a row's sampled tokens are: (start, end) of each run that is not masked."""
    spans, start = [], None
    for index, mask in enumerate(masks):
        if mask == MASKED:
            if start is not None:
                spans.append((start, index))
                start = None
        elif start is None:
            start = index
    if start is not None:
        spans.append((start, len(masks)))
    return spans


def _merge(parcel: Parcel, group: Group, rows: Sequence[Matched | None]) -> None:
    versions, logprobs = [], []
    for masks, row in zip(group.masks, rows, strict=True):
        sampled = sum(mask != MASKED for mask in masks)
        if row is None or len(row.logprobs) != sampled or sum(count for _, count in row.versions) != sampled:
            parcel.note.unmatched = True
            return
        values = iter(row.logprobs)
        versions.append(row.versions)
        logprobs.append([PROMPT_LOGPROB if mask == MASKED else next(values) for mask in masks])
    group.versions = versions
    if group.inference_logprobs is None:
        group.inference_logprobs = logprobs
    parcel.body = _encode(group)
    parcel.note.oldest_version = group.oldest_version()
