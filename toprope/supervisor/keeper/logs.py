"""Reads the output of components: bounded, and safe to show. Also bounds the keeper's own log.

A log holds any text that user code and models wrote, so escape sequences and invisible characters are removed before
anybody sees it, and every read has a limit.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toprope.errors import Corrupt
from toprope.records.run.folder import open_record
from toprope.supervisor import guard
from toprope.text_format import hide, printed_line

_LINE_CHARACTERS = 500
_READ_BYTES = 1 << 18


def clean_line(line: str, secrets: Iterable[str] = ()) -> str:
    """Return a line without escape sequences, control and format characters, cut to 500 characters, secrets masked."""
    line = hide(printed_line(line), secrets)
    return line if len(line) <= _LINE_CHARACTERS else line[: _LINE_CHARACTERS - 1] + "…"


class KeeperLog(io.TextIOBase):
    """The keeper's standard output: a file that never exceeds its limit, with one older part beside it. Text that does
    not fit on a full disk is lost, because output must not end a run."""

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
    """Lines of a log, oldest first. `start` is the byte at which they begin: pass it as `before` for older lines."""

    lines: list[str]
    start: int
    size: int


def read_page(path: Path, *, lines: int = 100, before: int | None = None, secrets: Iterable[str] = ()) -> LogPage:
    """Read the last `lines` lines that end at or before byte `before` (the end of the file when None).

    Reads at most 256 KiB, so a page may be shorter than asked for. A missing file counts as empty.

    Raises:
        Corrupt: The log cannot be read.
    """
    try:
        with open_record(path) as file:
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
    page = parts[-lines:] if lines > 0 else []
    if start and len(page) == len(parts) > 1:
        page = page[1:]
    dropped = parts[: len(parts) - len(page)]
    return LogPage(
        [clean_line(part.decode(errors="replace"), secrets) for part in page],
        start + sum(len(part) + 1 for part in dropped),
        size,
    )


def read_tail(path: Path, lines: int = 20, secrets: Iterable[str] = ()) -> list[str]:
    """Return the last non-empty lines of a log, also from its previous part if the newest has too few; none of a part
    that cannot be read."""
    tail: list[str] = []
    for part in (path, path.with_name(path.name + ".1")):
        if len(tail) < lines:
            with suppress(Corrupt):
                older = read_page(part, lines=lines * 2, secrets=secrets).lines
                tail = [line for line in older if line.strip()] + tail
    return tail[-lines:]
