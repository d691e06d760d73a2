"""The trajectory API without HTTP: door, journal, queue and registry as one, so that each change is in the journal
before it is in memory, and a process that starts on an old journal goes on where the last one ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from toprope.errors import Corrupt, NotFound
from toprope.records.journal.journal import (
    Committed,
    Delivered,
    Disconnected,
    Dropped,
    EnvironmentRegistered,
    Journal,
    Lost,
    Reset,
    Rewound,
    Tallied,
    TrainerRegistered,
)
from toprope.training.api.http.errors import Refused
from toprope.training.api.intake.deduplication import Repeats
from toprope.training.api.intake.validation import Door, Limits, Parcel
from toprope.training.api.queue.condition import Signal
from toprope.training.api.queue.fair_scheduler import Lanes, Waiting
from toprope.training.api.queue.group_queue import GroupQueue, Plan
from toprope.training.api.queue.registry import EnvironmentRegistration, Registry, TrainerRegistration
from toprope.training.api.storage.recovery import forget, restore

__all__ = ["Formed", "TrajectoryStore"]

_REASON = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,63}$")
_REASONS = 64


@dataclass(frozen=True)
class Formed:
    """A batch that was delivered, with the bodies of its groups."""

    plan: Plan
    bodies: list[bytes]
    stale: int = 0
    """Groups that were passed over since the last one because their policy version is too old."""


class TrajectoryStore:
    """Everything the endpoints do.

    Args:
        journal: Where groups and marks are kept; what is in it is taken up again.
        vocabulary: How many token ids the policy has, None while unknown (`set_vocabulary`).
        limits: Sizes.
        trainer: What holds until a trainer registers.
        alive_s: Seconds after which a silent environment loses its minimum allocation.
        max_staleness: Versions by which a group's oldest token may be behind the trainer's; None: any number.
        train_unmatched: Whether groups are delivered whose tokens the inference server did not recognise.
        keep: Whether segments of the journal stay when a checkpoint has passed all that is in them.
        now: The clock, seconds since the epoch.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        vocabulary: int | None = None,
        limits: Limits | None = None,
        trainer: TrainerRegistration | None = None,
        alive_s: float = 60.0,
        max_staleness: int | None = None,
        train_unmatched: bool = False,
        keep: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or Limits()
        self.queue = GroupQueue(Lanes(alive_s))
        self.registry = Registry(self.queue, trainer)
        self.changed = Signal()
        self.latest: int | None = None
        self.changes = 0
        """Grows with every change of the account."""
        self.version = 0
        """The newest policy version that the trainer asked with."""
        self.staleness: tuple[int, int] = (0, 0)
        """Of the last batch with versions: how many versions its oldest token was behind, at least and at most."""
        self._journal = journal
        self._door = Door(vocabulary, self.limits)
        self._now = now
        self._max_staleness, self._train_unmatched, self._keep = max_staleness, train_unmatched, keep
        self._by_cursor: bool | None = None
        self._repeats = Repeats()
        self._stale = 0
        was = restore(journal, self.queue, self.registry, self._repeats, now)
        self.latest, self._by_cursor, self._tallied = was.latest, was.by_cursor, was.tallied

    def set_vocabulary(self, size: int) -> None:
        """Token ids must be below `size` from now on."""
        self._door = Door(size, self.limits)

    # Groups come in

    def post(self, body: bytes) -> int:
        """Takes one group in and returns its number; a group that is known is not stored again. Raises `Refused` where
        it is not valid or there is no room, `NotPossibleNow` where it cannot be written."""
        return self.take(self.examine(body))

    def examine(self, body: bytes) -> Parcel:
        """Decodes and checks a group, and changes nothing. Raises `Refused` where it is not valid."""
        try:
            return self._open(body)
        except Refused as refusal:
            self._refuse(refusal)
            raise

    def take(self, parcel: Parcel) -> int:
        """`post` for a group that was examined."""
        seq = self._known(parcel)
        if seq is None:
            try:
                self._make_room(1, len(parcel.body))
            except Refused as refusal:
                self._refuse(refusal)
                raise
            seq = self._accept(parcel)
        self.changed.notify()
        return seq

    def examine_list(self, body: bytes) -> tuple[list[Parcel], list[tuple[int, Refused]]]:
        """The valid groups of a list, and the others' indices with the reasons. Changes nothing.

        Raises:
            Refused: The body is no list.
        """
        try:
            items = msgspec.json.decode(body, type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            refusal = Refused("malformed_json", f"The body is not a JSON list of groups: {error}.", status=400)
            self._refuse(refusal)
            raise refusal from None
        parcels: list[Parcel] = []
        refused: list[tuple[int, Refused]] = []
        for index, item in enumerate(items):
            try:
                parcels.append(self._open(bytes(item)))
            except Refused as refusal:
                refused.append((index, refusal))
        return parcels, refused

    def take_list(self, parcels: Sequence[Parcel], refused: Sequence[tuple[int, Refused]]) -> list[int]:
        """Takes the groups of a list in that were examined, and counts the others. Returns the numbers of `parcels`.

        Raises:
            Refused: There is no room for them; nothing was stored.
            NotPossibleNow: They cannot be written.
        """
        new = [parcel for parcel in parcels if self.queue.known(parcel.note.group_id) is None]
        try:
            self._make_room(len(new), sum(len(parcel.body) for parcel in new))
        except Refused as refusal:
            self._refuse(refusal)
            raise
        for _, refusal in refused:
            self._refuse(refusal)
        numbers = []
        for parcel in parcels:  # one after the other: a list may hold the same group twice
            seq = self._known(parcel)
            numbers.append(self._accept(parcel) if seq is None else seq)
        self.changes += 1
        self.changed.notify()
        return numbers

    def answered(self, seqs: Sequence[int]) -> None:
        """The answer to a post of these groups was sent."""
        self._repeats.answered(seqs)

    def unanswered(self, seqs: Sequence[int], parcels: Sequence[Parcel]) -> None:
        """The client of a post went before it had its answer: if the same bodies come again without a key from the same
        environment, within ten minutes, they are the same groups. `parcels`: what was posted, one for each number."""
        self._repeats.unanswered(seqs, parcels, self._now())

    # Batches go out

    def next_batch(self, cursor: int | None, sequences: int, version: int | None = None) -> Formed | None:
        """Forms and delivers a batch, or returns None when none can be formed yet.

        Args:
            cursor: Where the trainer stands; going back to an earlier one delivers the same groups again. None: as an
                Atropos trainer asks, which takes each batch for good.
            sequences: Rows of the batch.
            version: The policy version that will be trained; groups that are too old for it are dropped.

        Raises:
            Refused: The cursor does not fit, or none is given where the run's trainer reads with one.
            NotPossibleNow: The delivery cannot be written down.
        """
        if cursor is None and self._by_cursor:
            raise Refused(
                "cursor_needed",
                "This run's trainer reads with a cursor; a batch taken without one would be missing there. "
                "Use GET /latest_example or /counts to look in.",
                status=409,
                field="cursor",
            )
        self.registry.started = True
        if cursor is not None:
            if cursor != self.queue.delivered:
                self._rewind(cursor)
            self._by_cursor = True
        if version is not None:
            self.version = version
        while (plan := self.queue.plan(sequences, self._now())) is not None:
            if spoiled := [(group.seq, why) for group in plan.groups if (why := self._spoiled(group, version))]:
                for seq, why in spoiled:
                    self._lose(seq, why)
                self._stale += sum(why == "stale" for _, why in spoiled)
                continue
            bodies = self._read(plan)
            if bodies is None:
                continue
            if cursor is None and self.queue.delivered > self.queue.committed:
                self.commit(self.queue.delivered)  # asking for the next one says that the last one arrived
            if cursor is None:
                self._by_cursor = False
            self._journal.mark(
                Delivered(plan.cursor, [group.seq for group in plan.groups], sequences, plan.passed, cursor is not None)
            )
            self.queue.deliver(plan)
            if ages := [self.version - group.version for group in plan.groups if group.version >= 0]:
                self.staleness = min(ages), max(ages)
            self._change()
            stale, self._stale = self._stale, 0
            return Formed(plan, bodies, stale)
        return None

    def take_back(self, formed: Formed) -> None:
        """The client went before it had this batch: it waits again, if nothing was delivered since."""
        if self.queue.delivered == formed.plan.end and self.queue.committed <= formed.plan.cursor:
            self._rewind(formed.plan.cursor)

    def commit(self, cursor: int) -> int:
        """Deliveries up to `cursor` are in a checkpoint; returns how many groups that newly holds of.

        Raises:
            Refused: The cursor is ahead of what was delivered.
        """
        if cursor > self.queue.delivered:
            self.queue.check_cursor(cursor)
        if cursor <= self.queue.committed:
            return 0
        self._journal.mark(Committed(cursor))
        newly = self.queue.commit(cursor)
        self._change()
        oldest = self.queue.oldest_at_stake
        if self._journal.removable(oldest):
            snapshot = self.queue.snapshot()
            self.registry.save_to(snapshot)
            snapshot.by_cursor = self._by_cursor
            self._journal.leave(oldest, snapshot, keep=self._keep)
        return newly

    def drop(self, items: Sequence[tuple[int, str]]) -> int:
        """The trainer does not train on these delivered groups, each with its reason; returns how many are new.

        Raises:
            Refused: A reason is no name, or a group was not delivered; nothing was changed.
        """
        reasons: dict[str, list[int]] = {}
        for seq, reason in items:
            if not _REASON.fullmatch(reason):
                raise Refused(
                    "bad_reason",
                    f"{reason!r} is no reason: use lower-case letters, digits, '_', '-' and '.', at most 64.",
                    field="items",
                )
            reasons.setdefault(reason, []).append(seq)
        known = self.queue.counts().dropped
        if len(known.keys() | reasons.keys()) > _REASONS:
            raise Refused("too_many_reasons", f"At most {_REASONS} different reasons are kept.", field="items")
        self.queue.check_delivered([seq for seq, _ in items])
        dropped = 0
        for reason, seqs in reasons.items():
            self._journal.mark(Dropped(seqs, reason))
            dropped += len(self.queue.drop(seqs, reason))
        self._change()
        return dropped

    # Who takes part

    def register(self, trainer: TrainerRegistration) -> None:
        """
        Raises:
            Refused: Its batches can never be formed.
        """
        self.registry.check_trainer(trainer, self._now())
        self._journal.mark(TrainerRegistered(msgspec.to_builtins(trainer)))
        self.registry.set_trainer(trainer)

    def register_environment(self, environment: EnvironmentRegistration) -> int | None:
        """The environment's id, or None while the trainer has not started.

        Raises:
            Refused: Its groups can never be part of a batch.
        """
        now = self._now()
        self.registry.check_environment(environment, now)
        if not self.registry.started:
            return None
        if len(self.queue.lanes) >= self.limits.lanes:
            raise Refused(
                "too_many_environments", f"At most {self.limits.lanes} environments can register.", status=503
            )
        self._journal.mark(EnvironmentRegistered(len(self.registry.environments), msgspec.to_builtins(environment)))
        return self.registry.add_environment(environment, now)

    def disconnect_environment(self, env_id: int) -> None:
        """
        Raises:
            Refused: There is no such environment.
        """
        self.registry.heard(env_id, self._now())
        self._journal.mark(Disconnected(env_id))
        self.registry.disconnect(env_id)
        self.changed.notify()

    def environment_status(self, env_id: int) -> dict[str, object]:
        """What GET /status-env answers; a sign of life of that environment.

        Raises:
            Refused: There is no such environment.
        """
        self.registry.heard(env_id, self._now())
        return self.registry.status(env_id)

    def reset(self) -> None:
        """Drops all that is not committed, under the reason `reset`, and forgets trainer and environments."""
        self._journal.mark(Reset())
        forget(self.queue, self.registry, self._repeats)
        self._by_cursor = None
        self._change()

    def latest_body(self) -> bytes | None:
        """The newest group as it was posted; None where there is none or it was removed."""
        if self.latest is None or self.latest < self._journal.first:
            return None
        return self._journal.read(self.latest)

    def tally(self) -> None:
        """Writes down what was turned away, if that changed; to be called now and then."""
        counts = self.queue.counts()
        if (counts.duplicates, counts.refused) != self._tallied:
            self._journal.mark(Tallied(counts.duplicates, counts.refused))
            self._tallied = counts.duplicates, counts.refused

    # Inside

    def _open(self, body: bytes) -> Parcel:
        trainer = self.registry.trainer
        parcel = self._door.open(body, trainer.max_token_len if trainer else None)
        if parcel.env_id is not None:
            self.registry.heard(parcel.env_id, self._now())
            if trainer is not None and parcel.note.rows > trainer.batch_size:
                raise Refused(
                    "group_exceeds_batch",
                    f"{parcel.note.rows} rows never fit into the trainer's batches of {trainer.batch_size} sequences.",
                    field="tokens",
                )
        elif self.queue.lanes.get(parcel.note.lane) is None and len(self.queue.lanes) >= self.limits.lanes:
            raise Refused("too_many_environments", f"At most {self.limits.lanes} environments can post.", status=503)
        return parcel

    def _known(self, parcel: Parcel) -> int | None:
        seq = self.queue.known(parcel.note.group_id)
        if seq is None:
            seq = self._repeats.find(parcel, self._now())
        if seq is not None:
            self.queue.duplicate()
            self.changes += 1
        return seq

    def _refuse(self, refusal: Refused) -> None:
        self.queue.refuse(refusal.kind)
        self.changes += 1

    def _make_room(self, groups: int, size: int) -> None:
        limits, queue = self.limits, self.queue
        if groups > limits.queue_groups or size > limits.queue_bytes:
            raise Refused("too_large", "So much never fits into the queue.", status=413)
        if queue.waiting + groups > limits.queue_groups or queue.waiting_bytes + size > limits.queue_bytes:
            raise Refused(
                "queue_full",
                f"{queue.waiting} groups ({queue.waiting_bytes} bytes) wait for the trainer: no room for more.",
                status=503,
                retry_after=1,
            )

    def _accept(self, parcel: Parcel) -> int:
        parcel.note.open = self._repeats.open(self._now())
        if parcel.body is not parcel.posted and parcel.note.group_id is None:
            parcel.note.posted = self._repeats.digest(parcel.posted).hex()
        seq = self._journal.append(parcel.body, parcel.note)
        self.queue.accept(seq, parcel.note, len(parcel.body))
        self._repeats.accepted(seq, parcel)
        self.latest = seq
        self.changes += 1
        return seq

    def _read(self, plan: Plan) -> list[bytes] | None:
        """The bodies of a batch; a group that cannot be read is dropped, and the plan is void."""
        bodies = []
        for group in plan.groups:
            try:
                bodies.append(self._journal.read(group.seq))
            except (Corrupt, NotFound):
                self._lose(group.seq, "unreadable")
                return None
        return bodies

    def _spoiled(self, group: Waiting, version: int | None) -> str | None:
        """Why a group is not to be delivered to a trainer at `version`, or None."""
        if group.unmatched and not self._train_unmatched:
            return "unmatched"
        if version is None or self._max_staleness is None or group.version < 0:
            return None
        return "stale" if version - group.version > self._max_staleness else None

    def _lose(self, seq: int, reason: str) -> None:
        self._journal.mark(Lost(seq, reason))
        self.queue.lose(seq, reason)
        self._change()

    def _rewind(self, cursor: int) -> None:
        self.queue.check_cursor(cursor)
        self._journal.mark(Rewound(cursor))
        self.queue.rewind(cursor)
        self._change()

    def _change(self) -> None:
        self.changes += 1
        self.changed.notify()
