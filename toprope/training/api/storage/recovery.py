"""Taking a journal up again: the account, the participants and the open posts as they were when its writer ended.

Every mark is carried out once more in its order, and must fit. Where the oldest segments were removed, a snapshot
stands for them: what comes before it are only the notes of groups that were still at stake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from toprope.errors import Corrupt, InvalidValue
from toprope.records.journal.journal import Journal, Record
from toprope.records.journal.marks import (
    Committed,
    Delivered,
    Disconnected,
    Dropped,
    EnvironmentRegistered,
    GroupNote,
    Lost,
    Mark,
    Reset,
    Rewound,
    Snapshot,
    Tallied,
    TrainerRegistered,
)
from toprope.training.api.intake.deduplication import Repeats
from toprope.training.api.queue.group_queue import GroupQueue
from toprope.training.api.queue.registry import EnvironmentRegistration, Registry, TrainerRegistration

__all__ = ["Restored", "forget", "restore"]


@dataclass
class Restored:
    """What of a store is neither queue nor registry."""

    latest: int | None = None
    """The newest group's number."""
    by_cursor: bool | None = None
    """Whether the trainer reads with a cursor; None where none has read."""
    tallied: tuple[int, Mapping[str, int]] = field(default_factory=lambda: (0, {}))
    """Duplicates and refusals as they were last written down."""


def forget(queue: GroupQueue, registry: Registry, repeats: Repeats) -> None:
    """Drops all that is not committed and forgets who takes part."""
    queue.reset("reset")
    registry.reset()
    repeats.clear()


def restore(
    journal: Journal, queue: GroupQueue, registry: Registry, repeats: Repeats, now: Callable[[], float]
) -> Restored:
    """Brings an empty queue and registry to where the journal ends.

    Raises:
        Corrupt: The journal contradicts itself.
    """
    was = _replay(journal, queue, registry, repeats, now)
    if was is None and journal.widen():  # what stood for the segments set aside is damaged
        was = _replay(journal, queue, registry, repeats, now)
    if was is None:
        raise Corrupt(
            "The run's journal cannot be taken up again: what its removed segments added up to is damaged.",
            hint="It was left as it is. Its groups can still be read; train on in a new run.",
        )
    return was


def _replay(
    journal: Journal, queue: GroupQueue, registry: Registry, repeats: Repeats, now: Callable[[], float]
) -> Restored | None:
    """Carries out what the journal says; None where its beginning is missing and no snapshot stands for it."""
    was = Restored()
    notes: dict[int, tuple[GroupNote, int]] = {}
    newest: Record | None = None
    headless = journal.first > 1
    for record in journal.iterate():
        note = record.note
        try:
            if isinstance(note, GroupNote):
                if journal.has_snapshot:
                    notes[record.seq] = note, record.size
                if not headless:
                    queue.accept(record.seq, note, record.size)
                was.latest, newest = record.seq, record
            elif isinstance(note, Snapshot):
                if headless and not note.at_stake() <= notes.keys():
                    continue  # an older one than that for which the missing segments were left
                queue.load(note, notes, now())
                registry.load_from(note)
                was.by_cursor, was.tallied = note.by_cursor, (note.duplicates, note.refused)
                headless = False
            elif not headless:
                _apply(note, queue, registry, repeats, was, now)
        except (ValueError, InvalidValue, msgspec.ValidationError, KeyError, IndexError) as error:
            raise Corrupt(
                f"The run's journal cannot be taken up again: behind group {record.seq}, {error}.",
                hint="It was left as it is. Its groups can still be read; train on in a new run.",
            ) from error
    if headless:
        return None
    if newest is not None and isinstance(newest.note, GroupNote):
        repeats.restore(journal, newest.seq, newest.note)
    return was


def _apply(
    mark: Mark,
    queue: GroupQueue,
    registry: Registry,
    repeats: Repeats,
    was: Restored,
    now: Callable[[], float],
) -> None:
    match mark:
        case Delivered():
            queue.deliver(queue.replan(mark.cursor, mark.groups, mark.sequences, mark.passed))
            registry.started, was.by_cursor = True, mark.by_cursor
        case Rewound():
            queue.rewind(mark.cursor)
        case Committed():
            queue.commit(mark.cursor)
        case Dropped():
            queue.drop(mark.groups, mark.reason)
        case Lost():
            queue.lose(mark.group, mark.reason)
        case Reset():
            forget(queue, registry, repeats)
            was.by_cursor = None
        case TrainerRegistered():
            registry.set_trainer(msgspec.convert(mark.values, TrainerRegistration))
        case EnvironmentRegistered():
            registry.add_environment(msgspec.convert(mark.values, EnvironmentRegistration), now())
        case Disconnected():
            registry.disconnect(mark.env_id)
        case Tallied():
            queue.tally(mark.duplicates, mark.refused)
            was.tallied = mark.duplicates, mark.refused
