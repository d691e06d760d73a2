"""Checkpoints are complete or absent, contain no pickle, and continue training exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from toprope.errors import Corrupt
from toprope.records.run.folder import checkpoints_in
from toprope.settings.schema import Config
from toprope.training.policy.loading import load_model, load_tokenizer
from toprope.training.trainer.checkpoints.checkpoint_folder import CheckpointState, commit_checkpoint
from toprope.training.trainer.checkpoints.checkpoint_io import load_checkpoint, load_moments, save_checkpoint


def make(folder: Path) -> tuple[Any, Any, Any]:
    config = Config()
    config.launcher.device = "cpu"
    model = load_model(folder, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        ids = torch.randint(4, 200, (4, 6))
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_load_checkpoint_continues_exactly(tiny_policy: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_policy)
    model, optimizer, scheduler = make(tiny_policy)
    torch.manual_seed(1)
    train(model, optimizer, scheduler, 3)
    state = CheckpointState(step=3, cursor=24, policy_version=3, train_seconds=1.5)
    parts = {"model": model, "tokenizer": tokenizer, "optimizer": optimizer, "scheduler": scheduler}
    path = save_checkpoint(tmp_path, state, keep=2, **parts)
    numbers = [random.random() for _ in range(3)]
    expected = train(model, optimizer, scheduler, 3)

    torch.manual_seed(99)
    random.seed(99)
    model, optimizer, scheduler = make(path / "model")
    assert load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler) == state
    assert [random.random() for _ in range(3)] == numbers
    assert train(model, optimizer, scheduler, 3) == expected
    assert load_tokenizer(path / "model").chat_template == tokenizer.chat_template


def test_checkpoint_that_another_run_began_with_is_not_removed(tmp_path: Path) -> None:
    """Its adapters may lie over these weights, and the run that made them was resumed."""
    folder, other = tmp_path / "run-1" / "checkpoints", tmp_path / "run-2"
    folder.mkdir(parents=True)
    other.mkdir()

    def write(aside: Path) -> None:
        aside.mkdir()
        (aside / "state.json").write_text("{}")

    commit_checkpoint(folder, 1, write, keep=1)
    named = {"config": {"policy": {"model": str(folder / "step-000001" / "model")}}}
    (other / "spec.json").write_text(json.dumps(named))
    for step in (2, 3):
        commit_checkpoint(folder, step, write, keep=1)
    assert [path.name for path in checkpoints_in(folder)] == ["step-000001", "step-000003"]
    (other / "spec.json").unlink()
    commit_checkpoint(folder, 4, write, keep=1)
    assert [path.name for path in checkpoints_in(folder)] == ["step-000004"]


def test_checkpoints_have_no_pickle_and_old_ones_are_removed(tiny_policy: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_policy)
    model, optimizer, scheduler = make(tiny_policy)
    train(model, optimizer, scheduler, 1)
    for step in (1, 2, 10):
        save_checkpoint(
            tmp_path,
            CheckpointState(step, step * 8, step, 0.0),
            model=model,
            tokenizer=tokenizer,
            optimizer=optimizer,
            scheduler=scheduler,
            keep=2,
        )
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000002", "step-000010"]
    newest = checkpoints_in(tmp_path)[-1]
    suffixes = {path.suffix for path in newest.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


def test_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-000004" / "model").mkdir(parents=True)
    assert checkpoints_in(tmp_path) == []


def after_one_step(policy: Path, folder: Path) -> tuple[Path, Any, Any, Any]:
    """A checkpoint of step 1, with its model, optimizer and scheduler."""
    model, optimizer, scheduler = make(policy)
    train(model, optimizer, scheduler, 1)
    path = save_checkpoint(
        folder,
        CheckpointState(1, 8, 1, 0.0),
        model=model,
        tokenizer=load_tokenizer(policy),
        optimizer=optimizer,
        scheduler=scheduler,
        keep=1,
    )
    return path, model, optimizer, scheduler


@pytest.mark.parametrize("broken", ["state.json", "optimizer.safetensors", "random.safetensors"])
def test_damaged_checkpoint_is_refused_and_kept(tiny_policy: Path, tmp_path: Path, broken: str) -> None:
    path, model, optimizer, scheduler = after_one_step(tiny_policy, tmp_path)
    content = (path / broken).read_bytes()[:-7]
    (path / broken).write_bytes(content)
    with pytest.raises(Corrupt, match="step-000001"):
        load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert (path / broken).read_bytes() == content


class NestedMoments(torch.optim.AdamW):
    """Nests its state as bitsandbytes does, beside a number that is no tensor."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = {place: {"step": 7, "quantized": entry} for place, entry in found["state"].items()}
        return found | {"state": state}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        assert all(entry["step"] == 7 for entry in given["state"].values())
        super().load_state_dict(given | {"state": {n: entry["quantized"] for n, entry in given["state"].items()}})


