"""The journal of a run as the trajectory API uses it: accepted groups and marks, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from toprope.records.journal.marks import GroupNote, Mark, Snapshot

Keep = Literal["all", "sample", "none"]
"""Groups to keep once a checkpoint has passed them; a sample is every sixteenth."""


class Record(NamedTuple):
    """One entry of a journal: a group's note or a mark. `seq` is the number of the group, or of the last one."""

    seq: int
    note: GroupNote | Mark
    size: int
    """Bytes of the group's body; 0 for a mark."""


class Journal(Protocol):
    """The part of a journal that the trajectory API needs; storage is up to the implementation."""

    has_snapshot: bool
    """True if one of the marks is a snapshot."""

    @property
    def first(self) -> int:
        """The number of the oldest group that may still exist; above 1 if segments were removed."""
        ...

    def append(self, body: bytes, note: GroupNote) -> int:
        """Store a group and return its sequence number.

        Raises:
            NotPossibleNow: It could not be written (a full disk, for example); the journal is unchanged.
        """
        ...

    def mark(self, mark: Mark) -> None:
        """Store a mark. Raises: as `append`."""
        ...

    def read(self, seq: int) -> bytes:
        """A group's body.

        Raises:
            NotFound: No group has this number.
            Corrupt: Its bytes are damaged.
        """
        ...

    def iterate(self, after: int = 0) -> Iterator[Record]:
        """Groups numbered above `after`, and the marks after group `after`, in the order written."""
        ...

    def removable(self, before: int) -> bool:
        """Return True if some segments only hold groups numbered below `before`."""
        ...

    def leave(self, before: int, snapshot: Snapshot, *, keep: Keep) -> None:
        """Skip the `removable` segments from now on, after the snapshot is on disk; remove what is not to be kept.

        Raises: as `append`.
        """
        ...

    def widen(self) -> bool:
        """Read skipped segments too; return whether there were any."""
        ...

    def close(self) -> None: ...
