"""Collates the rows of a batch into tensors, for any algorithm that trains on delivered groups."""

from __future__ import annotations

from typing import TypeVar

import torch

from toprope.training.trainer.batch_source import TrainingRow

_T = TypeVar("_T")

BATCH_KEYS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",
    "num_items_in_batch",
    "old_per_token_logps",
    "sampling_per_token_logps",
)
"""Keys that `collate` returns: all that TRL's `_compute_loss` reads of a text batch, but for ref_per_token_logps."""


def collate(
    rows: list[TrainingRow], pad: int, *, mask_truncated: bool, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Tensors of R rows with longest prompt P and longest completion C.

    Returns:
        prompt_ids, prompt_mask: R x P, padded on the left. completion_ids, completion_mask, tool_mask (0 where the
        environment wrote), old_per_token_logps, sampling_per_token_logps: R x C, padded on the right.
        advantages: R, or R x C if an environment gave them per token.
        num_items_in_batch: scalar, number of trained tokens.
    """
    prompts = max(max(len(row.prompt) for row in rows), 1)
    completions = max(len(row.completion) for row in rows)

    def right(values: list[_T], fill: _T) -> list[_T]:
        return values + [fill] * (completions - len(values))

    def left(values: list[_T], fill: _T) -> list[_T]:
        return [fill] * (prompts - len(values)) + values

    shown = [not (mask_truncated and row.truncated) for row in rows]
    completion_mask = torch.tensor(
        [right([int(show)] * len(row.completion), 0) for row, show in zip(rows, shown, strict=True)]
    )
    tool_mask = torch.tensor([right([int(kept) for kept in row.trained], 0) for row in rows])
    logprobs = torch.tensor([right(row.logprobs, 0.0) for row in rows])
    if any(row.token_advantages is not None for row in rows):
        advantages = torch.tensor(
            [right(row.token_advantages or [row.advantage] * len(row.completion), 0.0) for row in rows]
        )
    else:
        advantages = torch.tensor([row.advantage for row in rows])
    batch = {
        "prompt_ids": torch.tensor([left(row.prompt, pad) for row in rows]),
        "prompt_mask": torch.tensor([left([1] * len(row.prompt), 0) for row in rows]),
        "completion_ids": torch.tensor([right(row.completion, pad) for row in rows]),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": advantages,
        "num_items_in_batch": (completion_mask * tool_mask).sum().float(),
        "old_per_token_logps": logprobs,
        "sampling_per_token_logps": logprobs,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}
