"""The account of a run's groups: what waits, what was delivered in which order, what a checkpoint has passed.

Pure and synchronous: no clock, no file, no decoding. The order between environments is `lanes.py`'s business. Groups
leave the queue in deliveries that are numbered; the trainer's cursor is how many groups were delivered so far in this
lineage. Going back to an earlier cursor (a checkpoint after a crash, an answer that got lost) moves later deliveries
back to waiting, and they are delivered again first, in the same order and the same batches. At every moment

    accepted = waiting + delivered, not committed + committed + dropped, by reason
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from toprope.records.journal.groups import Counts
from toprope.records.journal.marks import GroupNote, Snapshot
from toprope.training.api.http.errors import Refused
from toprope.training.api.queue.fair_scheduler import Lanes, Waiting

__all__ = ["GroupQueue", "Plan"]

_REMEMBERED_KEYS = 65_536


@dataclass(frozen=True)
class Plan:
    """A batch that can be delivered: nothing has changed yet."""

    cursor: int
    """Position before the batch."""
    groups: tuple[Waiting, ...]
    again: int
    """How many of them, from the first on, were delivered before."""
    sequences: int
    passed: str | None = None

    @property
    def end(self) -> int:
        """Position after the batch."""
        return self.cursor + len(self.groups)


class GroupQueue:
    """Groups from acceptance to the checkpoint that has passed them.

    Args:
        lanes: The order between environments.
    """

    def __init__(self, lanes: Lanes | None = None) -> None:
        self.lanes = Lanes() if lanes is None else lanes
        self.waiting = 0
        self.waiting_rows = 0
        self.waiting_bytes = 0
        self._accepted = self._committed_groups = self._duplicates = self._equal_score = self._unmatched = 0
        self._dropped: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._waits: dict[int, bool] = {}
        """Every group that waits (True) or is delivered (False), by number."""
        self._keys: dict[str, int] = {}
        self._log: deque[Waiting] = deque()
        self._ends: deque[tuple[int, int]] = deque()
        """Of each batch in the log the position after it and the rows that were asked for."""
        self._returned: deque[tuple[Waiting, int]] = deque()
        """Groups to deliver again, each with the rows asked for if it closed its batch, else 0."""
        self._last = 0
        self._steps_committed = 0
        self.committed = 0
        """The cursor of the last commit: going back behind it is not possible."""

    @property
    def delivered(self) -> int:
        """The cursor: groups delivered so far in this lineage."""
        return self.committed + len(self._log)

    @property
    def step(self) -> int:
        """Batches delivered in this lineage."""
        return self._steps_committed + len(self._ends)

    @property
    def oldest(self) -> float | None:
        """When the group that has waited longest was accepted."""
        heads = [lane.groups[0].at for lane in self.lanes if lane.groups]
        heads.extend(group.at for group, _ in list(self._returned)[:1])
        return min(heads, default=None)

    def counts(self) -> Counts:
        """The account."""
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

    def known(self, group_id: str | None) -> int | None:
        """The number of the group that was accepted under this key, if it is remembered: as long as it waits or is
        delivered, and for at least the 65,536 newest keys after that."""
        return None if group_id is None else self._keys.get(group_id)

    @property
    def oldest_at_stake(self) -> int:
        """The number of the oldest group that waits or is delivered; one more than the last where none does."""
        return next(iter(self._waits), self._last + 1)

    def duplicate(self) -> None:
        """Counts a post of a group that was accepted before."""
        self._duplicates += 1

    def refuse(self, reason: str) -> None:
        """Counts a post that was turned away."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def tally(self, duplicates: int, refused: Mapping[str, int]) -> None:
        """Takes over what was counted before a restart."""
        self._duplicates, self._refused = duplicates, dict(refused)

    def accept(self, seq: int, note: GroupNote, size: int) -> None:
        """Adds a group whose number is above all former ones.

        Raises:
            ValueError: It is not, or its key is known.
        """
        if seq <= self._last or self.known(note.group_id) is not None:
            raise ValueError(f"group {seq} ({note.group_id}) was accepted before")
        group = _waiting(seq, note, size)
        self._last = seq
        self._waits[seq] = True
        self._accepted += 1
        self._equal_score += note.equal_score
        self._unmatched += note.unmatched
        self._wait(group)
        self.lanes.add(group)
        if note.group_id is not None:
            self._keys[note.group_id] = seq
            while len(self._keys) > len(self._waits) + _REMEMBERED_KEYS:
                key = next(iter(self._keys))
                number = self._keys.pop(key)
                if number not in self._waits:
                    break
                self._keys[key] = number  # still at stake: to the end of the line

    def plan(self, sequences: int, now: float) -> Plan | None:
        """The next batch, or None when too little waits or an environment's minimum is waited for.

        Groups that were delivered before come first, in their old batches if as many rows are asked for. A batch has
        `sequences` rows; see `lanes.py` for when it has fewer, or more (one group that is larger).
        """
        again: list[Waiting] = []
        room = sequences
        for group, closed in self._returned:
            if again and group.rows > room:
                return Plan(self.delivered, tuple(again), len(again), sequences)
            again.append(group)
            room -= group.rows
            if closed == sequences or room <= 0:
                return Plan(self.delivered, tuple(again), len(again), sequences)
        if self.lanes.rows < room:
            return None
        pick = self.lanes.pick(room, now, alone=not again)
        if pick is None:
            return None
        return Plan(self.delivered, (*again, *pick.groups), len(again), sequences, pick.passed)

    def deliver(self, plan: Plan) -> None:
        """Records a batch as handed out.

        Raises:
            ValueError: The queue has moved on since it was planned.
        """
        if plan.cursor != self.delivered:
            raise ValueError(f"planned at {plan.cursor}, but {self.delivered} are delivered")
        for group in plan.groups[: plan.again]:
            if not self._returned or self._returned[0][0].seq != group.seq:
                raise ValueError(f"group {group.seq} is not the next to be delivered again")
            self._returned.popleft()
        if len(plan.groups) > plan.again:
            self.lanes.take(plan.groups[plan.again :], plan.passed)
        for group in plan.groups:
            self._waits[group.seq] = False
            self._log.append(group)
            self._unwait(group)
        self._ends.append((plan.end, plan.sequences))

    def replan(self, cursor: int, groups: Sequence[int], sequences: int, passed: str | None) -> Plan:
        """The plan of a delivery that was recorded earlier, to replay it on a queue that was rebuilt.

        Raises:
            ValueError: These groups are not the next ones.
        """
        members: list[Waiting] = []
        heads: dict[str, int] = {}
        for seq in groups:
            if len(members) < len(self._returned):
                group = self._returned[len(members)][0]
            else:
                group = self._head(seq, heads)
            if group.seq != seq:
                raise ValueError(f"group {seq} is not the next to be delivered")
            members.append(group)
        again = min(len(members), len(self._returned))
        return Plan(cursor, tuple(members), again, sequences, passed)

    def next_batch(self, cursor: int, sequences: int, now: float) -> Plan | None:
        """Forms and delivers the batch behind `cursor`, going back to it first where need be.

        Raises:
            Refused: The cursor is ahead of what was delivered, or behind what was committed.
        """
        self.rewind(cursor)
        plan = self.plan(sequences, now)
        if plan is not None:
            self.deliver(plan)
        return plan

    def check_cursor(self, cursor: int) -> None:
        """
        Raises:
            Refused: The cursor is ahead of what was delivered, or behind what was committed.
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
                f"not delivered again. Resume from a checkpoint with a cursor of {self.committed} to {self.delivered}.",
                status=409,
                field="cursor",
            )

    def rewind(self, cursor: int) -> int:
        """Moves deliveries past `cursor` back to waiting, to be delivered again first and in order; those that were
        dropped stay dropped. Returns how many moved.

        Raises:
            Refused: As `check_cursor`.
        """
        self.check_cursor(cursor)
        moved = 0
        while self.delivered > cursor:
            end, sequences = self._ends.pop()
            former = self._ends[-1][0] if self._ends else self.committed
            start = max(cursor, former)
            closes = sequences
            for _ in range(end - start):
                group = self._log.pop()
                if group.seq in self._waits:
                    self._waits[group.seq] = True
                    self._returned.appendleft((group, closes))
                    self._wait(group)
                    closes = 0
                    moved += 1
            if former < cursor:
                self._ends.append((cursor, sequences))  # the part of a batch before the cursor stays delivered
        return moved

    def commit(self, cursor: int) -> int:
        """Deliveries up to `cursor` are in a checkpoint; returns how many groups that newly holds of. A cursor that
        was passed before changes nothing.

        Raises:
            Refused: The cursor is ahead of what was delivered.
        """
        if cursor > self.delivered:
            self.check_cursor(cursor)
        newly = 0
        while self.committed < cursor:
            group = self._log.popleft()
            self.committed += 1
            if self._waits.pop(group.seq, None) is not None:
                newly += 1
        while self._ends and self._ends[0][0] <= self.committed:
            self._ends.popleft()
            self._steps_committed += 1
        self._committed_groups += newly
        return newly

    def drop(self, groups: Sequence[int], reason: str) -> list[int]:
        """Delivered groups that the trainer does not train on. Returns those that this changed: one that was dropped
        or committed before is passed over, so that a report can be repeated.

        Raises:
            Refused: One of them waits or never was; nothing was changed.
        """
        self.check_delivered(groups)
        gone = [seq for seq in dict.fromkeys(groups) if self._waits.pop(seq, None) is not None]
        if gone:
            self._dropped[reason] = self._dropped.get(reason, 0) + len(gone)
        return gone

    def check_delivered(self, groups: Sequence[int]) -> None:
        """
        Raises:
            Refused: One of them waits or never was.
        """
        for seq in groups:
            if not 1 <= seq <= self._last or self._waits.get(seq, False):
                raise Refused(
                    "not_delivered",
                    f"Group {seq} cannot be dropped: it was not delivered to the trainer.",
                    status=409,
                    field="items",
                )

    def lose(self, seq: int, reason: str) -> None:
        """Counts a waiting group as dropped that cannot be delivered.

        Raises:
            ValueError: It does not wait.
        """
        if not self._waits.get(seq, False):
            raise ValueError(f"group {seq} does not wait")
        group = next((group for group, _ in self._returned if group.seq == seq), None)
        if group is not None:
            self._returned = deque(item for item in self._returned if item[0].seq != seq)
        else:
            # As a rule it is about to be delivered, so that it stands at the head of its lane or close to it.
            near = (group for lane in self.lanes for group in islice(lane.groups, 64))
            far = (group for lane in self.lanes for group in lane.groups)
            group = next(group for group in chain(near, far) if group.seq == seq)
            self.lanes.remove(group)
        del self._waits[seq]
        self._unwait(group)
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def reset(self, reason: str) -> None:
        """Drops everything that waits or is delivered and not committed, and forgets the lanes."""
        self.rewind(self.committed)
        if self.waiting:
            self._dropped[reason] = self._dropped.get(reason, 0) + self.waiting
        self._waits.clear()
        self._returned.clear()
        self._keys.clear()
        self.lanes.clear()
        self.waiting = self.waiting_rows = self.waiting_bytes = 0

    def snapshot(self) -> Snapshot:
        """The whole account, but for the notes of the groups that are at stake."""
        states, present = self.lanes.states()
        back = {group.seq for group, _ in self._returned}
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
            returned=[(group.seq, closed) for group, closed in self._returned],
            waiting=[seq for seq, waits in self._waits.items() if waits and seq not in back],
            keys=dict(self._keys),
            lanes=states,
            lanes_now=present,
            last=self._last,
        )

    def load(self, snapshot: Snapshot, notes: Mapping[int, tuple[GroupNote, int]], now: float) -> None:
        """Replaces the account by a snapshot's.

        Args:
            snapshot: What `snapshot` returned.
            notes: Note and size of every group at stake, by number.
            now: From when on its environments are taken to be alive.

        Raises:
            KeyError: The note of a group at stake is missing.
        """
        self._accepted, self._committed_groups = snapshot.accepted, snapshot.committed_groups
        self._duplicates, self._equal_score = snapshot.duplicates, snapshot.equal_score
        self._unmatched, self._dropped, self._refused = snapshot.unmatched, snapshot.dropped, snapshot.refused
        self.committed, self._steps_committed = snapshot.committed, snapshot.steps_committed
        self._keys, self._last = snapshot.keys, snapshot.last
        self._ends = deque(snapshot.ends)
        self.waiting = self.waiting_rows = self.waiting_bytes = 0
        self.lanes.load(snapshot.lanes, snapshot.lanes_now, now)
        gone, waits = set(snapshot.gone), {}
        self._log = deque(
            Waiting(seq, rows, 0, "", 0.0) if seq in gone else _waiting(seq, *notes[seq]) for seq, rows in snapshot.log
        )
        waits.update((group.seq, False) for group in self._log if group.seq not in gone)
        self._returned = deque((_waiting(seq, *notes[seq]), closed) for seq, closed in snapshot.returned)
        for group, _ in self._returned:
            waits[group.seq] = True
            self._wait(group)
        for seq in snapshot.waiting:
            group = _waiting(seq, *notes[seq])
            waits[seq] = True
            self.lanes.put_back(group)
            self._wait(group)
        self._waits = dict(sorted(waits.items()))

    def _head(self, seq: int, heads: dict[str, int]) -> Waiting:
        for lane in self.lanes:
            index = heads.get(lane.name, 0)
            if index < len(lane.groups) and lane.groups[index].seq == seq:
                heads[lane.name] = index + 1
                return lane.groups[index]
        raise ValueError(f"group {seq} is not the oldest of its lane")

    def _wait(self, group: Waiting) -> None:
        self.waiting += 1
        self.waiting_rows += group.rows
        self.waiting_bytes += group.size

    def _unwait(self, group: Waiting) -> None:
        self.waiting -= 1
        self.waiting_rows -= group.rows
        self.waiting_bytes -= group.size


def _waiting(seq: int, note: GroupNote, size: int) -> Waiting:
    version = -1 if note.oldest_version is None else note.oldest_version
    return Waiting(seq, note.rows, size, note.lane, note.at, version, note.unmatched)
