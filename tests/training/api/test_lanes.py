"""The rule by which batches are filled: fair by weight, exact where possible, minimum allocations, no starvation."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.training.api.queue.fair_scheduler import PATIENCE, Lanes, Pick, Waiting


class Feeder:
    """Lanes whose groups get numbers of their own."""

    def __init__(self, alive_s: float = 60.0) -> None:
        self.lanes = Lanes(alive_s)
        self._numbers = count(1)

    def add(self, name: str, rows: int, times: int = 1) -> list[int]:
        groups = [Waiting(next(self._numbers), rows, 10, name, 0.0) for _ in range(times)]
        for group in groups:
            self.lanes.add(group)
        return [group.seq for group in groups]

    def take(self, room: int, now: float = 0.0) -> Pick | None:
        pick = self.lanes.pick(room, now)
        if pick is not None:
            self.lanes.take(pick.groups, pick.passed)
        return pick

    def names(self, room: int, now: float = 0.0) -> Counter[str] | None:
        pick = self.take(room, now)
        return None if pick is None else Counter(group.lane for group in pick.groups)


def test_one_lane_is_first_in_first_out() -> None:
    feeder = Feeder()
    numbers = feeder.add("a", 8, 10)
    taken = [[group.seq for group in feeder.take(32).groups] for _ in range(2)]
    assert taken == [numbers[:4], numbers[4:8]]


def test_lanes_share_by_weight_in_rows_not_in_groups() -> None:
    feeder = Feeder()
    feeder.lanes.lane("heavy").weight = 3.0
    feeder.add("heavy", 4, 400)
    feeder.add("light", 2, 400)
    rows: Counter[str] = Counter()
    for _ in range(20):
        for group in feeder.take(32).groups:
            rows[group.lane] += group.rows
    assert rows["heavy"] == pytest.approx(3 * rows["light"], rel=0.05)


def test_a_lane_that_was_empty_claims_nothing_for_the_past() -> None:
    feeder = Feeder()
    feeder.add("old", 1, 1000)
    feeder.add("new", 1, 1)
    for _ in range(10):
        feeder.take(32)
    feeder.add("new", 1, 500)
    assert feeder.names(32) == {"old": 16, "new": 16}


def test_sizes_are_combined_to_an_exact_batch() -> None:
    feeder = Feeder()
    feeder.add("a", 7, 3)
    feeder.add("b", 5, 3)
    assert feeder.names(24) == {"a": 2, "b": 2}
    feeder = Feeder()
    feeder.add("a", 3, 3)
    feeder.add("b", 5, 3)
    # In turns: 3 + 5 + 3 + 5 = 16, too much for 14; then 3 + 3 + 3 + 5.
    assert feeder.names(14) == {"a": 3, "b": 1}


def test_what_cannot_be_exact_is_as_full_as_it_can_be() -> None:
    feeder = Feeder()
    feeder.add("a", 5, 10)
    assert [group.rows for group in feeder.take(12).groups] == [5, 5]


def test_a_group_larger_than_the_batch_goes_alone_unless_that_is_forbidden() -> None:
    feeder = Feeder()
    feeder.add("a", 20)
    feeder.add("a", 4)
    assert feeder.lanes.pick(16, 0.0, alone=False) == Pick(())
    assert [group.rows for group in feeder.take(16).groups] == [20]


def test_the_neediest_lane_is_passed_over_for_exact_batches_a_few_times_only() -> None:
    feeder = Feeder()
    feeder.add("odd", 3, 1)
    feeder.add("even", 8, 100)
    feeder.lanes.lane("odd").virtual = -1.0
    batches = [feeder.take(16) for _ in range(PATIENCE + 1)]
    assert all(sum(group.rows for group in batch.groups) == 16 for batch in batches[:-1])
    assert [batch.passed for batch in batches] == ["odd"] * PATIENCE + [None]
    assert sorted(group.rows for group in batches[-1].groups) == [3, 8]


def test_a_minimum_is_kept_for_its_lane_and_waited_for_while_its_environment_lives() -> None:
    feeder = Feeder(alive_s=60.0)
    lane = feeder.lanes.lane("small")
    lane.minimum, lane.weight, lane.heard_at = 0.5, 0.001, 100.0
    feeder.add("big", 4, 50)
    assert feeder.take(16, now=110.0) is None
    feeder.add("small", 4, 2)
    assert feeder.names(16, now=110.0) == {"small": 2, "big": 2}
    assert feeder.take(16, now=160.0) is None, "it may still come"
    assert feeder.names(16, now=161.0) == {"big": 4}, "it was not heard of for a minute"
    lane.heard_at, lane.connected = 161.0, False
    assert feeder.names(16, now=161.0) == {"big": 4}, "it took its leave"


def test_minimums_that_add_up_to_everything_starve_nobody() -> None:
    feeder = Feeder()
    for name in ("a", "b"):
        feeder.lanes.lane(name).minimum, feeder.lanes.lane(name).heard_at = 0.5, 0.0
        feeder.add(name, 8, 100)
    feeder.add("poor", 8, 3)
    served = [feeder.names(16)["poor"] for _ in range(3 * (PATIENCE + 2))]
    assert sum(served) == 3 and served.index(1) <= PATIENCE + 1


def test_groups_must_be_taken_from_the_front() -> None:
    feeder = Feeder()
    feeder.add("a", 1, 2)
    second = feeder.lanes.lane("a").groups[1]
    with pytest.raises(ValueError, match="not the oldest"):
        feeder.lanes.take([second], None)


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(lanes=st.lists(st.tuples(sizes, st.floats(0.1, 10)), min_size=1, max_size=4), room=st.integers(1, 24))
def test_everything_is_delivered_whole_in_order_and_within_bounds(
    lanes: list[tuple[list[int], float]], room: int
) -> None:
    feeder, put = Feeder(), {}
    for index, (rows, weight) in enumerate(lanes):
        name = f"lane{index}"
        feeder.lanes.lane(name).weight = weight
        put[name] = [number for size in rows for number in feeder.add(name, size)]
    got: dict[str, list[int]] = {name: [] for name in put}
    while feeder.lanes.rows:
        before = feeder.lanes.rows
        pick = feeder.take(room)
        assert pick is not None and pick.groups, "something waits, so something is delivered"
        total = sum(group.rows for group in pick.groups)
        assert total <= room or len(pick.groups) == 1
        assert feeder.lanes.rows == before - total
        for group in pick.groups:
            got[group.lane].append(group.seq)
    assert got == put


@settings(max_examples=100, deadline=None)
@given(
    greedy=st.integers(1, 8),
    victim=st.integers(1, 8),
    room=st.integers(8, 40),
    weight=st.floats(0.2, 5),
)
def test_no_group_waits_for_ever_whatever_the_others_post(greedy: int, victim: int, room: int, weight: float) -> None:
    feeder = Feeder()
    feeder.lanes.lane("victim").weight = weight
    feeder.add("greedy", greedy, 100)
    (number,) = feeder.add("victim", victim)
    bound = (PATIENCE + 1) * (2 + int(room / weight))
    for _ in range(bound):
        feeder.add("greedy", greedy, 40)
        pick = feeder.take(room)
        if any(group.seq == number for group in pick.groups):
            return
    raise AssertionError(f"still waiting after {bound} batches")


@settings(max_examples=100, deadline=None)
@given(
    counts=st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.integers(1, 12), min_size=1),
    batches=st.integers(1, 3),
)
def test_sizes_that_divide_each_other_always_make_exact_batches_while_patience_lasts(
    counts: dict[int, int], batches: int
) -> None:
    feeder = Feeder()
    for size, times in counts.items():
        feeder.add(f"of{size}", size, times)
    for _ in range(batches):
        if feeder.lanes.rows < 16:
            return
        assert sum(group.rows for group in feeder.take(16).groups) == 16
