"""Imported by vLLM's workers, in vLLM's interpreter: log-probabilities before nucleus sampling.

vLLM returns log-probabilities either before temperature or after everything. Training needs those with temperature and
without the nucleus, because the trainer computes the same. So the last sampler's are replaced by those of its input.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler  # type: ignore[import-not-found]


class Extension:
    """Mixed into vLLM's worker."""

    def toprope_loaded(self) -> bool:
        """True; the engine asks whether this module is in force."""
        return True


def _sample_with_earlier_logprobs(self: Any, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
    needed = self.logprobs_mode == "processed_logprobs" and (k is not None or p is not None)
    earlier = logits.log_softmax(-1, dtype=torch.float32) if needed else None  # the sampler masks its input in place
    tokens, later = torch.nn.Module.__call__(self, logits, generators, k, p)
    return tokens, later if earlier is None else earlier


TopKTopPSampler.__call__ = _sample_with_earlier_logprobs
