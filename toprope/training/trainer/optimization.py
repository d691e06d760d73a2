"""Optimizer, learning rate schedule, and the check for values that are not finite. The schedule needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from toprope.settings.schema import Config

if TYPE_CHECKING:
    import torch

_SMALL = 1 << 16
"""Values of a tensor that are copied sooner than looked at in place."""


def learning_rate_factor(config: Config, step: int, elapsed_s: float) -> float:
    """Multiplier of the learning rate at `step`.

    Warm-up counts steps. The decay of `linear` and `cosine` follows the nearer of the two limits, steps and seconds, so
    that it ends with the run.
    """
    optimizer, budget = config.optimizer, config.budget
    warmup = 0 if optimizer.lr_scheduler_type == "constant" else optimizer.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optimizer.lr_scheduler_type in ("constant", "constant_with_warmup"):
        return 1.0
    progress = (step - warmup) / max(1, budget.steps - warmup)
    if budget.max_train_seconds is not None and not config.algorithm.deterministic:
        progress = max(progress, elapsed_s / budget.max_train_seconds)
    progress = min(max(progress, 0.0), 1.0)
    if optimizer.lr_scheduler_type == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def make_optimizer(config: Config, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    import torch

    section = config.optimizer
    matrices = [value for value in parameters.values() if value.dim() > 1]
    vectors = [value for value in parameters.values() if value.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups, betas = [group for group in groups if group["params"]], (section.adam_beta1, section.adam_beta2)
    if section.eight_bit:
        from toprope.training.policy.quantization import make_adamw_8bit

        eight_bit: torch.optim.Optimizer = make_adamw_8bit(groups, lr=section.learning_rate, betas=betas)
        return eight_bit
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=betas, fused=True)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True if all values of all floating-point tensors are finite."""
    import torch

    with torch.no_grad():
        # One pass without a copy, and NaN and infinity propagate. A CPU finds the largest magnitude ten times slower
        # than the two ends, a GPU finds it for all tensors together.
        floating = [tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
        if floating and all(tensor.device.type == "cpu" for tensor in floating):
            small = [tensor.flatten() for tensor in floating if tensor.numel() <= _SMALL]
            floating = [tensor for tensor in floating if tensor.numel() > _SMALL]
            floating += [torch.cat(small)] if small else []
            ends = [end for tensor in floating for end in torch.aminmax(tensor)]
            return bool(torch.stack(ends).isfinite().all())
        return bool(torch.nn.utils.get_total_norm(floating, float("inf")).isfinite())
