"""Reports of runs, built from their records."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.analysis.conftest import evaluation, rows, sampled
from tests.support.run_harness import RunHarness
from toprope.analysis.reports.model_card import _data
from toprope.analysis.reports.narrative import RunRecords, _bar, compose_run_report
from toprope.analysis.reports.page import Paragraph, Table
from toprope.analysis.reports.report import build, gather
from toprope.analysis.reports.results import Results
from toprope.atomic import write_json
from toprope.errors import Corrupt
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_rows
from toprope.records.run.status import Event, Status


@pytest.fixture
def specification(tmp_path):
    return RunHarness(tmp_path).specification()


@pytest.fixture
def status(specification):
    return Status(
        run_id=specification.run_id,
        kind="train",
        environment="dice",
        state="completed",
        created_at=100.0,
        training_at=108.0,
        ended_at=160.0,
        since=160.0,
        updated_at=160.0,
        checkpoint={"step": 40, "path": "checkpoints/step-40", "cursor": 9},
        counts={"accepted": 5},
    )


def test_report_has_intervals_and_says_if_accuracy_rose(specification, status):
    found = build(
        specification, status, {"before": evaluation("before", 6, 2), "after": evaluation("after", 170, 180)}, []
    )
    after = found.evaluations["after"]
    assert (after.sampled.accuracy, after.sampled.tasks, after.greedy.accuracy) == (0.85, 200, 0.9)
    assert 0.79 < after.sampled.low < 0.80 and 0.89 < after.sampled.high < 0.90
    assert after.sampled.parts == {"exact": 0.2} and after.sampled.errors == 1 and after.policy_version == 4
    assert found.rose is True
    same = build(specification, status, {"before": evaluation("before", 6), "after": evaluation("after", 8)}, [])
    assert same.rose is False and same.evaluations["after"].greedy is None
    assert build(specification, status, {"before": evaluation("before", 6)}, []).rose is None
    assert build(specification, status, {}, []).rose is None


def test_evaluation_of_several_policy_versions_names_them(specification, status):
    spread = evaluation("step-5", 6) | {"newest_version": 9}
    found = build(specification, status, {"before": evaluation("before", 6), "step-5": spread}, []).evaluations
    assert (found["before"].versions, found["step-5"].versions) == ("", " (policy versions 4 to 9)")


def test_report_has_times_steps_and_history(specification, status):
    events = [
        Event(seq=1, at=108.0, kind="state", data={"from": "starting", "to": "training"}),
        Event(seq=2, at=150.0, kind="state", data={"from": "training", "to": "evaluating"}),
    ]
    found = build(specification, status, {}, rows(95), events, checkpoint="/c", plot="/p.png")
    assert (found.seconds.total, found.seconds.to_first_step, found.seconds.training) == (60.0, 8.0, 42.0)
    assert (found.steps, found.rollouts, found.rollouts_per_second) == (95, 95 * 64, 9.0)
    assert (found.checkpoint, found.checkpoint_step, found.plot) == ("/c", 40, "/p.png")
    assert found.metrics["step"] == 95 and found.counts == {"accepted": 5}
    assert [point.step for point in found.history] == [9, 19, 28, 38, 47, 57, 66, 76, 85, 95]
    assert found.history[0].reward == 5.0 and found.history[-1].success == pytest.approx(90.5 / 95, abs=1e-6)
    assert len(build(specification, status, {}, rows(3)).history) == 3


def test_report_pairs_examples_before_and_after(specification, status):
    found = build(specification, status, {"after": evaluation("after", 1), "before": evaluation("before", 1)}, [])
    by_task = {example.task_id: example for example in found.examples}
    assert [example.task_id for example in found.examples] == ["b", "only before", "only after"]
    both = by_task["b"]
    assert (both.before, both.after, both.before_success, both.after_success) == ("before b", "after b", False, True)
    assert by_task["only after"].before is None and by_task["only after"].reference == "7"


def test_test_run_interval_counts_tasks_not_rollouts(specification, status):
    content = {"sampled": sampled(80, 20, rollouts=160, pass_at_k=0.7, all_wrong_share=0.3, all_right_share=0.1)}
    found = build(specification, status.model_copy(update={"kind": "test"}), {"test": content}, [])
    share = found.evaluations["test"].sampled
    assert (share.accuracy, share.tasks, share.rollouts, share.pass_at_k) == (0.5, 20, 160, 0.7)
    assert share.low == pytest.approx(0.2993, abs=1e-4)


@pytest.mark.parametrize(("tasks", "rollouts"), [(7, 17), (100, 113), (100, 201)])
def test_perfect_test_with_failed_judgements_is_reported(specification, status, tasks, rollouts):
    content = {"version": 1, "sampled": {**sampled(rollouts), "tasks": tasks, "rollouts": rollouts}}
    found = build(specification, status, {"test": content}, []).evaluations["test"].sampled
    assert (found.accuracy, found.high) == (1.0, 1.0)


def test_evaluation_without_tasks_has_no_share(specification, status):
    content = {"sampled": {"split": "heldout", "tasks": 0, "successes": 0, "accuracy": None}}
    assert build(specification, status, {"after": content}, []).evaluations["after"].sampled is None


@pytest.mark.parametrize("content", [{}, {"sampled": 3}, {"sampled": {"tasks": 2}}, {"sampled": {"tasks": "many"}}])
def test_invalid_evaluation_is_named(specification, status, content):
    with pytest.raises(Corrupt, match="'after'"):
        build(specification, status, {"after": content}, [])


def test_read_rows_takes_last_of_each_step_and_skips_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"reward":1}\n{"step":2,"reward":2}\n{"step":2,"reward":3}\n[]\n{"step":3,"rew')
    assert read_rows(path) == [{"step": 1, "reward": 1}, {"step": 2, "reward": 3}]
    assert read_rows(tmp_path / "none") == []


def test_gather_reads_folder_and_results_round_trip(tmp_path, specification, status):
    folder = RunFolder.create(tmp_path / "runs", specification.run_id)
    for label, wins in (("before", 5), ("after", 150)):
        write_json(folder.evaluation(label), evaluation(label, wins))
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows(4)))
    (folder.checkpoints / "step-40").mkdir()
    found = gather(folder, specification, status)
    assert found.rose and found.steps == 4 and found.plot is None
    assert found.checkpoint == str(folder.checkpoints / "step-40")
    assert Results.model_validate_json(found.model_dump_json()) == found
    (folder.checkpoints / "step-40").rmdir()
    assert gather(folder, specification, status).checkpoint is None


def test_training_time_excludes_time_between_attempts(specification, status):
    events = [
        Event(seq=1, at=108.0, kind="first_step", data={"step": 1}),
        Event(seq=2, at=120.0, kind="state", data={"from": "training", "to": "lost"}),
        Event(seq=3, at=140.0, kind="first_step", data={"step": 41}),
        Event(seq=4, at=150.0, kind="state", data={"from": "training", "to": "evaluating"}),
    ]
    resumed = status.model_copy(update={"attempt": 2, "training_at": 140.0})
    found = build(specification, resumed, {}, [{"step": 95, "train_seconds": 21.5}], events)
    assert (found.seconds.to_first_step, found.seconds.training) == (8.0, 21.5)


@pytest.mark.parametrize(("newest", "seconds"), [([{"step": 95, "train_seconds": 30.5}], 30.5), ([], 42.0)])
def test_training_goes_on_after_a_pause(specification, status, newest, seconds):
    moves = [(108.0, "starting", "training"), (112.0, "training", "paused"), (120.0, "paused", "training")]
    moves.append((150.0, "training", "evaluating"))
    events = [
        Event(seq=seq, at=at, kind="state", data={"from": former, "to": to})
        for seq, (at, former, to) in enumerate(moves, 1)
    ]
    assert build(specification, status, {}, newest, events).seconds.training == seconds


def test_page_with_many_evaluations_shows_the_last(specification, status):
    labels = ["after", "before", *(f"step-{number}" for number in range(1, 400))]
    found = build(specification, status, {label: evaluation(label, 6, 7) for label in labels}, [])
    table = next(
        block
        for block in compose_run_report(RunRecords(specification, status, found, [], []))
        if isinstance(block, Table)
    )
    shown = [row[0] for row in table.rows]
    assert shown[0] == "before, sampled" and shown[-1] == "after, greedy" and len(shown) == 28
    assert "step-1, sampled" in shown and "step-399, greedy" in shown


@pytest.mark.parametrize(("split", "subject", "unseen"), [("train", "Training", False), ("heldout", "Held-out", True)])
def test_only_heldout_tasks_are_called_unseen(specification, status, split, subject, unseen):
    """An environment with too few tasks is evaluated on those that it trained on."""
    content = {label: evaluation(label, wins) for label, wins in (("before", 6), ("after", 170))}
    for measured in content.values():
        measured["sampled"]["split"] = split
    run = RunRecords(specification, status, build(specification, status, content, []), [], [])
    texts = " ".join(block.text for block in compose_run_report(run) if isinstance(block, Paragraph))
    assert f"{subject} accuracy (sampled) went from 3.0%" in texts
    assert ("training never saw" in texts) is unseen and (_bar(run) is not None) is unseen


def test_card_names_files_of_knobs_without_their_folders(specification):
    specification.config.environment.knobs = {
        "path": "/home/alice/secret/rows.csv",
        "more": [{"folder": "~/secret/levels"}, 3],
        "prompt": "{question} / {hint}",
    }
    results = SimpleNamespace(evaluations={})
    card = SimpleNamespace(specification=specification, manifest=None, ancestors=[], results=results)
    told = " ".join(_data(card))
    assert "path: rows.csv" in told and "folder: levels" in told and "{question} / {hint}" in told
    assert "secret" not in told
