"""Estimate the memory of a run's trainer and sampler before its start, from the model's shape and the configuration.

Nothing is loaded: the shape is read from config.json, the number of parameters from the headers of safetensors files.
The terms are those of a forward and backward pass through a Llama-like model, with what the libraries themselves take
on a CPU; `make bench-fit` compares them with measured peaks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toprope.settings.schema import EMBEDDED, Config
from toprope.training.policy.tiny_model import RECIPES

MB = 1e6
TRAINER_BASE = SAMPLER_BASE = 380 * MB
"""Resident memory of the two programs before a model is loaded."""
PEFT = 80 * MB
"""Memory that the library of adapters adds."""
CUDA_BASE = 700 * MB
"""Memory that CUDA and its libraries take on a GPU, per process."""
_CHUNK = 1 << 26
"""Logits that the trainer holds at once (`toprope.training.trainer.step.forward.CHUNK_VALUES`)."""
_LOGIT_COPIES = 4
"""Logits, log-softmax, and two temporaries of the entropy."""
_SAMPLE_COPIES = 7
"""Logits of this token and the next, scaled ones, weights and their cumulative sum in float64."""
SAMPLED_AT_ONCE = 256
"""Rows of the sampler's largest decode batch."""
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class ModelShape:
    """Properties that decide memory. `parameters` counts tied weights once."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    measured: bool = True
    """True if the parameters were counted in the weights, False if computed from the shape."""
    dense: bool = True
    """False for a mixture of experts or recurrent layers, of which the activations are not known as well."""

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> ModelShape | None:
        """Return the shape in a config.json; None if it lacks a field."""
        text = config.get("text_config") or config
        try:
            hidden, layers, heads = (
                int(text[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
            )
            vocabulary = int(text["vocab_size"])
            intermediate = int(text.get("intermediate_size") or 4 * hidden)
            kv_heads = int(text.get("num_key_value_heads") or heads)
            head_dim = int(text.get("head_dim") or hidden // heads)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None
        strange = ("num_experts", "num_local_experts", "n_routed_experts", "mamba_d_ssm", "layer_types_ssm")
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        computed = layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden
        computed += (
            vocabulary * hidden * (1 if text.get("tie_word_embeddings", config.get("tie_word_embeddings")) else 2)
        )
        return cls(
            hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary,
            parameters or computed, parameters is not None, not any(text.get(name) for name in strange),
        )  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes by part, of one process at its peak."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Fit:
    """The estimate for a configuration, and what would lower it."""

    trainer: Memory
    """Of one process."""
    sampler: Memory
    total: float
    """Bytes of all processes in RAM, or of the GPU that holds most."""
    available: float | None
    """Bytes of the RAM or of one GPU; None if unknown."""
    gpus: int
    """GPUs of the run; 0: on the CPU."""
    sure: str
    """The trust that the estimate deserves, in words."""
    mends: tuple[tuple[str, Mapping[str, Any], float], ...] = field(default=())
    """Changes that make it fit, or lower it most: words, fields, bytes after it."""

    @property
    def fits(self) -> bool | None:
        """None if the available memory is unknown."""
        return None if self.available is None else self.total <= self.available


def read_shape(folder: Path) -> ModelShape | None:
    """Return the shape of a saved model (or of the base of saved adapters); None if it cannot be read."""
    try:
        adapters = folder / "adapter_config.json"
        if adapters.is_file():
            folder = Path(str(json.loads(adapters.read_bytes())["base_model_name_or_path"]))
        config = json.loads((folder / "config.json").read_bytes())
        files = sorted(folder.glob("*.safetensors"))
        counted = sum(_values(path) for path in files) if files else None
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return ModelShape.of(config, counted)


def shape_of(config: Config, hub_cache: Path | None = None) -> ModelShape | None:
    """Return the shape of a configuration's model from what is on this machine; None if it is unknown.

    Args:
        hub_cache: The Hub's cache, in which earlier downloads lie.
    """
    model = config.policy.model
    if model in EMBEDDED:
        return _embedded(model)
    if Path(model).expanduser().is_dir():
        return read_shape(Path(model).expanduser())
    if hub_cache is not None:
        folders = sorted((hub_cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
        return next((shape for folder in reversed(folders) if (shape := read_shape(folder)) is not None), None)
    return None


def _embedded(name: str) -> ModelShape:
    recipe = RECIPES[name]
    vocabulary = 256 + 2 + len(recipe.role_tokens) + len(recipe.phrase_tokens)
    written = {
        "hidden_size": recipe.hidden_size, "intermediate_size": recipe.intermediate_size, "vocab_size": vocabulary,
        "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads, "tie_word_embeddings": True,
    }  # fmt: skip
    shape = ModelShape.of(written)
    assert shape is not None
    return shape


def _values(path: Path) -> int:
    """Numbers stored in a safetensors file, from its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MOST_HEADER:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = json.loads(file.read(size))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for length in tensor["shape"]:
                count *= length
            total += count
    return total


