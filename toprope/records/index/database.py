"""The index: a database that all servers of a home share, with drafts, their history, starts and status stamps.

The truth about runs is in their folders, not here. It is SQLite in WAL mode, because clients start several servers at
once over one home. Each operation opens its own connection, so a thread, a fork or a second server never meets another
one's transaction.

A file that is damaged or not ours is left as it is; its owner decides about it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.errors import Corrupt, DiskFull, NotFound, NotPossibleNow, shown
from toprope.records.index.migrations import MIGRATIONS
from toprope.text_format import random_id

_BUSY_MS = 15000
"""More than a disk under load stands still."""
_LITTLE = 1 << 20


@dataclass(frozen=True)
class DraftRow:
    """A stored draft; `environment`, `knobs` and `config` are JSON values."""

    id: str
    created_at: float
    updated_at: float
    preset: str
    environment: dict[str, Any]
    knobs: list[dict[str, Any]]
    config: dict[str, Any]
    revision: int


@dataclass(frozen=True)
class EditRow:
    """One edit: `changes` are {"field", "before", "after"}; `revision` is the revision after it."""

    revision: int
    at: float
    changes: list[dict[str, Any]]


@dataclass(frozen=True)
class StartRow:
    """A run that was started from a draft's revision."""

    run_id: str
    draft_id: str
    revision: int
    kind: str
    at: float


