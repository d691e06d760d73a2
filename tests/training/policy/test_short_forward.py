"""The short forward pass gives the states, logits and gradients of the model's own, or is not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from toprope.training.policy.short_forward import ShortForward, make_short_forward

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_STRETCHED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**other: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SIZES, **other}))


def _mistral(**other: Any) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, **other))


def _qwen3(**other: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, **other))


def _with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.1)
    return model


_COVERED: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama, no shared heads": lambda: _llama(num_key_value_heads=4, attention_bias=True),
    "llama, stretched positions": lambda: _llama(rope_parameters=_STRETCHED),
    "mistral": lambda: _mistral(sliding_window=None),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{name: size for name, size in _SIZES.items() if name != "head_dim"})
    ),
    "qwen3": _qwen3,
    "adapters": _with_adapters,
}


def _built(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = build().eval()
    for value in model.parameters():  # norms begin at 1, and biases at 0, where a mistake would not show
        if value.ndim == 1:
            nn.init.normal_(value, 1.0, 0.3)
    return model


def _short(model: Any) -> ShortForward:
    short = make_short_forward(model)
    assert short is not None
    return short


@pytest.mark.parametrize("name", list(_COVERED))
def test_logits_and_gradients_are_those_of_the_model(name: str) -> None:
    """Of rows with padding before them, under a mask, and of rows without a mask; tokens one by one after those."""
    model = _built(_COVERED[name])
    short = _short(model)
    ids = torch.randint(0, 64, (3, 11))
    ids[:, 7] = 0
    known = torch.arange(11) >= torch.tensor([[0], [2], [5]])
    for masked in (True, False):
        positions = (known.cumsum(-1) - 1).clamp(min=0) if masked else torch.arange(11).expand(3, -1)
        mask = None
        if masked:
            mask = known[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()
            mask = mask | torch.eye(11, dtype=torch.bool)
        theirs = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ours = short.head(short.states(ids, positions, mask))
        chosen = known if masked else torch.ones_like(known)
        assert torch.allclose(ours[chosen], theirs[chosen], atol=1e-4)
        assert (ids[chosen] == 0).any()  # the padding token, whose embedding has no gradient
        with torch.no_grad():
            cache, parts = short.new_cache(), []
            for start, end in ((0, 8), (8, 9), (9, 10), (10, 11)):
                part = None if mask is None else mask[:, :, start:end, :end]
                parts.append(short.states(ids[:, start:end], positions[:, start:end], part, cache))
            assert torch.allclose(short.head(torch.cat(parts, 1))[chosen], ours[chosen], atol=1e-4)
        found = []
        for logits in (theirs, ours):
            model.zero_grad()
            (logits[chosen].log_softmax(-1)[:, 3].sum()).backward()
            found.append({key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None})
        assert found[0] and found[0].keys() == found[1].keys()
        for key, gradient in found[0].items():
            assert torch.allclose(found[1][key], gradient, atol=1e-4 * max(1.0, float(gradient.abs().max()))), key


@pytest.mark.parametrize("name", list(_COVERED))
def test_tokens_after_a_prompt_see_the_cache_and_new_weights(name: str) -> None:
    model = _built(_COVERED[name])
    short = _short(model)
    ids = torch.randint(0, 64, (2, 300))  # more than the table of angles begins with
    with torch.inference_mode():
        for change in (0.0, 0.3):
            for value in model.parameters():
                value.data.mul_(1.0 + change)
            cache, at = short.new_cache(), torch.arange(300).expand(2, -1)
            short.states(ids[:, :290], at[:, :290], None, cache)
            last = [short.states(ids[:, n : n + 1], at[:, n : n + 1], None, cache) for n in range(290, 300)]
            theirs = model(input_ids=ids, use_cache=False).logits[:, 290:]
            assert torch.allclose(short.head(torch.cat(last, 1)), theirs, atol=1e-3 * float(theirs.abs().max()))


def test_table_of_angles_made_while_sampling_serves_a_backward_pass() -> None:
    model = _built(_llama)
    short = _short(model)
    ids, at = torch.tensor([[1, 2, 3]]), torch.arange(3).unsqueeze(0)
    with torch.inference_mode():
        short.states(ids, at, None)
    short.states(ids, at, None).sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


class _Scaled(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(states)


def _hooked() -> Any:
    model = _llama()
    model.model.layers[1].register_forward_hook(lambda module, given, output: output)
    return model


def _replaced() -> Any:
    model = _llama()
    projection = model.model.layers[1].mlp.up_proj
    own = projection.forward
    projection.forward = lambda states: own(states)
    return model


def _checkpointing() -> Any:
    model = _llama()
    model.activation_checkpointing_enable()
    return model


def _other_norm() -> Any:
    model = _llama()
    own = type(model.model.norm)
    model.model.norm.__class__ = type("ShiftedNorm", (own,), {"forward": lambda self, states: states + 1})
    return model


_REFUSED: dict[str, Callable[[], Any]] = {
    "window": lambda: _mistral(sliding_window=12),
    "window beside full attention": lambda: _mistral(sliding_window=12, layer_types=["full_attention"] * 3),
    "windows in some layers": lambda: _qwen3(
        use_sliding_window=True,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "dropout": lambda: _llama(attention_dropout=0.1),
    "gelu": lambda: _llama(hidden_act="gelu"),
    "positions that depend on the length": lambda: _llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    ),
    "watched layer": _hooked,
    "replaced pass": _replaced,
    "checkpoints of activations": _checkpointing,
    "other norm": _other_norm,
    "other kind": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    ),
}


@pytest.mark.parametrize("name", list(_REFUSED))
def test_models_that_it_does_not_cover_are_refused_and_left_alone(name: str) -> None:
    model = _built(_REFUSED[name]).train()
    assert make_short_forward(model) is None
    assert model.training


def test_layers_that_are_more_than_a_matrix_are_called() -> None:
    model = _built(_llama)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = _Scaled
    ids, at = torch.tensor([[1, 2, 3]]), torch.arange(3).unsqueeze(0)
    ours = _short(model).states(ids, at, None)
    assert torch.allclose(ours, model.model(input_ids=ids).last_hidden_state, atol=1e-4)


def test_eager_attention_keeps_its_own_pass() -> None:
    model = _built(_llama)
    model.config._attn_implementation = "eager"
    assert make_short_forward(model) is None
