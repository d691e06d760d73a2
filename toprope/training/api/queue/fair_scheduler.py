"""Fair scheduling of groups between environments: by weight, whole groups, exact batches if possible, no starvation.

A lane holds the waiting groups of one environment, first in, first out. A batch of M rows is filled as follows:

1. A lane with a minimum allocation a first gets int(a * M) rows, as far as whole groups fit. If too little waits in
   such a lane and its environment is alive (connected, and active within `alive_s`), no batch is formed. The share of a
   dead environment is free.
2. Each lane has a virtual time that grows by rows / weight with every group it delivers; a lane that was empty starts
   again at the present. The lane with the lowest time is next, if its oldest group fits into the remaining room.
3. If room remains that no head of a lane fits, the scheduler takes the numbers of groups per lane that add up to
   exactly M and are nearest to those of step 2, if there are any. The neediest lane (lowest time at the start) keeps at
   least one group. It is skipped only if it prevents an exact batch or if minimum allocations take the whole batch, at
   most `PATIENCE` times in a row.
4. If nothing adds up to M, the scheduler takes the fullest batch below M that contains the neediest lane's head. A head
   with more than M rows forms a batch of its own when its lane is the neediest.

No group waits for ever: at least every (PATIENCE + 1)th batch takes the head of the neediest lane, which advances that
lane's time by at least 1 / weight. Times of other lanes never fall, so after finitely many batches every waiting lane
is the neediest. The cost of a batch grows with M and the number of lanes, not with the number of waiting groups.

Virtual times are those of weighted fair queueing: Demers, Keshav, Shenker, "Analysis and Simulation of a Fair Queueing
Algorithm", SIGCOMM 1989.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from toprope.records.journal.marks import LaneState

PATIENCE = 8
"""Consecutive batches that may skip the neediest lane in order to be exact."""


class WaitingGroup(msgspec.Struct, gc=False, frozen=True):
    """A group in the queue."""

    seq: int
    rows: int
    size: int
    """Size of its body in bytes."""
    lane: str
    at: float
    """Time of acceptance, seconds since the epoch."""
    version: int = -1
    """Oldest policy version that sampled one of its tokens; -1 if unknown."""
    unmatched: bool = False
    """True if the inference server did not recognise its tokens."""


@dataclass
class Lane:
    """The waiting groups of one environment, and its claim."""

    name: str
    weight: float = 1.0
    minimum: float = 0.0
    """Fraction of every batch reserved for it."""
    connected: bool = True
    active_at: float = 0.0
    groups: deque[WaitingGroup] = field(default_factory=deque)
    rows: int = 0
    largest: int = 1
    """Rows of its largest group so far."""
    virtual: float = 0.0
    skips: int = 0
    """Consecutive batches that skipped it while it was the neediest."""

    def is_alive(self, now: float, alive_s: float) -> bool:
        """True if its environment is connected and was active within `alive_s` seconds."""
        return self.connected and now - self.active_at <= alive_s


@dataclass(frozen=True)
class Selection:
    """Groups for a batch in order of acceptance; `skipped` is the lane whose turn it was and that got nothing."""

    groups: tuple[WaitingGroup, ...]
    skipped: str | None = None


class FairScheduler:
    """The lanes of a queue. Callers pass the time, so that everything here can be replayed.

    Args:
        alive_s: Seconds after which an inactive environment loses its minimum allocation.
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
        """The lane of that name, created if it is new."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
        return lane

    def get(self, name: str) -> Lane | None:
        """The lane of that name, or None."""
        return self._lanes.get(name)

    def add(self, group: WaitingGroup) -> None:
        """Append a group to its lane."""
        lane = self.lane(group.lane)
        if not lane.groups:
            lane.virtual = max(lane.virtual, self._now)
            self._busy[lane.name] = lane
        lane.groups.append(group)
        lane.rows += group.rows
        lane.largest = max(lane.largest, group.rows)
        self.rows += group.rows

    def take(self, groups: Iterable[WaitingGroup], skipped: str | None) -> None:
        """Remove selected groups and charge their lanes.

        Raises:
            ValueError: A group is not the oldest of its lane.
        """
        lane_names = set()
        for group in groups:
            lane = self._lanes[group.lane]
            if not lane.groups or lane.groups[0].seq != group.seq:
                raise ValueError(f"group {group.seq} is not the oldest of lane {group.lane!r}")
            lane.groups.popleft()
            lane.virtual += group.rows / lane.weight
            self._leave(lane, group)
            lane_names.add(lane.name)
        for name in lane_names:
            self._lanes[name].skips = 0
        if skipped is not None:
            self._lanes[skipped].skips += 1
        times = [self._neediest().virtual] if self._busy else [self._lanes[name].virtual for name in lane_names]
        self._now = max(self._now, *times)

    def remove(self, group: WaitingGroup) -> None:
        """Remove one group from any place in its lane."""
        lane = self._lanes[group.lane]
        lane.groups.remove(group)
        self._leave(lane, group)

    def states(self) -> tuple[list[LaneState], float]:
        """The state of every lane, without its groups, and the present virtual time."""
        states = [
            LaneState(lane.name, lane.weight, lane.minimum, lane.connected, lane.largest, lane.virtual, lane.skips)
            for lane in self
        ]
        return states, self._now

    def load(self, states: list[LaneState], present: float, active_at: float) -> None:
        """Replace everything by empty lanes with these states, whose environments were last active at `active_at`."""
        self.clear()
        self._now = present
        for state in states:
            lane = self.lane(state.name)
            lane.weight, lane.minimum, lane.connected = state.weight, state.minimum, state.connected
            lane.largest, lane.virtual, lane.skips, lane.active_at = (
                state.largest, state.virtual, state.passed, active_at,
            )  # fmt: skip

    def put_back(self, group: WaitingGroup) -> None:
        """Append a group that was in its lane when the loaded state was saved; the lane's time stays."""
        lane = self.lane(group.lane)
        lane.groups.append(group)
        self._busy[lane.name] = lane
        lane.rows += group.rows
        self.rows += group.rows

    def clear(self) -> None:
        """Forget all lanes and their groups."""
        self._lanes.clear()
        self._busy.clear()
        self.rows, self._now = 0, 0.0

    def has_minimums(self) -> bool:
        """True if a batch may have to wait for an environment with a minimum allocation."""
        return any(lane.minimum for lane in self._lanes.values())

    def select(self, room: int, now: float, *, alone: bool = True) -> Selection | None:
        """Select groups for `room` rows, without removing them; None while an environment's minimum is missing.

        Args:
            room: Rows to fill.
            now: Present time in seconds, which decides which environments are alive.
            alone: Allow a group larger than `room` as a batch of its own.
        """
        lanes = list(self._busy.values())
        if not lanes:
            return Selection(())
        sums = [_sums(lane, room) for lane in lanes]
        floors = self._floors(lanes, sums, room, now)
        if floors is None:
            return None
        neediest = lanes.index(self._neediest())
        if len(sums[neediest]) == 1:
            if alone:
                return Selection((lanes[neediest].groups[0],))
            return Selection(())
        counts = _take_turns(lanes, sums, floors, room)
        skipped = None
        if sum(row[count] for row, count in zip(sums, counts, strict=True)) < room:
            counts, skipped = self._fill_exactly(lanes, sums, floors, counts, neediest, room)
        elif not counts[
            neediest
        ]:  # minimum allocations take the whole batch, but the neediest gets a turn now and then
            if lanes[neediest].skips < PATIENCE:
                skipped = lanes[neediest].name
            else:
                minimum = [int(index == neediest) for index in range(len(lanes))]
                best = _nearest(sums, counts, minimum, room)
                assert best is not None, "the neediest lane's head fits"
                counts = best[1]
        groups = [group for lane, count in zip(lanes, counts, strict=True) for group in islice(lane.groups, count)]
        groups.sort(key=lambda group: group.seq)
        return Selection(tuple(groups), skipped)

    def _fill_exactly(
        self, lanes: list[Lane], sums: list[list[int]], floors: list[int], prefer: list[int], neediest: int, room: int
    ) -> tuple[list[int], str | None]:
        lower = [max(floor, int(index == neediest)) for index, floor in enumerate(floors)]
        best = _nearest(sums, prefer, lower, room)
        if best is None:  # minimum allocations leave the neediest no room: it goes first
            best = _nearest(sums, prefer, [int(index == neediest) for index in range(len(lanes))], room)
            assert best is not None, "the neediest lane's head fits"
        if best[0] < room and lanes[neediest].skips < PATIENCE:
            exact = _nearest(sums, prefer, floors, room)
            if exact is not None and exact[0] == room:
                return exact[1], lanes[neediest].name
        return best[1], None

    def _floors(self, lanes: list[Lane], sums: list[list[int]], room: int, now: float) -> list[int] | None:
        """Groups per lane to meet minimum allocations; None if a live environment has too few rows waiting."""
        floors, remaining = [0] * len(lanes), room
        for lane in self._lanes.values():
            need = int(lane.minimum * room)
            if need > lane.rows and lane.is_alive(now, self.alive_s):
                return None
        for index, lane in enumerate(lanes):
            need = int(lane.minimum * room)
            if not need:
                continue
            row = sums[index]
            count = next((count for count, rows in enumerate(row) if rows >= need), len(row) - 1)
            while row[count] > remaining:
                count -= 1
            floors[index] = count
            remaining -= row[count]
        return floors

    def _neediest(self) -> Lane:
        return min(self._busy.values(), key=lambda lane: (lane.virtual, lane.name))

    def _leave(self, lane: Lane, group: WaitingGroup) -> None:
        lane.rows -= group.rows
        self.rows -= group.rows
        if not lane.groups:
            del self._busy[lane.name]


