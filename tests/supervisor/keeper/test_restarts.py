"""Members that die or hang alone: started again in their place, or the end of the run; runs that are held still."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.support.run_harness import RunHarness, ended, eventually, until
from toprope.records.messages import Beat, Making, Progress
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_rows
from toprope.records.run.status import Status
from toprope.settings.launcher import LauncherSection, RestartAllowance
from toprope.supervisor.keeper.hang_detector import HangDetector
from toprope.supervisor.keeper.making import GroupCounts
from toprope.supervisor.keeper.status_writer import StatusWriter

ALL = {"trainer", "api", "environment"}
ONCE = {"do": "kill", "times": 1}


@pytest.fixture
def harness(tmp_path):
    made = RunHarness(tmp_path)
    yield made
    made.close()


def restarts(runs, folder) -> list[dict]:
    return [event.data for event in runs.events(folder.run_id) if event.kind == "restart"]


def test_every_member_may_die_once_and_the_run_completes(harness):
    """The order to evaluate at the end reaches the driver that takes the place of the one that got it."""
    behaviours = {
        "policy": {"at": "start", **ONCE},
        "api": {"at": "ready", "daemon": True, **ONCE},
        "inference": {"at": "ready", **ONCE},
        "trainer": {"at": "step-2", **ONCE},
        "environment": {"at": "evaluate", **ONCE},
    }
    runs, folder = harness.start(behaviours, restarts=1)
    status = ended(runs, folder)
    assert status.state == "completed", status.failure
    assert {name: member.restarts for name, member in status.crew.items()} == dict.fromkeys(behaviours, 1)
    told = restarts(runs, folder)
    assert {one["component"] for one in told} == set(behaviours)
    assert all("SIGKILL" in one["reason"] and (one["restart"], one["of"]) == (1, 1) for one in told)
    # The trainer had no checkpoint: it began anew, and of rows of the same step the later one counts.
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == [1, 2, 1, 2, 3] and [row["step"] for row in read_rows(folder.metrics)] == [1, 2, 3]
    labels = [event.data["label"] for event in runs.events(folder.run_id) if event.kind == "evaluation"]
    assert labels == ["before", "after"]
    states = [event.data["to"] for event in runs.events(folder.run_id) if event.kind == "state"]
    assert states == ["validating", "starting", "training", "evaluating", "completed"]
    harness.nothing_left(folder)


def test_a_trainer_goes_on_from_a_checkpoint_that_nobody_had_heard_of(harness):
    runs, folder = harness.start({"trainer": {"at": "unsaid", **ONCE}}, restarts=1)
    status = ended(runs, folder)
    assert status.state == "completed", status.failure
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == [1, 2, 3] and status.checkpoint["step"] == 3
    assert status.crew["trainer"].restarts == 1


def test_what_repeats_ends_the_run_with_how_often_and_the_last_words(harness):
    behaviours = {"inference": {"at": "ready", "do": "kill", "say": "out of luck"}, "trainer": {"endless": True}}
    runs, folder = harness.start(behaviours, restarts=2)
    status = ended(runs, folder)
    assert status.state == "failed" and status.failure.component == "inference", status.failure
    assert "SIGKILL" in status.reason and "started again 2 times within 600 s" in status.reason
    assert status.failure.excerpt[-1] == "out of luck" and status.failure.signal == "SIGKILL"
    told = restarts(runs, folder)
    assert [one["restart"] for one in told] == [1, 2]
    assert [one["wait_s"] for one in told] == [0.05, 0.1]
    harness.nothing_left(folder)


@pytest.mark.parametrize(
    ("component", "behaviour", "again"),
    [
        ("inference", {"at": "start", "do": "exit:3"}, 0),
        ("environment", {"at": "start", "do": "fail"}, 0),
        ("environment", {"at": "start", "do": "again"}, 1),
    ],
)
def test_a_member_that_fails_by_itself_before_it_served_is_tried_again_only_if_it_says_so(
    harness, component, behaviour, again
):
    runs, folder = harness.start({component: behaviour}, restarts=1)
    status = ended(runs, folder)
    assert status.state == "failed" and status.failure.component == component
    assert len(restarts(runs, folder)) == again


def test_members_that_hang_are_found_out_and_started_again(harness):
    frozen = {"beats": True, "do": "freeze", "times": 1}
    behaviours = {
        "inference": {"at": "ready", **frozen},
        "trainer": {"at": "step-2", "steps": 4, **frozen},
        "api": {"beats": True},
        "environment": {"beats": True},
    }
    runs, folder = harness.start(behaviours, restarts=9, hang_timeout_s=2.0, trainer_hang_timeout_s=3.0)
    status = ended(runs, folder)
    assert status.state == "completed", status.failure
    told = {one["component"]: one["reason"] for one in restarts(runs, folder)}
    assert set(told) >= {"inference", "trainer"}  # on a machine that stands still others may have been silent too
    assert "no sign of life" in told["inference"] and "at most 2 are" in told["inference"]
    assert "at most 3 are" in told["trainer"]
    harness.nothing_left(folder)


@pytest.mark.parametrize("moment", ["waiting", "starting"])
def test_a_stop_during_a_restart_starts_nothing_and_ends_at_once(harness, moment):
    behaviours = {"inference": {"at": "ready", "slow": 0 if moment == "waiting" else 600, **ONCE}}
    backoff = 600.0 if moment == "waiting" else 0.0
    runs, folder = harness.start({**behaviours, "trainer": {"endless": True}}, restarts=3, restart_backoff_s=backoff)
    eventually(lambda: restarts(runs, folder))
    if moment == "starting":
        former = Status.read(folder).crew["inference"].pid
        eventually(lambda: Status.read(folder).crew["inference"].pid not in (None, former))
    began = time.monotonic()
    runs.stop(folder.run_id, 1.0)
    status = ended(runs, folder)
    assert status.state == "stopped" and time.monotonic() - began < 15.0
    assert len(restarts(runs, folder)) == 1
    assert status.crew["inference"].state == ("exited" if moment == "waiting" else "stopped")
    harness.nothing_left(folder)


def test_a_run_is_held_and_goes_on_and_a_trainer_that_is_started_again_meanwhile_holds_still_too(harness):
    runs, folder = harness.start({"trainer": {"endless": True}}, restarts=1)
    until(runs, folder, "training")
    (folder.path / "hold").write_text("")
    status = until(runs, folder, "paused")
    assert status.reason == "somebody asked for it"
    os.kill(status.crew["trainer"].pid, signal.SIGKILL)
    eventually(lambda: (member := Status.read(folder).crew["trainer"]).restarts == 1 and member.state == "ready")
    rows = len(folder.metrics.read_text().splitlines())
    time.sleep(0.3)  # thirty steps' time
    assert len(folder.metrics.read_text().splitlines()) == rows and Status.read(folder).state == "paused"
    (folder.path / "hold").unlink()
    until(runs, folder, "training")
    eventually(lambda: len(folder.metrics.read_text().splitlines()) > rows)
    (folder.path / "hold").write_text("")
    until(runs, folder, "paused")
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    (folder.path / "hold").unlink()
    harness.nothing_left(folder)


def test_a_run_that_is_held_before_it_trains_says_so_when_it_has_come_that_far(harness):
    runs = harness.runs({"environment": {"at": "before", "do": "sleep"}})
    spec = harness.specification()
    real = runs._launcher.submit

    def holds_first(folder, variables, lock=None):
        (folder.path / "hold").write_text("")
        real(folder, variables, lock)

    runs._launcher.submit = holds_first
    folder = runs.start(spec)
    harness.started.append(folder)
    until(runs, folder, "paused")
    (folder.path / "hold").unlink()
    until(runs, folder, "evaluating")
    passed = [event.data["to"] for event in runs.events(folder.run_id) if event.kind == "state"]
    assert passed == ["validating", "starting", "paused", "starting", "training", "evaluating"]
    runs.stop(folder.run_id, 0)
    assert ended(runs, folder).state == "stopped"


def test_silence_is_a_hang_only_where_the_keeper_was_awake_and_the_member_had_a_pulse():
    pulse = HangDetector(lambda name: 100.0 if name == "trainer" else 10.0)
    now = 0.0
    for name in ("trainer", "api"):
        pulse.heard(name, Beat(), now)
    pulse.heard("environment", Progress("loading", 1, 2), now)
    while now < 10.0:
        now += 1.0
        assert pulse.silent(ALL, now) == {}
    now += 1.0
    assert pulse.silent(ALL, now) == {"api": 11.0} and pulse.silent({"trainer"}, now) == {}
    pulse.forget("api")
    assert pulse.silent(ALL, now + 1.0) == {}
    # The machine was suspended for an hour, or the keeper stopped.
    pulse.heard("api", Beat(), now + 1.0)
    now += 3600.0
    assert pulse.silent(ALL, now) == {}
    while now < 3618.0:
        now += 1.0
        pulse.heard("trainer", Progress("training", 1, 2), now)
        found = pulse.silent(ALL, now)
    assert list(found) == [] and pulse.silent(ALL, now + 4.0) == {"api": pytest.approx(11.0)}


def test_an_allowance_is_of_a_window_and_waits_longer_each_time():
    allowance = RestartAllowance(LauncherSection(restarts=3, restart_window_s=100.0, restart_backoff_s=0.5))
    assert [allowance.take(at) for at in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, None]
    assert allowance.take(100.5) == 2.0 and allowance.take(100.6) is None
    assert allowance.total == 4
    assert RestartAllowance(LauncherSection(restarts=0)).take(0.0) is None


def test_groups_of_a_driver_that_ended_are_given_up_and_counted(tmp_path):
    folder = RunFolder.create(tmp_path, "run-1")
    now = {"created_at": 1.0, "since": 1.0, "updated_at": 1.0}
    status = Status(run_id="run-1", kind="train", environment="dice", state="training", **now)

    class Written(StatusWriter):
        def touch(self):
            pass

    life = Written(folder, status.model_copy(update={"making": {"begun": 5, "posted": 5, "given_up": {"old": 0}}}))
    account = GroupCounts(life)
    account.take(Making(10, 1, 4, {"it raised": 2}))
    assert life.status.making["begun"] == 15 and life.status.making["given_up"] == {"old": 0, "it raised": 2}
    account.close()
    account.close()
    account.take(Making(2, 0, 2))
    account.close()
    made = life.status.making
    assert made["given_up"] == {"old": 0, "it raised": 2, "the environment's driver ended": 3}
    assert made["begun"] == 17 == made["posted"] + made["unanswered"] + sum(made["given_up"].values())
