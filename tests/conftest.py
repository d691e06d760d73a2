"""What tests share: one torch thread, and a tiny policy with random weights that loads in milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.tiny_policy import make_tiny_policy

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer, a chat template and a small random Llama."""
    return make_tiny_policy(tmp_path_factory.mktemp("tiny-policy"))