def estimate(
    config: Config, shape: ModelShape, *, prompt: int | None = None, gpu: bool = False, available: float | None = None
) -> tuple[Memory, Memory]:
    """Return the peaks of one process of the trainer, and of the sampler.

    Args:
        prompt: Tokens of a prompt; what policy.max_context leaves beside the answer if None.
        gpu: Weights, activations and caches lie on a GPU.
        available: Bytes of a GPU, of which vLLM takes a share; its cache is as of the other engines if None.
    """
    answer = config.rollout.max_new_tokens
    prompt = max(1, config.policy.max_context - answer) if prompt is None else prompt
    return _trainer(config, shape, prompt, answer, gpu), _sampler(config, shape, prompt, answer, gpu, available)


def _trainer(config: Config, shape: ModelShape, prompt: int, answer: int, gpu: bool) -> Memory:
    sft, lora, full = config.algorithm.name == "sft", config.policy.lora, shape.parameters
    trained = _adapters(config, shape) if lora else full
    weight = _bytes(config, gpu, trained_in_full=not lora)
    ranks = config.launcher.num_processes
    parts = {"libraries": CUDA_BASE if gpu else TRAINER_BASE + lora * PEFT}
    parts["weights"] = _weights(config, shape, weight) / (1 if _quantized(config) else ranks)
    if ranks > 1:  # a pass needs the embeddings and a layer whole, and the next layer already
        whole = shape.vocabulary * shape.hidden + 2.0 * max(full - shape.vocabulary * shape.hidden, 0) / shape.layers
        parts["layers in use"] = (2.0 if gpu else weight) * whole
    if lora:
        parts["adapters"] = 4.0 * trained / ranks
    if not sft and config.algorithm.beta and not lora:
        parts["reference policy"] = (1 if config.algorithm.reference_8bit else weight) * full
    parts["optimizer"] = (2.0 if config.optimizer.eight_bit else 8.0) * trained / ranks
    if not gpu and not sft:  # the mapped file has two slots
        parts["published weights"] = 8.0 * trained
    elif gpu and config.inference.transfer == "gpu" and not lora:  # a copy in the sampler's format
        parts["published weights"] = 2.0 * trained
    rows = config.sft.batch_size if sft else config.rollout.group_size * config.rollout.groups_per_step
    rows = -(-rows // ranks)
    all_rows, groups = rows, 1 if sft else config.rollout.group_size
    if not sft and config.optimizer.micro_batch_size:
        rows = min(rows, config.optimizer.micro_batch_size)
    tokens = _tokens(shape, rows, min(groups, rows), prompt, answer)
    number = 2.0 if config.optimizer.precision == "bfloat16" or (gpu and config.optimizer.precision == "auto") else 4.0
    layer = (_layer(shape) + (_adapter_copies(shape) if lora and not gpu else 0.0)) * tokens * number
    layers = layer * shape.layers
    if config.optimizer.gradient_checkpointing:
        layers = shape.hidden * shape.layers * tokens * number + layer
    kept = layers + layer  # and a layer's working copies
    scored = min(rows * answer * shape.vocabulary, _CHUNK)
    logits = 4.0 * _LOGIT_COPIES * scored
    head = 0.0 if lora else 4.0 * shape.vocabulary * shape.hidden
    gradients = 4.0 * trained / ranks
    several = rows < all_rows  # gradients of earlier micro-batches are held meanwhile
    passes = kept + max(logits, 0.75 * logits + head)
    if several or passes >= gradients:
        parts |= {"activations": kept, "logits": passes - kept}
    if several or passes < gradients:
        parts["gradients"] = gradients
    return Memory(parts)


def _sampler(config: Config, shape: ModelShape, prompt: int, answer: int, gpu: bool, available: float | None) -> Memory:
    weight = _bytes(config, gpu, trained_in_full=False)
    if config.algorithm.name == "sft":
        return Memory({})
    rows = min(config.rollout.concurrency * config.rollout.group_size, SAMPLED_AT_ONCE)
    length = prompt + answer
    # Buffers grow by a quarter, and the old one is still there while it is copied: of one layer at a time.
    cache = 2.0 * shape.layers * shape.kv_heads * shape.head_dim * weight * rows * min(1.25 * length, length + 64)
    prompts = rows / config.rollout.group_size * prompt
    reading = prompts * weight * (2 * shape.hidden + 3 * shape.intermediate + 3 * shape.heads * shape.head_dim)
    sampling = 4.0 * _SAMPLE_COPIES * rows * shape.vocabulary
    parts = {"libraries": CUDA_BASE if gpu else SAMPLER_BASE, "weights": _weights(config, shape, weight)}
    if config.policy.lora:
        parts["adapters"] = 4.0 * _adapters(config, shape)
    if gpu and available and config.inference.engine == "vllm":  # its cache takes what its share leaves
        share = config.inference.memory_share * available * max(1, config.launcher.inference_gpus)
        return Memory(parts | {"cache": max(0.0, share - sum(parts.values()))})
    parts["cache"] = cache
    parts["reading and sampling"] = max(reading, sampling)
    return Memory(parts)


def _quantized(config: Config) -> bool:
    return config.policy.load_in_4bit or config.policy.load_in_8bit


def _weights(config: Config, shape: ModelShape, weight: float) -> float:
    """Bytes of the weights: the matrices of the layers may be quantized, embeddings and output layer are not."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = shape.layers * (shape.hidden * (2.0 * queries + 2.0 * keys) + 3.0 * shape.hidden * shape.intermediate)
    matrices = min(matrices, shape.parameters) if _quantized(config) else 0.0
    # QLoRA's double quantization costs 0.127 bits a value beside its four.
    return weight * (shape.parameters - matrices) + (4.127 / 8 if config.policy.load_in_4bit else 1.0) * matrices


def _tokens(shape: ModelShape, rows: int, group: int, prompt: int, answer: int) -> int:
    """Tokens of one pass; a group's prompt is computed once where that costs less (`PolicyForward`)."""
    plain = rows * (prompt + answer)
    width = prompt + group * answer
    per_token = max(shape.parameters - shape.vocabulary * shape.hidden, 1)
    per_pair = 2 * shape.layers * shape.hidden
    shared = rows // group * width
    costs = (plain * (per_token + (prompt + answer) * per_pair), shared * (per_token + width * per_pair))
    return plain if group < 2 or costs[0] <= costs[1] else shared


def _layer(shape: ModelShape) -> float:
    """Numbers that one layer keeps for the backward pass, per token: the inputs of norms, matrices and products."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 6.0 * shape.hidden + 3.0 * queries + 2.0 * keys + 4.0 * shape.intermediate


def _adapter_copies(shape: ModelShape) -> float:
    """Outputs of a layer's adapters per token: temporary, but interleaved with what is kept, so that the allocator of
    a CPU holds on to their room (measured)."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return float(queries + 2 * keys + 2 * shape.hidden + 2 * shape.intermediate)


def _adapters(config: Config, shape: ModelShape) -> float:
    """Trained values of adapters on all linear modules."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return float(config.policy.lora_rank * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate)))


def _bytes(config: Config, gpu: bool, *, trained_in_full: bool) -> float:
    if config.policy.dtype == "auto":
        return 2.0 if gpu and not trained_in_full else 4.0
    return 4.0 if config.policy.dtype == "float32" else 2.0


def fit(config: Config, shape: ModelShape, available: float | None, *, prompt: int | None = None, gpus: int = 0) -> Fit:
    """Estimate a configuration, and name the changes that make it fit.

    Args:
        available: Bytes of this machine's memory, or of one GPU.
        prompt: Tokens of a prompt; the most that the context allows if None.
        gpus: 0: on the CPU; 1: as the configuration says; more: one for the sampler and the others for the trainer,
            unless the configuration says otherwise.
    """
    if gpus > 1 and config.launcher.num_processes == 1 and not config.launcher.inference_gpus:
        config = config.model_copy(deep=True)
        config.launcher.num_processes, config.launcher.inference_gpus = gpus - 1, 1
    if gpus:
        gpus = config.launcher.num_processes + config.launcher.inference_gpus
    trainer, sampler = estimate(config, shape, prompt=prompt, gpu=gpus > 0, available=available)
    sure = "within about 15 % on CPUs (make bench-fit)" if not gpus else "arithmetic: no GPU was measured"
    if not shape.measured:
        sure += "; the parameters are computed from the shape"
    if not shape.dense:
        sure += "; the activations of this architecture are not known well"
    found = Fit(trainer, sampler, _together(config, trainer, sampler, gpus > 0), available, gpus, sure)
    return replace(found, mends=_mends(config, shape, found, prompt, gpus)) if found.fits is False else found


def _together(config: Config, trainer: Memory, sampler: Memory, gpu: bool) -> float:
    if not gpu:
        return config.launcher.num_processes * trainer.total + sampler.total
    if apart := config.launcher.inference_gpus:
        return max(trainer.total, sampler.total / apart)
    if not (config.inference.sleep and sampler.parts):
        return trainer.total + sampler.total
    passes = sum(trainer.parts.get(name, 0.0) for name in ("activations", "logits"))
    return trainer.total + max(CUDA_BASE, sampler.total - passes)  # they take turns


def _mends(
    config: Config, shape: ModelShape, now: Fit, prompt: int | None, gpus: int
) -> tuple[tuple[str, Mapping[str, Any], float], ...]:
    rows = config.rollout.group_size * config.rollout.groups_per_step
    micro = config.optimizer.micro_batch_size or rows
    smaller = next((size for size in range(max(1, micro // 4), 0, -1) if rows % size == 0), 1)
    tried: list[tuple[str, dict[str, Any]]] = [
        ("smaller micro-batches", {"optimizer.micro_batch_size": smaller}),
        ("gradient checkpointing", {"optimizer.gradient_checkpointing": True}),
        ("adapters", {"policy.lora": True}),
        ("weights in 4 bits below adapters", {"policy.lora": True, "policy.load_in_4bit": True}),
        ("fewer answers at a time", {"rollout.concurrency": max(1, config.rollout.concurrency // 4)}),
        ("adapters, checkpointing, small batches", {
            "policy.lora": True, "optimizer.gradient_checkpointing": True, "optimizer.micro_batch_size": 1,
            "rollout.concurrency": 1,
        }),
    ]  # fmt: skip
    if gpus:
        processes = config.launcher.num_processes
        tried.insert(0, ("a GPU for the sampler", {"launcher.inference_gpus": config.launcher.inference_gpus + 1}))
        tried.insert(1, ("twice as many GPUs for the trainer", {"launcher.num_processes": 2 * processes}))
    found = []
    for words, changes in tried:
        changed = config.model_copy(deep=True)
        for name, value in changes.items():
            section, _, key = name.partition(".")
            setattr(getattr(changed, section), key, value)
        peaks = estimate(changed, shape, prompt=prompt, gpu=gpus > 0, available=now.available)
        total = _together(changed, *peaks, gpus > 0)
        if total < now.total and set(changed.conflicts()) <= set(config.conflicts()):
            found.append((words, changes, total))
    enough = [one for one in found if now.available is not None and one[2] <= now.available]
    return tuple(enough[:3] or sorted(found, key=lambda one: one[2])[:2])
