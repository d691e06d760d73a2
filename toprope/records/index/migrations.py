"""How the index came to its present shape, one script a version, so that the file of any earlier version still opens.

Entry n leads from `user_version` n to n + 1. Entries are never changed, only appended: databases have run them, and a
test opens a file of each earlier version. To add a table: append a string of statements, each ended by a semicolon,
with `IF NOT EXISTS` nowhere (a version is run once) and no semicolon within a statement; keep what reads and writes the
table in a module of its own, over `Index.reading()` and `Index.writing()`. What cannot be made again of the run
folders belongs into a file of its own as well: `toprope doctor --repair` begins a new index.
"""

from __future__ import annotations

__all__ = ["MIGRATIONS"]

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE drafts (
        id TEXT PRIMARY KEY,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        preset TEXT NOT NULL,
        environment TEXT NOT NULL,
        knobs TEXT NOT NULL,
        config TEXT NOT NULL,
        revision INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE edits (
        draft_id TEXT NOT NULL REFERENCES drafts(id),
        revision INTEGER NOT NULL,
        at REAL NOT NULL,
        changes TEXT NOT NULL,
        PRIMARY KEY (draft_id, revision)
    ) STRICT;
    CREATE TABLE starts (
        run_id TEXT PRIMARY KEY,
        draft_id TEXT NOT NULL,
        revision INTEGER NOT NULL,
        kind TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
    CREATE INDEX starts_by_draft ON starts (draft_id, revision, kind);
    CREATE TABLE stamps (
        run_id TEXT PRIMARY KEY,
        at REAL NOT NULL,
        seq INTEGER NOT NULL,
        snapshot TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE forks (
        draft_id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL
    ) STRICT;
    CREATE TABLE experiments (
        id TEXT PRIMARY KEY,
        at REAL NOT NULL,
        updated_at REAL NOT NULL,
        environment TEXT NOT NULL,
        entry TEXT NOT NULL
    ) STRICT;
    CREATE INDEX experiments_by_environment ON experiments (environment, at);
    CREATE TABLE ledger_read (
        one INTEGER PRIMARY KEY,
        bytes INTEGER NOT NULL,
        first_line TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE start_keys (
        key TEXT PRIMARY KEY,
        draft_id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
    """,
)
