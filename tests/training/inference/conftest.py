"""The tiny policy behind the embedded engine."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.engine import Engine, Sample, SamplingRequest
from toprope.training.policy.loading import load_tokenizer


@pytest.fixture(scope="module")
def model(tiny_policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_policy: Path) -> Any:
    return load_tokenizer(tiny_policy)


@pytest.fixture
def engine(model: Any, tokenizer: Any) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, tokenizer, max_context=64)
    engine.start()
    yield engine
    engine.stop()


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
