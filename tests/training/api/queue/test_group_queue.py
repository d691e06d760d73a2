"""The account of groups, also as a state machine of posts, deliveries, commits, drops, rewinds and restarts."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Counts
from toprope.records.journal.marks import GroupNote, Keep
from toprope.training.api.http.errors import Refused
from toprope.training.api.queue.fair_scheduler import FairScheduler
from toprope.training.api.queue.group_queue import GroupQueue
from toprope.training.api.storage.store import DeliveredBatch, TrajectoryStore


def queue_of(*rows: int) -> GroupQueue:
    queue = GroupQueue(FairScheduler())
    for number, size in enumerate(rows, 1):
        queue.accept(number, GroupNote(rows=size, group_id=f"g{number}", equal_score=number % 2 == 0), 100)
    return queue


def numbers(queue: GroupQueue, cursor: int, sequences: int) -> list[int] | None:
    queue.rewind(cursor)
    if (plan := queue.plan(sequences, 0.0)) is None:
        return None
    queue.deliver(plan)
    return [group.seq for group in plan.groups]


def test_batches_come_in_order_once_enough_rows_wait() -> None:
    queue = queue_of(8, 8, 8, 8, 8)
    assert [numbers(queue, cursor, 16) for cursor in (0, 2)] == [[1, 2], [3, 4]]
    assert numbers(queue, 4, 16) is None
    assert (queue.delivered, queue.step, queue.waiting, queue.waiting_rows, queue.waiting_bytes) == (4, 2, 1, 8, 100)
    assert queue.counts() == Counts(accepted=5, waiting=1, delivered=4, equal_score=2)


def test_same_cursor_gives_same_batch_again() -> None:
    queue = queue_of(5, 5, 5)
    assert numbers(queue, 0, 12) == [1, 2]
    queue.accept(4, GroupNote(rows=2, lane="other"), 100)
    assert numbers(queue, 0, 12) == [1, 2]
    assert queue.step == 1


def test_rewind_delivers_old_batches_again_first() -> None:
    queue = queue_of(*[4] * 9)
    batches = [numbers(queue, cursor, 8) for cursor in (0, 2, 4)]
    queue.commit(2)
    queue.rewind(2)
    assert (queue.step, queue.delivered, queue.waiting) == (1, 2, 7)
    assert [numbers(queue, cursor, 8) for cursor in (2, 4, 6)] == [*batches[1:], [7, 8]]


def test_rewind_with_other_batch_size_keeps_order() -> None:
    queue = queue_of(*[4] * 6)
    numbers(queue, 0, 8), numbers(queue, 2, 8)
    assert numbers(queue, 0, 12) == [1, 2, 3]
    assert numbers(queue, 3, 12) == [4, 5, 6]


def test_cursor_within_batch_splits_it() -> None:
    queue = queue_of(*[4] * 6)
    numbers(queue, 0, 16)
    assert numbers(queue, 3, 4) == [4]
    assert queue.step == 2
    assert numbers(queue, 4, 8) == [5, 6]


def test_cursor_out_of_range_is_refused() -> None:
    queue = queue_of(*[4] * 6)
    numbers(queue, 0, 16)
    queue.commit(2)
    with pytest.raises(Refused, match="4 groups were delivered") as ahead:
        numbers(queue, 5, 8)
    with pytest.raises(Refused, match="cursor of 2 to 4") as behind:
        numbers(queue, 1, 8)
    with pytest.raises(Refused):
        queue.commit(5)
    assert (ahead.value.kind, behind.value.kind) == ("cursor_ahead", "cursor_committed")
    assert queue.delivered == 4 and queue.counts().committed == 2


def test_dropped_groups_are_never_delivered_again() -> None:
    queue = queue_of(*[4] * 6)
    numbers(queue, 0, 16)
    assert queue.drop([2, 3], "stale") == [2, 3]
    assert queue.drop([3], "empty") == [], "a report can be repeated"
    assert numbers(queue, 0, 16) == [1, 4]
    queue.commit(2)
    assert queue.counts() == Counts(
        accepted=6, waiting=2, delivered=0, committed=2, dropped={"stale": 2}, equal_score=3
    )
    assert queue.drop([1], "late") == [], "the group is committed"


@pytest.mark.parametrize("number", [0, 5, 7])
def test_drop_refuses_whole_report_if_a_group_was_not_delivered(number: int) -> None:
    queue = queue_of(*[4] * 6)
    numbers(queue, 0, 16)
    with pytest.raises(Refused, match=f"Group {number} "):
        queue.drop([1, number], "stale")
    assert queue.counts().dropped == {}


def test_keys_are_remembered_while_groups_are_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.training.api.queue.group_queue._REMEMBERED_KEYS", 3)
    queue = GroupQueue(FairScheduler())
    queue.accept(1, GroupNote(rows=1, lane="slow", group_id="waits"), 1)
    queue.scheduler.lane("slow").virtual = 1e9
    queue.accept(2, GroupNote(rows=1, group_id="g2"), 1)
    for number in range(3, 50):
        queue.accept(number, GroupNote(rows=1, group_id=f"g{number}"), 1)
        numbers(queue, queue.delivered, 1)
        queue.commit(queue.delivered)
    assert queue.find("waits") == 1
    assert queue.find("g49") == 49 and queue.find("g2") is None and queue.counts().committed == 47
    assert queue.find(None) is None
    with pytest.raises(ValueError, match="before"):
        queue.accept(50, GroupNote(rows=1, group_id="waits"), 1)


def test_drop_waiting_counts_group_anywhere_in_queue() -> None:
    queue = queue_of(*[4] * 4)
    numbers(queue, 0, 8)
    queue.rewind(0)
    queue.drop_waiting(2, "unreadable")
    queue.drop_waiting(3, "unreadable")
    assert queue.counts().dropped == {"unreadable": 2} and queue.counts().balanced()
    assert numbers(queue, 0, 8) == [1, 4]
    with pytest.raises(ValueError, match="does not wait"):
        queue.drop_waiting(1, "unreadable")


class StoreMachine(RuleBasedStateMachine):
    """A store over a journal, restarted at any moment, compared with plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.time = 0.0
        self.posted: list[tuple[str, str, bytes]] = []  # (lane, key, body), by number
        self.log: list[tuple[list[int], int]] = []  # batches in the lineage: numbers and rows asked for
        self.base = 0  # position at which the log starts
        self.again: list[tuple[list[int], int]] = []  # batches to deliver again
        self.dropped: set[int] = set()
        self.committed: set[int] = set()
        self.duplicates = 0
        self.keep, self.recent = "all", False
        self.store = self.opened()

    @initialize(keep=st.sampled_from(["all", "sample", "none"]), recent=st.booleans())
    def choose(self, keep: Keep, recent: bool) -> None:
        """`keep`: what stays of committed segments; `recent`: a restart does not read them."""
        self.keep, self.recent = keep, recent
        self.journal.close()
        self.store = self.opened()

    def opened(self) -> TrajectoryStore:
        self.journal = FileJournal(self.folder, segment_bytes=2000, recent=self.recent)
        return TrajectoryStore(self.journal, keep=self.keep, now=lambda: self.time)

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)

    @property
    def cursor(self) -> int:
        return self.base + sum(len(batch) for batch, _ in self.log)

    def rewind(self, keep: int) -> int:
        """The model's rewind to the end of its first `keep` batches; returns the cursor."""
        back = [([seq for seq in batch if seq not in self.dropped], rows) for batch, rows in self.log[keep:]]
        self.again = [item for item in back if item[0]] + self.again
        del self.log[keep:]
        return self.cursor

    @rule(lane=st.sampled_from(["a", "b", "c"]), rows=st.integers(1, 6), equal=st.booleans())
    def post(self, lane: str, rows: int, equal: bool) -> None:
        key = f"key{len(self.posted)}"
        scores = [1.0] * rows if equal else [float(n) for n in range(rows)]
        group = {"tokens": [[1, 2]] * rows, "masks": [[-100, 2]] * rows, "scores": scores}
        body = json.dumps(group | {"group_id": key, "environment": lane}).encode()
        assert self.store.post(body) == len(self.posted) + 1
        self.posted.append((lane, key, body))

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def post_again(self, data: st.DataObject) -> None:
        keyed = [index for index, (_, key, _) in enumerate(self.posted) if key]
        if not keyed:
            return
        index = data.draw(st.sampled_from(keyed))
        assert self.store.post(self.posted[index][2]) == index + 1
        self.duplicates += 1

    @rule(rows=st.sampled_from([4, 6, 9]))
    def read(self, rows: int) -> None:
        self.delivered(self.store.next_batch(self.cursor, rows), rows)

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def rewind_and_read(self, data: st.DataObject) -> None:
        rows = data.draw(st.sampled_from([4, 6, 9]))
        cursor = self.rewind(data.draw(st.integers(0, len(self.log) - 1)))
        self.delivered(self.store.next_batch(cursor, rows), rows)

    def delivered(self, delivery: DeliveredBatch | None, rows: int) -> None:
        waiting = set(range(1, len(self.posted) + 1)) - self.outstanding - self.dropped - self.committed
        if delivery is None:
            assert sum(self.rows(seq) for seq in waiting) < rows
            return
        batch = [group.seq for group in delivery.plan.groups]
        assert batch and set(batch) <= waiting and len(set(batch)) == len(batch)
        assert delivery.bodies == [self.posted[seq - 1][2] for seq in batch]
        assert sum(map(self.rows, batch)) <= rows or len(batch) == 1
        returned = [seq for old, _ in self.again for seq in old]
        if self.again and self.again[0][1] == rows:
            assert batch == self.again[0][0], "an old batch is delivered again unchanged"
        repeated = batch[: len(returned)]
        assert repeated == returned[: len(repeated)], "and before other groups"
        fresh = batch[len(repeated) :]
        for lane in "abc":
            mine = [seq for seq in fresh if self.posted[seq - 1][0] == lane]
            queued = sorted(seq for seq in waiting - set(returned) if self.posted[seq - 1][0] == lane)
            assert mine == queued[: len(mine)], "first in, first out within a lane"
        left = len(repeated)
        while left:
            old, asked = self.again[0]
            if len(old) <= left:
                self.again.pop(0)
                left -= len(old)
            else:
                self.again[0] = (old[left:], asked)
                left = 0
        self.log.append((batch, rows))
        assert delivery.plan.end == self.cursor

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.log)))
        passed = [seq for batch, _ in self.log[:count] for seq in batch]
        self.base += len(passed)
        del self.log[:count]
        newly = set(passed) - self.dropped
        self.committed |= newly
        assert self.store.commit(self.base) == len(newly)

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.outstanding)), max_size=3))
        assert self.store.drop([(seq, "stale") for seq in chosen]) == len(set(chosen) - self.dropped)
        self.dropped |= set(chosen)

    @rule(lane=st.sampled_from(["a", "b", "c"]), answered=st.booleans(), repeat=st.booleans())
    def post_without_a_key(self, lane: str, answered: bool, repeat: bool) -> None:
        """Post as an Atropos environment does, which repeats a post that was not answered."""
        mark = len(self.posted) + 1000
        rows = {"tokens": [[1, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [1.0, 0.0]}
        body = json.dumps(rows | {"environment": lane, "task_id": f"t{mark}"}).encode()
        post = self.store.validate(body)
        seq = self.store.accept(post)
        assert seq == len(self.posted) + 1
        self.posted.append((lane, "", body))
        if answered:
            self.store.mark_answered([seq])
            return
        if repeat:
            self.store.mark_unanswered([seq], [post])
            again = self.store.validate(body)
            assert self.store.accept(again) == seq
        else:
            self.restart()  # killed before the answer
            again = self.store.validate(body)
            assert self.store.accept(again) == seq
        self.duplicates += 1
        self.store.mark_answered([seq])

    @rule(part=st.floats(0, 0.999))
    def kill_within_a_record(self, part: float) -> None:
        """A kill that leaves only the beginning of an unanswered post on disk."""
        self.store.save_counts()
        before = self.journal.last
        key = f"torn{len(self.posted)}"
        group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "group_id": key, "environment": "a"}
        self.store.post(json.dumps(group).encode())
        self.journal.close()
        newest = max(self.folder.glob("*.journal"))
        whole = newest.read_bytes()
        start = whole.rindex(b"\xffTJ1")
        newest.write_bytes(whole[: start + int(part * (len(whole) - start))])
        self.store = self.opened()
        assert self.journal.last == before

    @rule()
    def restart(self) -> None:
        self.store.save_counts()
        self.journal.close()
        self.store = self.opened()

    @rule()
    def hang_up(self) -> None:
        """A delivery that its reader never received, then a request at the same cursor."""
        before = self.store.next_batch(self.cursor, 6)
        again = self.store.next_batch(self.cursor, 6)
        assert (before and before.plan.groups) == (again and again.plan.groups)
        self.delivered(again, 6)

    @property
    def outstanding(self) -> set[int]:
        return {seq for batch, _ in self.log for seq in batch}

    def rows(self, seq: int) -> int:
        return self.posted[seq - 1][2].count(b"[1, 2]")

    @invariant()
    def accounts_agree(self) -> None:
        counts = self.store.queue.counts()
        assert counts.balanced()
        assert counts.accepted == len(self.posted)
        assert counts.delivered == len(self.outstanding - self.dropped)
        assert counts.committed == len(self.committed)
        assert sum(counts.dropped.values()) == len(self.dropped)
        assert counts.duplicates == self.duplicates
        assert self.store.queue.delivered == self.cursor


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase
