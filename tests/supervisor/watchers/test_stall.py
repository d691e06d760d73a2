"""Standing still is noticed: alive, but no step; who holds it up; and that it moves again."""

import time
from types import SimpleNamespace

import pytest

from tests.support.run_harness import RunHarness, ended, eventually, until
from toprope.records.messages import CountsReport, Evaluated, Progress, Stepped
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import CrewMember, Status, read_events
from toprope.settings.schema import Config
from toprope.supervisor.watchers.stall import StallWatcher


class Run:
    """A run whose time the test makes."""

    def __init__(self, path, state="training", **launcher):
        config = Config()
        config.rollout.groups_per_step = 4
        for name, value in launcher.items():
            setattr(config.launcher, name, value)
        self.status = Status(
            run_id="run-1", kind="train", environment="e", state=state, created_at=0.0, since=0.0, updated_at=0.0
        )
        self.now, self.events = 1000.0, []
        hands = SimpleNamespace(
            folder=RunFolder(path),
            specification=SimpleNamespace(config=config),
            status=lambda: self.status,
            event=lambda kind, **data: self.events.append((kind, data)),
        )
        self.watch = StallWatcher(hands, lambda: self.now)
        self.watch.looked(self.now)

    def update(self, **fields):
        self.status = self.status.model_copy(update=fields)

    def passes(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.watch.looked(self.now)

    def steps(self, count, every_s, first=1):
        for number in range(first, first + count):
            self.passes(every_s)
            self.watch.heard("trainer", Stepped(number, 1000, {}))
            self.update(progress={"step": number})

    @property
    def said(self):
        return [data for kind, data in self.events if kind == "stall"]


def test_a_run_that_stands_still_is_told_once_and_that_it_moves_again(tmp_path):
    run = Run(tmp_path)
    run.steps(5, 2.0)
    run.passes(299)
    assert run.said == []
    run.passes(600)
    [stall] = run.said
    assert (stall["over"], stall["step"], stall["usual_s"], stall["limit_s"]) == (False, 5, 2.0, 300.0)
    assert "No step for 5 min while everything is alive, usually one in 2.0 s" in stall["what"]
    run.steps(1, 1.0, first=6)
    assert [one["over"] for one in run.said] == [False, True]
    assert run.said[1]["what"] == "It moves again after 15 min."
    run.passes(299)
    assert len(run.said) == 2


def test_slow_steps_are_given_ten_times_what_is_usual(tmp_path):
    run = Run(tmp_path)
    run.steps(5, 100.0)
    run.passes(990)
    assert run.said == []
    run.passes(20)
    assert len(run.said) == 1


def test_thresholds_are_the_runs_own(tmp_path):
    run = Run(tmp_path, stall_after_s=5.0, stall_after_steps=2.0)
    run.steps(3, 4.0)
    run.passes(7)
    assert run.said == []
    run.passes(2)
    assert len(run.said) == 1
    silent = Run(tmp_path, stall_after_s=0.0)
    silent.steps(3, 1.0)
    silent.passes(5000)
    assert silent.said == []


@pytest.mark.parametrize(
    ("counts", "accepted", "component", "sign"),
    [
        ({"waiting": 9}, 0, "trainer", "9 groups wait for it and a step takes 4"),
        ({"waiting": 0}, 0, "environment or inference", "no group came since the last step, and 0 wait"),
        ({"waiting": 2}, 0, "environment or inference", "and 2 wait"),
        ({"waiting": 0}, 7, "environment", "7 groups came since the last step, too few that can be trained on"),
    ],
)
def test_who_holds_it_up_is_told_by_where_groups_pile_up(tmp_path, counts, accepted, component, sign):
    run = Run(tmp_path)
    run.watch.heard("api", CountsReport({"accepted": 20}))
    run.steps(3, 1.0)
    run.passes(10)
    run.watch.heard("api", CountsReport({"accepted": 20 + accepted}))
    run.update(counts=counts)
    run.passes(300)
    [stall] = run.said
    assert stall["component"] == component
    assert sign in stall["what"]
    assert f'component="{component.split()[0]}"' in stall["next"]


def test_progress_without_steps_is_movement_and_its_absence_is_told(tmp_path):
    run = Run(tmp_path, state="evaluating")
    for done in range(1, 8):
        run.passes(250)
        run.watch.heard("environment", Progress("testing", done, 100))
    assert run.said == []
    run.watch.heard("environment", Progress("testing", 7, 100))  # said again: no movement
    run.passes(2490)
    assert run.said == []
    run.passes(20)
    assert "No progress for 42 min" in run.said[0]["what"]
    run.watch.heard("environment", Evaluated("test", {}))
    assert run.said[-1]["over"] is True


def test_evaluation_in_between_and_pauses_are_no_stall(tmp_path):
    run = Run(tmp_path)
    run.steps(3, 1.0)
    for done in range(10):
        run.passes(200)
        run.watch.heard("environment", Progress("evaluating (step-3)", done, 10))
    run.update(state="paused")
    run.passes(5000)
    run.update(state="training")
    run.passes(299)
    assert run.said == []


def test_what_still_starts_has_a_limit_of_its_own(tmp_path):
    run = Run(tmp_path, state="starting")
    run.update(crew={"trainer": CrewMember(state="starting", since=0.0)})
    run.passes(2000)
    assert run.said == []
    run.update(crew={"trainer": CrewMember(state="ready", since=0.0)})
    run.passes(310)
    assert len(run.said) == 1


@pytest.fixture
def harness(tmp_path):
    harness = RunHarness(tmp_path)
    yield harness
    harness.close()


def test_a_keeper_tells_of_a_trainer_that_hangs_while_it_lives(harness):
    runs = harness.runs({"trainer": {"at": "step-2", "do": "sleep", "steps": 9}})
    specification = harness.specification()
    specification.config.launcher.stall_after_s = 1.5
    folder = runs.start(specification)
    harness.started.append(folder)
    until(runs, folder, "training")
    stall = eventually(lambda: list(read_events(folder.events, kinds=["stall"])), 30.0)[0]
    assert (stall.data["over"], stall.data["step"]) == (False, 2)
    assert stall.data["log_age_s"].keys() <= {"trainer", "inference", "environment"}
    assert not runs.status(folder.run_id).ended
    runs.stop(folder.run_id, 0.1)
    assert ended(runs, folder).state == "stopped"
    assert time.time() - stall.at < 60
