"""Steps that are captured give the tokens of plain ones, batch after batch; on a GPU they are real graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.training.inference.conftest import reference_logprobs, sample
from toprope.training.inference import decode_steps, embedded_engine
from toprope.training.inference.decode_steps import CapturedSteps, Compute, make_captured_steps
from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.engine import SamplingRequest
from toprope.training.policy.short_forward import ShortForward

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Repeats:
    """Captures by calling again, as a graph would read and write the same tensors."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, compute: Compute) -> Compute:
        self.captured += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            return compute()

        return replay


def _model(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
    return model.eval().requires_grad_(False).to(_DEVICE)


def _engine(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capture: Callable[[Compute], Compute]
) -> EmbeddedEngine:
    def make(short: ShortForward | None, device: torch.device) -> CapturedSteps:
        assert short is not None
        return CapturedSteps(short, capture)

    for name, value in (("_ROWS", 2), ("_COLUMNS", 8), ("_GRAPHS", 4)):
        monkeypatch.setattr(decode_steps, name, value)
    monkeypatch.setattr(embedded_engine, "make_captured_steps", make)
    engine = EmbeddedEngine(model, tokenizer, max_context=512)
    engine.end_ids = frozenset({7, 8})
    engine.start()
    return engine


_BATCHES = (
    [SamplingRequest([5, 6, 9], n=6, max_new_tokens=60), SamplingRequest([9] * 17 + [3], n=5, max_new_tokens=40)],
    [SamplingRequest([30, 31], n=3, max_new_tokens=20), SamplingRequest([5, 6], n=2, max_new_tokens=33)],
    [SamplingRequest([3] * 40, n=9, max_new_tokens=90, temperature=0.7)],
    [SamplingRequest([5, 6, 9], n=6, max_new_tokens=60), SamplingRequest([30], n=2, max_new_tokens=50, temperature=0)],
)
"""Rows and room shrink and grow, so that buffers are used again and made anew."""


def test_captured_steps_give_the_logprobs_of_a_plain_pass(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, capture = _model(), _Repeats()
    engine = _engine(model, tokenizer, monkeypatch, capture)
    lengths = set()
    try:
        for requests in _BATCHES:
            for request, samples in zip(requests, sample(engine, *requests), strict=True):
                for answer in samples:
                    expected = reference_logprobs(
                        model, request.prompt_ids, answer.token_ids, request.temperature or 1.0
                    )
                    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
                    lengths.add(len(answer.token_ids))
    finally:
        engine.stop()
    assert len(lengths) > 5
    assert capture.captured > decode_steps._GRAPHS and capture.replayed > capture.captured
    assert engine._captured is not None and len(engine._captured._graphs) <= decode_steps._GRAPHS


def test_a_batch_of_broken_weights_does_not_harm_the_next(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite keys stay in buffers, where no mask would hide them."""
    model = _model()
    engine = _engine(model, tokenizer, monkeypatch, _Repeats())
    [request] = _BATCHES[2]
    values = model.model.layers[0].self_attn.v_proj.weight
    whole = values.clone()
    try:
        sample(engine, request)  # the thread has looked at the sound model
        values.fill_(torch.inf)
        with pytest.raises(RuntimeError, match="not finite"):
            sample(engine, request)
        values.copy_(whole)
        for answer in sample(engine, _BATCHES[1][0])[0]:
            expected = reference_logprobs(model, _BATCHES[1][0].prompt_ids, answer.token_ids)
            assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
    finally:
        engine.stop()


@pytest.mark.parametrize("fault", ["raises", "repeats another step"])
def test_steps_that_cannot_be_captured_are_computed(
    fault: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tried = _model(), []

    def capture(compute: Compute) -> Compute:
        tried.append(1)
        if fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: 2 * compute()

    engine = _engine(model, tokenizer, monkeypatch, capture)
    [request] = _BATCHES[2]
    try:
        with pytest.warns(UserWarning, match="not captured"):
            [answers] = sample(engine, request)
        for answer in answers:
            expected = reference_logprobs(model, request.prompt_ids, answer.token_ids, 0.7)
            assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
    finally:
        engine.stop()
    assert len(tried) == 1


def test_few_shapes_are_left() -> None:
    rounded = decode_steps._rounded
    assert {rounded(rows, 8, 1) for rows in range(1, 257)} == {8, 16, 32, 64, 128, 256}
    assert all(count <= rounded(count, 64, 2) <= max(64, 1.5 * count + 64) for count in range(1, 5000))
    assert len({rounded(count, 64, 2) for count in range(1, 4097)}) < 15


def test_nothing_is_captured_on_a_cpu() -> None:
    assert make_captured_steps(ShortForward(_model()), torch.device("cpu")) is None


@pytest.mark.skipif(_DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_logprobs_of_a_plain_pass(dtype: torch.dtype, tokenizer: Any) -> None:
    model = _model().to(dtype)
    engine = EmbeddedEngine(model, tokenizer, max_context=512)
    engine.end_ids = frozenset({7, 8})
    engine.start()
    try:
        for requests in 2 * _BATCHES:
            for request, samples in zip(requests, sample(engine, *requests), strict=True):
                for answer in samples:
                    expected = reference_logprobs(
                        model, request.prompt_ids, answer.token_ids, request.temperature or 1.0
                    )
                    worst = (torch.tensor(answer.logprobs) - expected.cpu()).abs().max()
                    assert worst < (1e-3 if dtype is torch.float32 else 0.05)
        assert engine._captured is not None and engine._captured._graphs and not engine._captured._is_broken
        logprobs = sample(engine, SamplingRequest([5, 6], n=64, max_new_tokens=100, temperature=0))[0][0].logprobs
        model.lm_head.weight.mul_(0.5)  # in place, as new weights come
        changed = sample(engine, SamplingRequest([5, 6], n=64, max_new_tokens=100, temperature=0))[0][0].logprobs
        assert logprobs[-1] != changed[-1]
    finally:
        engine.stop()
