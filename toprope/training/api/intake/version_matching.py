"""Policy versions for groups of outside environments, requested from the inference server that sampled them.

An Atropos environment knows no policy versions, and its log-probabilities are optional. Our inference server sampled
its tokens, and keeps the samples it produced under keys of outside environments. A row is looked up by its sampled ids
and the ids before them. If a row of a group is not found, the group is marked as unmatched, and `rollout.unmatched`
decides if it is trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB, Group
from toprope.training.api.intake.validation import PostedGroup
from toprope.training.component.http_client import HttpConnections
from toprope.training.inference.samples import MATCH_PATH, MatchAnswer, MatchedRow, MatchRequest, SoughtRow

_TIMEOUT_S = 5.0
_PAUSE_S = 5.0
"""Pause after a failure: posts must not wait for a server that is gone."""

_group = msgspec.json.Decoder(Group)
_answer = msgspec.json.Decoder(MatchAnswer)
_encode = msgspec.json.Encoder().encode


class InferenceMatcher:
    """Queries an inference server. Leaves groups as they are until `connect` has given its address."""

    def __init__(self, secret: str) -> None:
        self._connections = HttpConnections({"Authorization": f"Bearer {secret}", "Content-Type": "application/json"})
        self._url: str | None = None
        self._not_before = 0.0
        self._turn = asyncio.Lock()
        """One query at a time: those that wait for the server's loop would use up their time there."""

    def connect(self, url: str) -> None:
        """Set the server's address."""
        self._url, self._not_before = url, 0.0

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def match(self, posts: Sequence[PostedGroup]) -> None:
        """Add versions (and missing log-probabilities) to groups that have none. Never fails.

        Marks a group as unmatched if one of its rows is not found.
        """
        if self._url is None:
            return
        groups = [_group.decode(post.body) for post in posts]
        rows = [
            SoughtRow(tokens, sampled_spans(masks))
            for group in groups
            for tokens, masks in zip(group.tokens, group.masks, strict=True)
        ]
        async with self._turn:
            matched = await self._query(self._url, rows)
        for post, group in zip(posts, groups, strict=True):
            group_rows, matched = matched[: len(group.tokens)], matched[len(group.tokens) :]
            _merge(post, group, group_rows)

    async def _query(self, url: str, rows: list[SoughtRow]) -> list[MatchedRow | None]:
        nothing: list[MatchedRow | None] = [None] * len(rows)
        if time.monotonic() < self._not_before:
            return nothing
        body = _encode(MatchRequest(rows))
        for _ in range(2):  # the server may have closed the idle connection
            try:
                answer = await self._connections.request("POST", url, MATCH_PATH, body=body, timeout_s=_TIMEOUT_S)
                matched = _answer.decode(answer.body).rows if answer.status == 200 else []
            except (OSError, msgspec.DecodeError):
                continue
            return matched if len(matched) == len(rows) else nothing
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
