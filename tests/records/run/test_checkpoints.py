"""A checkpoint is held against its manifest before it is used; a damaged one is passed over by name and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import records
from toprope.atomic import write_json
from toprope.errors import Corrupt
from toprope.records.run.checkpoints import MANIFEST, newest_sound, problem_of, seal, set_aside
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import EventLog, Status, read_events
from toprope.supervisor.runs.cleanup import prepare_attempt


def checkpoint(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"step-{step:06d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "weights").write_bytes(bytes([step]) * 5000)
    write_json(path / "state.json", {"version": 2, "step": step, "cursor": step * 2})
    seal(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was stopped, with checkpoints of steps 1, 2 and 3."""
    folder = records.run_folder(tmp_path / "runs", records.specification(), "stopped", ended_at=2.0)
    EventLog(folder).append("end")
    for step in (1, 2, 3):
        checkpoint(folder, step)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit flipped": (lambda path: flip(path / "model" / "weights"), "model/weights is damaged"),
    "cut short": (lambda path: (path / "model" / "weights").write_bytes(b"x" * 4999), "model/weights has 4999 bytes"),
    "a file gone": (lambda path: (path / "model" / "weights").unlink(), "model/weights is missing"),
    "state changed": (lambda path: (path / "state.json").write_text('{"version":2,"step":9,"cursor":9}'), "state.json"),
    "state gone": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "manifest gone": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "manifest torn": (lambda path: (path / MANIFEST).write_text('{"version": 1, "fi'), "manifest.json is not valid"),
    "manifest of elsewhere": (
        lambda path: write_json(path / MANIFEST, {"files": {"../x": {"bytes": 0, "sha256": ""}}}),
        "names files outside the checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_checkpoint_is_skipped_and_kept(folder: RunFolder, damage: str) -> None:
    spoil, said = DAMAGES[damage]
    newest = folder.checkpoints / "step-000003"
    assert problem_of(newest) is None
    spoil(newest)
    left = sorted(path.name for path in newest.rglob("*"))
    status = prepare_attempt(folder, Status.read(folder))
    assert status.checkpoint is not None
    assert (status.checkpoint["step"], status.checkpoint["cursor"]) == (2, 4)
    (warning,) = [event.data["what"] for event in read_events(folder.events) if event.kind == "warning"]
    assert said in warning and "step-000003" in warning and "goes on from step 2" in warning
    assert sorted(path.name for path in (folder.checkpoints / "damaged-step-000003").rglob("*")) == left
    assert folder.newest_checkpoint() == folder.checkpoints / "step-000002"


def test_no_sound_checkpoint_is_an_error(folder: RunFolder) -> None:
    for path in folder.checkpoints.iterdir():
        flip(path / "model" / "weights")
    before = Status.read(folder)
    with pytest.raises(Corrupt, match="Move the folder away to start again"):
        prepare_attempt(folder, before)
    assert Status.read(folder) == before
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000001", "step-000002", "step-000003"]


def test_large_files_are_compared_by_size_within_hash_limit(folder: RunFolder) -> None:
    newest = folder.checkpoints / "step-000003"
    flip(newest / "model" / "weights")
    assert problem_of(newest, hash_bytes=1000) is None
    found, damaged = newest_sound(folder, below=2)
    assert found is not None and (found.step, damaged) == (2, [])
    found, damaged = newest_sound(folder)
    assert found is not None and found.step == 2 and [one.path for one in damaged] == [newest]


def test_set_aside_never_overwrites(folder: RunFolder) -> None:
    first = set_aside(folder.checkpoints / "step-000003")
    checkpoint(folder, 3)
    second = set_aside(folder.checkpoints / "step-000003")
    assert first.is_dir() and second.is_dir() and first != second


def test_manifest_covers_every_file(folder: RunFolder) -> None:
    files = json.loads((folder.checkpoints / "step-000001" / MANIFEST).read_text())["files"]
    assert set(files) == {"state.json", "model/weights"} and files["model/weights"]["bytes"] == 5000
