"""The trajectory API without HTTP: validation, journal, queue and registry as one.

Each change is in the journal before it is in memory, so a process that starts on an existing journal continues where
the last one ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from toprope.errors import Corrupt, NotFound
from toprope.records.journal import marks
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import Keep
from toprope.training.api.http.errors import Refused
from toprope.training.api.intake.deduplication import DuplicateDetector, digest
from toprope.training.api.intake.validation import GroupValidator, Limits, PostedGroup
from toprope.training.api.queue.condition import Condition
from toprope.training.api.queue.fair_scheduler import FairScheduler, WaitingGroup
from toprope.training.api.queue.group_queue import BatchPlan, GroupQueue
from toprope.training.api.queue.registry import EnvironmentRegistration, Registry, TrainerRegistration
from toprope.training.api.storage.recovery import recover, reset

_REASON = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,63}$")
_MAX_REASONS = 64


@dataclass(frozen=True)
class DeliveredBatch:
    """A delivered batch with the bodies of its groups."""

    plan: BatchPlan
    bodies: list[bytes]
    stale: int = 0
    """Groups dropped since the batch before because their policy version was too old; the same if it is delivered
    again."""


class TrajectoryStore:
    """The operations behind the endpoints.

    Args:
        journal: Stores groups and marks; its content is recovered.
        vocabulary: Number of token ids of the policy; None while unknown (`set_vocabulary`).
        trainer: Registration that applies until a trainer registers.
        alive_s: Seconds after which an inactive environment loses its minimum allocation.
        max_staleness: Largest age of a group's oldest token, in policy versions; None for no limit.
        train_unmatched: Deliver groups whose tokens the inference server did not recognise.
        keep: What to keep of segments of the journal that a checkpoint fully covers.
        now: Clock, in seconds since the epoch.

    Raises:
        Corrupt: The journal cannot be recovered.
    """

    def __init__(
        self,
        journal: FileJournal,
        *,
        vocabulary: int | None = None,
        limits: Limits | None = None,
        trainer: TrainerRegistration | None = None,
        alive_s: float = 60.0,
        max_staleness: int | None = None,
        train_unmatched: bool = False,
        keep: Keep = "all",
        now: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or Limits()
        self.queue = GroupQueue(FairScheduler(alive_s))
        self.registry = Registry(self.queue, trainer)
        self.changed = Condition()
        self.duplicates = DuplicateDetector()
        self.changes = 0
        """Number of changes of the account so far."""
        self.version = 0
        """The policy version of the trainer's last request."""
        self.staleness: tuple[int, int] = (0, 0)
        """Lowest and highest age of a group's oldest token in the last batch with versions, in policy versions."""
        self._journal = journal
        self._validator = GroupValidator(vocabulary, self.limits)
        self._now = now
        self._max_staleness, self._train_unmatched, self._keep = max_staleness, train_unmatched, keep
        state = recover(journal, self.queue, self.registry, self.duplicates, now)
        self.latest, self.by_cursor, self._saved_counts = state.latest, state.by_cursor, state.saved_counts

    def set_vocabulary(self, size: int) -> None:
        """Refuse token ids of `size` and above from now on."""
        self._validator = GroupValidator(size, self.limits)

    # Posts

    def post(self, body: bytes) -> int:
        """Validate and store one group; returns its number. A known group is not stored again.

        Raises:
            Refused: The group is invalid, or the queue is full.
            NotPossibleNow: The group cannot be written.
        """
        return self.accept(self.validate(body))

    def validate(self, body: bytes) -> PostedGroup:
        """Decode and check a group without storing it.

        Raises:
            Refused: The group is invalid.
        """
        try:
            return self._validate(body)
        except Refused as refusal:
            self._count_refused(refusal)
            raise

    def accept(self, post: PostedGroup) -> int:
        """Store a validated group; see `post`."""
        seq = self._find_duplicate(post)
        if seq is None:
            self._require_room([post])
            seq = self._store(post)
        self.changed.notify()
        return seq

    def validate_list(self, body: bytes) -> tuple[list[PostedGroup], list[tuple[int, Refused]]]:
        """The valid groups of a list, and the indices of the others with the reasons.

        Raises:
            Refused: The body is not a list.
        """
        try:
            items = msgspec.json.decode(body, type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            malformed = Refused("malformed_json", f"The body is not a JSON list of groups: {error}.", status=400)
            self._count_refused(malformed)
            raise malformed from None
        posts: list[PostedGroup] = []
        refused: list[tuple[int, Refused]] = []
        for index, item in enumerate(items):
            try:
                posts.append(self._validate(bytes(item)))
            except Refused as refusal:
                refused.append((index, refusal))
        return posts, refused

    def accept_list(self, posts: Sequence[PostedGroup], refused: Sequence[tuple[int, Refused]]) -> list[int]:
        """Store the valid groups of a list and count the others; returns the numbers of `posts`.

        Raises:
            Refused: The queue is full; nothing was stored.
            NotPossibleNow: The groups cannot be written.
        """
        self._require_room([post for post in posts if self.queue.find(post.note.group_id) is None])
        for _, refusal in refused:
            self._count_refused(refusal)
        numbers = []
        for post in posts:  # one by one: a list may hold the same group twice
            seq = self._find_duplicate(post)
            numbers.append(self._store(post) if seq is None else seq)
        self._note_change()
        return numbers

    def mark_answered(self, seqs: Sequence[int]) -> None:
        """Note that the answer to a post of these groups was sent."""
        self.duplicates.mark_answered(seqs)

    def mark_unanswered(self, seqs: Sequence[int], posts: Sequence[PostedGroup]) -> None:
        """Note that the client of a post left before it had its answer; `posts` belong to `seqs` one by one.

        If the same environment posts the same bodies again without a key within ten minutes, they are the same groups.
        """
        self.duplicates.mark_unanswered(seqs, posts, self._now())

    # Batches

    def next_batch(self, cursor: int | None, sequences: int, version: int | None = None) -> DeliveredBatch | None:
        """Form and deliver a batch; None if none can be formed yet.

        Args:
            cursor: The trainer's position; an earlier one delivers the same groups again. None for an Atropos trainer,
                which never asks for a batch again.
            sequences: Rows of the batch.
            version: The policy version to train; groups that are too old for it are dropped.

        Raises:
            Refused: The cursor is out of range, or is missing although the run's trainer reads with one.
            NotPossibleNow: The delivery cannot be written.
        """
        if cursor is None and self.by_cursor:
            raise Refused(
                "cursor_needed",
                "This run's trainer reads with a cursor; it would miss a batch that is taken without one. "
                "Use GET /latest_example or /counts to inspect the run.",
                status=409,
                field="cursor",
            )
        self.registry.started = True
        if cursor is not None:
            if cursor != self.queue.delivered:
                self._rewind(cursor)
            self.by_cursor = True
        if version is not None:
            self.version = version
        while (plan := self.queue.plan(sequences, self._now())) is not None:
            if unusable := [(group.seq, why) for group in plan.groups if (why := self._drop_reason(group, version))]:
                for seq, why in unusable:
                    self._drop_waiting(seq, why)
                continue
            bodies = self._read_bodies(plan)
            if bodies is None:
                continue
            if cursor is None and self.queue.delivered > self.queue.committed:
                self.commit(self.queue.delivered)  # a request for the next batch confirms the last one
            if cursor is None:
                self.by_cursor = False
            self._journal.mark(
                marks.Delivered(
                    plan.cursor, [group.seq for group in plan.groups], sequences, plan.skipped, cursor is not None
                )
            )
            self.queue.deliver(plan)
            if ages := [self.version - group.version for group in plan.groups if group.version >= 0]:
                self.staleness = min(ages), max(ages)
            self._note_change()
            stale = sum(plan.cursor <= at < plan.end for at in self.queue.stale_at)
            return DeliveredBatch(plan, bodies, stale)
        return None

    def return_batch(self, batch: DeliveredBatch) -> None:
        """Return a batch whose client left to the queue, unless another batch was delivered since."""
        if self.queue.delivered == batch.plan.end and self.queue.committed <= batch.plan.cursor:
            self._rewind(batch.plan.cursor)

    def commit(self, cursor: int) -> int:
        """Record that deliveries up to `cursor` are in a checkpoint; returns how many groups are newly committed.

        Raises:
            Refused: The cursor is ahead of the deliveries.
            NotPossibleNow: The commit cannot be written.
        """
        if cursor > self.queue.delivered:
            self.queue.check_cursor(cursor)
        if cursor <= self.queue.committed:
            return 0
        self._journal.mark(marks.Committed(cursor))
        newly = self.queue.commit(cursor)
        self._note_change()
        oldest = self.queue.oldest_live
        if self._journal.removable(oldest):
            snapshot = self.queue.snapshot()
            self.registry.save_to(snapshot)
            snapshot.by_cursor = self.by_cursor
            self._journal.leave(oldest, snapshot, keep=self._keep)
        return newly

    def drop(self, items: Sequence[tuple[int, str]]) -> int:
        """Drop delivered groups that the trainer does not train on; returns how many were not dropped before.

        Args:
            items: Number and reason of each group.

        Raises:
            Refused: A reason is not a valid name, or a group was not delivered; nothing was changed.
            NotPossibleNow: The report cannot be written.
        """
        reasons: dict[str, list[int]] = {}
        for seq, reason in items:
            if not _REASON.fullmatch(reason):
                raise Refused(
                    "bad_reason",
                    f"{reason!r} is not a valid reason: use lower-case letters, digits, '_', '-' and '.', at most 64.",
                    field="items",
                )
            reasons.setdefault(reason, []).append(seq)
        known = self.queue.counts().dropped
        if len(known.keys() | reasons.keys()) > _MAX_REASONS:
            raise Refused("too_many_reasons", f"At most {_MAX_REASONS} different reasons are allowed.", field="items")
        self.queue.check_delivered([seq for seq, _ in items])
        dropped = 0
        for reason, seqs in reasons.items():
            self._journal.mark(marks.Dropped(seqs, reason))
            dropped += len(self.queue.drop(seqs, reason))
        self._note_change()
        return dropped

    # Participants

    def register(self, trainer: TrainerRegistration) -> None:
        """Register a trainer; it replaces an earlier one.

        Raises:
            Refused: The live environments can never fill its batches.
        """
        self.registry.check_trainer(trainer, self._now())
        self._journal.mark(marks.TrainerRegistered(msgspec.to_builtins(trainer)))
        self.registry.set_trainer(trainer)

    def register_environment(self, environment: EnvironmentRegistration) -> int | None:
        """Register an environment; returns its id, or None while no trainer has asked for a batch.

        Raises:
            Refused: Its groups can never be part of a batch, or there are too many environments.
        """
        now = self._now()
        self.registry.check_environment(environment, now)
        if not self.registry.started:
            return None
        if len(self.queue.scheduler) >= self.limits.lanes:
            raise Refused(
                "too_many_environments", f"At most {self.limits.lanes} environments can register.", status=503
            )
        self._journal.mark(
            marks.EnvironmentRegistered(len(self.registry.environments), msgspec.to_builtins(environment))
        )
        return self.registry.add_environment(environment, now)

    def disconnect_environment(self, env_id: int) -> None:
        """Release the claim of an environment that leaves.

        Raises:
            Refused: There is no such environment.
        """
        self.registry.record_activity(env_id, self._now())
        self._journal.mark(marks.Disconnected(env_id))
        self.registry.disconnect(env_id)
        self.changed.notify()

    def environment_status(self, env_id: int) -> dict[str, object]:
        """The answer of GET /status-env; the request also shows that the environment is alive.

        Raises:
            Refused: There is no such environment.
        """
        self.registry.record_activity(env_id, self._now())
        return self.registry.status(env_id)

    def reset(self) -> None:
        """Drop all groups that are not committed, with the reason `reset`, and forget trainer and environments."""
        self._journal.mark(marks.Reset())
        reset(self.queue, self.registry, self.duplicates)
        self.by_cursor = None
        self._note_change()

    def latest_body(self) -> bytes | None:
        """The newest group as stored; None if there is none or it was removed."""
        if self.latest is None or self.latest < self._journal.first:
            return None
        return self._journal.read(self.latest)

    def save_counts(self) -> None:
        """Write the counts of duplicates and refusals to the journal if they changed; call it now and then."""
        counts = self.queue.counts()
        if (counts.duplicates, counts.refused) != self._saved_counts:
            self._journal.mark(marks.Tallied(counts.duplicates, counts.refused))
            self._saved_counts = counts.duplicates, counts.refused

    def _validate(self, body: bytes) -> PostedGroup:
        trainer = self.registry.trainer
        post = self._validator.validate(body, trainer.max_token_len if trainer else None)
        if post.env_id is not None:
            self.registry.record_activity(post.env_id, self._now())
            if trainer is not None and post.note.rows > trainer.batch_size:
                raise Refused(
                    "group_exceeds_batch",
                    f"{post.note.rows} rows never fit into the trainer's batches of {trainer.batch_size} sequences.",
                    field="tokens",
                )
        elif self.queue.scheduler.get(post.note.lane) is None and len(self.queue.scheduler) >= self.limits.lanes:
            raise Refused("too_many_environments", f"At most {self.limits.lanes} environments can post.", status=503)
        return post

    def _find_duplicate(self, post: PostedGroup) -> int | None:
        """The number of the stored group that this post repeats, if any; counts the repetition."""
        seq = self.queue.find(post.note.group_id)
        if seq is None:
            seq = self.duplicates.find(post, self._now())
        if seq is not None:
            self.queue.count_duplicate()
            self.changes += 1
        return seq

    def _count_refused(self, refusal: Refused) -> None:
        self.queue.count_refused(refusal.kind)
        self.changes += 1

    def _require_room(self, posts: Sequence[PostedGroup]) -> None:
        """Count and raise a refusal if the queue has no room for these groups."""
        limits, queue = self.limits, self.queue
        groups, size = len(posts), sum(len(post.body) for post in posts)
        if groups > limits.queue_groups or size > limits.queue_bytes:
            refusal = Refused("too_large", "The post is larger than the whole queue.", status=413)
        elif queue.waiting + groups > limits.queue_groups or queue.waiting_bytes + size > limits.queue_bytes:
            refusal = Refused(
                "queue_full",
                f"The queue is full: {queue.waiting} groups ({queue.waiting_bytes} bytes) wait for the trainer.",
                status=503,
                retry_after=1,
            )
        else:
            return
        self._count_refused(refusal)
        raise refusal

    def _store(self, post: PostedGroup) -> int:
        post.note.open = self.duplicates.pending(self._now())
        if post.body is not post.posted and post.note.group_id is None:
            post.note.posted = digest(post.posted).hex()
        seq = self._journal.append(post.body, post.note)
        self.queue.accept(seq, post.note, len(post.body))
        self.duplicates.record(seq, post)
        self.latest = seq
        self.changes += 1
        return seq

    def _read_bodies(self, plan: BatchPlan) -> list[bytes] | None:
        """The bodies of a batch; None after a group that cannot be read was dropped."""
        bodies = []
        for group in plan.groups:
            try:
                bodies.append(self._journal.read(group.seq))
            except (Corrupt, NotFound):
                self._drop_waiting(group.seq, "unreadable")
                return None
        return bodies

    def _drop_reason(self, group: WaitingGroup, version: int | None) -> str | None:
        """The reason to drop a group instead of delivering it to a trainer at `version`, if any."""
        if group.unmatched and not self._train_unmatched:
            return "unmatched"
        if version is None or self._max_staleness is None or group.version < 0:
            return None
        return "stale" if version - group.version > self._max_staleness else None

    def _drop_waiting(self, seq: int, reason: str) -> None:
        self._journal.mark(marks.Lost(seq, reason))
        self.queue.drop_waiting(seq, reason)
        self._note_change()

    def _rewind(self, cursor: int) -> None:
        self.queue.check_cursor(cursor)
        self._journal.mark(marks.Rewound(cursor))
        self.queue.rewind(cursor)
        self._note_change()

    def _note_change(self) -> None:
        self.changes += 1
        self.changed.notify()
