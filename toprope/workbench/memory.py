"""Estimate the memory of a run's trainer and sampler before its start, from the model's shape and the configuration.

Nothing is loaded. The terms are those of a forward and backward pass through a Llama-like model, with what the
libraries themselves take on a CPU; `make bench-fit` compares them with measured peaks.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from toprope.analysis.findings.rules import said
from toprope.machine import gpu_names
from toprope.settings.endpoints import BASE
from toprope.settings.schema import Config
from toprope.settings.sections.environment import RUN
from toprope.workbench.model_shapes import ModelShape, shape_of

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
_IN_STEPS = ("activations", "logits", "gradients", "optimizer")
"""Parts of the trainer that its steps take, after the sampler has its cache."""
_APART = {"inference.sleep": False, "inference.transfer": "disk"}
"""Goes with GPUs of inference's own: both settings are for one that trainer and sampler share."""


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
    counted: bool = True
    """True if the parameters were counted in the weights."""
    installed: float | None = None
    """Bytes of all RAM with swap, or of one whole GPU; None if unknown."""
    weights: float = 0.0
    """Bytes of the weights that one process needs on its device, without which nothing runs."""
    mends: tuple[tuple[str, Mapping[str, Any], float], ...] = field(default=())
    """Changes that make it fit, or lower it most: words, fields, bytes after it."""

    @property
    def fits(self) -> bool | None:
        """None if the available memory is unknown."""
        return None if self.available is None else self.total <= self.available

    @property
    def where(self) -> str:
        return {0: "RAM", 1: "the GPU"}.get(self.gpus, f"the fullest of {self.gpus} GPUs")

    @property
    def verdict(self) -> str:
        """One sentence."""
        fits = {None: "how much is free is unknown", True: "fits", False: "does not fit"}[self.fits]
        free = "" if self.available is None else f" of {in_gb(self.available)} free"
        return f"about {in_gb(self.total)}{free} in {self.where}: {fits} ({self.sure})."

    @property
    def mended(self) -> list[str]:
        """The changes as sentences."""
        return [f"With {words} it takes {in_gb(total)}: {said(changes)}." for words, changes, total in self.mends]


