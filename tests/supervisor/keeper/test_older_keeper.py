"""Keepers of an older version work under a newer front end, and their runs can be resumed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import older_keeper
from tests.support.run_harness import ended, eventually
from toprope.records.run.folder import RunFolder
from toprope.supervisor.lock import is_held


@pytest.fixture
def kept(harness):
    """A folder of an older version, and its keeper."""
    folder = RunFolder(older_keeper.freeze(harness.path / "runs", "run-of-old"))
    keeper = subprocess.Popen([sys.executable, "-I", older_keeper.__file__, str(folder.path)], stdout=subprocess.PIPE)
    assert keeper.stdout.readline() == b"locked\n"
    yield folder, keeper
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()


def test_older_keeper_is_listed_followed_and_stopped(harness, kept):
    folder, keeper = kept
    runs = harness.runs()
    eventually(lambda: runs.status(folder.run_id).progress["step"] > 3)
    status = runs.status(folder.run_id)
    assert status.state == "training" and not status.reason and [one.run_id for one in runs.list()] == [folder.run_id]
    assert [event.seq for event in runs.events(folder.run_id)] == [1, 2, 3]
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    assert [event.seq for event in runs.events(folder.run_id, 3)] == [4, 5, 6, 7]
    keeper.wait(20)


def test_run_of_killed_older_keeper_can_be_resumed(harness, kept):
    folder, keeper = kept
    keeper.kill()
    keeper.wait()
    eventually(lambda: not is_held(folder.lock))
    runs = harness.runs()
    status = runs.status(folder.run_id)
    assert status.state == "lost" and status.resume_at is not None
    harness.started.append(folder)
    assert runs.resume(folder.run_id).attempt == 2
    assert ended(runs, folder).state == "completed"
    harness.check_nothing_left(folder)
