"""The tiny policy behind the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from toprope.training.inference.embedded_engine import EmbeddedEngine
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
