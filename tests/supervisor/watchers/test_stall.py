"""A stall is noticed, its likely cause is named, and its end is recorded."""

import time
from types import SimpleNamespace

import pytest

from tests.support import records
from tests.support.run_harness import ended, eventually, until
from toprope.records.messages import CountsReport, Evaluated, Progress, Stepped
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import CrewMember, read_events
from toprope.settings.schema import Config
from toprope.supervisor.watchers.stall import StallWatcher


class Run:
    """A run whose clock the test controls."""

    def __init__(self, path, state="training", **launcher):
        config = Config()
        config.rollout.groups_per_step = 4
        for name, value in launcher.items():
            setattr(config.launcher, name, value)
        self.status = records.status(state=state)
        self.now, self.events = 1000.0, []
        control = SimpleNamespace(
            folder=RunFolder(path),
            specification=SimpleNamespace(config=config),
            status=lambda: self.status,
            record_event=lambda kind, **data: self.events.append((kind, data)),
        )
        self.watch = StallWatcher(control, lambda: self.now)
        self.watch.on_tick(self.now)

    def update(self, **fields):
        self.status = self.status.model_copy(update=fields)

    def passes(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.watch.on_tick(self.now)

    def steps(self, count, every_s, first=1):
        for number in range(first, first + count):
            self.passes(every_s)
            self.watch.on_report("trainer", Stepped(number, 1000, {}))
            self.update(progress={"step": number})

    @property
    def said(self):
        return [data for kind, data in self.events if kind == "stall"]


def test_stall_is_recorded_once_and_when_over(tmp_path):
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


def test_stall_limit_is_ten_usual_steps(tmp_path):
    run = Run(tmp_path)
    run.steps(5, 100.0)
    run.passes(990)
    assert run.said == []
    run.passes(20)
    assert len(run.said) == 1


def test_stall_limits_come_from_the_run(tmp_path):
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
def test_stall_names_component_by_waiting_groups(tmp_path, counts, accepted, component, sign):
    run = Run(tmp_path)
    run.watch.on_report("api", CountsReport({"accepted": 20}))
    run.steps(3, 1.0)
    run.passes(10)
    run.watch.on_report("api", CountsReport({"accepted": 20 + accepted}))
    run.update(counts=counts)
    run.passes(300)
    [stall] = run.said
    assert stall["component"] == component
    assert sign in stall["what"]
    assert f'component="{component.split()[0]}"' in stall["next"]


def test_progress_without_steps_counts_as_movement(tmp_path):
    run = Run(tmp_path, state="evaluating")
    for done in range(1, 8):
        run.passes(250)
        run.watch.on_report("environment", Progress("testing", done, 100))
    assert run.said == []
    run.watch.on_report("environment", Progress("testing", 7, 100))  # said again: no movement
    run.passes(2490)
    assert run.said == []
    run.passes(20)
    assert "No progress for 42 min" in run.said[0]["what"]
    run.watch.on_report("environment", Evaluated("test", {}))
    assert run.said[-1]["over"] is True


def test_evaluation_and_pause_are_no_stall(tmp_path):
    run = Run(tmp_path)
    run.steps(3, 1.0)
    for done in range(10):
        run.passes(200)
        run.watch.on_report("environment", Progress("evaluating (step-3)", done, 10))
    run.update(state="paused")
    run.passes(5000)
    run.update(state="training")
    run.passes(299)
    assert run.said == []


def test_starting_member_is_no_stall(tmp_path):
    run = Run(tmp_path, state="starting")
    run.update(crew={"trainer": CrewMember(state="starting", since=0.0)})
    run.passes(2000)
    assert run.said == []
    run.update(crew={"trainer": CrewMember(state="ready", since=0.0)})
    run.passes(310)
    assert len(run.said) == 1


def test_keeper_records_stall_of_hanging_trainer(harness):
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
