"""trackio's own package and database: figures, evaluations, and a resumed run."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from toprope.trackers.on_trackio import TrackioTracker
from toprope.trackers.tracker import TrackedRun

pytestmark = pytest.mark.engines


def test_attempts_of_a_run_are_one_run_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    for attempt, steps in ((1, range(1, 4)), (2, range(4, 6))):
        tracker = TrackioTracker(TrackedRun("run-1", "letters", "train", tmp_path, "group", {"seed": 1}, attempt))
        for step in steps:
            tracker.log({"train/reward": step / 10, "train/global_step": step})
        tracker.log({"heldout/accuracy": 0.5, "train/global_step": steps[-1]})
        tracker.finish(0)
    with sqlite3.connect(tmp_path / "letters.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    told = [(name, step, json.loads(values)) for name, step, values in rows]
    assert [(name, step) for name, step, values in told if "train/reward" in values] == [
        ("run-1", step) for step in range(1, 6)
    ]
    assert [step for _, step, values in told if values.get("heldout/accuracy") == 0.5] == [3, 5]
