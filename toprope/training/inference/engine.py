"""The engine: one thread that samples from a model for many requests at once.

Requests that arrive within a short gathering time form a decode batch, whatever their settings. Prompts are read once
each, then their key-value cache is repeated for the n answers; rows that have ended leave the batch when enough have.
New weights are taken between decode batches, so every token of an answer has one known policy version.

It speaks to a model through `transformers` alone, so any causal language model of the Hub can stand behind it. It is
meant for a CPU or a small GPU; engines made for GPUs stand behind the same HTTP dialect.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from toprope.training.policy.weight_sync import WeightReader

__all__ = ["Engine", "Request", "Sample"]


@dataclass
class Request:
    """What to sample: `n` answers to one prompt of token ids."""

    prompt_ids: list[int]
    n: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    """Answers of a request with a seed do not depend on what else is in its batch, up to rounding."""


@dataclass
class Sample:
    """One answer. `logprobs` are natural logarithms under the distribution that was sampled (temperature applied,
    nucleus not); for temperature 0 under the unscaled one. `text` ends before a stop text; the ids do not."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    text: str
    finish_reason: str


class Engine:
    """Samples in a thread of its own.

    Args:
        model: A causal LM in evaluation mode; the engine's thread alone calls it.
        tokenizer: Its tokenizer.
        weights: Where newer weights come from; None for a policy that is not trained.
        gather_s: How long the first request of a batch waits for others.
        max_rows: Answers in one decode batch.
        seed: Seed of the sampling.
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
        import torch

        self._torch = torch
        self._model, self._tokenizer, self._weights = model, tokenizer, weights
        self._gather_s, self._max_rows, self.max_context = gather_s, max_rows, max_context
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._eos = _eos_ids(model, tokenizer)
        self._queue: queue.SimpleQueue[tuple[Request, Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.version = 0
        """Policy version of the newest batch."""
        self._working, self._pulse, self._pulse_seen = False, 0, -1
        self.batches = self.rows = self.tokens = 0
        self.busy_s = 0.0

    @property
    def endings(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return frozenset(self._eos)

    def start(self) -> None:
        """Starts the thread, with the trainer's present weights: this server may have taken the place of another."""
        if self._weights is not None:
            self.version = self._weights.refresh()
        self._thread.start()

    def moves(self) -> bool:
        """Whether the thread is idle, or has come further since this was asked last."""
        moved, self._pulse_seen = self._pulse != self._pulse_seen, self._pulse
        return self._thread.is_alive() and (moved or not self._working)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ends the thread after the batch in work, which is waited for; requests that still wait are answered with an
        error."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def submit(self, request: Request, done: Callable[[list[Sample] | Exception], None]) -> None:
        """Queues a request. `done` is called once, in the engine's thread, with n samples or the error."""
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
            try:
                if self._weights is not None:
                    self.version = self._weights.refresh()
                answers: list[Any] = list(self._generate([request for request, _ in batch]))
            except Exception as error:  # an answer to those who wait; the next batch may be fine
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

    def _generate(self, requests: list[Request]) -> list[list[Sample]]:
        torch = self._torch
        with torch.inference_mode():
            rows = _Rows(torch, requests, self._model.device, self._generator)
            ids, mask = rows.padded_prompts(self._pad)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            output = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            repeats = torch.tensor(rows.repeats, device=ids.device)
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

    @property
    def _pad(self) -> int:
        pad = self._tokenizer.pad_token_id
        return pad if pad is not None else next(iter(self._eos), 0)

    def _append(self, rows: _Rows, alive: list[int], tokens: list[int], logprobs: list[float]) -> list[bool]:
        """Adds a token to every row that still goes on; returns which rows have ended."""
        ended = []
        for row, token, logprob in zip(alive, tokens, logprobs, strict=True):
            if rows.finish[row]:
                ended.append(True)
                continue
            rows.token_ids[row].append(token)
            rows.logprobs[row].append(logprob)
            request = rows.request_of[row]
            length = len(rows.token_ids[row])
            if token in self._eos:
                rows.finish[row] = "stop"
            elif request.stop and self._hits_stop(rows.token_ids[row], request.stop):
                rows.finish[row] = "stop"
            elif length >= request.max_new_tokens or len(request.prompt_ids) + length >= self.max_context:
                rows.finish[row] = "length"
            ended.append(bool(rows.finish[row]))
        return ended

    def _hits_stop(self, token_ids: list[int], stop: list[str]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return any(word in text for word in stop)

    def _samples(self, requests: list[Request], rows: _Rows) -> list[list[Sample]]:
        texts = self._tokenizer.batch_decode(rows.token_ids, skip_special_tokens=True)
        answers, row = [], 0
        for request in requests:
            answer = []
            for _ in range(request.n):
                text = texts[row]
                cut = min((at for word in request.stop if (at := text.find(word)) >= 0), default=len(text))
                answer.append(
                    Sample(rows.token_ids[row], rows.logprobs[row], self.version, text[:cut], rows.finish[row])
                )
                row += 1
            answers.append(answer)
        return answers


class _Rows:
    """The answers of a decode batch while they grow."""

    def __init__(self, torch: Any, requests: list[Request], device: Any, generator: torch.Generator) -> None:
        self._torch, self._device, self._generator = torch, device, generator
        self._requests = requests
        self.repeats = [request.n for request in requests]
        self.request_of = [request for request in requests for _ in range(request.n)]
        count = len(self.request_of)
        self.token_ids: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.finish = [""] * count
        temperatures = [request.temperature for request in self.request_of]
        self._greedy = torch.tensor([value == 0 for value in temperatures], device=device)
        self._temperature = torch.tensor([value or 1.0 for value in temperatures], device=device).unsqueeze(1)
        self._plain = all(value == 1.0 for value in temperatures)
        self._any_greedy = any(value == 0 for value in temperatures)
        self._top_p = None
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

    def padded_prompts(self, pad: int) -> tuple[Any, Any]:
        """Ids and attention mask of the prompts, P x longest, padded on the left."""
        torch = self._torch
        longest = max(len(request.prompt_ids) for request in self._requests)
        ids = [[pad] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in self._requests]
        mask = [[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in self._requests]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def sample(self, logits: Any, alive: list[int]) -> tuple[Any, Any]:
        """Next tokens and their log-probabilities, one per row of `logits` (rows `alive` of the batch)."""
        torch = self._torch
        index = None if len(alive) == len(self.request_of) else torch.tensor(alive, device=self._device)
        logits = logits.float()
        if not self._plain:
            logits = logits / _pick(self._temperature, index)
        logprobs = torch.log_softmax(logits, -1)
        weights = logprobs.exp()
        if self._top_p is not None:
            weights = _nucleus(torch, weights, _pick(self._top_p, index))
        token = torch.multinomial(weights, 1, generator=self._generator).squeeze(1)
        for place, row in enumerate(alive):
            if (own := self._seeded.get(row)) is not None:
                token[place] = torch.multinomial(weights[place], 1, generator=own)[0]
        if self._any_greedy:
            token = torch.where(_pick(self._greedy, index), logits.argmax(-1), token)
        return token, logprobs.gather(1, token.unsqueeze(1)).squeeze(1)


def _pick(values: Any, index: Any) -> Any:
    return values if index is None else values[index]


def _nucleus(torch: Any, weights: Any, top_p: Any) -> Any:
    """Zeroes all but the smallest set of tokens whose probability reaches top_p (Holtzman et al. 2020)."""
    ordered, order = weights.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return weights.masked_fill(outside.scatter(-1, order, outside), 0.0)


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(found) if isinstance(found, list) else {found}
    ids.add(tokenizer.eos_token_id)
    ids.discard(None)
    return ids
