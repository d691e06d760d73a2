"""The learning rate over a run."""

from __future__ import annotations

import pytest

from toprope.settings.schema import Config
from toprope.training.trainer.optimization import learning_rate_factor


def configured(kind: str, warmup: int = 4, steps: int = 104, seconds: float | None = None) -> Config:
    config = Config()
    config.optimizer.lr_scheduler_type = kind  # type: ignore[assignment]
    config.optimizer.warmup_steps, config.budget.steps = warmup, steps
    config.budget.max_train_seconds = seconds
    return config


def test_warmup_rises_to_peak() -> None:
    config = configured("constant_with_warmup")
    assert [learning_rate_factor(config, step, 0.0) for step in range(6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    )
    assert learning_rate_factor(configured("constant"), 0, 0.0) == 1.0


def test_linear_and_cosine_decay_to_zero() -> None:
    assert learning_rate_factor(configured("linear"), 54, 0.0) == pytest.approx(0.5)
    assert learning_rate_factor(configured("linear"), 104, 0.0) == 0.0
    assert learning_rate_factor(configured("cosine"), 54, 0.0) == pytest.approx(0.5)
    assert learning_rate_factor(configured("cosine"), 104, 0.0) == pytest.approx(0.0)


def test_decay_follows_nearer_limit() -> None:
    config = configured("linear", seconds=80.0)
    assert learning_rate_factor(config, 54, 10.0) == pytest.approx(0.5)
    assert learning_rate_factor(config, 54, 60.0) == pytest.approx(0.25)
    assert learning_rate_factor(config, 54, 200.0) == 0.0


def test_deterministic_learning_rate_ignores_the_clock() -> None:
    config = Config()
    config.optimizer.lr_scheduler_type, config.optimizer.warmup_steps = "linear", 0
    config.budget.steps, config.budget.max_train_seconds = 100, 10.0
    assert learning_rate_factor(config, 10, 9.0) == pytest.approx(0.1)
    config.algorithm.deterministic = True
    assert learning_rate_factor(config, 10, 9.0) == pytest.approx(0.9)
