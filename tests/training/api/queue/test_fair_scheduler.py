"""Batches are fair by weight, exact if possible, respect minimum allocations, and starve no lane."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.training.api.queue.fair_scheduler import PATIENCE, FairScheduler, Selection, WaitingGroup


class Feeder:
    """A scheduler, and groups with ascending numbers."""

    def __init__(self, alive_s: float = 60.0) -> None:
        self.scheduler = FairScheduler(alive_s)
        self._numbers = count(1)

    def add(self, name: str, rows: int, times: int = 1) -> list[int]:
        groups = [WaitingGroup(next(self._numbers), rows, 10, name, 0.0) for _ in range(times)]
        for group in groups:
            self.scheduler.add(group)
        return [group.seq for group in groups]

    def take(self, room: int, now: float = 0.0) -> Selection | None:
        selection = self.scheduler.select(room, now)
        if selection is not None:
            self.scheduler.take(selection.groups, selection.skipped)
        return selection

    def names(self, room: int, now: float = 0.0) -> Counter[str] | None:
        selection = self.take(room, now)
        return None if selection is None else Counter(group.lane for group in selection.groups)


def test_one_lane_is_fifo() -> None:
    feeder = Feeder()
    numbers = feeder.add("a", 8, 10)
    taken = [[group.seq for group in feeder.take(32).groups] for _ in range(2)]
    assert taken == [numbers[:4], numbers[4:8]]


def test_lanes_share_rows_by_weight() -> None:
    feeder = Feeder()
    feeder.scheduler.lane("heavy").weight = 3.0
    feeder.add("heavy", 4, 400)
    feeder.add("light", 2, 400)
    rows: Counter[str] = Counter()
    for _ in range(20):
        for group in feeder.take(32).groups:
            rows[group.lane] += group.rows
    assert rows["heavy"] == pytest.approx(3 * rows["light"], rel=0.05)


def test_empty_lane_gains_no_claim() -> None:
    feeder = Feeder()
    feeder.add("old", 1, 1000)
    feeder.add("new", 1, 1)
    for _ in range(10):
        feeder.take(32)
    feeder.add("new", 1, 500)
    assert feeder.names(32) == {"old": 16, "new": 16}


def test_group_sizes_are_combined_to_exact_batch() -> None:
    feeder = Feeder()
    feeder.add("a", 7, 3)
    feeder.add("b", 5, 3)
    assert feeder.names(24) == {"a": 2, "b": 2}
    feeder = Feeder()
    feeder.add("a", 3, 3)
    feeder.add("b", 5, 3)
    # Taking turns gives 3 + 5 + 3 and then 5, too much for 14; 3 + 3 + 3 + 5 is exact.
    assert feeder.names(14) == {"a": 3, "b": 1}


def test_inexact_batch_is_as_full_as_possible() -> None:
    feeder = Feeder()
    feeder.add("a", 5, 10)
    assert [group.rows for group in feeder.take(12).groups] == [5, 5]


def test_group_larger_than_batch_is_delivered_alone_if_allowed() -> None:
    feeder = Feeder()
    feeder.add("a", 20)
    feeder.add("a", 4)
    assert feeder.scheduler.select(16, 0.0, alone=False) == Selection(())
    assert [group.rows for group in feeder.take(16).groups] == [20]


def test_neediest_lane_is_skipped_at_most_patience_times() -> None:
    feeder = Feeder()
    feeder.add("odd", 3, 1)
    feeder.add("even", 8, 100)
    feeder.scheduler.lane("odd").virtual = -1.0
    batches = [feeder.take(16) for _ in range(PATIENCE + 1)]
    assert all(sum(group.rows for group in batch.groups) == 16 for batch in batches[:-1])
    assert [batch.skipped for batch in batches] == ["odd"] * PATIENCE + [None]
    assert sorted(group.rows for group in batches[-1].groups) == [3, 8]


def test_minimum_is_awaited_while_environment_is_alive() -> None:
    feeder = Feeder(alive_s=60.0)
    lane = feeder.scheduler.lane("small")
    lane.minimum, lane.weight, lane.active_at = 0.5, 0.001, 100.0
    feeder.add("big", 4, 50)
    assert feeder.take(16, now=110.0) is None
    feeder.add("small", 4, 2)
    assert feeder.names(16, now=110.0) == {"small": 2, "big": 2}
    assert feeder.take(16, now=160.0) is None, "its group may still come"
    assert feeder.names(16, now=161.0) == {"big": 4}, "it was inactive for a minute"
    lane.active_at, lane.connected = 161.0, False
    assert feeder.names(16, now=161.0) == {"big": 4}, "it disconnected"


def test_minimums_of_whole_batch_starve_no_lane() -> None:
    feeder = Feeder()
    for name in ("a", "b"):
        feeder.scheduler.lane(name).minimum, feeder.scheduler.lane(name).active_at = 0.5, 0.0
        feeder.add(name, 8, 100)
    feeder.add("poor", 8, 3)
    served = [feeder.names(16)["poor"] for _ in range(3 * (PATIENCE + 2))]
    assert sum(served) == 3 and served.index(1) <= PATIENCE + 1


def test_take_refuses_group_that_is_not_oldest() -> None:
    feeder = Feeder()
    feeder.add("a", 1, 2)
    second = feeder.scheduler.lane("a").groups[1]
    with pytest.raises(ValueError, match="not the oldest"):
        feeder.scheduler.take([second], None)


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(lanes=st.lists(st.tuples(sizes, st.floats(0.1, 10)), min_size=1, max_size=4), room=st.integers(1, 24))
def test_all_groups_are_delivered_in_order_within_bounds(lanes: list[tuple[list[int], float]], room: int) -> None:
    feeder, added = Feeder(), {}
    for index, (rows, weight) in enumerate(lanes):
        name = f"lane{index}"
        feeder.scheduler.lane(name).weight = weight
        added[name] = [number for size in rows for number in feeder.add(name, size)]
    got: dict[str, list[int]] = {name: [] for name in added}
    while feeder.scheduler.rows:
        before = feeder.scheduler.rows
        selection = feeder.take(room)
        assert selection is not None and selection.groups, "if a group waits, a group is delivered"
        total = sum(group.rows for group in selection.groups)
        assert total <= room or len(selection.groups) == 1
        assert feeder.scheduler.rows == before - total
        for group in selection.groups:
            got[group.lane].append(group.seq)
    assert got == added


@settings(max_examples=100, deadline=None)
@given(
    greedy=st.integers(1, 8),
    victim=st.integers(1, 8),
    room=st.integers(8, 40),
    weight=st.floats(0.2, 5),
)
def test_no_group_waits_for_ever(greedy: int, victim: int, room: int, weight: float) -> None:
    feeder = Feeder()
    feeder.scheduler.lane("victim").weight = weight
    feeder.add("greedy", greedy, 100)
    (number,) = feeder.add("victim", victim)
    bound = (PATIENCE + 1) * (2 + int(room / weight))
    for _ in range(bound):
        feeder.add("greedy", greedy, 40)
        selection = feeder.take(room)
        if any(group.seq == number for group in selection.groups):
            return
    raise AssertionError(f"still waiting after {bound} batches")


@settings(max_examples=100, deadline=None)
@given(
    counts=st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.integers(1, 12), min_size=1),
    batches=st.integers(1, 3),
)
def test_sizes_that_divide_each_other_make_exact_batches(counts: dict[int, int], batches: int) -> None:
    feeder = Feeder()
    for size, times in counts.items():
        feeder.add(f"of{size}", size, times)
    for _ in range(batches):
        if feeder.scheduler.rows < 16:
            return
        assert sum(group.rows for group in feeder.take(16).groups) == 16
