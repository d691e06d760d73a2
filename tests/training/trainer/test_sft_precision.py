"""Supervised fine-tuning above quantized weights and in bfloat16: the published weights are the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.training.trainer.test_sft import fine_tuned, sft_config
from toprope.records.messages import Stepped
from toprope.records.run.folder import RunFolder
from toprope.settings.schema import Config
from toprope.training.policy.loading import load_model
from toprope.training.policy.weight_sync import TOLERANCE, WeightReader
from toprope.training.trainer import local
from toprope.training.trainer.step import learner


def published(folder: RunFolder, policy: Path, config: Config) -> Any:
    """The model of inference with the newest weights, which their check has found right."""
    model = load_model(policy, config)
    assert WeightReader(folder.crew, dict(model.named_parameters()), model).refresh() > 0
    return model


def test_adapters_above_quantized_weights_are_published_and_resume(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL replaces the tensors of such adapters by rounded ones."""
    loaded: list[Any] = []

    def load(*given: Any, **options: Any) -> Any:
        loaded.append(load_model(*given, **options))
        loaded[-1].is_loaded_in_4bit = True
        return loaded[-1]

    monkeypatch.setattr(local, "load_model", load)
    config = sft_config(policy__lora=True)
    fine_tuned(tmp_path / "run", tiny_policy, config, stop_after=2)
    member, folder = fine_tuned(tmp_path / "run", tiny_policy, config)
    assert [report.step for report in member.of(Stepped)] == [3, 4, 5]
    trained = {name: value for name, value in loaded[-1].named_parameters() if value.requires_grad}
    assert {value.dtype for value in trained.values()} == {torch.float32}
    found = dict(published(folder, tiny_policy, config).named_parameters())
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    assert any(bool(value.any()) for name, value in trained.items() if "lora_B" in name)


@pytest.fixture
def own_precision() -> Iterator[None]:
    """The precision of accelerate is that of the process, and other tests have theirs."""
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("own_precision")
def test_first_version_of_bfloat16_passes_the_check_of_float32_inference(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "cpu_computes_bfloat16", lambda: True)  # in software where the CPU lacks it
    monkeypatch.setitem(TOLERANCE, "float32", 1e-5)  # logits of a tiny policy are small, and so is their rounding
    config = sft_config(optimizer__precision="bfloat16", policy__dtype="float32")
    _, folder = fine_tuned(tmp_path / "run", tiny_policy, config, stop_after=1)
    published(folder, tiny_policy, config)
