"""Integrity checks of a report."""

from __future__ import annotations

import pytest

from tests.support import records
from toprope.analysis.integrity import examine, lineage_of, lone_wins
from toprope.analysis.statistics.comparison import Answers, Measured
from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder
from toprope.settings.schema import Config


def specification(run_id="a-run", model="embedded"):
    config = Config()
    config.policy.model = model
    return records.specification(run_id, config=config)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs", "a-run")


def evaluation(loaded="x", **sampled):
    values = {"answer_tokens": 10.0, "parse_failures": 0.0, "truncated": 0.0} | sampled
    return {"evaluator": {"loaded": {"environment": loaded}, "versions": {}}, "sampled": values}


def checks(folder, evaluations=None, rows=(), model="embedded"):
    found = examine(folder, specification(model=model), evaluations or {}, rows)
    return {check.name: check for check in found.checks}


def contents(copies=0, sharing=0):
    seen = {"train": 100, "validation": 10, "heldout": 50}
    pairs = {"train_heldout": copies, "train_validation": 0, "validation_heldout": 0}
    one = {"seen": seen, "copies": pairs, "passage_words": 9, "heldout_sharing_passages": sharing}
    return {"attempts": {"1": one | {"train_not_looked_at": 0}}}


def test_unrecorded_facts_are_unknown(folder):
    assert {check.state for check in checks(folder).values()} == {"unknown"}
    write_json(folder.path / "contents.json", {"attempts": {"1": "nonsense"}})
    assert (
        checks(folder, {"before": {"sampled": None}}, [{"completions/mean_length": "x"}])["splits"].state == "unknown"
    )


def test_overlapping_splits_are_a_warning(folder):
    write_json(folder.path / "contents.json", contents())
    assert checks(folder)["splits"].state == "ok"
    write_json(folder.path / "contents.json", contents(copies=3, sharing=2))
    found = checks(folder)["splits"]
    assert found.state == "warning"
    assert "3 train and heldout copies" in found.what and "2 held-out tasks that share a passage" in found.what


def test_changed_evaluator_source_is_a_warning(folder):
    assert checks(folder, {"before": evaluation(), "after": evaluation()})["evaluator"].state == "ok"
    between = checks(folder, {"before": evaluation(), "after": evaluation("y")})["evaluator"]
    assert between.state == "warning" and "Different code" in between.what
    touched = evaluation()
    touched["evaluator"]["on_disk"] = {"environment": "z"}
    under = checks(folder, {"before": evaluation(), "after": touched})["evaluator"]
    assert under.state == "warning" and "changed on disk during the run" in under.what


def test_changed_answer_length_or_format_is_a_warning(folder):
    rows = [{"completions/mean_length": length} for length in (10, 10, 12, 14, 25, 30)]
    assert checks(folder, rows=rows)["length"].state == "warning"
    assert checks(folder, rows=rows[:3])["length"].state == "ok"
    shorter = {"before": evaluation(), "after": evaluation(answer_tokens=3.0)}
    assert checks(folder, shorter)["length"].state == "warning"
    worse = {"before": evaluation(), "after": evaluation(parse_failures=0.2)}
    assert checks(folder, worse)["format"].state == "warning"
    better = {"before": evaluation(parse_failures=0.2), "after": evaluation()}
    assert checks(folder, better)["format"].state == "ok"


def test_lineage_follows_weights_through_runs(folder):
    runs = folder.path.parent
    grandparent = RunFolder.create(runs, "first-run")
    specification("first-run", "some/model").write(grandparent)
    parent = RunFolder.create(runs, "second-run")
    specification("second-run", str(grandparent.checkpoints / "step-000100" / "model")).write(parent)
    model = str(parent.checkpoints / "step-000200" / "model")
    assert lineage_of(folder, model) == [
        {"run": "second-run", "step": 200},
        {"run": "first-run", "step": 100},
        {"model": "some/model"},
    ]
    check = checks(folder, model=model)["lineage"]
    assert check.state == "unknown" and "step 200 of second-run, which started from step 100 of first-run" in check.what
    # A cycle ends too.
    specification("first-run", model).write(grandparent)
    assert len(lineage_of(folder, model)) <= 20


def measured(name, wins, *, begin=0):
    tasks = tuple(f"t{index}" for index in range(len(wins)))
    return Measured(name, 0, {}, {}, Answers(tasks[begin:], tuple(wins)[begin:]))


def test_win_of_one_seed_alone_is_a_warning():
    low, high = [1] * 10 + [0] * 90, [1] * 60 + [0] * 40
    lucky = lone_wins("c", [measured("a", low), measured("b", low), measured("c", high)])
    assert lucky.state == "warning" and lucky.observed["alone"] == 50
    assert lone_wins("a", [measured("a", low), measured("c", high)]).state == "ok"
    near = [0] * 5 + [1] * 12 + [0] * 83
    assert lone_wins("b", [measured("a", low), measured("b", near)]).state == "ok"
    assert lone_wins("a", [measured("a", low)]).state == "unknown"
    # An answer that nobody judged leaves the others comparable.
    lucky = lone_wins("c", [measured("a", low, begin=1), measured("b", low), measured("c", high)])
    assert lucky.state == "warning" and (lucky.observed["alone"], lucky.observed["tasks"]) == (50, 99)
    assert lone_wins("c", [measured("a", low, begin=80), measured("c", high)]).state == "unknown"
