"""Changes of accuracy by training: paired where the tasks are the same, by intervals elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from toprope.analysis.statistics.accuracy_change import AccuracyChange, change_between, change_by_environment


def measured(wins: list[int], tasks: list[str] | None = None, **more: Any) -> dict[str, Any]:
    ids = tasks or [f"t{number}" for number in range(len(wins))]
    by_task = {"by_task": {"tasks": ids, "wins": wins}}
    return {"tasks": len(wins), "accuracy": sum(wins) / len(wins)} | by_task | more


def pair(both: int, gained: int, lost: int, neither: int) -> tuple[dict[str, Any], dict[str, Any]]:
    before = [1] * both + [0] * gained + [1] * lost + [0] * neither
    after = [1] * both + [1] * gained + [0] * lost + [0] * neither
    return measured(before), measured(after)


def without_tasks(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "by_task"}


def change(*measurements: dict[str, Any]) -> AccuracyChange:
    found = change_between(*measurements)
    assert found is not None
    return found


def test_rise_within_overlapping_intervals_is_shown_by_the_paired_test() -> None:
    before, after = pair(379, 62, 36, 23)  # 83.0 % to 88.2 % of 500
    found = change(before, after)
    assert (found.verdict, found.gained, found.lost) == ("rose", 62, 36)
    assert found.p == pytest.approx(0.0112, abs=5e-4)
    assert found.sentence() == "Accuracy rose: 62 tasks gained, 36 lost, exact paired test p 0.011."
    fell = change(after, before)
    assert fell.verdict == "fell" and fell.phrase() == "fell (36 tasks gained, 62 lost, exact paired test p 0.011)"
    by_intervals = change(without_tasks(before), without_tasks(after))
    assert by_intervals.verdict == "none"
    assert by_intervals.sentence() == "A rise of accuracy is not shown: the intervals overlap."


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.9, "rose"), (0.08, "none"), (0.0, "fell")])
def test_intervals_decide_without_results_by_task(accuracy: float, verdict: str) -> None:
    found = change({"tasks": 100, "accuracy": 0.06}, {"tasks": 100, "accuracy": accuracy + 0})
    assert found.verdict == (verdict if accuracy else "none")
    assert change({"tasks": 500, "accuracy": 0.044}, {"tasks": 500, "accuracy": accuracy}).verdict == verdict


def test_few_changes_show_nothing() -> None:
    assert change(*pair(50, 12, 5, 33)).verdict == "none"
    assert change(*pair(50, 0, 0, 50)).p == 1.0


def test_tasks_are_paired_by_their_content() -> None:
    """An unjudged answer leaves its task out of one of the two measurements."""
    before, after = pair(20, 20, 0, 20)
    later = measured(after["by_task"]["wins"][1:], after["by_task"]["tasks"][1:])
    found = change(before, later)
    assert (found.gained, found.lost) == (20, 0)
    others = measured(after["by_task"]["wins"], [f"x{number}" for number in range(60)])
    assert change(before, others).p is None


def test_each_environment_is_paired_alone() -> None:
    tasks = [f"{label}/{number}" for label in ("gym", "gym/sums") for number in range(40)]
    shares = {"gym": {"tasks": 40, "accuracy": 0.5}, "gym/sums": {"tasks": 40, "accuracy": 0.5}}
    alone = {"small": {"tasks": 10, "accuracy": 0.5}}  # trained on, so its tasks are in no list
    before = measured([0] * 80, tasks, environments=shares | alone)
    after = measured([1] * 8 + [0] * 72, tasks, environments=shares | alone)
    found = change_by_environment(before, after)
    assert {label: one.verdict for label, one in found.items()} == {"gym": "rose", "gym/sums": "none", "small": "none"}
    assert (found["gym"].gained, found["gym/sums"].p, found["small"].p) == (8, 1.0, None)


def test_verdicts_of_many_environments_are_corrected_for_their_number() -> None:
    wins: dict[str, tuple[list[int], list[int]]] = {}
    for label, counts in (("a", (10, 40, 2, 8)), ("b", (20, 14, 4, 12)), ("c", (20, 0, 0, 20))):
        before, after = pair(*counts)
        wins[label] = before["by_task"]["wins"], after["by_task"]["wins"]
    tasks = [f"{label}/{number}" for label, (one, _) in wins.items() for number in range(len(one))]
    content = [
        measured(
            [win for both in wins.values() for win in both[side]], tasks,
            environments={label: without_tasks(measured(both[side])) for label, both in wins.items()},
        )
        for side in (0, 1)
    ]  # fmt: skip
    found = change_by_environment(*content)
    assert {label: one.verdict for label, one in found.items()} == {"a": "rose", "b": "none", "c": "none"}
    assert (found["b"].p, found["b"].corrected) == (pytest.approx(0.031, abs=1e-3), pytest.approx(0.062, abs=1e-3))
    assert "p 0.031, 0.062 among all environments" in found["b"].why


def test_unmeasured_accuracy_has_no_change() -> None:
    assert change_between({}, {"tasks": 10, "accuracy": 0.5}) is None
    assert change_by_environment({}, {}) == {}
