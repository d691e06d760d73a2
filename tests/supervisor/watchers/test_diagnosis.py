"""The keeper's diagnosis: events, open findings in the status, and resumed attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import records
from tests.support.run_harness import RunHarness, ended
from toprope.records.messages import CountsReport, Evaluated, Leveled, Skipping, Stepped
from toprope.records.run.curriculum import Curricula, CurriculumState, LevelMeasurement
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.supervisor.watchers.diagnosis import DiagnosisWatcher
from toprope.supervisor.watchers.watcher import RunControl

SICK = {"reward": 0.0, "success": 0.0, "errors/share": 1.0, "frac_reward_zero_std": 1.0}
SLOW = {"reward": 0.5, "time/step": 1.0, "time/wait": 0.8}


class Told:
    """A run's folder with a RunControl that records its calls."""

    def __init__(self, path: Path) -> None:
        harness = RunHarness(path)
        specification: Specification = harness.specification()
        specification.config.budget.steps = 100
        specification.config.rollout.groups_per_step = 2
        self.folder = RunFolder.create(path / "runs", specification.run_id)
        self.status = records.status(specification.run_id)
        self.events: list[dict[str, Any]] = []
        self.specification = specification

    def watcher(self) -> DiagnosisWatcher:
        refuse = self._refuse
        return DiagnosisWatcher(
            RunControl(
                self.folder,
                self.specification,
                lambda: self.status,
                self._event,
                self._update,
                stop=refuse,
                pause=refuse,
                proceed=refuse,
            )
        )

    def _event(self, kind: str, **data: Any) -> None:
        assert kind == "finding"
        self.events.append(data)

    def _update(self, **fields: Any) -> None:
        self.status = self.status.model_copy(update=fields)

    def _refuse(self, *arguments: Any) -> None:
        raise AssertionError("diagnosis stops and holds no run")

    @property
    def open(self) -> list[tuple[str, str]]:
        return [(finding.rule, finding.level) for finding in self.status.findings]

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(event["rule"], event["level"]) for event in self.events]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def steps(watcher: DiagnosisWatcher, first: int, last: int, values: dict[str, Any]) -> None:
    for step in range(first, last + 1):
        watcher.on_report("trainer", Stepped(step, 100, {"step": step, **values}))


def test_finding_is_event_and_stays_in_status_until_over(told: Told) -> None:
    watcher = told.watcher()
    steps(watcher, 1, 30, SICK)
    assert told.said == [("scorer_errors", "critical")] and ("scorer_errors", "critical") in told.open
    event = told.events[0]
    assert event["step"] and event["observed"]["errors_share"] == 1.0 and "describe_environment" in event["next"]
    json.dumps(told.status.model_dump(mode="json"), allow_nan=False)
    steps(watcher, 31, 60, {"reward": 0.5, "errors/share": 0.0})
    assert told.said[-1] == ("scorer_errors", "over") and told.open == []


def test_notes_are_no_events(told: Told) -> None:
    watcher = told.watcher()
    steps(watcher, 1, 40, SLOW)
    assert told.open == [("trainer_waits", "note")] and told.events == []
    steps(watcher, 41, 80, {**SLOW, "time/wait": 0.0})
    assert told.open == [] and told.events == []


def test_dropped_groups_are_found_without_a_step(told: Told) -> None:
    watcher = told.watcher()
    watcher.on_report("environment", Evaluated("before", {"accuracy": 0.0}))
    for count in (4, 12):
        watcher.on_report("api", CountsReport({"accepted": count, "dropped": {}}))
        watcher.on_report("trainer", Skipping({"zero_signal": count}, 0, 4))
    assert told.events == []
    watcher.on_report("trainer", Skipping({"zero_signal": 80}, 0, 4))
    assert told.said == [("all_wrong", "critical")] == told.open
    steps(watcher, 1, 1, {"reward": 0.1})
    assert told.said[-1] == ("all_wrong", "over") and told.open == []
    # The API hears of them with a checkpoint, which is after a step.
    for count in (0, 500, 900):
        watcher.on_report("api", CountsReport({"accepted": 2000, "dropped": {"zero_signal": count}}))
    assert len(told.said) == 2


