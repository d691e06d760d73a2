"""The journal of a run as the trajectory API uses it: accepted groups and marks, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from toprope.records.journal.marks import GroupNote, Mark, Snapshot

__all__ = ["Journal", "Record"]


class Record(NamedTuple):
    """One entry of a journal: a group's note or a mark. `seq` is the group's number, for a mark the last one's."""

    seq: int
    note: GroupNote | Mark
    size: int
    """Bytes of the group's body; 0 for a mark."""


class Journal(Protocol):
    """What the trajectory API needs of a journal; how it lasts is the implementation's business."""

    has_snapshot: bool
    """Whether one of the marks is a snapshot."""

    @property
    def first(self) -> int:
        """The number of the oldest group that may still be there; above 1 when segments were removed."""
        ...

    def append(self, body: bytes, note: GroupNote) -> int:
        """Keeps a group and returns its sequence number.

        Raises:
            NotPossibleNow: It could not be written (disk full, say); the journal is as it was.
        """
        ...

    def mark(self, mark: Mark) -> None:
        """Keeps what happened. Raises as `append` does."""
        ...

    def read(self, seq: int) -> bytes:
        """A group's body.

        Raises:
            NotFound: No group has this number.
            Corrupt: Its bytes are not those that were written.
        """
        ...

    def iterate(self, after: int = 0) -> Iterator[Record]:
        """Groups numbered above `after` and the marks behind group `after`, in the order written."""
        ...

    def removable(self, before: int) -> bool:
        """Whether there are segments that hold only groups numbered below `before`."""
        ...

    def leave(self, before: int, snapshot: Snapshot, *, keep: bool) -> None:
        """Sets them aside or removes them, once the snapshot is on disk. Raises as `append` does."""
        ...

    def widen(self) -> bool:
        """Has the groups that were set aside looked up too; whether there were any."""
        ...

    def close(self) -> None: ...
