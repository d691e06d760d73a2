"""Which environment's group is next: fair by weight, whole groups, exact batches where possible, and nobody starves.

A lane holds the waiting groups of one environment, first in, first out. A batch of M rows is filled by this rule:

1. Lanes with a minimum allocation a first get int(a * M) rows, as far as whole groups fit. While such a lane has too
   little waiting and its environment is alive (connected and heard of within `alive_s`), no batch is formed; the
   share of a dead one is free.
2. Each lane has a virtual time that grows by rows / weight with every group it delivers; a lane that was empty starts
   again at the present. The lane with the lowest time is next, as long as its oldest group fits into the room left.
3. When room is left that no head fits, the numbers of groups per lane that add up to exactly M and lie nearest to those
   of 2 are taken, if there are any. The neediest lane (lowest time at the start) keeps at least one group. Only where
   that prevents an exact batch, or minimum allocations take all of it, it is passed over, at most `PATIENCE` times in a
   row.
4. When nothing adds up to M, the fullest batch below M with the neediest lane's head is taken. A head with more than M
   rows that is the neediest goes alone.

No group waits for ever: at least every (PATIENCE + 1)th batch takes the head of the neediest lane, which advances that
lane's time by at least 1 / weight and shortens the way of those behind it; times of other lanes never fall, so after
finitely many batches every lane that waits is the neediest. The cost of a batch grows with M and the number of lanes,
not with what waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from toprope.records.journal.marks import LaneState

__all__ = ["PATIENCE", "Lane", "Lanes", "Pick", "Waiting"]

PATIENCE = 8
"""Batches in a row that may pass the neediest lane over for the sake of an exact one."""


class Waiting(msgspec.Struct, gc=False, frozen=True):
    """A group as the queue knows it."""

    seq: int
    rows: int
    size: int
    """Bytes of its body."""
    lane: str
    at: float
    """When it was accepted, seconds since the epoch."""
    version: int = -1
    """The oldest policy version that sampled a token of it, -1 where unknown."""
    unmatched: bool = False
    """Whether its tokens were looked for at the inference server and not found."""


@dataclass
class Lane:
    """One environment's waiting groups and its claim."""

    name: str
    weight: float = 1.0
    minimum: float = 0.0
    """Fraction of every batch that is kept for it."""
    connected: bool = True
    heard_at: float = 0.0
    groups: deque[Waiting] = field(default_factory=deque)
    rows: int = 0
    largest: int = 1
    """Rows of the largest group it ever had."""
    virtual: float = 0.0
    passed: int = 0

    def alive(self, now: float, alive_s: float) -> bool:
        """Whether its environment is there and was heard of lately."""
        return self.connected and now - self.heard_at <= alive_s


@dataclass(frozen=True)
class Pick:
    """Groups for a batch in order of acceptance; `passed` is the lane whose turn it was and that got nothing."""

    groups: tuple[Waiting, ...]
    passed: str | None = None


