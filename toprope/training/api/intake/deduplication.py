"""Detection of repeated posts without a key: Atropos environments send no key, and post again if no answer came.

The same body from the same environment is the same group if the first answer was not delivered, because the connection
broke or this process was killed. The note of each group lists the earlier groups in that state, so a process that
recovers the journal of a killed one knows them. A body that is posted again after its answer arrived is another group.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from toprope.errors import Corrupt, NotFound
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import GroupNote
from toprope.training.api.intake.validation import PostedGroup

WINDOW_S = 600.0
"""Seconds after which an equal body is always another group."""
_REMEMBERED = 1024
_IN_FLIGHT = 4096
_NOTED = 256


class DuplicateDetector:
    """The groups without a key whose poster may not have its answer. `len()` counts answers known to be lost."""

    def __init__(self) -> None:
        self._in_flight: dict[int, None] = {}
        self._unanswered: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unanswered)

    def record(self, seq: int, post: PostedGroup) -> None:
        """Note a stored group whose answer is about to be sent."""
        if post.note.group_id is None:
            self._in_flight[seq] = None
            if len(self._in_flight) > _IN_FLIGHT:
                del self._in_flight[next(iter(self._in_flight))]

    def mark_answered(self, seqs: Sequence[int]) -> None:
        """The operating system has the answer to these; it delivers it even if this process is killed."""
        for seq in seqs:
            self._in_flight.pop(seq, None)

    def mark_unanswered(self, seqs: Sequence[int], posts: Sequence[PostedGroup], now: float) -> None:
        """The answer to these did not reach their poster."""
        for seq, post in zip(seqs, posts, strict=True):
            if post.note.group_id is None:
                self._remember(post.note.lane, digest(post.posted), seq, now)

    def find(self, post: PostedGroup, now: float) -> int | None:
        """The number of the group that this post repeats, if any."""
        if not self._unanswered or post.note.group_id is not None:
            return None
        seq, at = self._unanswered.pop((post.note.lane, digest(post.posted)), (None, 0.0))
        if seq is None or now - at > WINDOW_S:
            return None
        self.record(seq, post)  # until this answer is sent, the post may come once more
        return seq

    def pending(self, now: float) -> list[int]:
        """The groups that may be posted again, newest last, for the note of the next group."""
        while self._unanswered and now - next(iter(self._unanswered.values()))[1] > WINDOW_S:
            self._unanswered.popitem(last=False)
        if not self._in_flight and not self._unanswered:
            return []
        return sorted({*self._in_flight, *(seq for seq, _ in self._unanswered.values())})[-_NOTED:]

    def recover(self, journal: FileJournal, last: int, last_note: GroupNote) -> None:
        """Recover the groups that a killed process had not answered: its last one, and those its note lists."""
        unanswered = {*last_note.open, last}
        for record in journal.iterate(min(unanswered) - 1):
            recorded = record.note
            if record.seq not in unanswered or not isinstance(recorded, GroupNote) or recorded.group_id is not None:
                continue
            try:
                key = bytes.fromhex(recorded.posted) if recorded.posted else digest(journal.read(record.seq))
            except (Corrupt, NotFound, ValueError):
                continue
            self._remember(recorded.lane, key, record.seq, recorded.at)

    def clear(self) -> None:
        """Forget everything."""
        self._in_flight.clear()
        self._unanswered.clear()

    def _remember(self, lane: str, key: bytes, seq: int, at: float) -> None:
        self._unanswered[lane, key] = (seq, at)
        while len(self._unanswered) > _REMEMBERED:
            self._unanswered.popitem(last=False)


def digest(body: bytes) -> bytes:
    """The key under which a body is compared with others."""
    return hashlib.blake2b(body, digest_size=16).digest()
