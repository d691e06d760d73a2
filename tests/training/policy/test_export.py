"""A checkpoint's policy as a folder for other programs: adapters over a model of the Hub, several chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.trainer_stand_ins import small_config
from toprope.errors import InvalidValue
from toprope.records.run.checkpoints import seal
from toprope.training.policy.export import export_policy
from toprope.training.policy.loading import load_model, load_pretrained, load_tokenizer
from toprope.training.policy.weight_sync import check_weights
from toprope.trajectories.jobs.orders import PolicyExport
from toprope.trajectories.jobs.policies import export_trained

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a model in the Hub's cache, with two revisions of which the newer is `main`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stored = tmp_path / "hub" / "models--acme--tiny"
    for revision in (OLD, NEW):
        shutil.copytree(tiny_policy, stored / "snapshots" / revision)
    other = load_pretrained(tiny_policy, "cpu")
    with torch.no_grad():
        other.lm_head.weight.mul_(3)
    other.save_pretrained(stored / "snapshots" / NEW)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(NEW)
    return "acme/tiny"


def test_adapters_over_a_revision_of_a_hub_model_are_merged(hub: str, tiny_policy: Path, tmp_path: Path) -> None:
    checkpoint, config = tmp_path / "checkpoint", small_config(policy__lora=True)
    policy = load_model(tiny_policy, config)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    policy.save_pretrained(checkpoint)
    load_tokenizer(tiny_policy).save_pretrained(checkpoint)
    adapters = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(
        json.dumps(adapters | {"base_model_name_or_path": hub, "revision": OLD})
    )
    merged = tmp_path / "merged"
    export_policy(checkpoint, merged, "merged", dtype="as saved", base="", converter=[])
    error = check_weights(load_pretrained(merged, "cpu")).largest_error(check_weights(policy).logprobs)
    assert error < 1e-4
    gone = {"base_model_name_or_path": str(tmp_path / "gone"), "revision": None}
    (checkpoint / "adapter_config.json").write_text(json.dumps(adapters | gone))
    with pytest.raises(InvalidValue, match="which is no longer there"):
        export_policy(checkpoint, tmp_path / "none", "merged", dtype="as saved", base="", converter=[])


@pytest.mark.parametrize("dtype", ["as saved", "bfloat16"])
def test_export_keeps_all_chat_templates(tiny_policy: Path, tmp_path: Path, dtype: str) -> None:
    checkpoint, target = tmp_path / "step-000001", tmp_path / "exported"
    shutil.copytree(tiny_policy, checkpoint / "model")
    tokenizer = load_tokenizer(tiny_policy)
    templates = {"default": tokenizer.chat_template, "tool_use": f"tools {tokenizer.chat_template}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(checkpoint / "model")
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "cursor": 0, "version": 2, "policy_version": 1}))
    seal(checkpoint)
    order = PolicyExport(checkpoint=str(checkpoint), form="merged", dtype=dtype, card="", origin={})
    outcome = export_trained(order, target, lambda *progress: None)
    assert load_tokenizer(target).chat_template == templates
    files = [path for path in target.rglob("*") if path.is_file()]
    assert outcome.items == len(files) and outcome.bytes == sum(path.stat().st_size for path in files)
    hashes = json.loads((target / "toprope.json").read_text())["files"]
    assert "additional_chat_templates/tool_use.jinja" in hashes and len(hashes) == len(files) - 1