def _sums(lane: Lane, room: int) -> list[int]:
    """Total rows of the lane's first 0, 1, 2, ... groups, as far as they fit."""
    sums = [0]
    for group in lane.groups:
        total = sums[-1] + group.rows
        if total > room:
            break
        sums.append(total)
    return sums


def _take_turns(lanes: list[Lane], sums: list[list[int]], floors: list[int], room: int) -> list[int]:
    """Groups per lane if the lane with the lowest virtual time is always next (step 2)."""
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
    """The largest total of rows up to `room` with at least `lower` groups of each lane, and the counts that reach it.

    Each lane in turn gets a count as near to `prefer` as possible. Reachable totals are the bits of an integer. None if
    `lower` alone exceeds `room`.
    """
    reach = [0] * len(sums) + [1]
    within = (1 << (room + 1)) - 1
    for index in range(len(sums) - 1, -1, -1):
        for rows in sums[index][lower[index] :]:
            reach[index] |= reach[index + 1] << rows
        reach[index] &= within
    total = remaining = reach[0].bit_length() - 1
    if total < 0:
        return None
    counts = []
    for index, row in enumerate(sums):
        fitting = [
            count
            for count in range(lower[index], len(row))
            if row[count] <= remaining and reach[index + 1] >> (remaining - row[count]) & 1
        ]
        count = min(fitting, key=lambda count: abs(count - prefer[index]))
        counts.append(count)
        remaining -= row[count]
    return total, counts
