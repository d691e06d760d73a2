"""Steps that are captured give the tokens of plain ones, batch after batch; on a GPU they are real graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers

from tests.training.inference.conftest import reference_logprobs, sample
from toprope.training.inference import decode_steps, embedded_engine
from toprope.training.inference.decode_steps import CapturedSteps, Compute, make_captured_steps
from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.engine import Sample, SamplingRequest
from toprope.training.policy.short_forward import ShortForward
from toprope.training.policy.weight_sync import WeightReader

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Repeats:
    """Captures by calling again, but only while the tensors are where a graph would read and write them."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.steps: CapturedSteps | None = None

    def _places(self) -> list[int]:
        steps = self.steps
        assert steps is not None
        used = [steps._mask, steps._tokens, steps._lengths, steps._slot, steps._logits]
        return [
            one.data_ptr() for one in (*used, *(flat for layer in steps._layers for flat in (layer.keys, layer.values)))
        ]

    def __call__(self, compute: Compute) -> Compute:
        self.captured += 1
        places, steps = self._places(), self.steps
        assert steps is not None
        table = steps._short.angles(1)

        def replay() -> torch.Tensor:
            self.replayed += 1
            assert places == self._places(), "a graph would use tensors that have gone"
            assert any(table is one for one in steps._tables), "nothing holds the angles that a graph reads"
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
    model: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capture: Callable[[Compute], Compute],
    *,
    graphs: int = 4,
    free: Callable[[], float] = lambda: math.inf,
    **settings: Any,
) -> EmbeddedEngine:
    def make(short: ShortForward | None, model: Any) -> CapturedSteps:
        assert short is not None
        steps = CapturedSteps(short, capture, free)
        if isinstance(capture, _Repeats):
            capture.steps = steps
        return steps

    for name, value in (("_ROWS", 2), ("_COLUMNS", 8), ("_GRAPHS", graphs)):
        monkeypatch.setattr(decode_steps, name, value)
    monkeypatch.setattr(embedded_engine, "make_captured_steps", make)
    engine = EmbeddedEngine(model, tokenizer, max_context=512, **settings)
    engine.end_ids = frozenset({7, 8})
    engine.start()
    return engine


def _assert_right(model: Any, requests: Sequence[SamplingRequest], answers: list[list[Sample]]) -> set[int]:
    """Compare log-probabilities with those of a plain pass; return the lengths of answers."""
    lengths = set()
    for request, samples in zip(requests, answers, strict=True):
        for answer in samples:
            expected = reference_logprobs(model, request.prompt_ids, answer.token_ids, request.temperature or 1.0)
            worst = float((torch.tensor(answer.logprobs) - expected).abs().max())
            assert worst < (1e-3 if model.dtype is torch.float32 else 0.05)
            lengths.add(len(answer.token_ids))
    return lengths


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
            lengths |= _assert_right(model, requests, sample(engine, *requests))
    finally:
        engine.stop()
    assert len(lengths) > 5
    assert capture.captured > decode_steps._GRAPHS and capture.replayed > capture.captured
    assert engine._captured is not None and len(engine._captured._graphs) <= decode_steps._GRAPHS


