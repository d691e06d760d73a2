"""Policy versions for groups of outside environments, requested from the inference server that sampled them.

An Atropos environment knows no policy versions, and its log-probabilities are optional. Our inference server sampled
its tokens, and keeps the samples it produced under keys of outside environments. A row is looked up by its sampled ids
and the ids before them. If a row of a group is not found, the group is marked as unmatched, and `rollout.unmatched`
decides if it is trained on.
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
from toprope.training.api.intake.validation import PostedGroup
from toprope.training.inference.samples import MATCH_PATH, MatchAnswer, MatchedRow, MatchRequest, SoughtRow

_TIMEOUT_S = 5.0
_PAUSE_S = 5.0
"""Pause after a failure: posts must not wait for a server that is gone."""

_group = msgspec.json.Decoder(Group)
_answer = msgspec.json.Decoder(MatchAnswer)
_encode = msgspec.json.Encoder().encode


class VersionMatcher(Protocol):
    """Finds the policy versions of sampled tokens."""

    async def match(self, posts: Sequence[PostedGroup]) -> None:
        """Add versions (and missing log-probabilities) to groups that have none. Never fails.

        Marks a group as unmatched if one of its rows is not found.
        """
        ...


class InferenceMatcher:
    """Queries an inference server. Leaves groups as they are until `connect` has given its address."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._address: tuple[str, int] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="matching")
        self._connection: http.client.HTTPConnection | None = None
        self._not_before = 0.0

    def connect(self, url: str) -> None:
        """Set the server's address."""
        parts = urlsplit(url)
        self._address, self._not_before = (parts.hostname or "", parts.port or 80), 0.0

    def close(self) -> None:
        """End the thread after its current request, and close the connection."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def match(self, posts: Sequence[PostedGroup]) -> None:
        address = self._address
        if address is None:
            return
        groups = [_group.decode(post.body) for post in posts]
        rows = [
            SoughtRow(tokens, sampled_spans(masks))
            for group in groups
            for tokens, masks in zip(group.tokens, group.masks, strict=True)
        ]
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._query, address, rows)
        for post, group in zip(posts, groups, strict=True):
            own, found = found[: len(group.tokens)], found[len(group.tokens) :]
            _merge(post, group, own)

    def _query(self, address: tuple[str, int], rows: list[SoughtRow]) -> list[MatchedRow | None]:
        nothing: list[MatchedRow | None] = [None] * len(rows)
        if time.monotonic() < self._not_before:
            return nothing
        body = _encode(MatchRequest(rows))
        for attempt in (1, 2):  # the server may have closed the idle connection
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


def sampled_spans(masks: list[int]) -> list[tuple[int, int]]:
    """(start, end) of each run of tokens that is not masked."""
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


def _merge(post: PostedGroup, group: Group, rows: Sequence[MatchedRow | None]) -> None:
    versions, logprobs = [], []
    for masks, row in zip(group.masks, rows, strict=True):
        sampled = sum(mask != MASKED for mask in masks)
        if row is None or len(row.logprobs) != sampled or sum(count for _, count in row.versions) != sampled:
            post.note.unmatched = True
            return
        values = iter(row.logprobs)
        versions.append(row.versions)
        logprobs.append([PROMPT_LOGPROB if mask == MASKED else next(values) for mask in masks])
    group.versions = versions
    if group.inference_logprobs is None:
        group.inference_logprobs = logprobs
    post.body = _encode(group)
    post.note.oldest_version = group.oldest_version()
