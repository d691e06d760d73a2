"""Policies that start from the weights of another run."""

from __future__ import annotations

import json
import time

import pytest

from toprope.errors import NotFound, NotPossibleNow
from toprope.records.run.checkpoints import seal
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Status
from toprope.workbench.launch.lineage import base_of


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path, "run-a")
    now = time.time()
    Status(
        run_id="run-a", kind="sft", environment="dice", state="completed", created_at=now, since=now, updated_at=now
    ).write(made)
    return made


def checkpoint(folder: RunFolder, step: int) -> None:
    path = folder.checkpoints / f"step-{step:06d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "model.safetensors").write_bytes(b"weights")
    (path / "state.json").write_text(json.dumps({"step": step, "cursor": 0, "version": 1}))
    seal(path)


def test_base_of_ignores_plain_model_names(tmp_path):
    assert base_of("embedded", tmp_path) is None and base_of("/some/folder", tmp_path) is None


def test_base_of_takes_newest_undamaged_checkpoint(folder):
    checkpoint(folder, 1)
    checkpoint(folder, 2)
    assert base_of("run:run-a", folder.path.parent) == ("run-a", str(folder.checkpoints / "step-000002" / "model"))
    (folder.checkpoints / "step-000002" / "model" / "model.safetensors").write_bytes(b"damaged")
    assert base_of("run:run-a", folder.path.parent)[1].endswith("step-000001/model")


def test_base_of_says_why_run_has_no_weights(folder):
    with pytest.raises(NotFound, match="no run"):
        base_of("run:nobody", folder.path.parent)
    with pytest.raises(NotPossibleNow, match="no checkpoint"):
        base_of("run:run-a", folder.path.parent)
    Status.read(folder).model_copy(update={"state": "training"}).write(folder)
    with pytest.raises(NotPossibleNow, match="still training"):
        base_of("run:run-a", folder.path.parent)
