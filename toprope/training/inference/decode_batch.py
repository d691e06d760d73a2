"""The rows of a decode batch: the answers that are being sampled, and the reasons for which they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toprope.training.inference.engine import FinishReason, Sample, SamplingRequest

_TOKENS_PER_CHARACTER = 4
"""Most tokens that tokenizers of bytes use for one character."""


@dataclass(slots=True)
class Row:
    """One answer."""

    request: int
    """Place of its request in the batch."""
    number: int
    """Place among the answers of its request."""
    limit: int
    """Largest number of tokens."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


class DecodeBatch:
    """The answers to several requests.

    Args:
        requests: The requests.
        tokenizer: Decodes the answers.
        end_ids: Token ids that end an answer.
        max_context: Longest sequence of prompt and answer, in tokens.
    """

    def __init__(
        self, requests: Sequence[SamplingRequest], tokenizer: Any, end_ids: frozenset[int], max_context: int
    ) -> None:
        self.requests, self._tokenizer, self._end_ids = requests, tokenizer, end_ids
        self.live: list[Row] = []
        """Rows that have not ended, in the order of the tensors."""
        self._answers: list[list[Row]] = []
        for place, request in enumerate(requests):
            limit = max(1, min(request.max_new_tokens, max_context - len(request.prompt_ids)))
            answers = [Row(place, number, limit) for number in range(request.n)]
            self._answers.append(answers)
            self.live += answers
        self._missing = [request.n for request in requests]
        self._any_stop = any(request.stop for request in requests)
        self._special = frozenset(tokenizer.all_special_ids) if self._any_stop else frozenset()
        self.tokens = 0
        """Number of tokens sampled so far."""

    def append(self, tokens: list[int], logprobs: list[float]) -> list[int]:
        """Append a token to every live row; returns the places of the rows that have ended, in ascending order."""
        ended = []
        self.tokens += len(tokens)
        for place, (row, token, logprob) in enumerate(zip(self.live, tokens, logprobs, strict=True)):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if token in self._end_ids:
                row.finish = "stop"
            elif self._any_stop and self._has_stop_text(row):
                row.finish = "stop"
            elif len(row.token_ids) >= row.limit:
                row.finish = "length"
            else:
                continue
            ended.append(place)
            self._missing[row.request] -= 1
        return ended

    def keep(self, order: Sequence[int]) -> None:
        """Reduce the live rows to these places, in this order."""
        self.live = [self.live[place] for place in order]

    def is_complete(self, request: int) -> bool:
        """True if all answers to that request have ended."""
        return not self._missing[request]

    def samples(self, request: int, version: int) -> list[Sample]:
        """The answers to a complete request."""
        rows, stop = self._answers[request], self.requests[request].stop
        texts = self._tokenizer.batch_decode([row.token_ids for row in rows], skip_special_tokens=True)
        found = []
        for row, text in zip(rows, texts, strict=True):
            assert row.finish is not None, "the request is complete"
            cut = min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))
            found.append(Sample(row.token_ids, row.logprobs, version, text[:cut], row.finish))
        return found

    def _has_stop_text(self, row: Row) -> bool:
        stop = self.requests[row.request].stop
        if not stop:
            return False
        # Only the last token can have completed a stop text, so the end of the answer is decoded at every token, and
        # the whole answer only if a stop text is in it. The margin holds what decoders change at the beginning.
        length = (max(map(len, stop)) + 2) * _TOKENS_PER_CHARACTER
        tail: list[int] = []
        for token in reversed(row.token_ids):
            if token not in self._special:
                tail.append(token)
                if len(tail) > length:
                    break
        text = self._tokenizer.decode(tail[::-1], skip_special_tokens=True)
        if not any(word in text for word in stop):
            return False
        if len(tail) <= length:
            return True
        text = self._tokenizer.decode(row.token_ids, skip_special_tokens=True)
        return any(word in text for word in stop)