def test_graphs_live_as_long_as_the_tensors_that_they_use(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are made anew between equal batches, and the table of angles while graphs live."""
    long = [SamplingRequest([3] * 5, max_new_tokens=400)]
    model, capture = _model(), _Repeats()
    engine = _engine(model, tokenizer, monkeypatch, capture, graphs=128)
    try:
        for requests in (_BATCHES[0], _BATCHES[2], _BATCHES[0], long, _BATCHES[0]):
            engine.end_ids = frozenset() if requests is long else frozenset({7, 8})
            _assert_right(model, requests, sample(engine, *requests))
    finally:
        engine.stop()
    assert capture.steps is not None and len(capture.steps._tables) > 1


def test_weights_that_come_between_tokens_are_used(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Weights:
        version = 0

        def refresh(self) -> int:
            if capture.replayed >= 10 and not self.version:
                model.lm_head.weight.mul_(0.5)
                self.version = 1
            return self.version

    model, capture = _model(), _Repeats()
    engine = _engine(model, tokenizer, monkeypatch, capture, weights=cast(WeightReader, Weights()), in_flight="drop")
    engine.end_ids = frozenset()
    [request] = _BATCHES[2]
    try:
        answers = sample(engine, request)
    finally:
        engine.stop()
    _assert_right(model, [request], answers)
    assert all(answer.versions == [(1, 90)] for answer in answers[0])


def test_a_batch_of_broken_weights_does_not_harm_the_next(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite values stay in buffers, where no mask would hide them."""
    model = _model()
    engine = _engine(model, tokenizer, monkeypatch, _Repeats())
    weight = model.model.layers[0].self_attn.v_proj.weight
    whole = weight.clone()
    try:
        sample(engine, *_BATCHES[2])  # the thread has looked at the sound model
        weight.fill_(torch.inf)
        with pytest.raises(RuntimeError, match="not finite"):
            sample(engine, *_BATCHES[2])
        weight.copy_(whole)
        _assert_right(model, _BATCHES[1], sample(engine, *_BATCHES[1]))
    finally:
        engine.stop()


@pytest.mark.parametrize("lack", ["none is free", "it runs out"])
def test_batches_without_memory_for_buffers_are_computed(
    lack: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, like, short = [], decode_steps._Buffers.like, [True]

    def run_out(layer: Any, places: int) -> Any:
        made.append(places)
        if short[0] and len(made) == 2:
            raise torch.OutOfMemoryError
        return like(layer, places)

    if lack == "it runs out":
        monkeypatch.setattr(decode_steps._Buffers, "like", run_out)
    model, capture = _model(), _Repeats()
    free = (lambda: 1000.0 if short[0] else math.inf) if lack == "none is free" else lambda: math.inf
    engine = _engine(model, tokenizer, monkeypatch, capture, free=free)
    try:
        _assert_right(model, _BATCHES[0], sample(engine, *_BATCHES[0]))
        assert not capture.captured and capture.steps is not None and not capture.steps._layers
        short[0] = False
        _assert_right(model, _BATCHES[1], sample(engine, *_BATCHES[1]))
        assert capture.captured
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
    try:
        with pytest.warns(UserWarning, match="not captured"):
            _assert_right(model, _BATCHES[2], sample(engine, *_BATCHES[2]))
        _assert_right(model, _BATCHES[1], sample(engine, *_BATCHES[1]))
        assert engine._captured is not None and not engine._captured._layers
    finally:
        engine.stop()
    assert len(tried) == 1


def test_few_shapes_are_left() -> None:
    rounded = decode_steps._round_up
    assert {rounded(rows, 8, 1) for rows in range(1, 257)} == {8, 16, 32, 64, 128, 256}
    assert all(count <= rounded(count, 64, 2) <= 1.5 * count + 64 for count in range(1, 5000))
    assert len({rounded(count, 64, 2) for count in range(1, 4097)}) < 15


def test_nothing_is_captured_on_a_cpu_or_of_quantized_weights() -> None:
    model = _model().cpu()
    assert make_captured_steps(ShortForward(model), model) is None
    quantized = SimpleNamespace(device=torch.device("cuda"), is_quantized=True)
    assert make_captured_steps(ShortForward(model), quantized) is None


on_a_gpu = pytest.mark.skipif(_DEVICE == "cpu", reason="needs an NVIDIA GPU")


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_logprobs_of_a_plain_pass(dtype: torch.dtype, tokenizer: Any) -> None:
    model = _model().to(dtype)
    engine = EmbeddedEngine(model, tokenizer, max_context=512)
    engine.end_ids = frozenset({7, 8})
    engine.start()
    long = [SamplingRequest([3] * 5, max_new_tokens=400)]
    try:
        for requests in (*_BATCHES, long, *_BATCHES):
            engine.end_ids = frozenset() if requests is long else frozenset({7, 8})
            _assert_right(model, requests, sample(engine, *requests))
        assert engine._captured is not None and engine._captured._graphs and not engine._captured._is_broken
        asked = SamplingRequest([5, 6], n=64, max_new_tokens=100, temperature=0)
        logprobs = sample(engine, asked)[0][0].logprobs
        model.lm_head.weight.mul_(0.5)  # in place, as new weights come
        assert logprobs[-1] != sample(engine, asked)[0][0].logprobs[-1]
    finally:
        engine.stop()


@on_a_gpu
def test_a_module_that_waits_for_the_gpu_is_computed(tokenizer: Any) -> None:
    class Waits(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            assert states.abs().max().item() >= 0
            return super().forward(states)

    model = _model()
    former = model.model.layers[0].mlp.up_proj
    waits = Waits(former.in_features, former.out_features, bias=False, device=_DEVICE).requires_grad_(False)
    model.model.layers[0].mlp.up_proj = waits
    engine = EmbeddedEngine(model, tokenizer, max_context=512)
    engine.start()
    try:
        with pytest.warns(UserWarning, match="not captured"):
            _assert_right(model, _BATCHES[0], sample(engine, *_BATCHES[0]))
        _assert_right(model, _BATCHES[1], sample(engine, *_BATCHES[1]))
    finally:
        engine.stop()
