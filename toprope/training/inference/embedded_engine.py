"""The embedded engine: one thread that samples from a transformers model for many requests at once.

Requests that arrive within a short time form a decode batch, whatever their settings. Each prompt is read once, then
its key-value cache is repeated for the n answers. Once half of the rows have ended, ended rows leave the batch. New
weights are adopted between decode batches.

Any causal language model of transformers works. The engine is meant for a CPU or a small GPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from toprope.training.inference.engine import Done, FinishReason, Sample, SamplingRequest

if TYPE_CHECKING:
    from toprope.training.policy.weight_sync import WeightReader


class EmbeddedEngine:
    """See `toprope.training.inference.engine.Engine` for the contract.

    Args:
        model: A causal LM in evaluation mode; only the engine's thread calls it.
        weights: Source of newer weights; None for a policy that is not trained.
        gather_s: Seconds for which the first request of a batch waits for others.
        max_rows: Largest number of answers in one decode batch.
        max_context: Longest sequence of prompt and answer, in tokens.
        seed: Seed for requests without one.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        weights: WeightReader | None = None,
        gather_s: float = 0.002,
        max_rows: int = 256,
        max_context: int = 4096,
        seed: int = 0,
    ) -> None:
        self._model, self._tokenizer, self._weights = model, tokenizer, weights
        self._gather_s, self._max_rows, self.max_context = gather_s, max_rows, max_context
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self.end_ids = _find_end_ids(model, tokenizer)
        self._queue: queue.SimpleQueue[tuple[SamplingRequest, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._working, self._pulse, self._last_pulse = False, 0, -1
        self.version = self.batches = self.rows = self.tokens = 0
        self.busy_s = 0.0

    def start(self) -> None:
        """Start the thread with the trainer's present weights, since this server may replace an earlier one."""
        if self._weights is not None:
            self.version = self._weights.refresh()
        self._thread.start()

    def is_progressing(self) -> bool:
        """True if the thread is idle, or has advanced since the last call."""
        advanced, self._last_pulse = self._pulse != self._last_pulse, self._pulse
        return self._thread.is_alive() and (advanced or not self._working)

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the thread after its current batch; waiting requests are answered with an error."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def submit(self, request: SamplingRequest, done: Done) -> None:
        """Queue a request; `done` is called in the engine's thread."""
        self._queue.put((request, done))

    def _run(self) -> None:
        held = None
        while True:
            first = held or self._queue.get()
            held = None
            if first is None:
                break
            self._working, self._pulse = True, self._pulse + 1
            batch, rows = [first], first[0].n
            deadline = time.monotonic() + self._gather_s
            while rows < self._max_rows:
                try:
                    item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if item is None:
                    self._queue.put(None)
                    break
                if rows + item[0].n > self._max_rows:
                    held = item
                    break
                batch.append(item)
                rows += item[0].n
            began = time.monotonic()
            answers: Sequence[list[Sample] | Exception]
            try:
                if self._weights is not None:
                    self.version = self._weights.refresh()
                answers = self._generate([request for request, _ in batch])
            except Exception as error:  # the error is the answer to this batch; the next one may succeed
                answers = [error] * len(batch)
            self.busy_s += time.monotonic() - began
            self.batches, self.rows = self.batches + 1, self.rows + rows
            for (_, done), answer in zip(batch, answers, strict=True):
                done(answer)
            self._working = False
        if held is not None:
            held[1](RuntimeError("the engine has stopped"))
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                item[1](RuntimeError("the engine has stopped"))

    def _generate(self, requests: list[SamplingRequest]) -> list[list[Sample]]:
        with torch.inference_mode():
            rows = _Rows(requests, self._model.device, self._generator)
            ids, mask = rows.padded_prompts(self._pad_id())
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            output = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            repeats = torch.tensor([request.n for request in requests], device=ids.device)
            source = torch.arange(len(requests), device=ids.device).repeat_interleave(repeats)
            if len(source) != len(requests):
                cache.batch_select_indices(source)
            logits, mask = output.logits[source, -1], mask[source]
            lengths = mask.sum(1, keepdim=True)
            alive = list(range(len(source)))
            while True:
                self._pulse += 1
                token, logprob = rows.sample(logits, alive)
                ended = self._append(rows, alive, token.tolist(), logprob.tolist())
                if all(ended):
                    break
                if sum(ended) * 2 >= len(alive):
                    kept = torch.tensor([i for i, end in enumerate(ended) if not end], device=ids.device)
                    cache.batch_select_indices(kept)
                    token, mask, lengths = token[kept], mask[kept], lengths[kept]
                    alive = [row for row, end in zip(alive, ended, strict=True) if not end]
                mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
                output = self._model(
                    input_ids=token.unsqueeze(1),
                    attention_mask=mask,
                    position_ids=lengths,
                    past_key_values=cache,
                    use_cache=True,
                )
                logits, lengths = output.logits[:, -1], lengths + 1
            self.tokens += sum(len(tokens) for tokens in rows.token_ids)
            return self._samples(requests, rows)

    def _pad_id(self) -> int:
        pad: int | None = self._tokenizer.pad_token_id
        return pad if pad is not None else next(iter(self.end_ids), 0)

    def _append(self, rows: _Rows, alive: list[int], tokens: list[int], logprobs: list[float]) -> list[bool]:
        """Append a token to every row that has not ended; returns which rows have ended."""
        ended = []
        for row, token, logprob in zip(alive, tokens, logprobs, strict=True):
            if rows.finish[row] is None:
                rows.token_ids[row].append(token)
                rows.logprobs[row].append(logprob)
                rows.finish[row] = self._finish_reason(rows.request_of[row], rows.token_ids[row])
            ended.append(rows.finish[row] is not None)
        return ended

    def _finish_reason(self, request: SamplingRequest, token_ids: list[int]) -> FinishReason | None:
        if token_ids[-1] in self.end_ids:
            return "stop"
        if request.stop:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            if any(word in text for word in request.stop):
                return "stop"
        length = len(token_ids)
        if length >= request.max_new_tokens or len(request.prompt_ids) + length >= self.max_context:
            return "length"
        return None

    def _samples(self, requests: list[SamplingRequest], rows: _Rows) -> list[list[Sample]]:
        texts = self._tokenizer.batch_decode(rows.token_ids, skip_special_tokens=True)
        answers, row = [], 0
        for request in requests:
            answer = []
            for _ in range(request.n):
                text, reason = texts[row], rows.finish[row]
                assert reason is not None, "sampling ends when every row has ended"
                cut = min((at for word in request.stop if (at := text.find(word)) >= 0), default=len(text))
                answer.append(Sample(rows.token_ids[row], rows.logprobs[row], self.version, text[:cut], reason))
                row += 1
            answers.append(answer)
        return answers


class _Rows:
    """The growing answers of a decode batch."""

    def __init__(self, requests: list[SamplingRequest], device: torch.device, generator: torch.Generator) -> None:
        self._device, self._generator = device, generator
        self._requests = requests
        self.request_of = [request for request in requests for _ in range(request.n)]
        count = len(self.request_of)
        self.token_ids: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.finish: list[FinishReason | None] = [None] * count
        temperatures = [request.temperature for request in self.request_of]
        self._greedy = torch.tensor([value == 0 for value in temperatures], device=device)
        self._temperature = torch.tensor([value or 1.0 for value in temperatures], device=device).unsqueeze(1)
        self._unscaled = all(value == 1.0 for value in temperatures)
        self._any_greedy = any(value == 0 for value in temperatures)
        self._top_p: torch.Tensor | None = None
        if any(request.top_p < 1 for request in requests):
            self._top_p = torch.tensor([request.top_p for request in self.request_of], device=device).unsqueeze(1)
        self._seeded: dict[int, torch.Generator] = {}
        row = 0
        for request in requests:
            for index in range(request.n):
                if request.seed is not None:
                    seed = (request.seed * 1_000_003 + index) % 2**63
                    self._seeded[row] = torch.Generator(device=device).manual_seed(seed)
                row += 1

    def padded_prompts(self, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and attention mask of the prompts, both (requests, longest prompt), padded on the left."""
        longest = max(len(request.prompt_ids) for request in self._requests)
        ids = [[pad] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in self._requests]
        mask = [[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in self._requests]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def sample(self, logits: torch.Tensor, alive: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the next token of each row.

        Args:
            logits: (rows, vocabulary).
            alive: Indices of these rows in the batch.

        Returns:
            Tokens and their log-probabilities, both (rows,).
        """
        index = None if len(alive) == len(self.request_of) else torch.tensor(alive, device=self._device)
        logits = logits.float()
        if not self._unscaled:
            logits = logits / _select(self._temperature, index)
        logprobs = torch.log_softmax(logits, -1)
        weights = logprobs.exp()
        if self._top_p is not None:
            weights = _nucleus(weights, _select(self._top_p, index))
        token = torch.multinomial(weights, 1, generator=self._generator).squeeze(1)
        for place, row in enumerate(alive):
            if (own := self._seeded.get(row)) is not None:
                token[place] = torch.multinomial(weights[place], 1, generator=own)[0]
        if self._any_greedy:
            token = torch.where(_select(self._greedy, index), logits.argmax(-1), token)
        return token, logprobs.gather(1, token.unsqueeze(1)).squeeze(1)


def _select(values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return values if index is None else values[index]


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of tokens whose probability reaches top_p (Holtzman et al. 2020).

    `weights` is (rows, vocabulary), `top_p` (rows, 1).
    """
    ordered, order = weights.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return weights.masked_fill(outside.scatter(-1, order, outside), 0.0)


def _find_end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id]
    return frozenset(token for token in ids if token is not None)
