"""The value head of PPO: what reward to expect, read off the policy's last hidden state, one number a token.

It stands on the policy's own trunk, so there is no second model in memory. It is a file of its own in a checkpoint
(`value_head.safetensors`): what is published, and what `from_pretrained` loads, stays a plain language model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["FILE", "ValueHead", "with_values"]

FILE = "value_head"
"""Its name in a checkpoint."""


class ValueHead(nn.Module):
    """A hidden layer as wide as the trunk, and one number. It begins at zero everywhere: expecting nothing is the one
    guess that does no harm before the first reward was seen.

    Args:
        width: Of the trunk's hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Values of hidden states: ... x width to ..."""
        return self.out(torch.tanh(self.hidden(states))).squeeze(-1)


def with_values(
    model: Any, head: ValueHead | None, ids: torch.Tensor, mask: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and values at the positions from which the last `keep` tokens were chosen.

    Args:
        model: A causal LM, with adapters or without.
        head: The value head; None: values are not wanted.
        ids: R x T token ids.
        mask: R x T, 0 at padding.
        keep: How many tokens at the end of each row, C.

    Returns:
        Logits R x C x V in float32, and values R x C.
    """
    found: list[torch.Tensor] = []

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0])

    # What the output layer is given is the last hidden state after the final norm, in every architecture and below
    # adapters, and is there anyway.
    hook = model.get_output_embeddings().register_forward_pre_hook(look)
    try:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep + 1, use_cache=False
        ).logits
    finally:
        hook.remove()
    logits = logits[:, -keep - 1 : -1].float()
    if head is None:
        return logits, None
    with torch.autocast(ids.device.type, enabled=False):  # half precision would round values to three digits
        return logits, head(found[-1][:, -keep - 1 : -1].float())
