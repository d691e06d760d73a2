"""TensorBoard's files, read back as TensorBoard reads them: records with masked checksums, and the events in them."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from toprope_server.cli.app import build
from typer.testing import CliRunner

from tests.support import records
from tests.support.run_harness import RunHarness
from toprope.analysis.reports.report import trackers_of
from toprope.atomic import write_json
from toprope.errors import InvalidValue, NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import header
from toprope.records.run.specification import Specification
from toprope.records.sweep_journal import Candidate, Generation, Measured, Scored, Started, SweepLog
from toprope.settings.schema import Config
from toprope.supervisor.programs import TRACKER, members_of
from toprope.trackers.follower import RunFollower
from toprope.trackers.tensorboard import TensorBoardTracker, export_to_tensorboard
from toprope.trackers.tracker import tracked_run
from toprope.workbench.launch.requirements import require_trackers

pytest.importorskip("tensorboardX")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, over all event files of a folder, the oldest first."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda one: one.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at : at + 8])
            body = data[at + 12 : at + 12 + length]
            assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body)
            at += 16 + length
            event = Event.FromString(body)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag].append((event.step, value.simple_value))
    return found


@pytest.fixture
def harness(tmp_path: Path) -> Any:
    house = RunHarness(tmp_path)
    yield house
    house.close()


def make(harness: RunHarness, kind: str = "train", state: str = "completed", **fields: Any) -> RunFolder:
    specification = harness.specification(kind).model_copy(update=fields)
    return records.run_folder(harness.path / "runs", specification, state, ended_at=9.0)


def rows(folder: RunFolder, attempt: int, steps: range, reward: float) -> None:
    with folder.metrics.open("ab") as file:
        file.write(header(attempt))
        for step in steps:
            file.write(json.dumps({"step": step, "time": 1.0, "reward": reward, "loss": None}).encode() + b"\n")


def evaluation(folder: RunFolder, label: str, split: str, successes: int, **more: Any) -> None:
    sampled = {"split": split, "tasks": 50, "successes": successes, "accuracy": successes / 50, "errors": 0, **more}
    content = {"label": label, "sampled": sampled, "greedy": None, "policy_version": 0, "seconds": 1.0}
    write_json(folder.evaluation(label), content)


def test_finished_run_is_exported_with_its_evaluations(harness: RunHarness, tmp_path: Path) -> None:
    folder = make(harness)
    evaluation(folder, "before", "heldout", 5)
    rows(folder, 1, range(1, 7), 0.25)
    rows(folder, 2, range(5, 9), 0.75)
    evaluation(folder, "step-4", "validation", 20)
    evaluation(folder, "after", "heldout", 40)
    found = scalars(export_to_tensorboard(folder, tmp_path / "out"))
    steps = dict(found["train/reward"])  # of two values for one step the later one counts
    assert steps == {step: 0.25 if step < 5 else 0.75 for step in range(1, 9)}
    assert "train/loss" not in found and "train/global_step" not in found
    assert [(step, round(value, 4)) for step, value in sorted(found["heldout/accuracy"])] == [(0, 0.1), (8, 0.8)]
    assert [(step, round(value, 4)) for step, value in found["validation/accuracy"]] == [(4, 0.4)]
    assert not (folder.path / "trackers.json").exists()  # the run's own record stays as it was


def test_test_and_sweep_are_exported(harness: RunHarness, tmp_path: Path) -> None:
    test = make(harness, "test")
    by_task = {"ids": ["a", "b"], "wins": [2, 0], "scores": [[1.0, 1.0], [0.0, 0.5]]}
    evaluation(test, "test", "validation", 20, by_task=by_task, group_size=2)
    found = scalars(export_to_tensorboard(test, tmp_path / "test"))
    assert found["test/score"] == [(1, 1.0), (2, 0.25)] and found["test/success"] == [(1, 1.0), (2, 0.0)]
    sweep = make(harness, "sweep")
    log = SweepLog(sweep)
    values = [{"optimizer.learning_rate": 0.5}, {"optimizer.learning_rate": 0.25}]
    candidates = [Candidate(id=f"c{place:03d}", values=one, steps=5) for place, one in enumerate(values)]
    log.append(Generation(epoch=1, candidates=candidates))
    for place, score in enumerate((0.25, 0.5)):
        log.append(Started(candidate=f"c{place:03d}", epoch=1, run_id=f"{sweep.run_id}-m0{place}"))
        log.append(Scored(candidate=f"c{place:03d}", score=score, measured=Measured(accuracy=score, steps=5)))
    found = scalars(export_to_tensorboard(sweep, tmp_path / "sweep"))
    assert found["sweep/score"] == [(1, 0.25), (2, 0.5)]
    assert found["sweep/optimizer.learning_rate"] == [(1, 0.5), (2, 0.25)]


def test_live_run_and_full_folder_are_refused(harness: RunHarness, tmp_path: Path) -> None:
    live = make(harness, state="training")
    with pytest.raises(NotPossibleNow, match="has not ended"):
        export_to_tensorboard(live, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(NotPossibleNow, match="has files already"):
        export_to_tensorboard(make(harness), tmp_path / "full")
    assert not (tmp_path / "out").exists()


def test_attempts_of_a_live_run_write_beside_each_other(harness: RunHarness) -> None:
    folder = make(harness)
    specification = Specification.read(folder)
    for attempt, steps in ((1, range(1, 4)), (2, range(4, 6))):
        rows(folder, attempt, steps, attempt / 4)
        tracker = TensorBoardTracker(tracked_run(specification, folder.path, attempt))
        follower = RunFollower(folder, specification, [tracker])
        follower.finish()
    files = list((folder.path / "tensorboard").glob("*.attempt-*"))
    assert len(files) == 2
    assert scalars(folder.path / "tensorboard")["train/reward"] == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5), (5, 0.5)]
    assert trackers_of(folder)["tensorboard"]["folder"] == str(folder.path / "tensorboard")


def test_figures_that_count_as_logged_survive_a_kill(harness: RunHarness) -> None:
    folder = make(harness, state="training")
    specification = Specification.read(folder)
    follower = RunFollower(folder, specification, [TensorBoardTracker(tracked_run(specification, folder.path, 1))])
    for steps in (range(1, 4), range(4, 40)):
        rows(folder, 1, steps, 0.5)
        follower.pass_on()
        assert [step for step, _ in scalars(folder.path / "tensorboard")["train/reward"]] == list(range(1, steps.stop))
    follower.finish()


def test_configuration_adds_the_tracker_to_the_crew(harness: RunHarness) -> None:
    plain = harness.specification()
    logging = plain.config.logging.model_copy(update={"trackers": ["tensorboard"]})
    tracked = plain.model_copy(update={"config": plain.config.model_copy(update={"logging": logging})})
    assert TRACKER not in members_of(plain) and members_of(tracked)[-1] == TRACKER


def test_missing_package_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.workbench.launch.requirements.missing", lambda modules: list(modules))
    require_trackers(Config())
    with pytest.raises(InvalidValue, match="tensorboardX is not installed"):
        require_trackers(Config.model_validate({"logging": {"trackers": ["tensorboard"]}}))


def test_command_writes_a_folder(harness: RunHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(harness)
    rows(folder, 1, range(1, 3), 0.5)
    monkeypatch.setenv("TOPROPE_HOME", str(harness.path))
    monkeypatch.setenv("TOPROPE_CONFIG", str(tmp_path / "config"))
    done = CliRunner().invoke(build(), ["export", folder.run_id, "--tensorboard", "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert scalars(tmp_path / "out")["train/reward"] == [(1, 0.5), (2, 0.5)]
    again = CliRunner().invoke(build(), ["export", folder.run_id, "--tensorboard", "--to", str(tmp_path / "out")])
    assert again.exit_code == 1 and "has files already" in again.output
