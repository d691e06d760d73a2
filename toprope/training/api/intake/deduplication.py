"""Which posts without a key are repetitions: environments of Atropos send none, and post again when no answer came.

The same body from the same environment is the same group if the answer to the first was not delivered: the connection
broke, or this process was killed. Which groups were in that state is in the note of each group that follows them, so
that a process that starts on the journal of a killed one knows. A body whose answer did arrive and that comes once more
is another group.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from toprope.errors import Corrupt, NotFound
from toprope.records.journal.journal import Journal
from toprope.records.journal.marks import GroupNote
from toprope.training.api.intake.validation import Parcel

__all__ = ["WINDOW_S", "Repeats"]

WINDOW_S = 600.0
"""Seconds after which the same body is another group in any case."""
_REMEMBERED = 1024
_IN_FLIGHT = 4096
_NOTED = 256


class Repeats:
    """Groups without a key whose poster may not have had its answer."""

    def __init__(self) -> None:
        self._in_flight: dict[int, None] = {}
        self._unanswered: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()

    def accepted(self, seq: int, parcel: Parcel) -> None:
        """A group was stored, its answer is on the way."""
        if parcel.note.group_id is None:
            self._in_flight[seq] = None
            if len(self._in_flight) > _IN_FLIGHT:
                del self._in_flight[next(iter(self._in_flight))]

    def answered(self, seqs: Sequence[int]) -> None:
        """The answer to these is with the operating system, which delivers it even if this process is killed."""
        for seq in seqs:
            self._in_flight.pop(seq, None)

    def unanswered(self, seqs: Sequence[int], parcels: Sequence[Parcel], now: float) -> None:
        """The answer to these did not reach their poster."""
        for seq, parcel in zip(seqs, parcels, strict=True):
            if parcel.note.group_id is None:
                self._remember(parcel.note.lane, self.digest(parcel.posted), seq, now)

    def find(self, parcel: Parcel, now: float) -> int | None:
        """The number of the group that this post repeats, if it does."""
        if not self._unanswered or parcel.note.group_id is not None:
            return None
        seq, at = self._unanswered.pop((parcel.note.lane, self.digest(parcel.posted)), (None, 0.0))
        if seq is None or now - at > WINDOW_S:
            return None
        self.accepted(seq, parcel)  # until this answer is on its way it may come once more
        return seq

    def open(self, now: float) -> list[int]:
        """The groups that may come again, newest last; for the note of the next group."""
        while self._unanswered and now - next(iter(self._unanswered.values()))[1] > WINDOW_S:
            self._unanswered.popitem(last=False)
        if not self._in_flight and not self._unanswered:
            return []
        return sorted({*self._in_flight, *(seq for seq, _ in self._unanswered.values())})[-_NOTED:]

    def restore(self, journal: Journal, last: int, note: GroupNote) -> None:
        """What a killed process had not answered: its last group, and those that this one's note names."""
        wanted = {*note.open, last}
        for record in journal.iterate(min(wanted) - 1):
            found = record.note
            if record.seq not in wanted or not isinstance(found, GroupNote) or found.group_id is not None:
                continue
            try:
                digest = bytes.fromhex(found.posted) if found.posted else self.digest(journal.read(record.seq))
            except (Corrupt, NotFound, ValueError):
                continue
            self._remember(found.lane, digest, record.seq, found.at)

    def clear(self) -> None:
        """Forgets everything."""
        self._in_flight.clear()
        self._unanswered.clear()

    def digest(self, body: bytes) -> bytes:
        """A short name of a body."""
        return hashlib.blake2b(body, digest_size=16).digest()

    def _remember(self, lane: str, digest: bytes, seq: int, at: float) -> None:
        self._unanswered[lane, digest] = (seq, at)
        while len(self._unanswered) > _REMEMBERED:
            self._unanswered.popitem(last=False)
