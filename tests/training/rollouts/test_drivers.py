"""Several drivers of one run: what they must not share, and what one of them does alone."""

from __future__ import annotations

from pathlib import Path

from toprope.records.trained_tasks import TrainedTasks, read_trained
from toprope.settings.schema import Config


def test_each_driver_records_its_tasks_in_a_file_of_its_own(tmp_path: Path) -> None:
    for driver in (1, 2, 3):
        TrainedTasks(tmp_path, None, driver).add(f"task-{driver}", [{"role": "user", "content": f"Question {driver}?"}])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trained-tasks-2.txt", "trained-tasks-3.txt", "trained-tasks.txt",
    ]  # fmt: skip
    assert {"task-1", "task-2", "task-3"} <= read_trained(tmp_path)


def test_what_one_driver_does_alone_conflicts_with_several() -> None:
    config = Config()
    config.algorithm.deterministic = True
    assert not any("launcher.drivers" in one for one in config.conflicts())
    config.launcher.drivers = 2
    assert any("algorithm.deterministic needs one driver" in one for one in config.conflicts())
    config.algorithm.deterministic = False
    assert not config.conflicts()
    config.rollout.max_staleness = 0
    assert any("rollout.max_staleness 0 needs one driver" in one for one in config.conflicts())
    config.rollout.max_staleness = 8
    config.environment.curriculum = {"knob": "size", "levels": [1, 2]}
    assert any("environment.curriculum needs one driver" in one for one in config.conflicts())
