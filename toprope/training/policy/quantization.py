"""Weights and optimizer moments in 8 bits, by bitsandbytes, for GPUs that are short of memory."""

from __future__ import annotations

import importlib
from typing import Any

from toprope.errors import InvalidValue


def quantization_config(field: str) -> Any:
    """The transformers configuration that loads a model in 8 bits (LLM.int8(), Dettmers et al. 2022).

    Args:
        field: The setting that asks for it, for the error.

    Raises:
        InvalidValue: bitsandbytes or an NVIDIA GPU is missing.
    """
    _import_bitsandbytes(field)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def make_adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Any:
    """AdamW with block-wise moments in 8 bits (Dettmers et al. 2021).

    Raises:
        InvalidValue: bitsandbytes or an NVIDIA GPU is missing.
    """
    return _import_bitsandbytes("optimizer.eight_bit").optim.AdamW8bit(groups, lr=lr, betas=betas)


def _import_bitsandbytes(field: str) -> Any:
    import torch

    if not torch.cuda.is_available():
        raise InvalidValue(f"{field} needs an NVIDIA GPU, and PyTorch finds none here.", hint=f"Switch {field} off.")
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise InvalidValue(
            f"{field} needs the library bitsandbytes, which cannot be imported here: {error}.",
            hint=f"Install it beside Toprope (pip install bitsandbytes), or switch {field} off.",
        ) from None