def in_gb(size: float) -> str:
    """Return a number of bytes in words."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def fit_here(
    config: Config,
    variables: Mapping[str, str] | None = None,
    *,
    gpus: int | None = None,
    allowed: Sequence[str] | None = None,
    prompt: int | None = None,
) -> Fit | str:
    """Estimate a configuration on this machine; in words, why that is impossible.

    Args:
        variables: As `shape_of` takes them.
        gpus: Number of GPUs; 0: the CPU; None: as launcher.device, `allowed` and this machine say.
        allowed: The owner's `machine.gpus`.
        prompt: Tokens of a prompt; the most that policy.max_context allows if None.
    """
    shape = shape_of(config.policy, variables)
    if isinstance(shape, str):
        return shape
    lent = None
    if gpus is None:
        lent = len(allowed) if allowed is not None else len(gpu_names()) or None
        gpus = 1 if config.launcher.device != "cpu" and lent != 0 and shutil.which("nvidia-smi") else 0
    free, installed = _memory_here(gpus)
    return replace(fit(config, shape, free, prompt=prompt, gpus=gpus, lent=lent), installed=installed)


def _memory_here(gpus: int) -> tuple[float | None, float | None]:
    """Free and installed bytes of RAM, the latter with swap, or of the emptiest and the largest GPU."""
    if not gpus:
        memory = psutil.virtual_memory()
        return float(memory.available), float(memory.total + psutil.swap_memory().total)
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        free, whole = zip(*(map(float, line.split(",")) for line in done.stdout.splitlines()), strict=True)
        return max(free) * 2**20, max(whole) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None


def estimate(
    config: Config, shape: ModelShape, *, prompt: int | None = None, gpu: bool = False, available: float | None = None
) -> tuple[Memory, Memory]:
    """Return the peaks of one process of the trainer, and of the sampler.

    Args:
        prompt: Tokens of a prompt; what policy.max_context leaves beside the answer if None. Demonstrations are then as
            long as sft.max_length.
        gpu: Weights, activations and caches lie on a GPU.
        available: Free bytes of a GPU. vLLM takes a share of them with its weights; transformers' cache is a share of
            what weights leave, and a trainer on the same GPU. None: their caches are as the embedded engine's.
    """
    answer, longest = config.rollout.max_new_tokens, config.sft.max_length
    row = longest if prompt is None else min(longest, prompt + answer)
    prompt = max(1, config.policy.max_context - answer) if prompt is None else prompt
    trained = (0, row) if config.algorithm.name == "sft" else (prompt, answer)
    trainer = _trainer(config, shape, *trained, gpu)
    if available and config.inference.engine == "transformers" and not config.launcher.inference_gpus:
        available = max(1.0, available - sum(size for name, size in trainer.parts.items() if name not in _IN_STEPS))
    return trainer, _sampler(config, shape, prompt, answer, gpu, available)


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
    penalty = config.ppo.kl_coef if config.algorithm.name == "ppo" else config.algorithm.beta
    if not sft and penalty and not lora:
        parts["reference policy"] = (1 if config.algorithm.reference_8bit else weight) * full
    parts["optimizer"] = (2.0 if config.optimizer.eight_bit else 8.0) * trained / ranks
    if not gpu and not sft:  # the mapped file has two slots
        parts["published weights"] = 8.0 * trained
    elif gpu and config.inference.transfer == "gpu" and not lora:  # a copy in the sampler's format
        parts["published weights"] = 2.0 * trained
    rows = -(-_batch(config) // ranks)
    all_rows, groups = rows, 1 if sft else config.rollout.group_size
    if config.optimizer.micro_batch_size:
        rows = min(rows, config.optimizer.micro_batch_size)
    while sft and all_rows % rows:  # its passes are of equal size
        rows -= 1
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
    rows = min(config.rollout.concurrency * config.rollout.group_size, SAMPLED_AT_ONCE)
    length = prompt + answer
    held, columns = rows, min(1.25 * length, length + 64)
    # Buffers grow by a quarter, and the old one is still there while it is copied: of one layer at a time.
    if gpu:  # they are rounded up
        held, columns = max(8, 1 << (rows - 1).bit_length()), max(1.25 * length, length + 64)
    prompts = rows / config.rollout.group_size * prompt
    per_token = 2.0 * shape.layers * shape.kv_heads * shape.head_dim * weight
    cache = per_token * (held * columns + (prompts if gpu else 0.0))  # that of the prompts lies beside the buffers
    reading = prompts * weight * (2 * shape.hidden + 3 * shape.intermediate + 3 * shape.heads * shape.head_dim)
    sampling = 4.0 * _SAMPLE_COPIES * rows * shape.vocabulary
    parts = {"libraries": CUDA_BASE if gpu else SAMPLER_BASE, "weights": _weights(config, shape, weight)}
    if config.policy.lora:
        parts["adapters"] = 4.0 * _adapters(config, shape)
    share, others = config.inference.memory_share, sum(parts.values())
    opponent = config.environment.opponent
    if opponent == BASE or opponent.startswith(RUN):  # an embedded engine of its own, taken to be as large
        parts["opponent"] = parts["weights"] + cache + max(reading, sampling)
    if gpu and available and config.inference.engine == "vllm":  # the cache takes what the share leaves
        whole = share * available * max(1, config.launcher.inference_gpus)
        return Memory(parts | {"cache": max(0.0, whole - others)})
    if gpu and available and config.inference.engine == "transformers":  # the share is of what is free by then
        return Memory(parts | {"cache": share * max(0.0, available - others)})
    parts["cache"] = cache
    parts["reading and sampling"] = max(reading, sampling)
    return Memory(parts)


def _batch(config: Config) -> int:
    """Rows of an optimizer step."""
    sft = config.algorithm.name == "sft"
    return config.sft.batch_size if sft else config.rollout.group_size * config.rollout.groups_per_step


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
    if trained_in_full or config.policy.dtype == "float32":
        return 4.0
    return 2.0 if gpu or config.policy.dtype != "auto" else 4.0


def fit(
    config: Config,
    shape: ModelShape,
    available: float | None,
    *,
    prompt: int | None = None,
    gpus: int = 0,
    lent: int | None = None,
) -> Fit:
    """Estimate a configuration, and name the changes that make it fit.

    Args:
        available: Bytes of this machine's memory, or of one GPU.
        prompt: Tokens of a prompt; the most that the context allows if None.
        gpus: 0: on the CPU; 1: as the configuration says; more: one for the sampler and the others for the trainer,
            unless the configuration says otherwise.
        lent: GPUs that runs may use; no change needs more. None if unknown.
    """
    if gpus > 1 and config.launcher.num_processes == 1 and not config.launcher.inference_gpus:
        config = _with(config, _APART | {"launcher.num_processes": gpus - 1, "launcher.inference_gpus": 1})
    if gpus:
        gpus = config.launcher.num_processes + config.launcher.inference_gpus
    trainer, sampler = estimate(config, shape, prompt=prompt, gpu=gpus > 0, available=available)
    sure = (
        "within about 15 % on CPUs (make bench-fit)"
        if not gpus
        else "arithmetic; an H200 was measured, with adapters: 14 % off"
    )
    if not shape.measured:
        sure += "; the parameters are computed from the shape"
    if not shape.dense:
        sure += "; the activations of this architecture are not known well"
    held = (
        trainer.parts.get("weights", 0.0),
        sampler.parts.get("weights", 0.0) / max(1, config.launcher.inference_gpus),
    )
    total = _total(config, trainer, sampler, gpus > 0)
    result = Fit(trainer, sampler, total, available, gpus, sure, shape.measured, weights=max(held))
    return replace(result, mends=_mends(config, shape, result, prompt, gpus, lent)) if result.fits is False else result


def _total(config: Config, trainer: Memory, sampler: Memory, gpu: bool) -> float:
    if not gpu:
        return config.launcher.num_processes * trainer.total + sampler.total
    if apart := config.launcher.inference_gpus:
        return max(trainer.total, sampler.total / apart)
    if not (config.inference.sleep and sampler.parts):
        return trainer.total + sampler.total
    passes = sum(trainer.parts.get(name, 0.0) for name in ("activations", "logits"))
    return trainer.total + max(CUDA_BASE, sampler.total - passes)  # they take turns


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    config = config.model_copy(deep=True)
    for name, value in changes.items():
        section, _, key = name.partition(".")
        setattr(getattr(config, section), key, value)
    return config


def _mends(
    config: Config, shape: ModelShape, now: Fit, prompt: int | None, gpus: int, lent: int | None
) -> tuple[tuple[str, Mapping[str, Any], float], ...]:
    rows = _batch(config)
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
        apart = {name: value for name, value in _APART.items() if _with(config, {name: value}) != config}
        more = config.launcher.inference_gpus + 1
        tried.insert(0, ("a GPU for the sampler", {**apart, "launcher.inference_gpus": more}))
        tried.insert(1, ("twice as many GPUs for the trainer", {"launcher.num_processes": 2 * processes}))
    better = []
    for words, changes in tried:
        changed = _with(config, changes)
        wanted = changed.launcher.num_processes + changed.launcher.inference_gpus
        if gpus and lent is not None and wanted > max(gpus, lent):
            continue
        peaks = estimate(changed, shape, prompt=prompt, gpu=gpus > 0, available=now.available)
        total = _total(changed, *peaks, gpus > 0)
        if total < now.total and set(changed.conflicts()) <= set(config.conflicts()):
            better.append((words, changes, total))
    enough = [mend for mend in better if now.available is not None and mend[2] <= now.available]
    return tuple(enough[:3] or sorted(better, key=lambda mend: mend[2])[:2])
