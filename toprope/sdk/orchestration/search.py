"""Search over a corpus of one's own, offline: SQLite's full-text index over text files or JSON lines.

    Corpus.of(Path("notes")).search("height of the Eiffel tower", 3)

Ranking is BM25 (Robertson and Zaragoza, 2009) as SQLite computes it.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toprope.sdk.errors import InvalidRequest

__all__ = ["Corpus", "Hit"]

_TEXTS = {".txt", ".md", ".rst"}
_LONGEST = 2000
"""Characters of one passage; longer texts are cut at paragraphs."""
_MOST_BYTES = 200 << 20


@dataclass(frozen=True)
class Hit:
    """A passage that was found, the best first."""

    title: str
    text: str
    score: float


class Corpus:
    """Passages in memory. Safe to search from several threads.

    Args:
        passages: Pairs of title and text.
    """

    def __init__(self, passages: Iterable[tuple[str, str]]) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        self._db.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')")
        self._db.executemany("INSERT INTO passages VALUES (?, ?)", passages)
        self.size = self._db.execute("SELECT count(*) FROM passages").fetchone()[0]

    @classmethod
    def of(cls, path: Path) -> Corpus:
        """The corpus in a folder of text files, or in a file: text, or JSON lines with `text` and perhaps `title`.

        Raises:
            InvalidRequest: There is none, or it is larger than 200 MiB.
        """
        path = path.expanduser()
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        files = [one for one in files if one.suffix.lower() in _TEXTS | {".jsonl"}]
        if not files or not all(one.is_file() for one in files):
            raise InvalidRequest(f"{path} holds no corpus: a .jsonl, .txt, .md or .rst file, or a folder of them.")
        if sum(one.stat().st_size for one in files) > _MOST_BYTES:
            raise InvalidRequest(f"{path} is larger than {_MOST_BYTES >> 20} MiB, the most that is searched in memory.")
        return cls(passage for one in files for passage in _passages(one))

    def search(self, query: str, most: int = 5) -> list[Hit]:
        """Passages that hold words of the query, the best first; an empty list where none does."""
        words = re.findall(r"\w+", query)[:32]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._db.execute(
                "SELECT title, text, bm25(passages) FROM passages WHERE passages MATCH ? ORDER BY 3, rowid LIMIT ?",
                (match, most),
            ).fetchall()
        return [Hit(title, text, -score) for title, text, score in rows]


def _passages(file: Path) -> Iterator[tuple[str, str]]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                content = row["text"]
            except (ValueError, KeyError, TypeError):
                raise InvalidRequest(f'{file}, line {number}: expected a JSON object with a "text".') from None
            yield from _cut(str(row.get("title") or f"{file.stem} {number}"), str(content))
        return
    yield from _cut(file.stem, text)


def _cut(title: str, text: str) -> Iterator[tuple[str, str]]:
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if passage and len(passage) + len(paragraph) > _LONGEST:
            yield title, passage
            passage = ""
        passage = f"{passage}\n\n{paragraph.strip()}" if passage else paragraph.strip()
    if passage:
        yield title, passage
