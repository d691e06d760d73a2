"""Read metrics.jsonl: all of it, its last row, or a sample that is large enough for a plot or a report.

A run of a million steps leaves hundreds of megabytes. `read_history` reads a small file whole, and from a large one
only rows at even distances of bytes, which costs the same for any size.

The trainer begins each attempt with a header line that names the file's version. An attempt that resumes from a
checkpoint writes the steps after it again: a row counts unless a later line has the same or a lower step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from toprope.errors import Corrupt
from toprope.records.run.folder import REPAIR_HINT, check_version, lines_backwards, open_record

METRICS_VERSION = 1
_WHOLE_BYTES = 1 << 20
"""A file up to this size is read whole."""
_ROWS = 512
_PIECE = 2048
"""Bytes read at each place; a row has about 600."""
_LONGEST_ROW = 1 << 17
_decoder = msgspec.json.Decoder()


@dataclass(frozen=True)
class History:
    """Rows of a run, ascending by step, including the newest. `whole`: every row that counts; otherwise rows at about
    even distances."""

    rows: list[dict[str, Any]]
    whole: bool

    @property
    def last(self) -> dict[str, Any]:
        """The newest row; empty before the first."""
        return self.rows[-1] if self.rows else {}


def header(attempt: int) -> bytes:
    """The header line of an attempt, which the trainer writes before its first row."""
    line = {"version": METRICS_VERSION, "attempt": attempt}
    return json.dumps(line).encode() + b"\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every row that counts, ascending by step; none if the file is missing. Torn lines are skipped.

    Raises:
        TooNew: A newer version wrote the file.
        Corrupt: The file cannot be read.
    """
    try:
        with open_record(path) as file:
            return _counting(_rows(path, file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror or error}.", hint=REPAIR_HINT) from None


def read_history(path: Path, rows: int = _ROWS, *, whole_bytes: int = _WHOLE_BYTES) -> History:
    """About `rows` rows over a whole run, in milliseconds; all rows of a file of at most `whole_bytes`.

    Raises:
        TooNew: A newer version wrote the file.
        Corrupt: The file cannot be read.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return History([], True)
    if size <= whole_bytes:
        return History(read_rows(path), True)
    with open_record(path) as file:
        return History(_counting(_sample_rows(path, file, size, max(rows, 2))), False)


def last_row(path: Path) -> dict[str, Any]:
    """The newest row; empty before the first. Reads only the end of the file.

    Raises:
        TooNew: A newer version wrote it.
        Corrupt: It cannot be read.
    """
    try:
        with open_record(path) as file:
            return _last(path, file) or {}
    except FileNotFoundError:
        return {}


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The newest rows that count, ascending by step: at most `count`, or as many as the last 128 KiB hold.

    Raises:
        TooNew: A newer version wrote the file.
        Corrupt: It cannot be read.
    """
    try:
        with open_record(path) as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _LONGEST_ROW))
            lines = file.read(size - start).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return _counting(_rows(path, lines[1:] if start else lines))[-count:]


def _rows(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.endswith(b"\n") and (row := _row(path, line)) is not None:
            yield row


def _row(path: Path, line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if it is torn or a header.

    Raises:
        TooNew: It is the header of a newer version.
    """
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step = row.get("step")
    if step is None:
        check_version(path, row, METRICS_VERSION)
        return None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def _counting(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those that a later attempt repeated."""
    counting: list[dict[str, Any]] = []
    for row in rows:
        while counting and counting[-1]["step"] >= row["step"]:
            counting.pop()
        counting.append(row)
    return counting


def _sample_rows(path: Path, file: BinaryIO, size: int, count: int) -> Iterator[dict[str, Any]]:
    last_at = -1
    for number in range(count - 1):
        at = number * size // (count - 1)
        row, starts = _row_after(path, file.fileno(), at, size)
        if row is not None and starts > last_at:
            last_at = starts
            yield row
    newest = _last(path, file)
    if newest is not None:
        yield newest


def _row_after(path: Path, descriptor: int, at: int, size: int) -> tuple[dict[str, Any] | None, int]:
    """The first row that begins at or after byte `at`, and its offset."""
    start, length = max(at - 1, 0), _PIECE
    while True:
        piece = os.pread(descriptor, length, start)
        begin = 0 if at == 0 else piece.find(b"\n") + 1
        begins = begin > 0 or at == 0
        while begins and (end := piece.find(b"\n", begin)) != -1:
            row = _row(path, piece[begin : end + 1])
            if row is not None:
                return row, start + begin
            begin = end + 1
        if start + length >= size or length > _LONGEST_ROW:
            return None, -1
        length *= 8


def _last(path: Path, file: BinaryIO) -> dict[str, Any] | None:
    lines = lines_backwards(file, 4 * _PIECE, 32 * _LONGEST_ROW)
    next(lines, None)  # empty or torn
    return next((row for line in lines if (row := _row(path, line)) is not None), None)
