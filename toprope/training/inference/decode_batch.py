"""The rows of a decode batch: the answers that are being sampled, and the reasons for which they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toprope.training.inference.engine import FinishReason, Sample, SamplingRequest, extend_runs

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
    versions: list[tuple[int, int]] = field(default_factory=list)
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

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> list[int]:
        """Append a token to every live row; returns the places of the rows that have ended, in ascending order.

        Args:
            tokens: One for each live row.
            logprobs: Their log-probabilities.
            version: Policy version that they were sampled from.
        """
        rows = enumerate(zip(self.live, tokens, logprobs, strict=True))
        return [place for place, (row, token, logprob) in rows if self.append_to(row, token, logprob, version)]

    def append_to(self, row: Row, token: int, logprob: float, version: int) -> bool:
        """Append a token to one row; returns True if the row has ended."""
        self.tokens += 1
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        extend_runs(row.versions, version)
        if token in self._end_ids or (self._any_stop and self._has_stop_text(row)):
            row.finish = "stop"
        elif len(row.token_ids) >= row.limit or self.requests[row.request].given_up:
            row.finish = "length"
        else:
            return False
        self._missing[row.request] -= 1
        return True

    def keep(self, order: Sequence[int]) -> None:
        """Reduce the live rows to these places, in this order."""
        self.live = [self.live[place] for place in order]

    def is_complete(self, request: int) -> bool:
        """True if all answers to that request have ended."""
        return not self._missing[request]

    def samples(self, request: int) -> list[Sample]:
        """The answers to a complete request."""
        rows, stop = self._answers[request], self.requests[request].stop
        texts = self._tokenizer.batch_decode([row.token_ids for row in rows], skip_special_tokens=True)
        samples = []
        for row, text in zip(rows, texts, strict=True):
            assert row.finish is not None, "the request is complete"
            samples.append(Sample(row.token_ids, row.logprobs, row.versions, cut_text(text, stop), row.finish))
        return samples

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


def cut_text(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of its stop texts."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))]
