"""Weights in 4 and 8 bits, and optimizer moments in 8 bits, by bitsandbytes, where memory is short."""

from __future__ import annotations

import importlib
from typing import Any

from toprope.errors import InvalidValue
from toprope.settings.schema import PolicySection


def quantization_config(field: str, *, needs_gpu: bool = True) -> Any:
    """The transformers configuration that loads a model in 8 bits (LLM.int8(), Dettmers et al. 2022).

    Args:
        field: The setting that asks for it, for the error.
        needs_gpu: False where a CPU, though slow, will do.

    Raises:
        InvalidValue: bitsandbytes or an NVIDIA GPU is missing.
    """
    _import_bitsandbytes(field, needs_gpu)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def frozen_weights_config(policy: PolicySection, dtype: Any) -> Any | None:
    """The transformers configuration for the weights below adapters; None if they keep their format.

    4 bits are NF4 with quantized constants (QLoRA, Dettmers et al. 2023).

    Args:
        dtype: Number format of computations.

    Raises:
        InvalidValue: bitsandbytes is missing.
    """
    if policy.load_in_8bit:
        return quantization_config("policy.load_in_8bit", needs_gpu=False)
    if not policy.load_in_4bit:
        return None
    _import_bitsandbytes("policy.load_in_4bit", needs_gpu=False)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def make_adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Any:
    """AdamW with block-wise moments in 8 bits (Dettmers et al. 2021).

    Raises:
        InvalidValue: bitsandbytes or an NVIDIA GPU is missing.
    """
    return _import_bitsandbytes("optimizer.eight_bit", needs_gpu=True).optim.AdamW8bit(groups, lr=lr, betas=betas)


def _import_bitsandbytes(field: str, needs_gpu: bool) -> Any:
    import torch

    if needs_gpu and not torch.cuda.is_available():
        raise InvalidValue(f"{field} needs an NVIDIA GPU, and PyTorch finds none here.", hint=f"Switch {field} off.")
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise InvalidValue(
            f"{field} needs the library bitsandbytes, which cannot be imported here: {error}.",
            hint=f"Install it beside Toprope (pip install bitsandbytes), or switch {field} off.",
        ) from None
