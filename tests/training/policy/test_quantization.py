"""Frozen weights in 4 and 8 bits below adapters: refused in words without bitsandbytes, trained with it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.run_engines import BITSANDBYTES
from tests.support.trainer_stand_ins import StandInApi, rows, small_config, small_run_config, train_in
from toprope.errors import InvalidValue
from toprope.records.run.folder import RunFolder
from toprope.settings.schema import Config
from toprope.training.policy.loading import load_model

FIELDS = {"4": "policy__load_in_4bit", "8": "policy__load_in_8bit"}


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.parametrize("bits", FIELDS)
def test_quantized_weights_need_bitsandbytes(tiny_policy: Path, bits: str) -> None:
    with pytest.raises(InvalidValue, match=f"policy.load_in_{bits}bit needs the library bitsandbytes"):
        load_model(tiny_policy, small_config(**{FIELDS[bits]: True}, policy__lora=True), trained=True)


def test_quantized_weights_are_for_adapters_alone() -> None:
    config = Config()
    config.policy.load_in_4bit = True
    assert config.conflicts() == ["policy.load_in_4bit freezes the weights, so it needs policy.lora."]
    config.policy.lora = True
    assert config.conflicts() == []
    config.policy.load_in_8bit = True
    assert "exclude each other" in config.conflicts()[0]


@pytest.fixture
def wide_policy(tiny_policy: Path, tmp_path: Path) -> Path:
    """A policy whose matrices have whole blocks of 64 values in a row, as 4 bits on a CPU need."""
    from transformers import AutoConfig, LlamaForCausalLM

    shutil.copytree(tiny_policy, tmp_path / "wide")
    config = AutoConfig.from_pretrained(tiny_policy)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.mark.engines
@pytest.mark.skipif(not BITSANDBYTES.is_dir(), reason="bitsandbytes is not there: make test-engines")
@pytest.mark.parametrize("bits", FIELDS)
def test_adapters_train_on_quantized_weights(wide_policy: Path, tmp_path: Path, bits: str) -> None:
    """One process, and two ranks, each with the whole quantized weights."""
    told = {}
    for processes in (1, 2):
        code = f"from {__name__} import child; child(*{(str(tmp_path), str(wide_policy), bits, processes)!r})"
        path = os.pathsep.join([str(Path(__file__).parents[3]), str(BITSANDBYTES)])
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told[processes] = json.loads(done.stdout.splitlines()[-1])
    one, two = told[1], told[2]
    assert one["stored"] == {"4": "torch.uint8", "8": "torch.int8"}[bits]
    assert 0 < one["difference"] < 0.2, "quantized weights answer nearly as the whole ones do"
    assert len(one["losses"]) == 4 and one["moved"]
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)


def child(path: str, policy: str, bits: str, processes: int) -> None:
    """Train two steps, resume for two more, and print what was found."""
    from safetensors.torch import load_file

    changes: dict[str, Any] = {FIELDS[bits]: True, "policy__lora": True, "budget__steps": 4}
    config = small_run_config(**changes, launcher__num_processes=processes)
    folder = RunFolder.create(Path(path), f"run-{bits}-{processes}")
    train_in(folder, Path(policy), config, StandInApi(), stop_after=2)
    train_in(folder, Path(policy), config, StandInApi())
    model = load_model(Path(policy), config, trained=True)
    ids = torch.arange(5, 20).unsqueeze(0)
    with torch.no_grad(), model.disable_adapter():
        difference = (model(ids).logits - load_model(Path(policy), small_config())(ids).logits).abs().max()
    checkpoint = folder.newest_checkpoint()
    assert checkpoint is not None
    adapters = load_file(checkpoint / "model" / "adapter_model.safetensors")
    stored = next(value.dtype for name, value in model.named_parameters() if name.endswith("q_proj.base_layer.weight"))
    print(
        json.dumps(
            {
                "stored": str(stored),
                "difference": float(difference),
                "losses": [row["loss"] for row in rows(folder)],
                "moved": all(bool(value.any()) for name, value in adapters.items() if "lora_B" in name),
            }
        )
    )
