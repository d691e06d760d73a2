"""The embedded engine: one thread that samples from a transformers model for many requests at once.

Requests that arrive close together form a decode batch, whatever their settings. Equal prompts are read once, and
their keys and values are repeated for all answers to them; many long prompts are read in several passes. On a CPU, the
next turn of a conversation is read from where the prompt before it ended, if the weights are the same. A row leaves
the batch when it ends, and a request is answered when its last row has ended. New weights are adopted between decode
batches, or between tokens: rows then go on with the keys and values that they have, or begin again.

Any causal language model of transformers works. On a GPU see `decode_steps`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from toprope.training.inference.decode_batch import DecodeBatch
from toprope.training.inference.decode_steps import CapturedSteps, PlainSteps, Prompts, Steps, make_captured_steps
from toprope.training.inference.engine import Cancelled, Done, Engine, Sample, SamplingRequest
from toprope.training.inference.growing_cache import KeptPrompts, RowMoves
from toprope.training.inference.sampling import TokenSampler
from toprope.training.policy.short_forward import ShortForward, make_short_forward
from toprope.training.policy.turn_end import find_end_ids
from toprope.training.policy.weight_sync import WeightReader, WeightsDiffer

if TYPE_CHECKING:
    from toprope.errors import TopropeError

_Item = tuple[SamplingRequest, Done]
_GATHER_ROUNDS = 4
"""Longest wait for a batch, in multiples of the wait for one more request."""
_GATHER_SHARE, _GATHER_MOST_S = 0.02, 0.05
"""The wait for one more request as a share of the last batch's time, and its limit: a batch that comes late by that
little has the rows of clients that were answered together and come back one by one."""
_PASS_TOKENS = 32_768
"""Tokens of several prompts that are read in one pass, padding included: more take memory and are not faster."""
_BATCH_TOKENS = 8 * _PASS_TOKENS
"""The same for a batch of a model whose prompts are read in one pass, because its passes cannot be joined."""
_DELIVER_S = 0.02
"""Seconds for which answers are collected before they are delivered together; each delivery wakes the server."""


class _NewWeights(Exception):
    """New weights came while answers were sampled that they drop."""


class EmbeddedEngine(Engine):
    """See `toprope.training.inference.engine.Engine` for the contract.

    Args:
        model: A causal LM in evaluation mode; only the engine's thread calls it.
        weights: Source of newer weights; None for a policy that is not trained.
        gather_s: Seconds without a new request after which a batch begins, or more after a batch that took long; it
            waits at most four times as long.
        max_rows: Largest number of answers in one decode batch.
        max_context: Longest sequence of prompt and answer, in tokens.
        seed: Seed for requests without one.
        in_flight: See `rollout.in_flight`.
        kept_bytes: Most bytes of keys and values of former prompts that are kept on a CPU. What begins with such a
            prompt gets other last bits than if it were read as a whole.
        gave_up: Called with the reason if the trainer's weights cannot be taken over.
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
        in_flight: str = "auto",
        kept_bytes: int = 256 << 20,
        gave_up: Callable[[TopropeError], object] = lambda error: None,
    ) -> None:
        self._model, self._tokenizer, self._weights = model, tokenizer, weights
        self._gather_s, self._max_rows, self.max_context = gather_s, max_rows, max_context
        self._in_flight, self._gave_up = in_flight, gave_up
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._kept = KeptPrompts(kept_bytes if model.device.type == "cpu" else 0)
        self._takes_wide_masks: bool | None = None
        self._short: ShortForward | None = None
        self._captured: CapturedSteps | None = None
        self.end_ids = find_end_ids(model, tokenizer)
        self._queue: queue.SimpleQueue[tuple[SamplingRequest, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._working, self._stopped, self._pulse, self._last_pulse = False, False, 0, -1
        self.version = self.batches = self.tokens = 0
        self.busy_s = self._last_batch_s = 0.0

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
        self._stopped = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._refuse_waiting()

    def submit(self, request: SamplingRequest, done: Done) -> None:
        """Queue a request; `done` is called in the engine's thread."""
        if self._stopped:
            done(RuntimeError("the engine has stopped"))
        else:
            self._queue.put((request, done))

    def cancel(self, request: SamplingRequest) -> None:
        """End the request's rows at their next token."""
        request.given_up = True

    def _run(self) -> None:
        self._short = make_short_forward(self._model)
        self._takes_wide_masks = True if self._short is not None else None
        self._captured = make_captured_steps(self._short, self._model)
        pending = None
        while True:
            first = pending or self._queue.get()
            pending = None
            if first is None:
                break
            self._working, self._pulse = True, self._pulse + 1
            batch, pending = self._gather(first)
            began = time.monotonic()
            waiting = dict(enumerate(done for _, done in batch))
            answers: dict[int, list[Sample] | Exception] | None = None
            try:
                self._take_weights()
                with suppress(_NewWeights):
                    answers = self._generate([request for request, _ in batch], waiting, self._in_flight)
                # Only once: updates may come faster than answers. The error is gone, whose frames held the batch's keys
                # and values.
                if answers is None:
                    unanswered = [batch[place][0] for place in waiting]
                    waiting = dict(enumerate(waiting.values()))
                    answers = self._generate(unanswered, waiting, "keep")
            except Exception as error:  # the error is the answer to this batch; the next one may succeed
                # Its frames hold the batch's tensors.
                answers = dict.fromkeys(waiting, error.with_traceback(None))
                if isinstance(error, WeightsDiffer):
                    self._gave_up(error)
            self._last_batch_s = time.monotonic() - began
            self.busy_s += self._last_batch_s
            self.batches += 1
            for request, answer in answers.items():
                waiting[request](answer)
            self._working = False
        self._refuse_waiting()

    def _take_weights(self) -> bool:
        """Take over newer weights; return True if there were any."""
        former = self.version
        if self._weights is not None:
            self.version = self._weights.refresh()
        if self.version == former:
            return False
        self._kept.clear()
        return True

    def _refuse_waiting(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1](RuntimeError("the engine has stopped"))

    def _gather(self, first: _Item) -> tuple[list[_Item], _Item | None]:
        """The requests of a batch, and the one that no longer fitted, if any."""
        batch, rows, longest = [first], first[0].n, len(first[0].prompt_ids)
        pause = max(self._gather_s, min(_GATHER_MOST_S, _GATHER_SHARE * self._last_batch_s))
        latest = time.monotonic() + _GATHER_ROUNDS * pause
        prompts = {tuple(first[0].prompt_ids)}  # equal ones are read once
        while rows < self._max_rows:
            try:
                item = self._queue.get(timeout=max(0.0, min(pause, latest - time.monotonic())))
            except queue.Empty:
                break
            if item is None:
                self._queue.put(None)
                break
            longest = max(longest, len(item[0].prompt_ids))
            prompts.add(tuple(item[0].prompt_ids))
            is_large = not self._takes_wide_masks and len(prompts) * longest > _BATCH_TOKENS
            if is_large or rows + item[0].n > self._max_rows:
                return batch, item
            batch.append(item)
            rows += item[0].n
        return batch, None

    def _generate(
        self, requests: list[SamplingRequest], waiting: dict[int, Done], in_flight: str
    ) -> dict[int, list[Sample] | Exception]:
        """Sample the answers to all requests. Those that end early are delivered and leave `waiting`.

        Returns:
            The other answers, by the place of their request.

        Raises:
            _NewWeights: Weights came, and `in_flight` drops what is being sampled.
        """

        def answer(request: int) -> list[Sample] | Exception:
            return Cancelled() if requests[request].given_up else batch.samples(request)

        device = self._model.device
        batch = DecodeBatch(requests, self._tokenizer, self.end_ids, self.max_context)
        sampler = TokenSampler([(requests[row.request], row.number) for row in batch.live], device, self._generator)
        with torch.inference_mode():
            logits, steps = self._read_prompts(requests)
            complete: list[int] = []
            delivered = time.monotonic()
            while True:
                self._pulse += 1
                token, logprob = sampler.sample(logits)
                ended = batch.append(token.tolist(), logprob.tolist(), self.version)
                if ended:
                    requests_ended = {batch.live[place].request for place in ended}
                    complete += [request for request in sorted(requests_ended) if batch.is_complete(request)]
                    if len(ended) == len(batch.live):
                        break
                    moves = RowMoves(len(batch.live), ended, device)
                    batch.keep(moves.order)
                    sampler.keep(moves.index, moves.order)
                    steps.keep(moves)
                    token = token[moves.index]
                    if complete and time.monotonic() - delivered > _DELIVER_S:
                        for request in complete:
                            waiting.pop(request)(answer(request))
                        complete, delivered = [], time.monotonic()
                if self._weights is not None and in_flight in ("pause", "drop"):
                    if self._take_weights() and in_flight == "drop":
                        for request in complete:
                            waiting.pop(request)(answer(request))
                        self.tokens += batch.tokens
                        raise _NewWeights
                logits = steps.after(token)
        self.tokens += batch.tokens
        return {request: answer(request) for request in complete}

    def _read_prompts(self, requests: list[SamplingRequest]) -> tuple[torch.Tensor, Steps]:
        """Run the model over the prompts, each different one once.

        Returns:
            Logits of the first tokens (rows, vocabulary), and what computes those of the others.
        """
        device, places = self._model.device, dict[tuple[int, ...], int]()
        source = [
            place
            for request in requests
            for place in [places.setdefault(tuple(request.prompt_ids), len(places))] * request.n
        ]
        texts = list(places)
        longest, lengths = max(map(len, texts)), torch.tensor([[len(text)] for text in texts])
        is_padded, is_large = bool((lengths < longest).any()), len(texts) * longest > _PASS_TOKENS
        begun = list(map(self._kept.beginning, texts))
        if self._takes_wide_masks is None and (is_padded or is_large or self._kept.has_continued):
            self._takes_wide_masks = takes_wide_masks(self._model)
        in_parts = self._takes_wide_masks and (is_large or any(begun))
        logits, cache = self._read_in_parts(texts, begun) if in_parts else self._read(texts)
        self._kept.keep(texts, cache if self._takes_wide_masks else None)
        index = torch.tensor(source, device=device)
        width = longest + min(self.max_context, max(request.max_new_tokens for request in requests))
        mask = None
        if is_padded:
            mask = (torch.arange(width) >= longest - lengths).to(device)
            mask = mask[index, None, None] if self._takes_wide_masks else mask[index]
        prompts = Prompts(logits, cache, index, mask, lengths.to(device)[index], longest, width)
        captured = None if self._captured is None else self._captured.begin(prompts)
        return logits[index], captured or PlainSteps(lambda *arguments: self._run_model(*arguments)[0], prompts)

    def _read(self, texts: list[tuple[int, ...]]) -> tuple[torch.Tensor, Any]:
        """Run the model over prompts; return the logits (prompts, vocabulary) after each, and the cache."""
        device, longest, pad = self._model.device, max(map(len, texts)), self._pad_id()
        padding = torch.tensor([[longest - len(text)] for text in texts])
        ids = torch.tensor([[pad] * (longest - len(text)) + list(text) for text in texts]).to(device)
        mask = None
        if padding.any():
            mask = (torch.arange(longest) >= padding).to(device)
            mask = _prompt_mask(mask) if self._takes_wide_masks else mask
        positions = (torch.arange(longest) - padding).clamp(min=0).to(device)
        try:
            return self._run_model(ids, positions, mask)
        except torch.OutOfMemoryError:
            if self._captured is None:
                raise
            self._captured.release()  # buffers of former batches
            torch.cuda.empty_cache()
            return self._run_model(ids, positions, mask)

    def _read_on(self, text: tuple[int, ...], begun: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Any]:
        """`_read` of one prompt, of whose beginning the keys and values are there."""
        device, count, longest = self._model.device, begun[0].shape[1], len(text)
        cache = DynamicCache(config=self._model.config)
        layers: list[Any] = cache.layers
        for number, layer in enumerate(layers):
            layer.update(*(tensor.unsqueeze(0) for tensor in begun[2 * number : 2 * number + 2]))
        mask = torch.ones(1, 1, longest - count, longest, dtype=torch.bool, device=device).tril(count)
        positions = torch.arange(count, longest, device=device).unsqueeze(0)
        return self._run_model(torch.tensor([text[count:]], device=device), positions, mask, cache)

    def _read_in_parts(
        self, texts: list[tuple[int, ...]], begun: list[tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, Any]:
        """`_read` in several passes, whose keys and values are joined: only for layers of full attention.

        Args:
            texts: The prompts.
            begun: For each the keys and values of its beginning, if they are there.
        """
        longest, row = max(map(len, texts)), 0
        logits, joined = list[torch.Tensor](), list[torch.Tensor]()
        for part in _parts(texts, begun):
            self._pulse += 1
            part_logits, cache = self._read_on(part[0], begun[row]) if begun[row] else self._read(part)
            logits.append(part_logits)
            tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
            joined = joined or [
                tensor.new_zeros(len(texts), tensor.shape[1], longest, tensor.shape[3]) for tensor in tensors
            ]
            for target, tensor in zip(joined, tensors, strict=True):
                target[row : row + len(part), :, -tensor.shape[2] :] = tensor
            row += len(part)
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = joined[2 * number : 2 * number + 2]
        return torch.cat(logits), cache

    def _run_model(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """Append tokens (rows, tokens) to a cache, or a new one; return the logits (rows, vocabulary) after the last,
        and the cache."""
        if self._short is not None:
            cache = self._short.new_cache() if cache is None else cache
            return self._short.head(self._short.states(ids, positions, mask, cache)[:, -1]), cache
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], output.past_key_values

    def _pad_id(self) -> int:
        pad: int | None = self._tokenizer.pad_token_id
        return pad if pad is not None else next(iter(self.end_ids), 0)


def _parts(texts: list[tuple[int, ...]], begun: list[tuple[torch.Tensor, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts in parts of at most `_PASS_TOKENS` tokens each, padding included, or of one prompt, as those are of which
    the beginning has been read."""
    parts: list[list[tuple[int, ...]]] = []
    longest, is_open = 0, False
    for text, is_begun in zip(texts, map(bool, begun), strict=True):
        longest = max(longest, len(text))
        if not is_open or is_begun or (len(parts[-1]) + 1) * longest > _PASS_TOKENS:
            parts.append([])
            longest = len(text)
        parts[-1].append(text)
        is_open = not is_begun
    return parts


def _prompt_mask(real: torch.Tensor) -> torch.Tensor:
    """(rows, 1, tokens, tokens): what each token of a prompt may see, from (rows, tokens): true where none is padding.
    Padding sees itself, because a softmax over nothing is not a number."""
    causal = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool, device=real.device).tril()
    mask = real[:, None, None] & causal
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)  # in place: a second mask of a long prompt is large
    return mask


def takes_wide_masks(model: Any) -> bool:
    """True if prompts may be masked by `_prompt_mask` and one new token by (rows, 1, 1, tokens), so that the model need
    not make such masks, which takes it longer.

    Masks of layers that look back a limited distance, or that are no attention, depend on more; other models make
    positions or biases of the mask. So the layers have to be of full attention, without state beside them, and the
    logits have to be equal.
    """
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size")):
        if set(getattr(config, "layer_types", None) or ()) != {"full_attention"}:
            return False  # a mask may differ only beyond the few tokens tried here
    device, logits = model.device, []
    mask = torch.tensor([[False, True, True, True], [True] * 4], device=device)
    prompts, places = torch.tensor([[0, 1, 2], [2, 1, 0]], device=device), mask.cumsum(-1) - 1
    try:
        for wide in (False, True):
            cache = model(
                input_ids=prompts,
                attention_mask=_prompt_mask(mask[:, :3]) if wide else mask[:, :3],
                position_ids=places[:, :3].clamp(min=0),
                use_cache=True,
            ).past_key_values
            if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
                return False
            output = model(
                input_ids=prompts[:, :1],
                attention_mask=mask[:, None, None] if wide else mask,
                position_ids=places[:, 3:],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(output.logits)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False  # the model does not take such a mask
    return torch.equal(*logits)
