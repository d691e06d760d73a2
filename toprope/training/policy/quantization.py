"""Weights and moments in 8 bits, by bitsandbytes, where a GPU's memory is short; else a sentence that says why not."""

from __future__ import annotations

from typing import Any

from toprope.errors import InvalidValue

__all__ = ["adamw", "quantized"]


def quantized(field: str) -> Any:
    """How transformers loads a model in 8 bits (LLM.int8(), Dettmers et al. 2022).

    Args:
        field: What asks for it, for the error.

    Raises:
        InvalidValue: There is no bitsandbytes or no NVIDIA GPU here.
    """
    _bitsandbytes(field)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def adamw(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Any:
    """AdamW whose moments have 8 bits, block by block (Dettmers et al. 2021).

    Raises:
        InvalidValue: There is no bitsandbytes or no NVIDIA GPU here.
    """
    return _bitsandbytes("optimizer.eight_bit").optim.AdamW8bit(groups, lr=lr, betas=betas)


def _bitsandbytes(field: str) -> Any:
    import torch

    if not torch.cuda.is_available():
        raise InvalidValue(f"{field} needs an NVIDIA GPU, and PyTorch sees none here.", hint=f"Switch {field} off.")
    try:
        import bitsandbytes
    except ImportError as error:
        raise InvalidValue(
            f"{field} needs the library bitsandbytes, which cannot be imported here: {error}.",
            hint=f"Install it beside Toprope (pip install bitsandbytes), or switch {field} off.",
        ) from None
    return bitsandbytes