class Lanes:
    """The lanes of a queue. Times are passed in, so that everything here can be replayed.

    Args:
        alive_s: Seconds after which an environment that was not heard of loses its minimum allocation.
    """

    def __init__(self, alive_s: float = 60.0) -> None:
        self.alive_s = alive_s
        self.rows = 0
        self._lanes: dict[str, Lane] = {}
        self._busy: dict[str, Lane] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def lane(self, name: str) -> Lane:
        """The lane of that name, made when it is new."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
        return lane

    def get(self, name: str) -> Lane | None:
        """The lane of that name, if there is one."""
        return self._lanes.get(name)

    def add(self, group: Waiting) -> None:
        """Puts a group at the end of its lane."""
        lane = self.lane(group.lane)
        if not lane.groups:
            lane.virtual = max(lane.virtual, self._now)
            self._busy[lane.name] = lane
        lane.groups.append(group)
        lane.rows += group.rows
        lane.largest = max(lane.largest, group.rows)
        self.rows += group.rows

    def take(self, groups: Iterable[Waiting], passed: str | None) -> None:
        """Removes picked groups and charges their lanes.

        Raises:
            ValueError: One of them is not the oldest of its lane.
        """
        taken = set()
        for group in groups:
            lane = self._lanes[group.lane]
            if not lane.groups or lane.groups[0].seq != group.seq:
                raise ValueError(f"group {group.seq} is not the oldest of lane {group.lane!r}")
            lane.groups.popleft()
            lane.virtual += group.rows / lane.weight
            self._leave(lane, group)
            taken.add(lane.name)
        for name in taken:
            self._lanes[name].passed = 0
        if passed is not None:
            self._lanes[passed].passed += 1
        times = [self._neediest().virtual] if self._busy else [self._lanes[name].virtual for name in taken]
        self._now = max(self._now, *times)

    def remove(self, group: Waiting) -> None:
        """Takes one group out, wherever in its lane it stands."""
        lane = self._lanes[group.lane]
        lane.groups.remove(group)
        self._leave(lane, group)

    def states(self) -> tuple[list[LaneState], float]:
        """What is to be known of the lanes besides the groups in them, and their present time."""
        states = [
            LaneState(lane.name, lane.weight, lane.minimum, lane.connected, lane.largest, lane.virtual, lane.passed)
            for lane in self
        ]
        return states, self._now

    def load(self, states: list[LaneState], present: float, heard_at: float) -> None:
        """Replaces everything by empty lanes with these states; `heard_at`: when their environments gave a sign."""
        self.clear()
        self._now = present
        for state in states:
            lane = self.lane(state.name)
            lane.weight, lane.minimum, lane.connected = state.weight, state.minimum, state.connected
            lane.largest, lane.virtual, lane.passed, lane.heard_at = (
                state.largest, state.virtual, state.passed, heard_at,
            )  # fmt: skip

    def put_back(self, group: Waiting) -> None:
        """`add` for a group that was in its lane when its state was taken: the lane's time stays."""
        lane = self.lane(group.lane)
        lane.groups.append(group)
        self._busy[lane.name] = lane
        lane.rows += group.rows
        self.rows += group.rows

    def clear(self) -> None:
        """Forgets every lane and what waits in it."""
        self._lanes.clear()
        self._busy.clear()
        self.rows, self._now = 0, 0.0

    def waits_for_minimum(self) -> bool:
        """Whether a batch may have to wait for an environment with a minimum allocation."""
        return any(lane.minimum for lane in self._lanes.values())

    def pick(self, room: int, now: float, *, alone: bool = True) -> Pick | None:
        """What the rule puts into `room` rows; None while it waits for an environment. Changes nothing.

        Args:
            room: Rows to fill.
            now: The time, for who is alive.
            alone: Whether a group larger than `room` may be a batch of its own.
        """
        lanes = list(self._busy.values())
        if not lanes:
            return Pick(())
        sums = [_sums(lane, room) for lane in lanes]
        floors = self._floors(lanes, sums, room, now)
        if floors is None:
            return None
        neediest = lanes.index(self._neediest())
        if len(sums[neediest]) == 1:
            if alone:
                return Pick((lanes[neediest].groups[0],))
            return Pick(())
        counts = _by_turns(lanes, sums, floors, room)
        passed = None
        if sum(row[count] for row, count in zip(sums, counts, strict=True)) < room:
            counts, passed = self._exact(lanes, sums, floors, counts, neediest, room)
        elif not counts[neediest]:  # minimum allocations take the whole batch: its turn comes now and then all the same
            if lanes[neediest].passed < PATIENCE:
                passed = lanes[neediest].name
            else:
                kept = [int(index == neediest) for index in range(len(lanes))]
                best = _nearest(sums, counts, kept, room)
                assert best is not None, "the neediest lane's head fits, or this is not called"
                counts = best[1]
        groups = [group for lane, count in zip(lanes, counts, strict=True) for group in islice(lane.groups, count)]
        groups.sort(key=lambda group: group.seq)
        return Pick(tuple(groups), passed)

    def _exact(
        self, lanes: list[Lane], sums: list[list[int]], floors: list[int], prefer: list[int], neediest: int, room: int
    ) -> tuple[list[int], str | None]:
        kept = [max(floor, int(index == neediest)) for index, floor in enumerate(floors)]
        best = _nearest(sums, prefer, kept, room)
        if best is None:  # minimum allocations leave the neediest no room: its turn comes first
            best = _nearest(sums, prefer, [int(index == neediest) for index in range(len(lanes))], room)
            assert best is not None, "the neediest lane's head fits, or this is not called"
        if best[0] < room and lanes[neediest].passed < PATIENCE:
            exact = _nearest(sums, prefer, floors, room)
            if exact is not None and exact[0] == room:
                return exact[1], lanes[neediest].name
        return best[1], None

    def _floors(self, lanes: list[Lane], sums: list[list[int]], room: int, now: float) -> list[int] | None:
        """Groups per lane that its minimum allocation asks for, or None while an environment is waited for."""
        floors, left = [0] * len(lanes), room
        for lane in self._lanes.values():
            need = int(lane.minimum * room)
            if need > lane.rows and lane.alive(now, self.alive_s):
                return None
        for index, lane in enumerate(lanes):
            need = int(lane.minimum * room)
            if not need:
                continue
            row = sums[index]
            count = next((count for count, rows in enumerate(row) if rows >= need), len(row) - 1)
            while row[count] > left:
                count -= 1
            floors[index] = count
            left -= row[count]
        return floors

    def _neediest(self) -> Lane:
        return min(self._busy.values(), key=lambda lane: (lane.virtual, lane.name))

    def _leave(self, lane: Lane, group: Waiting) -> None:
        lane.rows -= group.rows
        self.rows -= group.rows
        if not lane.groups:
            del self._busy[lane.name]


