"""The forward pass of models in the shape of Llama, without the calls of modules around the computation.

A small policy computes less long than transformers takes to prepare it: this pass takes half as long for a token of the
embedded policy. Parameters, adapters and the cache are the model's own. Other models keep their own method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

__all__ = ["ShortForward", "make_short_forward"]

_KINDS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_FIXED_POSITIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose angles depend on the position alone."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Largest difference of logits that rounding explains, as a share of the largest logit."""
_ROOM = 256
"""Least number of positions in the table of angles."""

_Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    before_attention: _Map
    query: _Map
    key: _Map
    value: _Map
    query_norm: _Map | None
    key_norm: _Map | None
    output: _Map
    before_mlp: _Map
    gate: _Map
    up: _Map
    down: _Map
    scale: float


class ShortForward:
    """Computes hidden states and logits.

    Args:
        model: A causal LM whose class is one of Llama, Mistral, Qwen2 or Qwen3, without dropout of attention.
    """

    def __init__(self, model: Any) -> None:
        base = model.model
        self._rotary, self._embed = base.rotary_emb, _embedding(base.embed_tokens)
        self._layers = [_layer(layer) for layer in base.layers]
        self._norm, self.head = _norm(base.norm), _linear(model.lm_head)
        self._width: int = base.layers[0].self_attn.head_dim
        self._heads: int = base.config.num_attention_heads
        self._kept_heads: int = base.config.num_key_value_heads
        self._config = base.config
        self._angles = torch.empty(0)
        """(positions, 2, width): cosine, and sine with the sign that rotation needs."""

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Any = None
    ) -> torch.Tensor:
        """Return the last hidden states, (rows, tokens, width), which `head` turns into logits.

        Args:
            ids: (rows, tokens).
            positions: (rows, tokens): places of the tokens in their texts.
            mask: (rows, 1, tokens, tokens in the cache and these), true for what a token may see; None for all before
                it, and only with an empty cache or a single token.
            cache: A cache of transformers, to which keys and values are added; None for none.
        """
        rows, count = ids.shape
        cached = 0 if cache is None else cache.get_seq_length()
        longest = cached + count  # no place is beyond it, and it waits for no device
        cos, sin = self.angles(longest)[positions].unsqueeze(-2).unbind(2)
        states, causal = self._embed(ids), mask is None and count > 1
        for number, layer in enumerate(self._layers):
            normed = layer.before_attention(states)
            query, key, value = (
                project(normed).view(rows, count, heads, self._width)
                for project, heads in (
                    (layer.query, self._heads),
                    (layer.key, self._kept_heads),
                    (layer.value, self._kept_heads),
                )
            )
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = layer.query_norm(query), layer.key_norm(key)
            query, key, value = (
                _rotate(query, cos, sin),
                _rotate(key, cos, sin).transpose(1, 2),
                value.transpose(1, 2),
            )
            if cache is not None:
                key, value = cache.layers[number].update(key, value)
            if count == 1:  # heads that share keys and values are queries of one head
                query = query.view(rows, self._kept_heads, -1, self._width)
                mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scale)
            else:
                shared = self._heads // self._kept_heads
                if shared > 1 and not causal:  # CUDA has no kernel for shared heads and a mask
                    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
                mixed = scaled_dot_product_attention(
                    query.transpose(1, 2),
                    key,
                    value,
                    attn_mask=mask,
                    is_causal=causal,
                    scale=layer.scale,
                    enable_gqa=shared > 1 and causal,
                ).transpose(1, 2)
            states = states + layer.output(mixed.reshape(rows, count, -1))
            normed = layer.before_mlp(states)
            states = states + layer.down(silu(layer.gate(normed)) * layer.up(normed))
        return self._norm(states)

    def angles(self, count: int) -> torch.Tensor:
        """A table of at least so many positions, (positions, 2, width); another one if the last was too short."""
        if len(self._angles) < count:
            self._angles = self._tabulate(max(_ROOM, 2 * count))
        return self._angles

    def new_cache(self) -> Any:
        """An empty cache."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=self._config)

    def _tabulate(self, count: int) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            places = torch.arange(count, device=self._rotary.inv_freq.device).unsqueeze(0)
            cos, sin = self._rotary(self._embed(places[:, :1]), position_ids=places)
            half = cos.size(-1) // 2
            return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)


def make_short_forward(model: Any) -> ShortForward | None:
    """Return the short pass of a model, or None if the model has another shape or gives other logits.

    Args:
        model: A causal LM of transformers, with or without adapters.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if type(inner).__name__ not in _KINDS:
        return None
    was_training = model.training
    model.eval()
    try:
        if not _is_covered(inner):
            return None
        with torch.no_grad():
            short = ShortForward(inner)
            expected, computed = _probe(model, None), _probe(model, short)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None  # the model has other parts than its kind
    finally:
        model.train(was_training)
    limit = _TOLERANCE.get(model.dtype, 0.0) * float(expected.abs().max())
    return short if bool((expected - computed).abs().max() <= limit) else None


