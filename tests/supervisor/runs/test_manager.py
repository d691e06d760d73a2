"""Runs from start to end, with stand-ins as crews: status, events, files and stops."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import anyio
import pytest

from tests.support import records
from tests.support.run_harness import ended, eventually, until
from toprope.analysis.findings.stored_runs import explain_run
from toprope.analysis.reports.results import Results
from toprope.atomic import write_json
from toprope.errors import ComponentFailed, Corrupt, NotFound, NotPossibleNow
from toprope.records.run.specification import Specification
from toprope.records.run.status import TRANSITIONS, Status
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.runs.manager import RunManager

ENDLESS = {"trainer": {"endless": True}}


def states(runs, folder) -> list[str]:
    return [event.data["to"] for event in runs.events(folder.run_id) if event.kind == "state"]


def test_training_run_completes(harness):
    runs, folder = harness.start(plot=True)
    status = ended(runs, folder)
    assert status.state == "completed", status.failure
    assert states(runs, folder) == ["validating", "starting", "training", "evaluating", "completed"]
    steps = [event.data for event in runs.events(folder.run_id) if event.kind == "state"]
    assert all(step["to"] in TRANSITIONS[step["from"]] for step in steps)
    kinds = [event.kind for event in runs.events(folder.run_id)]
    assert kinds.count("evaluation") == 2 and kinds.count("checkpoint") == 1 and kinds.count("first_step") == 1
    assert kinds[-1] == "end"
    assert status.evaluations["after"]["accuracy"] == 0.9
    assert status.counts == {"accepted": 3, "committed": 3}
    assert status.checkpoint["path"] == "checkpoints/step-000003" and status.checkpoint["cursor"] == 6
    assert status.progress["step"] == 3 and status.progress["total_steps"] == 3
    assert status.created_at <= status.started_at <= status.training_at <= status.ended_at
    assert {name: member.state for name, member in status.crew.items()} == {
        "policy": "finished",
        "trainer": "finished",
        "environment": "stopped",
        "inference": "stopped",
        "api": "stopped",
    }
    results = Results.model_validate(json.loads(folder.results.read_text()))
    assert results.state == "completed" and results.rose is True and results.steps == 3
    assert results.plot == str(folder.plot) and folder.plot.read_bytes().startswith(b"\x89PNG")
    assert results.seconds.total > 0
    harness.check_nothing_left(folder)
    assert not is_held(folder.lock)
    stored = folder.explanation.stat().st_ino
    explain_run(folder, Specification.read(folder), runs.status(folder.run_id))
    assert folder.explanation.stat().st_ino == stored, "a reader made the explanation again"
    for path in folder.path.rglob("*"):
        if "checkpoints" not in path.parts:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_test_run_completes_without_trainer(harness):
    runs, folder = harness.start(kind="test")
    status = ended(runs, folder)
    assert status.state == "completed", status.failure
    assert states(runs, folder) == ["validating", "starting", "evaluating", "completed"]
    assert {name: member.state for name, member in status.crew.items()} == {
        "policy": "finished",
        "inference": "stopped",
        "environment": "finished",
    }
    results = Results.model_validate(json.loads(folder.results.read_text()))
    assert results.evaluations["test"].sampled.accuracy == 0.4
    assert results.rose is None and results.plot is None
    harness.check_nothing_left(folder)


def test_run_outlives_killed_starter(harness):
    runs = harness.runs({"trainer": {"endless": True}})
    spec = harness.specification()
    (harness.path / "spec.json").write_text(spec.model_dump_json())
    command = list(runs.launcher.command)
    code = f"""
