"""Records of a run with the least that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import Status
from toprope.settings.schema import Config


def specification(run_id: str = "run-1", **fields: Any) -> Specification:
    """Return the specification of a training run, with other fields if they are given."""
    usual: dict[str, Any] = {
        "kind": "train",
        "created_at": 1.0,
        "toprope_version": "0",
        "environment": EnvironmentSource(name="dice", file="/nowhere.py", attribute="Dice"),
        "config": Config(),
        "policy_cache": "/nowhere",
    }
    return Specification(run_id=run_id, **(usual | fields))


def status(run_id: str = "run-1", state: str = "training", **fields: Any) -> Status:
    """Return the status of a run, with other fields if they are given."""
    usual: dict[str, Any] = {"kind": "train", "environment": "dice", "created_at": 1.0, "since": 1.0, "updated_at": 1.0}
    return Status(run_id=run_id, state=state, **(usual | fields))  # type: ignore[arg-type]


def run_folder(runs: Path, specification: Specification, state: str = "training", **fields: Any) -> RunFolder:
    """Create the folder of a run with its specification and status.

    Args:
        runs: The folder of runs.
        specification: That of `specification` or of a `RunHarness`.
        state: The run's state.
        fields: Other fields of its status.
    """
    folder = RunFolder.create(runs, specification.run_id)
    specification.write(folder)
    status(folder.run_id, state, kind=specification.kind, **fields).write(folder)
    return folder
