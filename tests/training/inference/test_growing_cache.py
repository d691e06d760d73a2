"""Decoding with growing buffers gives the numbers of a plain forward pass, for several architectures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from tests.training.inference.conftest import reference_logprobs, sample
from toprope.training.inference import embedded_engine, growing_cache
from toprope.training.inference.embedded_engine import EmbeddedEngine, takes_wide_masks
from toprope.training.inference.engine import SamplingRequest
from toprope.training.inference.growing_cache import GrowingLayer, KeptPrompts, RowMoves, grow_by_blocks, keep_rows
from toprope.training.policy.weight_sync import WeightFile, WeightReader

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


@contextmanager
def _talking(model: Any, tokenizer: Any, **more: Any) -> Iterator[tuple[Callable[..., Any], list[int], KeptPrompts]]:
    """Yield a function that answers prompts and compares log-probabilities with a plain pass, a list that gets the
    number of tokens of each pass over prompts, and the engine's kept prompts."""
    engine = EmbeddedEngine(model, tokenizer, max_context=500, gather_s=0.2, **more)
    engine.end_ids = frozenset()
    read, run = list[int](), engine._run_model

    def counted(ids: torch.Tensor, *others: Any) -> Any:
        if ids.shape[1] > 1:
            read.append(ids.shape[1])
        return run(ids, *others)

    def answers(*prompts: list[int], n: int = 1) -> list[list[int]]:
        read.clear()
        found = sample(engine, *(SamplingRequest(prompt, n=n, max_new_tokens=6) for prompt in prompts))
        for prompt, samples in zip(prompts, found, strict=True):
            assert len(samples) == n
            for answer in samples:
                expected = reference_logprobs(model, prompt, answer.token_ids)
                assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
        return [samples[0].token_ids for samples in found]

    engine._run_model = counted  # type: ignore[method-assign]
    engine.start()
    try:
        yield answers, read, engine._kept
    finally:
        engine.stop()


def _prompt(tokens: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(5, 60) for _ in range(tokens)]


@pytest.mark.parametrize(
    ("build", "short", "goes_on"),
    [
        (_llama, True, True),
        (_llama, False, True),
        (_learned_positions, False, True),
        (_sliding, False, False),
        (_convolutional, False, False),
        (_linear_beside_layers, False, False),
    ],
)
def test_next_turn_is_read_from_where_the_prompt_before_it_ended(
    build: Any, short: bool, goes_on: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_cache, "_LEAST_KEPT", 10)
    if not short:
        monkeypatch.setattr(embedded_engine, "make_short_forward", lambda model: None)
    torch.manual_seed(0)
    model = build().eval().requires_grad_(False)
    with _talking(model, tokenizer) as (answers, read, _):
        talk = _prompt(30)
        added = [0]
        for turn in range(4):
            [answer] = answers(talk)
            # Before the second turn nothing tells that conversations go on, so it is read as a whole.
            assert sum(one for one in read if one > 2) == (added[-1] if goes_on and turn > 1 else len(talk)), turn
            more = [*answer, *_prompt(5 + turn, turn)]
            talk += more
            added.append(len(more))
        # Others of other lengths, new ones, and several answers to each, in one batch.
        answers(talk, _prompt(12, 7), [*talk, 9], talk[:33], _prompt(45, 8), [*talk, *_prompt(9, 3)], n=3)


def test_single_questions_keep_no_keys_and_values(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_cache, "_LEAST_KEPT", 10)
    with _talking(_llama().eval().requires_grad_(False), tokenizer) as (answers, _, kept):
        for number in range(5):
            answers(_prompt(40, number))
        assert len(kept._kept) == 5 and not kept._bytes
        answers([*_prompt(40, 0), 7])
        assert kept._bytes == 41 * 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes


def test_new_weights_forget_what_former_ones_computed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_cache, "_LEAST_KEPT", 10)
    trained, served = _llama(), _llama().eval().requires_grad_(False)
    reader = WeightReader(tmp_path, dict(served.named_parameters()))
    publisher = WeightFile(tmp_path, dict(trained.named_parameters()))
    with _talking(served, tokenizer, weights=reader) as (answers, read, _):
        talk = _prompt(30)
        for _ in range(3):
            talk += [*answers(talk)[0], 9]
        assert read == [7]
        publisher.publish()
        talk += [*answers(talk)[0], 9]
        assert read == [51]
        answers(talk)
        assert read == [7]


@pytest.mark.parametrize("room", [0, 4 * 20 * 384, 1 << 30])
def test_kept_prompts_stay_within_their_room(room: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_cache, "_LEAST_KEPT", 10)
    monkeypatch.setattr(growing_cache, "_MOST_KEPT", 20)
    with _talking(_llama().eval().requires_grad_(False), tokenizer, kept_bytes=room) as (answers, read, kept):
        answers(_prompt(20))
        for number in range(30):
            answers(_prompt(20 + number))
            assert sum(one for one in read if one > 1) == (20 + number if number < 2 or not room else 0)
            held = sum(tensor.nbytes for tensors in kept._kept.values() for tensor in tensors)
            assert held == kept._bytes <= room and len(kept._kept) <= 20
    assert bool(kept._kept) == bool(room)


def test_prompt_beyond_the_room_takes_no_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_cache, "_LEAST_KEPT", 10)
    kept, cache = KeptPrompts(2 * 30 * 4), DynamicCache()
    cache.update(torch.zeros(1, 1, 40, 1), torch.zeros(1, 1, 40, 1), 0)
    kept.keep([range(20)], cache)
    kept.beginning(range(21))
    kept.keep([range(20)], cache)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: pytest.fail("it was copied"))
    kept.keep([range(40, 80)], cache)
    assert [tensor.shape for tensor in kept.beginning(range(21))] == [(1, 20, 1)] * 2
