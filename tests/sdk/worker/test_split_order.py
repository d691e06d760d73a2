"""The order of tasks within their split: the first of a finite source stand for all of it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from toprope.sdk import Environment, Task
from toprope.sdk.worker import splits as splits_module
from toprope.sdk.worker.splits import FAMILY_RULE, ORDER_RULE, SPLITS, TaskSplits


class SortedRows(Environment):
    """A sorted file."""

    finite = True
    broken_at = -1

    def tasks(self):
        for number in range(300):
            if number == self.broken_at:
                raise ValueError("no such row")
            yield Task(f"row {number:03}", source=f"row {number:03}")


class SortedSplits(SortedRows):
    def tasks(self, split):
        return (Task(f"{split} {number:03}") for number in range(60))


def first_of(environment: Environment, seed: int = 0, rule: int = ORDER_RULE) -> dict[str, list[str]]:
    splits = TaskSplits(environment, seed, rule=rule)
    return {split: [task.content for task in splits.page(split, 0, 20)] for split in SPLITS}


@pytest.mark.parametrize("kind", [SortedRows, SortedSplits])
def test_the_first_finite_tasks_stand_for_all(kind: type[Environment]) -> None:
    first, other_seed, old = (first_of(kind(), seed, rule) for seed, rule in ((0, 5), (1, 5), (0, FAMILY_RULE)))
    for split in SPLITS:
        assert old[split] == sorted(old[split]), "runs of earlier versions keep the order of the file"
        assert first[split] != sorted(first[split]) and set(first[split]) != set(old[split])
    assert first == first_of(kind())
    assert {split: first[split] == other_seed[split] for split in SPLITS} == {
        "train": False, "validation": True, "heldout": True,
    }  # fmt: skip


def test_own_splits_that_are_held_out_are_ordered_without_reading_an_endless_one() -> None:
    class Endless(Environment):
        def tasks(self, split):
            return (Task(f"{split} {number:03}") for number in (count() if split == "train" else range(60)))

    first = first_of(Endless())
    assert first["train"] == sorted(first["train"]) and first["heldout"] != sorted(first["heldout"])


def test_a_pass_over_ordered_tasks_repeats_none() -> None:
    splits = TaskSplits(SortedRows(), 3)
    size = len(splits.page("train", 0, 500))
    passes = [splits.get("train", number) for number in range(2 * size)]
    first, second = ([task.content for task, epoch in passes if epoch == number] for number in range(2))
    assert len(set(first)) == size and first != second and set(first) == set(second)


def test_tasks_have_no_number_until_they_are_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(splits_module, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    splits, pages = TaskSplits(SortedRows()), []
    while not pages or not pages[-1]:
        pages.append([task.content for task in splits.page("heldout", 0, 20, 50)])
    assert len(pages) > 3 and pages[-1] == first_of(SortedRows())["heldout"]


def test_a_failure_leaves_the_ordered_tasks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SortedRows, "broken_at", 100)
    splits = TaskSplits(SortedRows())
    with pytest.raises(ValueError, match="no such row"):
        splits.get("train", 0)
    found = [task.content for task in splits.page("train", 0, splits.known("train"))]
    assert sum(map(splits.known, SPLITS)) == 100 and found != sorted(found)


def test_the_order_stops_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits_module, "ORDER_LIMIT", 100)
    numbers = [task.content for task in TaskSplits(SortedRows()).page("train", 0, 300)]
    assert (
        numbers[:60] != sorted(numbers[:60])
        and max(numbers[:60]) < "row 120"
        and numbers[-60:] == sorted(numbers[-60:])
    )


def test_own_training_tasks_have_the_limit_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits_module, "ORDER_LIMIT", 100)
    trained = [task.content for task in TaskSplits(SortedSplits()).page("train", 0, 60)]
    assert len(trained) == 60 and trained != sorted(trained)


def test_few_finite_tasks_keep_the_splits_of_earlier_rules() -> None:
    class Few(SortedRows):
        def tasks(self):
            return (Task(f"row {number}", source=f"row {number}") for number in range(12))

    class Unlisted(Few):
        finite = False

    former, unlisted = (first_of(kind(), rule=FAMILY_RULE) for kind in (Few, Unlisted))
    assert former == unlisted and not all(former.values()), "chance leaves a split empty"
    assert all(first_of(Few()).values()), "few tasks fill all splits"