def test_stale_groups_that_the_api_drops_are_found_without_a_step(told: Told) -> None:
    watcher = told.watcher()
    for count in (4, 40, 80):
        watcher.on_report("api", CountsReport({"accepted": count, "dropped": {"stale": count}}))
    assert told.said == [("dropped_stale", "critical")] == told.open
    # Dropped groups are no standstill while steps go on.
    for step in range(1, 12):
        watcher.on_report("api", CountsReport({"accepted": 80 + 20 * step, "dropped": {"stale": 80 + 15 * step}}))
        steps(watcher, step, step, {"reward": 0.1})
    assert len(told.said) == 2


def test_resumed_attempt_repeats_no_finding(told: Told) -> None:
    first = told.watcher()
    rows = [{"step": step, **SICK} for step in range(1, 31)]
    for row in rows:
        first.on_report("trainer", Stepped(row["step"], 100, row))
    told.folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told.status = told.status.model_copy(update={"attempt": 2, "findings": []})
    second = told.watcher()
    assert ("scorer_errors", "critical") in told.open
    steps(second, 31, 40, SICK)
    assert told.said == [("scorer_errors", "critical")]


def test_keeper_names_kind_of_failure(tmp_path: Path) -> None:
    harness = RunHarness(tmp_path)
    try:
        crew = {
            "trainer": {"say": "RuntimeError: CUDA out of memory. Tried to allocate", "at": "step-2", "do": "exit:3"}
        }
        runs, folder = harness.start({**crew})
        status = ended(runs, folder, 60.0)
    finally:
        harness.close()
    assert status.failure is not None and status.failure.kind == "gpu_out_of_memory"
    assert "out of memory" in status.failure.evidence and "micro_batch_size" in status.failure.hint
    [state] = [event.data for event in runs.events(folder.run_id) if event.data.get("to") == "failed"]
    assert state["failure"] == "gpu_out_of_memory"


LEVEL = Leveled("dice", "sides", 1, 3, 20, 9, 10, 40)
EASY = {"reward": 0.9, "success": 0.9, "entropy": 0.2, "frac_reward_zero_std/all_wrong": 0.0}
HARD = {"reward": 0.2, "success": 0.2, "entropy": 0.5, "frac_reward_zero_std/all_wrong": 0.5}


def test_harder_level_of_a_curriculum_is_no_collapse(tmp_path: Path) -> None:
    for name, report in (("none", Evaluated("before", {})), ("level", LEVEL)):
        told = Told(tmp_path / name)
        watcher = told.watcher()
        steps(watcher, 1, 40, EASY)
        watcher.on_report("environment", report)
        steps(watcher, 41, 70, HARD)
        assert (("collapse", "critical") in told.said) == (name == "none")


def test_resumed_attempt_knows_where_levels_began(told: Told) -> None:
    rows = [{"step": step, **(EASY if step <= 40 else HARD)} for step in range(1, 71)]
    told.folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measure = LevelMeasurement(step=40, level=0, successes=9, tasks=10, moved=True)
    state = CurriculumState(knob="sides", levels=[6, 20, 100], level=1, since=40, measures=[measure])
    Curricula(environments={"dice": state}).write(told.folder)
    told.status = told.status.model_copy(update={"attempt": 2})
    steps(told.watcher(), 71, 80, HARD)
    assert "collapse" not in dict([*told.said, *told.open])


def test_level_that_nothing_solves_is_not_wrong_since_the_start(told: Told) -> None:
    watcher = told.watcher()
    steps(watcher, 1, 40, EASY)
    watcher.on_report("environment", LEVEL)
    unsolved = {"reward": 0.0, "success": 0.0, "entropy": 0.5, "frac_reward_zero_std/all_wrong": 1.0}
    steps(watcher, 41, 90, {**unsolved, "frac_reward_zero_std": 1.0, "groups/delivered": 2.0})
    assert "all_wrong" not in dict(told.said)
