"""The trainer's record of a Weights & Biases run, and its place in a report."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from toprope.analysis.reports.report import gather
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import Status
from toprope.settings.schema import Config
from toprope.training.trainer.base import write_wandb_record

PAGE = "https://wandb.example/me/toprope/runs/r1"


@pytest.mark.parametrize(("mode", "url"), [("offline", None), ("online", PAGE)])
def test_wandb_record_has_folder_and_url_if_online(tmp_path, monkeypatch, mode, url):
    folder = RunFolder.create(tmp_path, "r1")
    config = Config()
    config.logging.wandb = mode
    specification = Specification(
        run_id="r1", kind="train", created_at=0, toprope_version="0", environment=EnvironmentSource(name="x"),
        config=config, policy_cache="/nowhere",
    )  # fmt: skip
    status = Status(run_id="r1", kind="train", environment="x", state="training", created_at=0, since=0, updated_at=0)
    assert gather(folder, specification, status).wandb == {"mode": mode}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    write_wandb_record(folder, mode)
    assert not (folder.path / "wandb.json").exists()
    run = SimpleNamespace(url=url, dir=f"{folder.path}/wandb/run-1/files")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    write_wandb_record(folder, mode)
    assert read_json(folder.path / "wandb.json")["folder"] == f"{folder.path}/wandb/run-1"
    told = gather(folder, specification, status).wandb
    assert told is not None and told["mode"] == mode and told.get("url") == url
    config.logging.wandb = "disabled"
    assert gather(folder, specification, status).wandb is None
