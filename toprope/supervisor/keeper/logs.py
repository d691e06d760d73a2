"""Reading what components printed: bounded, and safe to show. And the keeper's own log, which is bounded as theirs.

A log holds whatever user code and models wrote, so escape sequences and invisible characters are taken out before
anybody sees it, and nothing is read without a limit.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from toprope.supervisor import guard

__all__ = ["LogPage", "KeeperLog", "clean_line", "read_page", "read_tail"]

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_LINE_CHARACTERS = 500
_READ_BYTES = 1 << 18


def clean_line(line: str, secrets: Iterable[str] = ()) -> str:
    """One line without escape sequences, control and format characters, cut to 500 characters, secrets masked."""
    line = _ESCAPES.sub("", line.rstrip("\r\n"))
    # A progress bar rewrites its line; what a terminal would show at the end is what comes after the last return.
    line = line.rpartition("\r")[2].replace("\t", "    ")
    line = "".join(c for c in line if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))
    for secret in secrets:
        if secret:
            line = line.replace(secret, "[secret]")
    return line if len(line) <= _LINE_CHARACTERS else line[: _LINE_CHARACTERS - 1] + "…"


class KeeperLog(io.TextIOBase):
    """Where a keeper prints: a file that never grows past its cap, with one older part beside it. What cannot be
    written, because the disk is full, is lost: words must not end a run."""

    def __init__(self, path: Path, limit: int) -> None:
        self._log = guard.Log(str(path), limit, 1)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, text: str, /) -> int:
        self._log.write(text.encode(errors="replace"))
        return len(text)


@dataclass(frozen=True)
class LogPage:
    """Some lines of a log, oldest first. `start` is the byte at which they begin: the `before` of the page before."""

    lines: list[str]
    start: int
    size: int


def read_page(path: Path, *, lines: int = 100, before: int | None = None, secrets: Iterable[str] = ()) -> LogPage:
    """The last `lines` lines that end at or before byte `before` (the end of the file when None).

    Reads at most 256 KiB: a page can be shorter than asked for. An absent file is an empty one.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            end = size if before is None else max(0, min(before, size))
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            data = file.read(end - start)
    except FileNotFoundError:
        return LogPage([], 0, 0)
    parts = data.split(b"\n")
    if parts and not parts[-1]:
        parts.pop()
    kept = parts[-lines:] if lines > 0 else []
    if start and len(kept) == len(parts) > 1:
        kept = kept[1:]
    dropped = parts[: len(parts) - len(kept)]
    return LogPage(
        [clean_line(part.decode(errors="replace"), secrets) for part in kept],
        start + sum(len(part) + 1 for part in dropped),
        size,
    )


def read_tail(path: Path, lines: int = 20, secrets: Iterable[str] = ()) -> list[str]:
    """The last non-empty lines of a log; of its previous part where the newest was begun just now."""
    found = [line for line in read_page(path, lines=lines * 2, secrets=secrets).lines if line.strip()]
    if len(found) < lines:
        older = read_page(path.with_name(path.name + ".1"), lines=lines * 2, secrets=secrets).lines
        found = [line for line in older if line.strip()] + found
    return found[-lines:]
