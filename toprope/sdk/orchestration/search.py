"""Search: offline over your own corpus, or on the web through a provider.

    Corpus.of(Path("notes")).search("height of the Eiffel tower", 3)

A corpus is text files or JSON lines in SQLite's full-text index, ranked by its BM25 (Robertson and Zaragoza, 2009). A
provider is a function from query and number to pairs of title and text; its key comes from a variable of the owner's
settings, never from a configuration.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from toprope.sdk.errors import InvalidRequest
from toprope.sdk.orchestration.tools import LONGEST_PASSAGE

__all__ = ["KEYS", "Corpus", "provider"]

_TEXTS = {".txt", ".md", ".rst"}
_PIECE = re.compile(rf"\S.{{0,{LONGEST_PASSAGE - 1}}}(?!\S)|\S{{{LONGEST_PASSAGE}}}", re.DOTALL)
"""As much of a paragraph as a passage takes, cut between words where it has any."""
_MOST_BYTES = 200 << 20


class Corpus:
    """Passages in memory, searchable from several threads.

    Args:
        passages: Pairs of title and text.
    """

    def __init__(self, passages: Iterable[tuple[str, str]]) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        self._db.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')")
        self._db.executemany("INSERT INTO passages VALUES (?, ?)", passages)

    @classmethod
    def of(cls, path: Path) -> Corpus:
        """Read a folder of files that are not hidden, or one file: text, or JSON lines with `text`, perhaps `title`.

        Raises:
            InvalidRequest: It holds no corpus, or more than 200 MiB.
        """
        path = path.expanduser()
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        files = [file for file in files if file.suffix.lower() in _TEXTS | {".jsonl"}]
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files or not all(file.is_file() for file in files):
            raise InvalidRequest(f"{path} holds no corpus: a .jsonl, .txt, .md or .rst file, or a folder of them.")
        if sum(file.stat().st_size for file in files) > _MOST_BYTES:
            raise InvalidRequest(f"{path} is larger than {_MOST_BYTES >> 20} MiB, the most that is searched in memory.")
        return cls(passage for file in files for passage in _passages(file))

    def search(self, query: str, most: int = 5) -> list[tuple[str, str]]:
        """Title and text of the passages that hold any word of the query, the best first."""
        words = re.findall(r"\w+", query)[:32]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            return self._db.execute(
                "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
                (match, most),
            ).fetchall()


def _passages(file: Path) -> Iterator[tuple[str, str]]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):  # splitlines also parts at U+2028, which JSON may contain
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
    """Passages of whole paragraphs, as long as the policy sees them; longer paragraphs are cut."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for piece in map(str.strip, _PIECE.findall(paragraph)):
            longer = f"{passage}\n\n{piece}" if passage else piece
            if len(longer) > LONGEST_PASSAGE:
                yield title, passage
                longer = piece
            passage = longer
    if passage:
        yield title, passage


KEYS = {"brave": "BRAVE_API_KEY", "tavily": "TAVILY_API_KEY"}
"""Environment variable with the key of each provider."""

_URLS = {"brave": "https://api.search.brave.com/res/v1/web/search", "tavily": "https://api.tavily.com/search"}
_TIMEOUT_S = 15.0
_LONGEST_ANSWER = 4 << 20


def provider(name: str, url: str = "") -> Callable[[str, int], list[tuple[str, str]]]:
    """The search function of a provider.

    Args:
        name: `brave` (api.search.brave.com) or `tavily` (api.tavily.com).
        url: Address of a proxy with the same API.

    Raises:
        InvalidRequest: Unknown provider, or its key is not set.
    """
    if name not in KEYS:
        raise InvalidRequest(f"Unknown search provider {name!r}; known: {', '.join(KEYS)}.")
    key = os.environ.get(KEYS[name], "")
    if not key:
        raise InvalidRequest(f"{name} needs {KEYS[name]} in the owner's settings, variables of environment.")
    address = url or _URLS[name]

    def search(query: str, most: int) -> list[tuple[str, str]]:
        if name == "brave":
            parameters = urllib.parse.urlencode({"q": query[:400], "count": most})
            answer = _fetch(urllib.request.Request(f"{address}?{parameters}", headers={"X-Subscription-Token": key}))
            rows = (answer.get("web") or {}).get("results") or []
            return [(str(row.get("title", "")), str(row.get("description", ""))) for row in rows[:most]]
        body = json.dumps({"query": query[:400], "max_results": most}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        answer = _fetch(urllib.request.Request(address, data=body, headers=headers))
        return [
            (str(row.get("title", "")), str(row.get("content", ""))) for row in (answer.get("results") or [])[:most]
        ]

    return search


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, which could carry the key elsewhere."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _fetch(request: urllib.request.Request) -> dict[str, Any]:
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read(_LONGEST_ANSWER))
    except urllib.error.HTTPError as error:
        error.close()
        raise InvalidRequest(f"The search provider answered {error.code}.") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"The search provider could not be asked: {getattr(error, 'reason', error)}.") from None
    return answer if isinstance(answer, dict) else {}
