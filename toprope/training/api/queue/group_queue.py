"""The account of a run's groups: waiting, delivered in which order, committed by a checkpoint, or dropped.

Pure and synchronous: no clock, no file, no decoding. `fair_scheduler` decides the order between environments. Groups
leave the queue in numbered deliveries; the trainer's cursor is the number of groups delivered so far in this lineage.
Rewinding to an earlier cursor (a checkpoint after a crash, an answer that was lost) moves later deliveries back to
waiting, and they are delivered again first, in the same order and the same batches. At every moment

    accepted = waiting + delivered, not committed + committed + dropped, by reason
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from toprope.records.journal.groups import Counts
from toprope.records.journal.marks import GroupNote, Snapshot
from toprope.training.api.http.errors import Refused
from toprope.training.api.queue.fair_scheduler import FairScheduler, WaitingGroup

_REMEMBERED_KEYS = 65_536


@dataclass(frozen=True)
class BatchPlan:
    """A batch that can be delivered. Planning changes nothing."""

    cursor: int
    """Position before the batch."""
    groups: tuple[WaitingGroup, ...]
    again: int
    """Number of groups at the start that were delivered before."""
    sequences: int
    """Rows that the trainer asked for."""
    skipped: str | None = None
    """The lane whose turn it was and that got nothing."""

    @property
    def end(self) -> int:
        """Position after the batch."""
        return self.cursor + len(self.groups)


class _BatchEnd(NamedTuple):
    """Position after a delivered batch, and the rows that the trainer asked for."""

    cursor: int
    sequences: int


class _Returned(NamedTuple):
    """A group to deliver again; `closes` is the number of rows asked for if it ended its batch, else 0."""

    group: WaitingGroup
    closes: int


class GroupQueue:
    """Groups from acceptance to the checkpoint that covers them.

    Args:
        scheduler: Decides the order between environments.
    """

    def __init__(self, scheduler: FairScheduler) -> None:
        self.scheduler = scheduler
        self.waiting = 0
        self.waiting_rows = 0
        self.waiting_bytes = 0
        self._accepted = self._committed_groups = self._duplicates = self._equal_score = self._unmatched = 0
        self._dropped: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._waits: dict[int, bool] = {}
        """Live groups by number: True if waiting, False if delivered."""
        self._keys: dict[str, int] = {}
        self._log: deque[WaitingGroup] = deque()
        self._ends: deque[_BatchEnd] = deque()
        """The batches in the log."""
        self._returned: deque[_Returned] = deque()
        self.stale_at: list[int] = []
        """The cursor at which each group that was too old to be delivered was dropped, from the last commit on."""
        self._last = 0
        self._steps_committed = 0
        self.committed = 0
        """The cursor of the last commit; earlier groups cannot be delivered again."""

    @property
    def delivered(self) -> int:
        """The cursor: number of groups delivered so far in this lineage."""
        return self.committed + len(self._log)

    @property
    def step(self) -> int:
        """Number of batches delivered in this lineage."""
        return self._steps_committed + len(self._ends)

    @property
    def oldest(self) -> float | None:
        """Time at which the oldest waiting group was accepted; None if none waits."""
        heads = [lane.groups[0].at for lane in self.scheduler if lane.groups]
        heads.extend(returned.group.at for returned in list(self._returned)[:1])
        return min(heads, default=None)

    def counts(self) -> Counts:
        """The present numbers of the account."""
        return Counts(
            accepted=self._accepted,
            waiting=self.waiting,
            delivered=len(self._waits) - self.waiting,
            committed=self._committed_groups,
            dropped=dict(self._dropped),
            refused=dict(self._refused),
            duplicates=self._duplicates,
            equal_score=self._equal_score,
            unmatched=self._unmatched,
        )

    def find(self, group_id: str | None) -> int | None:
        """The number of the group that was accepted under this key, or None.

        Keys are remembered while their groups are live; after that, at least the 65,536 newest are.
        """
        return None if group_id is None else self._keys.get(group_id)

    @property
    def oldest_live(self) -> int:
        """The number of the oldest group that waits or is delivered; one more than the last number if none is."""
        return next(iter(self._waits), self._last + 1)

    def count_duplicate(self) -> None:
        """Count a repeated post of an accepted group."""
        self._duplicates += 1

    def count_refused(self, reason: str) -> None:
        """Count a refused post."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def restore_counts(self, duplicates: int, refused: Mapping[str, int]) -> None:
        """Restore the counts of duplicates and refusals from before a restart."""
        self._duplicates, self._refused = duplicates, dict(refused)

    def accept(self, seq: int, note: GroupNote, size: int) -> None:
        """Add a group whose number is higher than all earlier ones.

        Raises:
            ValueError: The number is not higher, or the key is known.
        """
        if seq <= self._last or self.find(note.group_id) is not None:
            raise ValueError(f"group {seq} ({note.group_id}) was accepted before")
        group = _waiting_group(seq, note, size)
        self._last = seq
        self._waits[seq] = True
        self._accepted += 1
        self._equal_score += note.equal_score
        self._unmatched += note.unmatched
        self._count_waiting(group)
        self.scheduler.add(group)
        if note.group_id is not None:
            self._keys[note.group_id] = seq
            while len(self._keys) > len(self._waits) + _REMEMBERED_KEYS:
                key = next(iter(self._keys))
                number = self._keys.pop(key)
                if number not in self._waits:
                    break
                self._keys[key] = number  # still live: move it to the end

    def plan(self, sequences: int, now: float) -> BatchPlan | None:
        """The next batch; None if too few rows wait or an environment's minimum is missing.

        Groups that were delivered before come first, in their old batches if the same number of rows is asked for. A
        batch has `sequences` rows; `fair_scheduler` documents when it has fewer, or more (one larger group).
        """
        returned, room = list[WaitingGroup](), sequences
        for group, closes in self._returned:
            if returned and group.rows > room:
                return BatchPlan(self.delivered, tuple(returned), len(returned), sequences)
            returned.append(group)
            room -= group.rows
            if closes == sequences or room <= 0:
                return BatchPlan(self.delivered, tuple(returned), len(returned), sequences)
        if self.scheduler.rows < room:
            return None
        selection = self.scheduler.select(room, now, alone=not returned)
        if selection is None:
            return None
        return BatchPlan(self.delivered, (*returned, *selection.groups), len(returned), sequences, selection.skipped)

    def deliver(self, plan: BatchPlan) -> None:
        """Record a batch as delivered.

        Raises:
            ValueError: The queue has changed since the batch was planned.
        """
        if plan.cursor != self.delivered:
            raise ValueError(f"the batch was planned at {plan.cursor}, but {self.delivered} groups are delivered")
        for group in plan.groups[: plan.again]:
            if not self._returned or self._returned[0].group.seq != group.seq:
                raise ValueError(f"group {group.seq} is not the next to be delivered again")
            self._returned.popleft()
        if len(plan.groups) > plan.again:
            self.scheduler.take(plan.groups[plan.again :], plan.skipped)
        for group in plan.groups:
            self._waits[group.seq] = False
            self._log.append(group)
            self._uncount_waiting(group)
        self._ends.append(_BatchEnd(plan.end, plan.sequences))

    def replan(self, cursor: int, groups: Sequence[int], sequences: int, skipped: str | None) -> BatchPlan:
        """The plan of a delivery from the journal, to replay it.

        Raises:
            ValueError: These groups are not the next ones.
        """
        members: list[WaitingGroup] = []
        heads: dict[str, int] = {}
        for seq in groups:
            if len(members) < len(self._returned):
                group = self._returned[len(members)].group
            else:
                group = self._next_in_lane(seq, heads)
            if group.seq != seq:
                raise ValueError(f"group {seq} is not the next to be delivered")
            members.append(group)
        returned_count = min(len(members), len(self._returned))
        return BatchPlan(cursor, tuple(members), returned_count, sequences, skipped)

    def check_cursor(self, cursor: int) -> None:
        """Check that deliveries can continue at `cursor`.

        Raises:
            Refused: The cursor is ahead of the deliveries, or behind the last commit.
        """
        if cursor > self.delivered:
            raise Refused(
                "cursor_ahead",
                f"The cursor {cursor} is ahead of this run: {self.delivered} groups were delivered so far.",
                status=409,
                field="cursor",
            )
        if cursor < self.committed:
            raise Refused(
                "cursor_committed",
                f"The cursor {cursor} is behind the commit at {self.committed}: those groups are in a checkpoint and "
                "are not delivered again. Resume from a checkpoint with a cursor of "
                f"{self.committed} to {self.delivered}.",
                status=409,
                field="cursor",
            )

    def rewind(self, cursor: int) -> None:
        """Move deliveries past `cursor` back to waiting, to be delivered again first and in order.

        Dropped groups stay dropped.

        Raises:
            Refused: See `check_cursor`.
        """
        self.check_cursor(cursor)
        while self.delivered > cursor:
            end, sequences = self._ends.pop()
            former = self._ends[-1].cursor if self._ends else self.committed
            start = max(cursor, former)
            closes = sequences
            for _ in range(end - start):
                group = self._log.pop()
                if group.seq in self._waits:
                    self._waits[group.seq] = True
                    self._returned.appendleft(_Returned(group, closes))
                    self._count_waiting(group)
                    closes = 0
            if former < cursor:
                self._ends.append(_BatchEnd(cursor, sequences))  # the part of a batch before the cursor stays delivered

    def commit(self, cursor: int) -> int:
        """Record that deliveries up to `cursor` are in a checkpoint; returns how many groups are newly committed.

        A cursor behind the last commit changes nothing.

        Raises:
            Refused: The cursor is ahead of the deliveries.
        """
        if cursor > self.delivered:
            self.check_cursor(cursor)
        newly = 0
        while self.committed < cursor:
            group = self._log.popleft()
            self.committed += 1
            if self._waits.pop(group.seq, None) is not None:
                newly += 1
        while self._ends and self._ends[0].cursor <= self.committed:
            self._ends.popleft()
            self._steps_committed += 1
        self.stale_at = [at for at in self.stale_at if at >= self.committed]
        self._committed_groups += newly
        return newly

    def drop(self, groups: Sequence[int], reason: str) -> list[int]:
        """Drop delivered groups that the trainer does not train on; returns those that were not dropped before.

        Groups that are already dropped or committed are ignored, so a report can be repeated.

        Raises:
            Refused: A group was not delivered; nothing was changed.
        """
        self.check_delivered(groups)
        dropped = [seq for seq in dict.fromkeys(groups) if self._waits.pop(seq, None) is not None]
        if dropped:
            self._dropped[reason] = self._dropped.get(reason, 0) + len(dropped)
        return dropped

    def check_delivered(self, groups: Sequence[int]) -> None:
        """Check that groups were delivered.

        Raises:
            Refused: A group waits or does not exist.
        """
        for seq in groups:
            if not 1 <= seq <= self._last or self._waits.get(seq, False):
                raise Refused(
                    "not_delivered",
                    f"Group {seq} cannot be dropped: it was not delivered to the trainer.",
                    status=409,
                    field="items",
                )

    def drop_waiting(self, seq: int, reason: str) -> None:
        """Drop a waiting group that cannot be delivered.

        Raises:
            ValueError: The group does not wait.
        """
        if not self._waits.get(seq, False):
            raise ValueError(f"group {seq} does not wait")
        group = next((returned.group for returned in self._returned if returned.group.seq == seq), None)
        if group is not None:
            self._returned = deque(returned for returned in self._returned if returned.group.seq != seq)
        else:
            # It was usually about to be delivered, so search the heads of the lanes first.
            near = (group for lane in self.scheduler for group in islice(lane.groups, 64))
            far = (group for lane in self.scheduler for group in lane.groups)
            group = next(group for group in chain(near, far) if group.seq == seq)
            self.scheduler.remove(group)
        del self._waits[seq]
        if reason == "stale":
            self.stale_at.append(self.delivered)
        self._uncount_waiting(group)
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def reset(self, reason: str) -> None:
        """Drop all groups that are not committed, and forget the lanes."""
        self.rewind(self.committed)
        if self.waiting:
            self._dropped[reason] = self._dropped.get(reason, 0) + self.waiting
        self._waits.clear()
        self._returned.clear()
        self._keys.clear()
        self.stale_at.clear()
        self.scheduler.clear()
        self.waiting = self.waiting_rows = self.waiting_bytes = 0

    def snapshot(self) -> Snapshot:
        """The whole account, without the notes of live groups."""
        states, present = self.scheduler.states()
        returned_numbers = {returned.group.seq for returned in self._returned}
        return Snapshot(
            accepted=self._accepted,
            committed_groups=self._committed_groups,
            duplicates=self._duplicates,
            equal_score=self._equal_score,
            unmatched=self._unmatched,
            dropped=dict(self._dropped),
            refused=dict(self._refused),
            committed=self.committed,
            steps_committed=self._steps_committed,
            log=[(group.seq, group.rows) for group in self._log],
            gone=[group.seq for group in self._log if group.seq not in self._waits],
            ends=list(self._ends),
            stale_at=list(self.stale_at),
            returned=[(group.seq, closes) for group, closes in self._returned],
            waiting=[seq for seq, waits in self._waits.items() if waits and seq not in returned_numbers],
            keys=dict(self._keys),
            lanes=states,
            lanes_now=present,
            last=self._last,
        )

    def load(self, snapshot: Snapshot, notes: Mapping[int, tuple[GroupNote, int]], now: float) -> None:
        """Replace the account by that of a snapshot.

        Args:
            snapshot: A result of `snapshot`.
            notes: Note and body size of every live group, by number.
            now: Time at which its environments count as active.

        Raises:
            KeyError: The note of a live group is missing.
        """
        self._accepted, self._committed_groups = snapshot.accepted, snapshot.committed_groups
        self._duplicates, self._equal_score = snapshot.duplicates, snapshot.equal_score
        self._unmatched, self._dropped, self._refused = snapshot.unmatched, snapshot.dropped, snapshot.refused
        self.committed, self._steps_committed = snapshot.committed, snapshot.steps_committed
        self._keys, self._last = snapshot.keys, snapshot.last
        self._ends, self.stale_at = deque(_BatchEnd(*end) for end in snapshot.ends), snapshot.stale_at
        self.waiting = self.waiting_rows = self.waiting_bytes = 0
        self.scheduler.load(snapshot.lanes, snapshot.lanes_now, now)
        dropped = set(snapshot.gone)
        self._log = deque(
            WaitingGroup(seq, rows, 0, "", 0.0) if seq in dropped else _waiting_group(seq, *notes[seq])
            for seq, rows in snapshot.log
        )
        waits = {group.seq: False for group in self._log if group.seq not in dropped}
        self._returned = deque(_Returned(_waiting_group(seq, *notes[seq]), closes) for seq, closes in snapshot.returned)
        for group, _ in self._returned:
            waits[group.seq] = True
            self._count_waiting(group)
        for seq in snapshot.waiting:
            group = _waiting_group(seq, *notes[seq])
            waits[seq] = True
            self.scheduler.put_back(group)
            self._count_waiting(group)
        self._waits = dict(sorted(waits.items()))

    def _next_in_lane(self, seq: int, heads: dict[str, int]) -> WaitingGroup:
        for lane in self.scheduler:
            index = heads.get(lane.name, 0)
            if index < len(lane.groups) and lane.groups[index].seq == seq:
                heads[lane.name] = index + 1
                return lane.groups[index]
        raise ValueError(f"group {seq} is not the oldest of its lane")

    def _count_waiting(self, group: WaitingGroup) -> None:
        self.waiting += 1
        self.waiting_rows += group.rows
        self.waiting_bytes += group.size

    def _uncount_waiting(self, group: WaitingGroup) -> None:
        self.waiting -= 1
        self.waiting_rows -= group.rows
        self.waiting_bytes -= group.size


def _waiting_group(seq: int, note: GroupNote, size: int) -> WaitingGroup:
    version = -1 if note.oldest_version is None else note.oldest_version
    return WaitingGroup(seq, note.rows, size, note.lane, note.at, version, note.unmatched)