class Index:
    """The database at `path`. The first write creates it; reading before that finds nothing.

    Raises (every method): Corrupt if the file is damaged or not ours, NotPossibleNow if a newer version wrote it or it
    stays locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked = False

    def create_draft(
        self, preset: str, environment: dict[str, Any], knobs: list[dict[str, Any]], config: dict[str, Any]
    ) -> DraftRow:
        """Store a new draft at revision 1 under an id such as `draft-7f3k`."""
        now = time.time()
        with self.writing() as db:
            for length in (4, 4, 4, 6, 8, 12):
                draft_id = f"draft-{random_id(length)}"
                inserted = db.execute(
                    "INSERT OR IGNORE INTO drafts VALUES (?, ?, ?, ?, ?, ?, ?, 1)",
                    (draft_id, now, now, preset, to_json(environment), to_json(knobs), to_json(config)),
                ).rowcount
                if inserted:
                    return DraftRow(draft_id, now, now, preset, environment, knobs, config, 1)
        raise NotPossibleNow("Found no free id for a draft.", hint="Call again.")

    def draft(self, draft_id: str) -> DraftRow:
        """The draft of that id.

        Raises:
            NotFound: No draft has it.
        """
        with self.reading() as db:
            return _draft(_draft_row(db, draft_id))

    def drafts(self, limit: int = 50) -> list[DraftRow]:
        """Drafts, the last edited first, without those whose row cannot be read."""
        with self.reading() as db:
            rows = db.execute("SELECT * FROM drafts ORDER BY updated_at DESC, id LIMIT ?", (limit,)) if db else ()
            drafts = []
            for row in rows:
                try:
                    drafts.append(_draft(row))
                except Corrupt:
                    continue
            return drafts

    def edit_draft(
        self, draft_id: str, edit: Callable[[DraftRow], tuple[dict[str, Any], list[dict[str, Any]]]]
    ) -> DraftRow:
        """Replace a draft's configuration in one transaction, so edits by two servers follow each other.

        Args:
            edit: Maps the present draft to the new configuration and the changes. If it raises, the draft stays as it
                was. Without changes nothing is written and the revision stays.

        Raises:
            NotFound: There is no such draft.
        """
        with self.writing() as db:
            row = _draft(_draft_row(db, draft_id))
            config, changes = edit(row)
            if not changes:
                return row
            now = time.time()
            db.execute(
                "UPDATE drafts SET config = ?, revision = ?, updated_at = ? WHERE id = ?",
                (to_json(config), row.revision + 1, now, draft_id),
            )
            db.execute("INSERT INTO edits VALUES (?, ?, ?, ?)", (draft_id, row.revision + 1, now, to_json(changes)))
            return _draft(_draft_row(db, draft_id))

    def edits(self, draft_id: str) -> list[EditRow]:
        """A draft's edits, oldest first."""
        with self.reading() as db:
            _draft_row(db, draft_id)
            assert db is not None  # there is no draft without a database
            rows = db.execute(
                "SELECT revision, at, changes FROM edits WHERE draft_id = ? ORDER BY revision", (draft_id,)
            )
            return [EditRow(row["revision"], row["at"], _of_draft(draft_id, row, "changes", list)) for row in rows]

    def record_start(self, start: StartRow, live: Callable[[StartRow], bool] | None) -> StartRow | None:
        """Record that a run starts from a draft's revision, unless one of the same kind is live.

        Args:
            start: The run that is about to start.
            live: Whether a run that was recorded earlier is live; None: several may be live at once.

        Returns:
            None if the start was recorded; otherwise the start of the live run.
        """
        with self.writing() as db:
            if live is not None:
                rows = db.execute(
                    "SELECT * FROM starts WHERE draft_id = ? AND revision = ? AND kind = ? ORDER BY at DESC",
                    (start.draft_id, start.revision, start.kind),
                )
                for row in rows.fetchall():
                    earlier = StartRow(**dict(row))
                    if live(earlier):
                        return earlier
            db.execute(
                "INSERT INTO starts (run_id, draft_id, revision, kind, at) VALUES (?, ?, ?, ?, ?)",
                (start.run_id, start.draft_id, start.revision, start.kind, start.at),
            )
        return None

    def forget_start(self, run_id: str) -> None:
        """Remove the record of a run that did not start."""
        with self.writing() as db:
            db.execute("DELETE FROM starts WHERE run_id = ?", (run_id,))

    def starts(self, draft_id: str) -> list[StartRow]:
        """Runs that were started from a draft, newest first."""
        with self.reading() as db:
            rows = db.execute("SELECT * FROM starts WHERE draft_id = ? ORDER BY at DESC", (draft_id,)) if db else ()
            return [StartRow(**dict(row)) for row in rows]

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection for reading; None if there is no database yet."""
        if not self.path.exists():
            yield None
            return
        with self._connect(reading=True) as db:
            yield db

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection inside a write transaction; commit at the end, roll back on an exception."""
        if not self.path.exists():
            self._create()
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                if db.in_transaction:  # on a full disk SQLite has rolled back already
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    @contextmanager
    def _connect(self, reading: bool = False) -> Iterator[sqlite3.Connection]:
        # A log beside the file means that a process died with it open or has it open now. Each process then checks the
        # file once.
        unclean = not self._checked and Path(f"{self.path}-wal").exists()
        db = None
        try:
            db = self._open(reading)
            db.row_factory = sqlite3.Row
            db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            db.execute("PRAGMA foreign_keys = ON")
            self._migrate(db)
            if unclean and (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise _Unreadable(problem)
            self._checked = True
            yield db
        except sqlite3.OperationalError as error:
            raise self._refusal(error) from None
        except (sqlite3.DatabaseError, _Unreadable) as error:
            raise self._corrupt(error) from None
        finally:
            if db is not None:
                db.close()

    def _open(self, reading: bool) -> sqlite3.Connection:
        """A connection. On a full disk or in a read-only folder SQLite cannot create its files beside the database; a
        reader then opens it as immutable, which is safe because nobody can write to it."""
        db = sqlite3.connect(self.path, timeout=_BUSY_MS / 1000, isolation_level=None)
        if not reading:
            return db
        try:
            db.execute("PRAGMA user_version").fetchone()
            return db
        except sqlite3.OperationalError as error:
            log = Path(f"{self.path}-wal")
            unable = self._no_room(str(error)) or not os.access(self.path.parent, os.W_OK)
            if not unable or (log.exists() and log.stat().st_size):
                return db
        except BaseException:
            db.close()
            raise
        db.close()
        return sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)

    def _no_room(self, text: str) -> bool:
        """Return True if SQLite failed for lack of room; it often reports something else."""
        if "disk is full" in text:
            return True
        unclear = "disk I/O error" in text or "unable to open" in text
        return unclear and shutil.disk_usage(self.path.parent).free < _LITTLE

    def _refusal(self, error: sqlite3.OperationalError | OSError) -> Corrupt | NotPossibleNow:
        text = str(error)
        if "locked" in text or "busy" in text:
            return NotPossibleNow(
                f"{self.path} stayed locked for {_BUSY_MS // 1000} s by another process.", hint="Call again."
            )
        if self._no_room(text):
            return DiskFull(
                f"{self.path} cannot be used: {text}.",
                hint="Its disk seems to be full: `toprope prune` shows how much old runs take.",
            )
        if "no such table" in text or "no such column" in text or "has no column" in text:
            return self._corrupt(error)
        return NotPossibleNow(
            f"{self.path} cannot be used: {text}.", hint="Check its permissions and the room on the disk."
        )

    def _corrupt(self, error: Exception) -> Corrupt:
        return Corrupt(
            f"{self.path} is damaged or not an index of Toprope ({error}); it was left as it is.",
            hint="Runs are safe in their folders. The owner runs `toprope doctor --repair`, which keeps the file and "
            "builds a new one from its readable parts and from the runs.",
        )

    def _create(self) -> None:
        """Create the database under a temporary name and link it to its place, so one of two servers wins."""
        try:
            # 0600, as -wal and -shm will be.
            descriptor, name = tempfile.mkstemp(prefix=".index.", dir=self.path.parent)
        except OSError as error:
            raise self._refusal(error) from None
        os.close(descriptor)
        temporary = Path(name)
        try:
            db = sqlite3.connect(temporary, isolation_level=None)
            try:
                self._migrate(db)
            finally:
                db.close()
            os.link(temporary, self.path)
        except FileExistsError:
            pass
        except (sqlite3.OperationalError, OSError) as error:
            raise self._refusal(error) from None
        finally:
            for suffix in ("", "-wal", "-shm"):
                Path(name + suffix).unlink(missing_ok=True)

    def _migrate(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == len(MIGRATIONS):
            return
        if version > len(MIGRATIONS):
            raise NotPossibleNow(
                f"{self.path} was written by a newer version of Toprope (its version {version}, ours "
                f"{len(MIGRATIONS)}); it was left as it is.",
                hint="Update Toprope, or set TOPROPE_HOME to another folder.",
            )
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and tables:
            raise _Unreadable("it holds tables of another program")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            for script in MIGRATIONS[version:]:
                for statement in script.split(";"):
                    if statement.strip():
                        db.execute(statement)
            db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


class _Unreadable(Exception):
    """The database is not one that we wrote."""


def to_json(value: Any) -> str:
    """A JSON value as the columns hold it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _draft_row(db: sqlite3.Connection | None, draft_id: str) -> sqlite3.Row:
    row: sqlite3.Row | None = None
    if db is not None:
        row = db.execute("SELECT * FROM drafts WHERE id = ?", (draft_id,)).fetchone()
    if row is None:
        raise NotFound(f"There is no draft {shown(draft_id)}.", hint="select_environment makes one.")
    return row


def _of_draft(draft_id: str, row: sqlite3.Row, column: str, kind: type) -> Any:
    """The JSON value in a column of a draft. Damage to it concerns this draft alone."""
    try:
        value = json.loads(row[column])
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise Corrupt(
            f"The draft {draft_id} cannot be read: its {column} in the index is damaged. It was left as it is; other "
            "drafts are not affected.",
            hint="select_environment makes a new one.",
        )
    return value


def _draft(row: sqlite3.Row) -> DraftRow:
    return DraftRow(
        id=row["id"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        preset=row["preset"],
        environment=_of_draft(row["id"], row, "environment", dict),
        knobs=_of_draft(row["id"], row, "knobs", list),
        config=_of_draft(row["id"], row, "config", dict),
        revision=row["revision"],
    )
