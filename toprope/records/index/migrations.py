"""Migrations of the index, one script per version, so a file of any earlier version still opens.

Entry n leads from `user_version` n to n + 1. Never change an entry, only append: databases have run them, and a test
opens a file of each earlier version. To add a table, append a string of statements, each ended by a semicolon, without
`IF NOT EXISTS` (a version runs once) and without a semicolon inside a statement. Read and write the table in its own
module, through `Index.reading()` and `Index.writing()`. Data that cannot be rebuilt from the run folders also needs a
file of its own, because `toprope doctor --repair` begins a new index. Only earlier versions use the tables
`experiments` and `ledger_read`.
"""

from __future__ import annotations

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