def _sums(lane: Lane, room: int) -> list[int]:
    """Rows of the lane's first 0, 1, 2, ... groups, as far as they fit."""
    sums = [0]
    for group in lane.groups:
        total = sums[-1] + group.rows
        if total > room:
            break
        sums.append(total)
    return sums


def _by_turns(lanes: list[Lane], sums: list[list[int]], floors: list[int], room: int) -> list[int]:
    counts = list(floors)
    room -= sum(row[count] for row, count in zip(sums, counts, strict=True))
    times = [
        (lane.virtual + sums[index][counts[index]] / lane.weight, lane.name, index) for index, lane in enumerate(lanes)
    ]
    heapq.heapify(times)
    while times and room:
        time, name, index = heapq.heappop(times)
        row, count = sums[index], counts[index]
        if count + 1 < len(row) and (rows := row[count + 1] - row[count]) <= room:
            counts[index] += 1
            room -= rows
            heapq.heappush(times, (time + rows / lanes[index].weight, name, index))
    return counts


def _nearest(sums: list[list[int]], prefer: list[int], lower: list[int], room: int) -> tuple[int, list[int]] | None:
    """The largest total up to `room` with at least `lower` groups of each lane, and the counts that make it, each lane
    in turn as near to `prefer` as possible. Totals that can be reached are the bits of an integer."""
    reach = [0] * len(sums) + [1]
    within = (1 << (room + 1)) - 1
    for index in range(len(sums) - 1, -1, -1):
        for rows in sums[index][lower[index] :]:
            reach[index] |= reach[index + 1] << rows
        reach[index] &= within
    total = left = reach[0].bit_length() - 1
    if total < 0:
        return None
    counts = []
    for index, row in enumerate(sums):
        fitting = [
            count
            for count in range(lower[index], len(row))
            if row[count] <= left and reach[index + 1] >> (left - row[count]) & 1
        ]
        count = min(fitting, key=lambda count: abs(count - prefer[index]))
        counts.append(count)
        left -= row[count]
    return total, counts
