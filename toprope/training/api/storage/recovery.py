"""Recovery from a journal: the account, the participants and unanswered posts as they were when its writer ended.

Every mark is replayed in order and must fit. If the oldest segments were removed, a snapshot replaces them: only the
notes of groups that were still live then come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from toprope.errors import Corrupt, InvalidValue
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import (
    Committed,
    Delivered,
    Disconnected,
    Dropped,
    EnvironmentRegistered,
    GroupNote,
    Lost,
    Mark,
    Record,
    Reset,
    Rewound,
    Snapshot,
    Tallied,
    TrainerRegistered,
)
from toprope.training.api.intake.deduplication import DuplicateDetector
from toprope.training.api.queue.group_queue import GroupQueue
from toprope.training.api.queue.registry import EnvironmentRegistration, Registry, TrainerRegistration


@dataclass
class RecoveredState:
    """The recovered state of a store apart from queue and registry."""

    latest: int | None = None
    """The newest group's number."""
    by_cursor: bool | None = None
    """True if the trainer reads with a cursor; None if none has read."""
    saved_counts: tuple[int, Mapping[str, int]] = field(default_factory=lambda: (0, {}))
    """Duplicates and refusals as last written to the journal."""


def reset(queue: GroupQueue, registry: Registry, duplicates: DuplicateDetector) -> None:
    """Drop all groups that are not committed, and forget trainer and environments."""
    queue.reset("reset")
    registry.reset()
    duplicates.clear()


def recover(
    journal: FileJournal, queue: GroupQueue, registry: Registry, duplicates: DuplicateDetector, now: Callable[[], float]
) -> RecoveredState:
    """Bring an empty queue and registry to the end of the journal.

    Raises:
        Corrupt: The journal contradicts itself.
    """
    state = _replay(journal, queue, registry, duplicates, now)
    if state is None and journal.widen():  # the snapshot that replaces older segments is damaged
        state = _replay(journal, queue, registry, duplicates, now)
    if state is None:
        raise Corrupt(
            "The run's journal cannot be recovered: the snapshot that replaces its removed segments is damaged.",
            hint="The journal was not changed. Its groups can still be read; continue training in a new run.",
        )
    return state


def _replay(
    journal: FileJournal, queue: GroupQueue, registry: Registry, duplicates: DuplicateDetector, now: Callable[[], float]
) -> RecoveredState | None:
    """Replay the journal; None if its beginning is missing and no snapshot replaces it."""
    state = RecoveredState()
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
                state.latest, newest = record.seq, record
            elif isinstance(note, Snapshot):
                if headless and not note.at_stake() <= notes.keys():
                    continue  # an older snapshot, which needs segments that are gone
                queue.load(note, notes, now())
                registry.load_from(note)
                state.by_cursor, state.saved_counts = note.by_cursor, (note.duplicates, note.refused)
                headless = False
            elif not headless:
                _apply(note, queue, registry, duplicates, state, now)
        except (ValueError, InvalidValue, msgspec.ValidationError, KeyError, IndexError) as error:
            raise Corrupt(
                f"The run's journal cannot be recovered: after group {record.seq}, {error}.",
                hint="The journal was not changed. Its groups can still be read; continue training in a new run.",
            ) from error
    if headless:
        return None
    if newest is not None and isinstance(newest.note, GroupNote):
        duplicates.recover(journal, newest.seq, newest.note)
    return state


def _apply(
    mark: Mark,
    queue: GroupQueue,
    registry: Registry,
    duplicates: DuplicateDetector,
    state: RecoveredState,
    now: Callable[[], float],
) -> None:
    match mark:
        case Delivered():
            queue.deliver(queue.replan(mark.cursor, mark.groups, mark.sequences, mark.passed))
            registry.started, state.by_cursor = True, mark.by_cursor
        case Rewound():
            queue.rewind(mark.cursor)
        case Committed():
            queue.commit(mark.cursor)
        case Dropped():
            queue.drop(mark.groups, mark.reason)
        case Lost():
            queue.drop_waiting(mark.group, mark.reason)
        case Reset():
            reset(queue, registry, duplicates)
            state.by_cursor = None
        case TrainerRegistered():
            registry.set_trainer(msgspec.convert(mark.values, TrainerRegistration))
        case EnvironmentRegistered():
            registry.add_environment(msgspec.convert(mark.values, EnvironmentRegistration), now())
        case Disconnected():
            registry.disconnect(mark.env_id)
        case Tallied():
            queue.restore_counts(mark.duplicates, mark.refused)
            state.saved_counts = mark.duplicates, mark.refused
