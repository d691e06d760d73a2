"""Every file that a run leaves says its version: what an older version wrote is read, what a newer one wrote is refused
with what to do about it, and left as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import records
from tests.support.run_harness import RunHarness
from toprope.analysis.reports.report import gather
from toprope.analysis.reports.results import RESULTS_VERSION, Results
from toprope.atomic import write_json
from toprope.errors import TooNew
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import GroupNote
from toprope.records.run.checkpoints import newest_sound, problem_of, seal
from toprope.records.run.folder import RunFolder, find_record
from toprope.records.run.manifest import Code, Configuration, EnvironmentInputs, Hardware, Manifest, Policy
from toprope.records.run.metrics import header, read_rows
from toprope.records.run.specification import Specification
from toprope.records.run.status import EventLog, Status, read_events
from toprope.records.run.tested_models import (
    AnsweredConversation,
    TestedModel,
    read_answers,
    read_models,
    write_answers,
    write_models,
)
from toprope.records.run.usage import Usage
from toprope.supervisor.capacity.reservations import Machine, Reservations
from toprope.supervisor.lock import RunLock


def report(folder: RunFolder) -> Any:
    return gather(folder, Specification.read(folder), Status.read(folder))


@dataclass
class File:
    """A file of a run folder and who reads it; `mark` changes what the version is written in."""

    path: str
    read: Callable[[RunFolder], Any]
    optional: bool = True
    """True if older versions wrote it without a version."""


FILES = [
    File("spec.json", Specification.read),
    File("status.json", Status.read),
    File("events.jsonl", lambda folder: list(read_events(folder.events))),
    File("metrics.jsonl", lambda folder: read_rows(folder.metrics)),
    File("evaluations/before.json", report),
    File("results.json", lambda folder: find_record(folder.results, RESULTS_VERSION, Results)),
    File("trackers.json", report),
    File("models.json", read_models),
    File("answers.json", read_answers),
    File("usage.json", Usage.read),
    File("manifest.json", lambda folder: Manifest.read(folder)),
    File("checkpoints/step-000003/state.json", lambda folder: newest_sound(folder), optional=False),
    File("checkpoints/step-000003/manifest.json", lambda folder: newest_sound(folder), optional=False),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run folder with every file in it."""
    path = tmp_path_factory.mktemp("versions")
    house = RunHarness(path)
    specification = house.specification()
    specification.config.logging.wandb = "offline"
    folder = records.run_folder(path / "runs", specification)
    EventLog(folder).append("state", to="training")
    folder.metrics.write_bytes(header(1) + b'{"step": 1, "reward": 0.5}\n')
    sampled = {"split": "heldout", "tasks": 10, "successes": 5, "accuracy": 0.5}
    write_json(folder.evaluation("before"), {"version": 1, "label": "before", "sampled": sampled, "greedy": None})
    write_json(folder.path / "trackers.json", {"version": 1, "trackers": {"wandb": {"mode": "offline"}}})
    write_models(folder, [TestedModel(name="a", model="a", seconds=1.0)])
    write_answers(
        folder, [AnsweredConversation(messages=[{"role": "user", "content": "x"}], answers=["y"], truncated=[False])]
    )
    Usage(at=1.0).write(folder)
    Manifest(
        run_id=folder.run_id, kind="train", made_at=1.0, code=Code(version="0"), python="3",
        configuration=Configuration(sha256="0", locks_sha256="0", seed=0),
        environment=EnvironmentInputs(name="dice"), policy=Policy(model="m"), hardware=Hardware(),
    ).write(folder)  # fmt: skip
    checkpoint = folder.checkpoints / "step-000003"
    checkpoint.mkdir()
    write_json(checkpoint / "state.json", {"version": 2, "step": 3, "cursor": 6})
    seal(checkpoint)
    write_json(folder.results, report(folder).model_dump(mode="json"))
    return folder


def of(document: dict[str, Any], version: int | None) -> dict[str, Any]:
    kept = {key: value for key, value in document.items() if key != "version"}
    return kept if version is None else {**kept, "version": version}


def rewrite(path: Path, version: int | None) -> None:
    """Gives the file another version, or none."""
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        marked = [of(line, version) if "version" in line else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in marked))
    else:
        write_json(path, of(json.loads(path.read_text()), version))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_file_names_its_version_and_is_read(original: RunFolder, file: File) -> None:
    text = (original.path / file.path).read_text()
    assert '"version":' in text
    assert file.read(original) is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_newer_file_is_refused_unchanged(original: RunFolder, file: File) -> None:
    path = original.path / file.path
    before = path.read_bytes()
    try:
        rewrite(path, 99)
        newer = path.read_bytes()
        with pytest.raises(TooNew, match="Update Toprope"):
            file.read(original)
        assert path.read_bytes() == newer
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("file", [file for file in FILES if file.optional], ids=lambda file: file.path)
def test_file_without_version_is_read(original: RunFolder, file: File) -> None:
    path = original.path / file.path
    before = path.read_bytes()
    try:
        rewrite(path, None)
        assert file.read(original) is not None
    finally:
        path.write_bytes(before)


def test_models_and_answers_as_bare_lists_are_read(original: RunFolder) -> None:
    for name, read in (("models", read_models), ("answers", read_answers)):
        path = original.path / f"{name}.json"
        before, entries = path.read_bytes(), read(original)
        try:
            write_json(path, json.loads(before)[name])
            assert read(original) == entries != []
        finally:
            path.write_bytes(before)


def test_checkpoint_without_manifest_is_read(original: RunFolder, tmp_path: Path) -> None:
    old = tmp_path / "step-000003"
    old.mkdir()
    write_json(old / "state.json", {"version": 1, "step": 3, "cursor": 6})
    assert problem_of(old) is None
    write_json(old / "state.json", {"version": 2, "step": 3, "cursor": 6})
    assert problem_of(old) == "manifest.json is missing"


def test_newer_journal_is_refused_unchanged(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    journal.append(b"{}", GroupNote(rows=1))
    journal.close()
    (path,) = tmp_path.glob("*.journal")
    with path.open("ab") as file:
        file.write(path.read_bytes().replace(b"\xffTJ1", b"\xffTJ2"))
    before = path.read_bytes()
    with pytest.raises(TooNew, match="Update Toprope"):
        FileJournal(tmp_path)
    assert path.read_bytes() == before


def test_newer_reservation_is_kept(tmp_path: Path) -> None:
    house = RunHarness(tmp_path)
    other, mine = house.specification(), house.specification()
    folder = RunFolder.create(tmp_path / "runs", other.run_id)
    lock = RunLock.acquire(folder.lock)
    assert lock is not None
    reservations = Reservations(tmp_path / "runs")
    reservations.announce(Machine(threads=1))
    reservations.claim(other)
    entry = tmp_path / "runs" / ".reservations" / f"{other.run_id}.json"
    assert json.loads(entry.read_text())["version"] == 1
    rewrite(entry, 99)
    with pytest.raises(TooNew, match="Update Toprope"):
        reservations.claim(mine)
    assert json.loads(entry.read_text())["version"] == 99
    lock.release()
