"""Helpers for tests of inference: blocking requests to an engine, and log-probabilities computed directly."""

from __future__ import annotations

import queue
from typing import Any

import torch

from toprope.training.inference.engine import Engine, Sample, SamplingRequest

SECRET = "s3cret"


def sample(engine: Engine, *requests: SamplingRequest) -> list[list[Sample]]:
    """Submit requests at once; return their samples in order, or raise the first error."""
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    for index, request in enumerate(requests):
        engine.submit(request, lambda result, index=index: answers.put((index, result)))
    by_index = dict(answers.get(timeout=300) for _ in requests)
    for result in by_index.values():
        if isinstance(result, Exception):
            raise result
    return [by_index[index] for index in range(len(requests))]


def reference_logprobs(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of an answer's ids from one forward pass, shape (len(answer),)."""
    with torch.no_grad():
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).cpu().gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