def saved_after_two_steps(
    kind: type[torch.optim.AdamW], tiny_policy: Path, folder: Path
) -> tuple[Path, dict[int, dict[str, torch.Tensor]], Any, Any]:
    """The checkpoint, the optimizer's plain state, the model and the scheduler."""
    model, _, _ = make(tiny_policy)
    optimizer = kind(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    train(model, optimizer, scheduler, 2)
    state, parts = CheckpointState(2, 8, 2, 0.0), {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = save_checkpoint(folder, state, keep=1, tokenizer=load_tokenizer(tiny_policy), **parts)
    return path, torch.optim.AdamW.state_dict(optimizer)["state"], model, scheduler


def test_nested_moments_are_restored(tiny_policy: Path, tmp_path: Path) -> None:
    path, expected, model, scheduler = saved_after_two_steps(NestedMoments, tiny_policy, tmp_path)
    again = NestedMoments(model.parameters(), lr=1e-2)
    load_checkpoint(path, model=model, optimizer=again, scheduler=scheduler)
    found = torch.optim.AdamW.state_dict(again)["state"]
    assert found.keys() == expected.keys() and len(found) > 10
    for place, entry in expected.items():
        assert all(torch.equal(value, found[place][key]) for key, value in entry.items())


class QuantizedMoments(torch.optim.AdamW):
    """Nests its state as bitsandbytes does, with tensors of other shapes than the parameter's."""

    non_castable_tensor_keys = frozenset({"qmap1", "absmax1", "state1"})

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = {}
        for place, entry in found["state"].items():
            moments = {"qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.ones(3), "state1": entry["exp_avg"]}
            state[place] = {"step": 2, "quantized": moments | {"step": entry["step"]}}  # AdamW wants one
        return found | {"state": state}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        super().load_state_dict(given | {"state": {n: entry["quantized"] for n, entry in given["state"].items()}})


def test_quantized_moments_go_on_in_another_run(tiny_policy: Path, tmp_path: Path) -> None:
    """Beside them are tensors of other shapes. Other optimizers, and parameters of another shape, begin without."""
    path, expected, model, _ = saved_after_two_steps(QuantizedMoments, tiny_policy, tmp_path)
    again = QuantizedMoments(model.parameters(), lr=1e-2)
    assert load_moments(path, model=model, optimizer=again) == len(expected) > 10
    found = torch.optim.AdamW.state_dict(again)["state"]
    assert all(torch.equal(entry["exp_avg"], found[place]["state1"]) for place, entry in expected.items())
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert load_moments(path, model=model, optimizer=plain) == 0 and not plain.state_dict()["state"]
    model.resize_token_embeddings(300)
    resized = QuantizedMoments(model.parameters(), lr=1e-2)
    assert load_moments(path, model=model, optimizer=resized) == len(expected) - 1


def test_checkpoint_state_has_version(tiny_policy: Path, tmp_path: Path) -> None:
    path, *_ = after_one_step(tiny_policy, tmp_path)
    assert json.loads((path / "state.json").read_text())["version"] == 2
