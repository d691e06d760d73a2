"""Decoding with growing buffers gives the numbers of a plain forward pass, for several architectures."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from tests.training.inference.conftest import reference_logprobs, sample
from toprope.training.inference import embedded_engine, growing_cache
from toprope.training.inference.embedded_engine import EmbeddedEngine, takes_wide_masks
from toprope.training.inference.engine import SamplingRequest
from toprope.training.inference.growing_cache import GrowingLayer, RowMoves, grow_by_blocks, keep_rows

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))


def _sliding() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen3Config(
        **_SIZES, use_sliding_window=True, sliding_window=12, layer_types=types, head_dim=8
    )
    return transformers.Qwen3ForCausalLM(config)


def _convolutional() -> Any:
    types = ["conv", "full_attention", "conv"]
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**_SIZES, layer_types=types))


def _learned_positions() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None)
    )


def _linear_beside_layers() -> Any:
    types = ["full_attention", "linear_attention", "full_attention"]
    config = transformers.MiniMaxConfig(**_SIZES, head_dim=8, num_local_experts=2, layer_types=types)
    return transformers.MiniMaxForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "short"),
    [
        (_llama, True),
        (_llama, False),
        (_sliding, False),
        (_convolutional, False),
        (_learned_positions, False),
        (_linear_beside_layers, False),
    ],
)
def test_logprobs_match_a_plain_pass_while_rows_leave(
    build: Any, short: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are filled and copied several times, and rows end at different lengths."""
    monkeypatch.setattr(growing_cache, "_BLOCK", 4)
    torch.manual_seed(0)
    model = build().eval().requires_grad_(False)
    if not short:
        monkeypatch.setattr(embedded_engine, "make_short_forward", lambda model: None)
    engine = EmbeddedEngine(model, tokenizer, max_context=512)
    engine.end_ids = frozenset({7, 8})  # about one token in 32, so rows end all the time
    engine.start()
    requests = [
        SamplingRequest([5, 6, 9], n=6, max_new_tokens=60),
        SamplingRequest([9] * 17 + [3], n=5, max_new_tokens=40, temperature=0.7),
        SamplingRequest([5, 6, 9], n=3, max_new_tokens=25, seed=3),
        SamplingRequest([30, 31], n=2, max_new_tokens=33, temperature=0.0),
    ]
    try:
        answers = sample(engine, *requests)
    finally:
        engine.stop()
    assert (engine._short is not None) == short
    lengths = set()
    for request, samples in zip(requests, answers, strict=True):
        assert len(samples) == request.n
        for answer in samples:
            expected = reference_logprobs(model, request.prompt_ids, answer.token_ids, request.temperature or 1.0)
            assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
            ended = answer.token_ids[-1] in engine.end_ids
            assert answer.finish_reason == ("stop" if ended else "length")
            assert ended or len(answer.token_ids) == request.max_new_tokens
            assert not engine.end_ids & set(answer.token_ids[:-1])
            lengths.add(len(answer.token_ids))
    assert len(lengths) > 5


def _biased_by_distance() -> Any:
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=None
    )
    return transformers.FalconForCausalLM(config)


def _window_in_a_cache_of_its_own() -> Any:
    types = ["full_attention"] * 3
    config = transformers.MiniMaxConfig(**_SIZES, head_dim=8, num_local_experts=2, sliding_window=8, layer_types=types)
    return transformers.MiniMaxForCausalLM(config)


def _window_that_no_layer_tells() -> Any:
    """Without the configuration, all layers of a cache are of full attention."""
    model = _llama()
    model.config.sliding_window = 8
    model.register_forward_pre_hook(
        lambda _, args, given: (args, {"past_key_values": DynamicCache()} | given), with_kwargs=True
    )
    return model


def _other_logits_under_wide_masks() -> Any:
    def change(model: Any, args: Any, given: dict[str, Any], output: Any) -> None:
        output.logits += given["attention_mask"].ndim == 4

    model = _llama()
    model.register_forward_hook(change, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("build", "wide"),
    [
        (_llama, True),
        (_learned_positions, True),
        (_sliding, False),
        (_convolutional, False),
        (_biased_by_distance, False),
        (_window_in_a_cache_of_its_own, False),
        (_window_that_no_layer_tells, False),
        (_other_logits_under_wide_masks, False),
    ],
)
def test_only_models_of_plain_attention_get_masks_ready_made(build: Any, wide: bool) -> None:
    torch.manual_seed(0)
    model = build().eval().requires_grad_(False)
    assert takes_wide_masks(model) == wide
    model.config._attn_implementation = "eager"
    assert not takes_wide_masks(model)


def test_layer_equals_the_librarys_layer_when_rows_leave_and_methods_of_the_library_are_used() -> None:
    torch.manual_seed(1)
    chooser = random.Random(1)
    plain, growing = DynamicCache(), DynamicCache()
    first = torch.randn(9, 2, 3, 4), torch.randn(9, 2, 3, 5)
    for cache in (plain, growing):
        cache.update(*first, 0)
    grow_by_blocks(growing)
    assert type(growing.layers[0]) is GrowingLayer and type(plain.layers[0]) is DynamicLayer
    rows = 9
    for step in range(150):
        token = torch.randn(rows, 2, 1, 4), torch.randn(rows, 2, 1, 5)
        for mine, theirs in zip(growing.update(*token, 0), plain.update(*token, 0), strict=True):
            assert torch.equal(mine, theirs)
        if step % 20 == 19 and rows > 2:
            moves = RowMoves(rows, sorted(chooser.sample(range(rows), 2 if step == 79 else 1)), torch.device("cpu"))
            keep_rows(growing, moves)
            plain.batch_select_indices(moves.index)
            rows = moves.count
        if step == 50:
            plain.crop(-2)
            growing.crop(-2)
        assert growing.get_seq_length() == plain.get_seq_length()


def test_growing_buffers_copy_each_token_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """n tokens cost about 5 n copies, where concatenation costs n^2 / 2."""
    from transformers.cache_utils import DynamicCache

    copied = []
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    grow_by_blocks(cache)
    layer = cache.layers[0]
    for _ in range(4000):
        before = layer._buffers
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
        if layer._buffers is not before:
            copied.append(layer.get_seq_length())
    assert 0 < sum(copied) < 6 * 4000


def test_buffers_have_no_room_that_answers_cannot_fill() -> None:
    from transformers.cache_utils import DynamicCache

    cache, token = DynamicCache(), torch.ones(2, 1, 1, 4)
    cache.update(torch.zeros(2, 1, 6, 4), torch.zeros(2, 1, 6, 4), 0)
    grow_by_blocks(cache, longest=9)
    for length in range(7, 12):  # two tokens more than were announced: the buffers grow all the same
        keys, _ = cache.update(token, token, 0)
        assert [buffer.shape[-2] for buffer in cache.layers[0]._buffers] == [max(length, 9)] * 2
        assert keys.sum() == 2 * 4 * (length - 6)