def _probe(model: Any, short: ShortForward | None) -> torch.Tensor:
    """Logits of two prompts and of two tokens after each, with and without padding before the first prompt."""
    device, parts = model.device, []
    tokens = torch.tensor([[0, 1, 2, 0, 1], [2, 1, 0, 2, 1]], device=device)
    padded = torch.tensor([[False, True, True, True, True], [True] * 5], device=device)
    for real in (torch.ones_like(padded), padded):
        places, cache = (real.cumsum(-1) - 1).clamp(min=0), None
        for start, end in ((0, 3), (3, 4), (4, 5)):
            at, ids = places[:, start:end], tokens[:, start:end]
            if short is None:
                output = model(
                    input_ids=ids,
                    attention_mask=real[:, :end],
                    position_ids=at,
                    past_key_values=cache,
                    use_cache=True,
                )
                cache, logits = output.past_key_values, output.logits
            else:
                cache = short.new_cache() if cache is None else cache
                mask = None
                if not bool(real.all()):
                    mask = real[:, None, None, :end].expand(-1, 1, end - start, -1)
                    mask = mask & torch.ones(end, end, dtype=torch.bool, device=device).tril()[start:]
                logits = short.head(short.states(ids, at, mask, cache))
            parts.append(logits[real[:, start:end]].float())
    return torch.cat(parts)


def _is_covered(model: Any) -> bool:
    """If every layer looks at all former tokens, by positions that stay, and nobody changed the pass of a module."""
    config, base = model.config, model.model
    changed = any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or getattr(module, "gradient_checkpointing", False)
        for module in model.modules()
    )
    return (
        getattr(config, "sliding_window", None) is None
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and getattr(base.rotary_emb, "rope_type", None) in _FIXED_POSITIONS
        and config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and not getattr(config, "attention_dropout", 0.0)
        and not changed
    )


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(heads * cos, heads.roll(heads.size(-1) // 2, -1), sin)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        before_attention=_norm(layer.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=None if query_norm is None else _norm(query_norm),
        key_norm=None if key_norm is None else _norm(key_norm),
        output=_linear(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        scale=attention.scaling,
    )


def _linear(module: nn.Module) -> _Map:
    """The module itself if it is more than a matrix, as one with adapters or quantized weights is."""
    if type(module) is not nn.Linear:
        return module
    weight, bias = module.weight, module.bias
    return lambda states: linear(states, weight, bias)


def _embedding(module: nn.Module) -> _Map:
    if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
        return module
    weight, padding = module.weight, module.padding_idx  # whose row has no gradient
    return lambda tokens: embedding(tokens, weight, padding)


def _norm(module: Any) -> _Map:
    """Root mean square normalisation (arXiv:1910.07467) over the last axis."""
    weight, epsilon = module.weight, module.variance_epsilon
    shape = weight.shape
    return lambda states: rms_norm(states, shape, weight, epsilon)
