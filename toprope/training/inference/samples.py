"""Samples for outside environments, found again by their token ids.

An environment that posts its groups itself (Atropos) uses one key for all requests, so a request cannot be assigned to
a rollout. Its answers are kept here instead of in sessions, with prompt, log-probabilities and policy version, under
the sampled ids. The trajectory API asks for them when the group is posted.

A key belongs to an outside environment if its session is `outside` or begins with `outside-` (`<secret>.outside`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass

import msgspec

from toprope.training.inference.engine import Sample, extend_runs

MATCH_PATH = "/v1/samples/match"
_OUTSIDE = "outside"
_DISTINCTIVE = 16
"""Number of sampled ids that identify a sample even if the environment wrote the prompt with other tokens."""


def is_outside(session: str) -> bool:
    """True for the session of an outside environment's key."""
    return session == _OUTSIDE or session.startswith(_OUTSIDE + "-")


class SoughtRow(msgspec.Struct):
    """A row: its ids, and the (start, end) of each run of sampled ids."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class MatchRequest(msgspec.Struct):
    """The body of POST /v1/samples/match."""

    rows: list[SoughtRow]


class MatchedRow(msgspec.Struct):
    """A row's sampled tokens: runs of (version, count), and one log-probability per token, in order."""

    versions: list[tuple[int, int]]
    logprobs: list[float]


class MatchAnswer(msgspec.Struct):
    """The answer, row by row; None for a row that was not sampled here or was forgotten."""

    rows: list[MatchedRow | None]


@dataclass(frozen=True)
class _Sample:
    prompt: bytes
    logprobs: array[float]
    versions: list[tuple[int, int]]


class SampleIndex:
    """Samples by their ids; the oldest are forgotten first.

    Args:
        limit: Number of sampled tokens to remember, at 8 bytes each.
        end_ids: Ids that end an answer. Environments that tokenise an answer's text leave them out.
    """

    def __init__(self, limit: int = 4_000_000, end_ids: frozenset[int] = frozenset()) -> None:
        self._limit, self._end_ids = limit, end_ids
        self._by_ids: OrderedDict[bytes, deque[_Sample]] = OrderedDict()
        self._order: deque[tuple[bytes, int]] = deque()
        self.tokens = 0
        """Number of remembered tokens."""

    def add(self, prompt_ids: list[int], sample: Sample) -> None:
        """Remember a sample."""
        token_ids = sample.token_ids
        entry = _Sample(_digest(prompt_ids), array("d", sample.logprobs), sample.versions)
        if len(token_ids) > 1 and token_ids[-1] in self._end_ids:
            self._add(token_ids[:-1], entry, 0)  # before the whole sample, so that both are forgotten together
        self._add(token_ids, entry, len(token_ids))

    def match(self, row: SoughtRow) -> MatchedRow | None:
        """The sampled tokens of a row, which may be none at all; None if one of its spans was not sampled here.

        Equal samples (short answers) are returned in the order in which they were sampled.
        """
        matched = MatchedRow([], [])
        for start, end in row.spans:
            sample = self._find(row.tokens[start:end], row.tokens[:start])
            if sample is None:
                return None
            remaining = end - start  # the row may leave out the end token
            matched.logprobs.extend(sample.logprobs[:remaining])
            for version, count in sample.versions:
                if remaining:
                    extend_runs(matched.versions, version, min(count, remaining))
                    remaining -= min(count, remaining)
        return matched

    def _add(self, token_ids: list[int], sample: _Sample, size: int) -> None:
        key = _digest(token_ids)
        self._by_ids.setdefault(key, deque()).append(sample)
        self._order.append((key, size))
        self.tokens += size
        while self.tokens > self._limit and self._order:
            oldest, size = self._order.popleft()
            samples = self._by_ids[oldest]
            samples.popleft()
            if not samples:
                del self._by_ids[oldest]
            self.tokens -= size

    def _find(self, token_ids: list[int], prompt_ids: list[int]) -> _Sample | None:
        samples = self._by_ids.get(_digest(token_ids))
        if samples is None:
            return None
        prompt = _digest(prompt_ids)
        index = next((index for index, sample in enumerate(samples) if sample.prompt == prompt), None)
        if index is None:
            return samples[-1] if len(token_ids) >= _DISTINCTIVE else None
        sample = samples[index]
        del samples[index]
        samples.append(sample)
        return sample


def _digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()