import json, os, pathlib, signal, time
from toprope.supervisor.runs.manager import RunManager
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.records.run.specification import Specification
spec = Specification.model_validate_json(pathlib.Path({str(harness.path / "spec.json")!r}).read_text())
runs = RunManager(pathlib.Path({str(runs.path)!r}), LocalLauncher({command!r}))
began = time.monotonic()
runs.start(spec)
print(time.monotonic() - began, flush=True)
os.killpg(os.getpgrp(), signal.SIGKILL)
"""
    starter = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20, start_new_session=True
    )
    assert starter.returncode == -signal.SIGKILL, starter.stderr
    assert float(starter.stdout) < 10.0
    folder = runs.folder(spec.run_id)
    harness.started.append(folder)
    until(runs, folder, "training")
    assert runs.stop(folder.run_id).state == "training"
    assert ended(runs, folder).state == "stopped"
    harness.check_nothing_left(folder)


def adopts_orphans():
    get_child_subreaper, found = 37, ctypes.c_int()  # prctl(2)
    assert ctypes.CDLL(None).prctl(get_child_subreaper, ctypes.byref(found)) == 0
    return bool(found.value)


def test_keeper_is_detached_from_starter(harness):
    runs, folder = harness.start(ENDLESS)
    keeper = harness.keeper(folder)
    # Another test may have made this process the one that adopts orphans.
    assert keeper.ppid() != os.getpid() or adopts_orphans()
    assert os.getsid(keeper.pid) not in (os.getsid(0), keeper.pid)
    targets = {os.readlink(f"/proc/{keeper.pid}/fd/{number}") for number in (0, 1, 2)}
    assert targets == {"/dev/null", str(folder.log("keeper"))}
    runs.stop(folder.run_id, 0)
    ended(runs, folder)


def test_repeated_start_returns_same_run(harness):
    runs, folder = harness.start(ENDLESS)
    spec = json.loads(folder.spec.read_text())
    same = harness.specification().model_validate(spec)
    assert runs.start(same) == folder
    # The process that forked the keeper may be seen for a moment.
    eventually(lambda: harness.count_keepers(folder) == 1)
    with pytest.raises(NotPossibleNow, match="Another run"):
        runs.start(same.model_copy(update={"draft_id": "other"}))
    runs.stop(folder.run_id, 0)
    ended(runs, folder)


def test_second_keeper_exits_at_once(harness):
    runs, folder = harness.start(ENDLESS)
    until(runs, folder, "training")
    command = [*runs.launcher.command, str(folder.path), "--foreground"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert second.returncode == 75 and "another keeper" in second.stderr
    LocalLauncher(runs.launcher.command).submit(folder, {})
    assert runs.status(folder.run_id).state == "training"
    runs.stop(folder.run_id, 0)
    assert ended(runs, folder).state == "stopped"
    harness.check_nothing_left(folder)


def test_keeper_of_ended_run_starts_nothing(harness):
    runs, folder = harness.start()
    before = ended(runs, folder)
    eventually(lambda: not is_held(folder.lock))
    again = subprocess.run(
        [*runs.launcher.command, str(folder.path), "--foreground"], capture_output=True, text=True, timeout=20
    )
    assert again.returncode == 1 and "not started again" in again.stderr
    assert Status.read(folder) == before


@pytest.mark.parametrize("when", ["queued", "validating", "training", "evaluating"])
def test_stop_in_any_state_ends_run(harness, when):
    behaviours = {
        "queued": {},
        "validating": {"environment": {"mute": True}},
        "training": ENDLESS,
        "evaluating": {"environment": {"at": "evaluate", "do": "hang"}},
    }[when]
    runs, folder = harness.start(behaviours)
    if when != "queued":
        until(runs, folder, when)
    runs.stop(folder.run_id)
    status = ended(runs, folder)
    assert status.state == "stopped" and status.reason == "stopped on request"
    assert states(runs, folder)[-2:] == ["stopping", "stopped"]
    harness.check_nothing_left(folder)
    assert not list(folder.orders.iterdir())
    before = len(list(folder.logs.iterdir()))
    runs.stop(folder.run_id)
    assert runs.status(folder.run_id) == status
    assert len(list(folder.logs.iterdir())) == before


def test_stop_before_keeper_starts_launches_no_member(harness):
    runs = harness.runs()
    real = runs.launcher

    class StopsFirst(LocalLauncher):
        def submit(self, folder, variables, lock=None):
            self.stop(folder, 1.0)
            real.submit(folder, variables, lock)

    runs = RunManager(runs.path, StopsFirst())
    folder = runs.start(harness.specification())
    harness.started.append(folder)
    assert ended(runs, folder).state == "stopped"
    assert states(runs, folder) == ["stopping", "stopped"]
    assert [path.name for path in folder.logs.iterdir()] == ["keeper.log"]


def test_sigterm_to_keeper_stops_run(harness):
    runs, folder = harness.start(ENDLESS)
    until(runs, folder, "training")
    harness.keeper(folder).terminate()
    status = ended(runs, folder)
    assert status.state == "stopped" and "SIGTERM" in status.reason
    harness.check_nothing_left(folder)


def test_stop_lets_trainer_save_checkpoint(harness):
    runs, folder = harness.start({"trainer": {"endless": True, "patient": True, "saving": 0.4}}, stop_grace_s=10.0)
    until(runs, folder, "training")
    runs.stop(folder.run_id)
    status = ended(runs, folder)
    assert status.state == "stopped"
    assert status.checkpoint["step"] >= 1 and status.crew["trainer"].exit_code == 0
    assert (folder.path / status.checkpoint["path"]).is_dir()


def test_members_ignoring_sigterm_stop_within_grace(harness):
    deaf = {name: {"deaf": True, "daemon": True} for name in ("api", "inference", "environment", "policy")}
    runs, folder = harness.start({**deaf, "trainer": {"endless": True, "deaf": True, "saving": 600}})
    until(runs, folder, "training")
    began = time.monotonic()
    runs.stop(folder.run_id, 1.0)
    status = ended(runs, folder)
    assert status.state == "stopped"
    assert 1.0 <= time.monotonic() - began < 15.0
    harness.check_nothing_left(folder)


def test_second_stop_shortens_grace(harness):
    runs, folder = harness.start({"trainer": {"endless": True, "deaf": True, "saving": 600}})
    until(runs, folder, "training")
    runs.stop(folder.run_id, 600.0)
    until(runs, folder, "stopping")
    began = time.monotonic()
    runs.stop(folder.run_id, 0.0)
    assert ended(runs, folder).state == "stopped"
    assert time.monotonic() - began < 15.0
    harness.check_nothing_left(folder)


def test_invalid_order_is_a_warning(harness):
    runs, folder = harness.start(ENDLESS)
    until(runs, folder, "training")
    write_json(folder.orders / "a.json", {"order": "fly"})
    (folder.orders / "b.json").write_text("{")
    warnings = eventually(lambda: len([e for e in runs.events(folder.run_id) if e.kind == "warning"]) == 2)
    assert warnings and runs.status(folder.run_id).state == "training"
    runs.stop(folder.run_id, 0)
    assert ended(runs, folder).state == "stopped"


def test_deleted_run_folder_ends_crew(harness):
    runs, folder = harness.start(ENDLESS)
    until(runs, folder, "training")
    while folder.path.exists():
        shutil.rmtree(folder.path, ignore_errors=True)
    eventually(lambda: not harness.processes(folder))
    with pytest.raises(NotFound):
        runs.status(folder.run_id)


def test_half_deleted_run_is_told_as_deleted_and_not_as_lost_keeper(harness):
    runs, folder = harness.start(ENDLESS)
    until(runs, folder, "training")
    status = folder.status.read_bytes()
    while folder.path.exists():
        shutil.rmtree(folder.path, ignore_errors=True)
    eventually(lambda: not harness.processes(folder))
    folder.path.mkdir()
    folder.status.write_bytes(status)  # the last write of a keeper that had not noticed yet
    found = runs.status(folder.run_id)
    assert found.state == "lost" and "folder was deleted while the run was training" in found.reason
    assert "keeper" not in found.reason and str(folder.path) in found.reason
    with pytest.raises(NotFound, match="has no specification.*was deleted") as refused:
        runs.resume(folder.run_id)
    assert "list_runs" in refused.value.hint


def test_failed_keeper_start_gives_reason(harness, tmp_path):
    runs = RunManager(
        tmp_path / "runs", LocalLauncher([sys.executable, "-P", "-c", "raise ImportError('no torch here')"])
    )
    spec = harness.specification()
    with pytest.raises(ComponentFailed, match="no torch here"):
        runs.start(spec)
    status = runs.status(spec.run_id)
    assert status.state == "failed" and status.failure.component == "keeper" and "no torch here" in status.reason
    assert status.ended_at is not None


def test_start_killed_before_keeper_is_lost(harness):
    """The starter holds the lock before the first status exists, so its end makes the run lost."""
    runs = harness.runs()

    class Dies(LocalLauncher):
        def submit(self, folder, variables, lock=None):
            assert runs.status(folder.run_id).state == "queued"
            raise KeyboardInterrupt

    spec = harness.specification()
    with pytest.raises(KeyboardInterrupt):
        RunManager(runs.path, Dies()).start(spec)
    assert runs.status(spec.run_id).state == "lost"


def test_list_shows_all_runs_newest_first(harness):
    runs, first = harness.start(kind="test")
    _, second = harness.start(kind="test")
    ended(runs, first)
    ended(runs, second)
    bad = runs.path / "bad"
    shutil.copytree(first.path, bad)
    (bad / "status.json").write_text("{")
    worse = runs.path / "worse"
    worse.mkdir()
    (runs.path / "not a run").mkdir()
    (runs.path / "file").write_text("")
    found = {status.run_id: status for status in runs.list()}
    assert set(found) == {first.run_id, second.run_id, "bad", "worse"}
    assert found["bad"].state == "lost" and "not valid JSON" in found["bad"].reason
    assert (bad / "status.json").read_text() == "{"
    order = [status.run_id for status in runs.list() if status.state == "completed"]
    assert order == [second.run_id, first.run_id]
    with pytest.raises(Corrupt):
        runs.status("bad")


def test_list_omits_run_being_created(harness):
    runs = harness.runs()
    assert runs.list() == []
    with pytest.raises(NotFound):
        runs.status("none")
    young = runs.path / "young"
    young.mkdir(parents=True)
    lock = RunLock.acquire(young / "keeper.lock")
    assert runs.list() == []
    lock.release()
    assert [status.run_id for status in runs.list()] == ["young"]


def test_wait_reads_no_file_in_the_event_loop(harness):
    """A disk that stands still would stop all clients of a server."""
    folder = records.run_folder(harness.path / "runs", records.specification("run-a"), "training")
    lock, runs, readers = RunLock.acquire(folder.lock), harness.runs(), set()
    read, find = runs._statuses.read, runs.folder

    def noted(work):
        return lambda given: readers.add(threading.get_ident()) or work(given)

    runs._statuses.read, runs.folder = noted(read), noted(find)
    assert anyio.run(runs.wait_end, "run-a", 0.2).state == "training"
    lock.release()
    assert readers and threading.get_ident() not in readers


def test_wait_ends_with_the_run_or_the_time(harness):
    runs, folder = harness.start(ENDLESS)

    async def waits():
        began = anyio.current_time()
        status = await runs.wait_end(folder.run_id, 0.3)
        assert not status.ended and anyio.current_time() - began >= 0.3
        runs.stop(folder.run_id, 0)
        status = await runs.wait_end(folder.run_id, 20.0)
        assert status.state == "stopped" and status.ended_at is not None

    anyio.run(waits)


def test_status_never_takes_lock_from_keeper(harness):
    """A keeper that starts while front ends look gets its lock."""
    runs = harness.runs(ENDLESS)
    folder = runs.start(harness.specification())
    harness.started.append(folder)
    for _ in range(200):
        assert runs.status(folder.run_id).state != "lost"
        assert runs.list()[0].state != "lost"
    runs.stop(folder.run_id, 0)
    ended(runs, folder)


def test_start_on_full_disk_leaves_no_files(harness, monkeypatch):
    def full(self, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Specification, "write", full)
    runs = harness.runs()
    with pytest.raises(NotPossibleNow, match="No space left on device.*prune"):
        runs.start(harness.specification())
    assert [path.name for path in (harness.path / "runs").iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize("below", ["", "runs"])
def test_listing_names_a_file_in_place_of_the_folder(tmp_path, below):
    (tmp_path / "home").write_text("x")
    with pytest.raises(NotPossibleNow, match="is not a folder") as refused:
        RunManager(tmp_path / "home" / below, LocalLauncher()).list()
    assert "Move away the file" in refused.value.hint
