"""Splits that share no content, whatever the stream of tasks repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from toprope.sdk import Environment, Task
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest
from toprope.sdk.rollouts import configure
from toprope.sdk.worker import splits as splits_module
from toprope.sdk.worker.splits import (
    FAMILY_RULE,
    PATIENCE,
    PROMPT_RULE,
    SHARING_RULE,
    SOURCE_RULE,
    SPLITS,
    TaskSplits,
)


class Numbers(Environment):
    """Endless, with repetitions that differ in case and spaces."""

    def tasks(self):
        for number in count():
            yield Task(f"What is {number}?")
            yield Task(f"what  IS {number}?")


class Few(Environment):
    """Forty tasks over and over."""

    def tasks(self):
        for number in count():
            yield Task(f"Number {number % 40}")


def splits_of(environment: type[Environment], seed: int = 0) -> TaskSplits:
    return TaskSplits(configure(environment()), seed)


def contents(splits: TaskSplits, count: int) -> dict[str, set[str]]:
    return {split: {task.content for task in splits.page(split, 0, count)} for split in SPLITS}


def split_of(content: str) -> str:
    """The split of a task with this normalised content."""
    h = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 100
    return "train" if h < 80 else "validation" if h < 90 else "heldout"


def test_splits_share_no_content_and_repeat_none() -> None:
    splits = splits_of(Numbers)
    found = contents(splits, 50)
    assert all(len(tasks) == 50 for tasks in found.values())
    assert not found["train"] & found["validation"] | found["train"] & found["heldout"]
    assert not found["validation"] & found["heldout"]
    assert all(split_of(content) == split for split, tasks in found.items() for content in tasks)


def test_task_number_is_stable() -> None:
    one, other = splits_of(Numbers), splits_of(Numbers, seed=7)
    late = one.get("train", 120)[0]
    assert one.get("heldout", 3)[0].id == other.get("heldout", 3)[0].id
    assert other.get("train", 120)[0].id == late.id == one.get("train", 120)[0].id


def test_finite_training_split_restarts_in_other_order() -> None:
    splits = splits_of(Few)
    size = len(splits.page("train", 0, 10_000))
    assert splits.exhausted("train") and 20 < size <= 40
    passes = [[splits.get("train", epoch * size + number) for number in range(size)] for epoch in range(3)]
    assert [{epoch for _, epoch in one} for one in passes] == [{0}, {1}, {2}]
    orders = [[task.id for task, _ in one] for one in passes]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    other = splits_of(Few, seed=1)
    assert [other.get("train", number)[0].id for number in range(size)] == orders[0]
    assert [other.get("train", size + number)[0].id for number in range(size)] != orders[1]


def test_evaluation_splits_end() -> None:
    splits = splits_of(Few)
    size = len(splits.page("heldout", 0, 100))
    with pytest.raises(InvalidRequest, match=f"has {size} tasks"):
        splits.get("heldout", size)


def test_empty_split_is_an_error() -> None:
    class Three(Environment):
        def tasks(self):
            yield from (Task(f"What is {number}?") for number in range(3))

    splits = splits_of(Three)
    empty = next(split for split in SPLITS if split not in {split_of(f"what is {number}?") for number in range(3)})
    with pytest.raises(InvalidRequest, match="no tasks"):
        splits.get(empty, 0)
    assert not splits.shared


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("first", SPLITS)
def test_one_or_two_tasks_are_in_every_split(count: int, listed: bool, first: str) -> None:
    class Fewest(Environment):
        def tasks(self):
            yield from (Task(f"Question {number}") for number in range(count))

    Fewest.listed = listed
    splits = splits_of(Fewest)
    before = splits.get(first, 0)[0].id
    found = {split: [task.id for task in splits.page(split, 0, 10)] for split in SPLITS}
    assert splits.shared and found[first][0] == before
    assert {len(ids) for ids in found.values()} == {count} and len({frozenset(ids) for ids in found.values()}) == 1
    assert [splits.get("train", number)[1] for number in range(count * 2)] == [0] * count + [1] * count


@pytest.mark.parametrize("rule", [PROMPT_RULE, SOURCE_RULE])
def test_two_tasks_stay_apart_in_runs_that_began_before_they_were_shared(rule: int) -> None:
    """Such a run held one out; on a resume it measures the same task."""
    train = next(text for text in map(str, range(99)) if split_of(text) == "train")
    heldout = next(text for text in map(str, range(99)) if split_of(text) == "heldout")

    class Two(Environment):
        def tasks(self):
            yield from (Task(train), Task(heldout))

    splits = TaskSplits(configure(Two()), rule=rule)
    found = {split: [task.prompt for task in splits.page(split, 0, 10)] for split in SPLITS}
    assert found == {"train": [train], "validation": [], "heldout": [heldout]} and not splits.shared


def test_fewest_tasks_need_not_be_comparable() -> None:
    class NoTruth:
        def __eq__(self, other):  # as arrays do
            raise ValueError("The truth value is ambiguous.")

    @dataclass(frozen=True)
    class Measured(Task):
        """It is compared by value, unlike a Task."""

    class Two(Environment):
        def tasks(self):
            yield from (Measured("Question", data={"image": NoTruth()}, key=str(number)) for number in range(2))

    splits = splits_of(Two)
    assert [len(splits.page(split, 0, 10)) for split in SPLITS] == [2, 2, 2]


def test_one_task_of_a_family_is_in_one_split() -> None:
    """Another level of a curriculum may hold it out."""

    class One(Environment):
        def tasks(self):
            yield Task("What is 1?")

    easy = splits_of(One)
    hard = TaskSplits(configure(One()), family=[easy])
    for splits in (easy, hard):
        assert [len(splits.page(split, 0, 10)) for split in SPLITS].count(0) == 2 and not splits.shared


@pytest.mark.parametrize(("split", "index"), [("tarin", 0), ("train", -1), ("train", True), ("train", "0")])
def test_invalid_split_or_index_is_refused(split: str, index: Any) -> None:
    with pytest.raises(InvalidRequest):
        splits_of(Few).get(split, index)


def test_own_splits_drop_heldout_content() -> None:
    class Own(Environment):
        def tasks(self, split):
            start = {"train": 0, "validation": 8, "heldout": 10}[split]
            for number in range(start, start + 5):
                yield Task(f"{number}")

    found = contents(splits_of(Own), 100)
    assert found["heldout"] == {"10", "11", "12", "13", "14"}
    assert found["validation"] == {"8", "9"}
    assert found["train"] == {"0", "1", "2", "3", "4"}


def test_copies_within_a_split_and_between_splits_are_counted_apart() -> None:
    class Same(Environment):
        def tasks(self, split):
            return [Task(f"{number % 9}") for number in range(10)]

    class Equal(Environment):
        def tasks(self):
            return [Task("Which word?", reference=str(number)) for number in range(300)]

    splits = splits_of(Same)
    splits.survey(100, 5.0)
    assert splits.known("train") == 0 and splits.leaked("train") == splits.leaked("validation") == 10
    assert splits.known("heldout") == 9 and splits.copies == 1
    equal = splits_of(Equal)
    equal.survey(100, 5.0)
    assert equal.known("train") == 1 and equal.copies == 299


def test_own_endless_train_split_drops_heldout_content() -> None:
    class Own(Environment):
        def tasks(self, split):
            return (Task(f"{n % 700}") for n in count()) if split == "train" else [Task(f"{n}") for n in range(9)]

    splits = splits_of(Own)
    assert splits.get("train", 0)[0].content == "9"
    assert splits.get("train", 691)[1] == 1 and splits.known("train") == 691 > PATIENCE


def test_failing_stream_is_not_an_exhausted_one() -> None:
    class Raises(Environment):
        def tasks(self):
            yield Task("a")
            raise OSError("the file is gone")

    splits = splits_of(Raises)
    for _ in range(2):
        with pytest.raises(OSError, match="the file is gone"):
            splits.page("train", 0, 10)
    assert not splits.exhausted("train")


def test_stream_must_yield_tasks() -> None:
    class Wrong(Environment):
        def tasks(self):
            yield {"prompt": "x"}

    with pytest.raises(EnvironmentMistake, match="not dict"):
        splits_of(Wrong).get("train", 0)


def test_tasks_that_cannot_be_iterated_are_named() -> None:
    class Forgets(Environment):
        def tasks(self):
            return None

    with pytest.raises(EnvironmentMistake, match=r"tasks\(\) returned None: it must yield tasks"):
        splits_of(Forgets).get("train", 0)


def test_survey_stops_at_limit_or_deadline() -> None:
    splits = splits_of(Numbers)
    splits.survey(5, 60.0)
    assert min(splits.known(split) for split in SPLITS) >= 5 and splits.known("train") < 1000
    late = splits_of(Numbers)
    late.survey(10**9, 0.0)
    assert late.known("train") == 0


def test_survey_stops_at_its_deadline_while_it_looks_for_a_task_of_a_rare_split(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(splits_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tasks = [Task(text) for text in map(str, range(200)) if split_of(text) == "train"]

    class Slow(Environment):
        def tasks(self):
            for task in tasks:
                now[0] += 1.0
                yield task

    splits = splits_of(Slow)
    splits.survey(5, 3.0)
    assert now[0] == 3.0 and splits.known("train") == 3


def test_tasks_that_turn_out_to_be_slow_and_endless_are_not_read_to_see_if_there_are_others() -> None:
    read: list[int] = []

    class Slow(Environment):
        listed = True

        def tasks(self):
            for number in count():
                read.append(number)
                self.listed = number < 4
                yield Task(str(number))

    slow = splits_of(Slow)
    slow.page("train", 0, 1)
    assert len(read) == 5
    Slow.listed = False
    assert contents(slow, 9) == contents(splits_of(Slow), 9)


class Rows(Environment):
    """Questions whose prompt a template makes of a row, as in the adapter `dataset`."""

    template = "{}"

    def tasks(self):
        for row in range(600):
            yield Task(self.template.format(f"question {row}"), reference="x", source=f"row {row}")

    def score(self):
        return 0.0


def rows_of(rule: int, template: str) -> dict[str, set[str]]:
    environment = Rows()
    environment.template = template
    splits = TaskSplits(environment, rule=rule)
    return {split: {task.source or "" for task in splits.page(split, 0, 600)} for split in SPLITS}


def test_a_template_moves_no_row_from_one_split_to_another():
    """The attack: train under one template, and meet the sealed rows of another."""
    plain, other = (rows_of(SOURCE_RULE, template) for template in ("{}", "Please answer: {}"))
    assert plain == other and all(len(rows) > 30 for rows in plain.values())
    # Runs of earlier versions keep their rule, so that they resume and can be repeated; there the attack succeeds.
    plain, other = (rows_of(PROMPT_RULE, template) for template in ("{}", "Please answer: {}"))
    assert plain["heldout"] & other["train"]


def test_the_id_of_a_task_is_that_of_its_source():
    first, second = Rows(), Rows()
    second.template = "Please answer: {}"
    ids = []
    for environment in (first, second):
        splits = TaskSplits(environment)
        ids.append([splits.id_of(task) for task in splits.page("train", 0, 20)])
    assert ids[0] == ids[1]
    old = TaskSplits(first, rule=PROMPT_RULE)
    assert [old.id_of(task) for task in old.page("train", 0, 5)] == [task.id for task in old.page("train", 0, 5)]


class ListedRows(Environment):
    """A few rows."""

    listed = True
    rows = 5
    broken_at = -1

    def tasks(self):
        for number in range(self.rows):
            if number == self.broken_at:
                raise ValueError("no such row")
            yield Task(f"Row {number}")


@pytest.mark.parametrize("rows", [3, 5, 29, 30, 200])
def test_few_listed_tasks_fill_every_split(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedRows, "rows", rows)
    splits = splits_of(ListedRows)
    splits.get("train", 0)  # whatever is asked for first
    found = contents(splits, 500)
    assert all(found.values()) and sum(map(len, found.values())) == rows == len(set.union(*found.values()))
    other = splits_of(ListedRows)
    other.page("heldout", 0, 1)
    assert contents(other, 500) == found, "the same in every process"
    if rows >= 30:
        assert all(split_of(content) == split for split, of in found.items() for content in of)


class FewBoards(Environment):
    """An endless stream with twelve different tasks."""

    listed = True
    salt = 0

    def tasks(self):
        for number in count():
            yield Task(f"Board {self.salt * 100 + number * 7 % 12}")


def test_few_tasks_of_an_endless_stream_fill_every_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for salt in range(12):
        monkeypatch.setattr(FewBoards, "salt", salt)
        found = contents(splits_of(FewBoards), 500)
        assert all(found.values()) and sum(map(len, found.values())) == 12


@pytest.mark.parametrize(("easy", "hard"), [(9, 20), (12, 25), (5, 200)])
def test_few_tasks_of_two_levels_are_in_one_split_each(easy: int, hard: int) -> None:
    def level(rows: int, family: Sequence[TaskSplits], rule: int) -> TaskSplits:
        environment = ListedRows()
        environment.rows = rows
        return TaskSplits(environment, family=family, rule=rule)

    def crossing(rule: int) -> set[str]:
        first = level(easy, [], rule)
        levels = [first, level(hard, [first], rule)]
        one, other = (contents(splits, 500) for splits in levels)
        assert all(one.values()) and all(other.values())
        return {task for split in SPLITS for task in one[split] if task not in other[split]}

    assert not crossing(FAMILY_RULE)
    assert crossing(SHARING_RULE), "runs that began under it measure the same when they resume"


def test_a_level_of_few_tasks_trains_on_one_that_the_family_holds_out_nowhere() -> None:
    def found(shift: int) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        class Level(ListedRows):
            def tasks(self):
                return (Task(f"level {shift} row {number}") for number in range(self.rows))

        small, large = Level(), Level()
        small.rows, large.rows = 1 + shift % 2, 60
        first = TaskSplits(small)
        second = TaskSplits(large, family=[first])
        return contents(first, 500), contents(second, 500)

    for shift in range(60):
        one, other = found(shift)
        assert one["train"], shift
        assert all(one[split] <= other[split] for split in SPLITS), shift


def test_a_level_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ListedRows()
    broken.broken_at = 2
    hard = TaskSplits(broken)
    easy = TaskSplits(ListedRows(), family=[hard])
    assert sum(map(len, contents(easy, 50).values())) == 5
    with pytest.raises(ValueError, match="no such row"):
        hard.page("train", 0, 10)


def test_a_failure_keeps_the_listed_tasks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedRows, "rows", 0)
    with pytest.raises(InvalidRequest, match="^The train split has no tasks: its data are missing, or its knobs"):
        splits_of(ListedRows).get("train", 0)
    monkeypatch.setattr(ListedRows, "rows", 9)
    monkeypatch.setattr(ListedRows, "broken_at", 6)
    splits = splits_of(ListedRows)
    with pytest.raises(ValueError, match="no such row"):
        splits.get("train", 0)
    assert sum(splits.known(split) for split in SPLITS) == 6
