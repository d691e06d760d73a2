"""Follow metrics.jsonl as it grows: at most 400 buckets of mean, lowest and highest value for each column.

A bucket covers `width` steps, a power of two; when there are more than 400, neighbours are merged. A follower reads
from its last offset, and only the columns that a page draws. What `records.run.metrics` says of rows holds here: a row
counts unless a later line has the same or a lower step, and a torn last line counts when it is whole.

A million rows take about three seconds the first time, so `read` can stop after a while and continue at the next call.
Until all is read, a piece shows a sample of the whole run.
"""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors import Corrupt
from toprope.records.run.folder import REPAIR_HINT, check_version, open_record
from toprope.records.run.metrics import METRICS_VERSION, read_history

MOST_BUCKETS = 400
COLUMNS: Mapping[str, str] = {
    "reward": "reward",
    "reward_std": "reward_std",
    "success": "success",
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "mean_token_accuracy": "mean_token_accuracy",
    "parse_failures": "parse_failures",
    "clipped": "clip_ratio/region_mean",
    "truncated": "completions/clipped_ratio",
    "length": "completions/mean_length",
    "length_max": "completions/max_length",
    "all_right": "frac_reward_zero_std/all_right",
    "all_wrong": "frac_reward_zero_std/all_wrong",
    "errors": "errors/share",
    "moved": "policy/moved",
    "approx_kl": "policy/approx_kl",
    "logp_difference": "sampling/sampling_logp_difference/mean",
    "staleness": "staleness/mean",
    "time_step": "time/step",
    "time_wait": "time/wait",
    "time_prepare": "time/prepare",
    "time_passes": "time/passes",
    "time_rest": "time/rest",
    "rollouts_per_second": "rollouts_per_second",
    "waiting": "groups/waiting",
    "value_explained": "value/explained_variance",
}
"""Columns by our name -> the name in metrics.jsonl."""
_PART = re.compile(r"rewards/(.+)/mean")
_MOST_PARTS = 8
_PIECE = 4 << 20


@dataclass(frozen=True)
class Bands:
    """One column: means, lowest and highest values by bucket; None where a bucket has no value."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


@dataclass(frozen=True)
class Piece:
    """The buckets from the index `start` on.

    Attributes:
        generation: A reader that has buckets of another generation replaces all of them.
        start: A reader keeps its buckets before this index and replaces the rest.
        width: Steps that a bucket covers.
        rows: Rows that count so far.
        complete: The file was read to its end. Otherwise the buckets hold a sample of the rows of the whole run.
        x: The last step in each bucket that has a row.
        columns: By our name, without columns that have no value; parts of the reward as `part:0`, `part:1`, ...
        parts: Names of these parts, as the environment chose them.
    """

    generation: int
    start: int
    width: int
    rows: int
    last_step: int
    complete: bool
    x: list[int]
    columns: dict[str, Bands]
    parts: tuple[str, ...]


@dataclass(slots=True)
class _Bucket:
    place: int
    """Steps place * width + 1 to (place + 1) * width."""
    at: int
    """Offset in the file from which its rows are found."""
    last: int = 0
    rows: int = 0
    counts: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    lows: list[float | None] = field(default_factory=list)
    highs: list[float | None] = field(default_factory=list)

    def add(self, rows: Sequence[Any]) -> None:
        """Add rows of ascending steps; `rows` is not empty."""
        columns = zip(*map(msgspec.structs.astuple, rows), strict=True)
        steps = next(columns)
        next(columns)  # the version
        self.last, self.rows = steps[-1], self.rows + len(rows)
        if not self.counts:
            many = len(rows[0].__struct_fields__) - 2
            self.counts, self.sums, self.lows, self.highs = [0] * many, [0.0] * many, [None] * many, [None] * many
        for number, column in enumerate(columns):
            values = [value for value in column if value is not None] if None in column else column
            if not values:
                continue
            self.counts[number] += len(values)
            self.sums[number] += sum(values)
            low, high = min(values), max(values)
            known_low, known_high = self.lows[number], self.highs[number]
            self.lows[number] = low if known_low is None else min(low, known_low)
            self.highs[number] = high if known_high is None else max(high, known_high)

    def join(self, other: _Bucket) -> None:
        """Add a later bucket's rows."""
        self.last, self.rows = other.last, self.rows + other.rows
        for number, count in enumerate(other.counts):
            self.counts[number] += count
            self.sums[number] += other.sums[number]
            lows = [bound for bound in (self.lows[number], other.lows[number]) if bound is not None]
            highs = [bound for bound in (self.highs[number], other.highs[number]) if bound is not None]
            self.lows[number], self.highs[number] = min(lows, default=None), max(highs, default=None)

    def copy(self) -> _Bucket:
        """A bucket of its own with the same values."""
        return _Bucket(
            self.place, self.at, self.last, self.rows, self.counts[:], self.sums[:], self.lows[:], self.highs[:]
        )


class SeriesFollower:
    """The series of one run. Safe to use from several threads.

    Args:
        path: metrics.jsonl, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._generation = 0
        self._forget()

    def _forget(self) -> None:
        self._generation += 1
        self._inode, self._offset, self._complete = 0, 0, True
        self._width, self._buckets = 1, list[_Bucket]()
        self._names: list[str] = []
        self._parts: tuple[str, ...] = ()
        self._kind: Any = None
        self._decoder: Any = None
        self._sketch: SeriesFollower | None = None
        self._unreadable, self._odd_end = 0, False

    @property
    def unreadable(self) -> int:
        """Damaged lines so far. One of which a crash left only the beginning does not count."""
        return self._unreadable + self._odd_end

    def read(self, seconds: float | None = None) -> bool:
        """Read what was appended, for about so many seconds at most; return whether anything changed.

        Raises:
            TooNew: A newer version wrote the file.
            Corrupt: It cannot be read.
        """
        with self._lock:
            try:
                with open_record(self._path) as file:
                    return self._read(file, None if seconds is None else time.monotonic() + seconds)
            except FileNotFoundError:
                had = self._offset > 0
                if had:
                    self._forget()
                return had
            except OSError as error:
                raise Corrupt(f"{self._path} cannot be read: {error.strerror or error}.", hint=REPAIR_HINT) from None

    def piece(
        self, generation: int = 0, seen: int = 0, *, most: int = MOST_BUCKETS, until: int | None = None
    ) -> Piece | None:
        """The buckets that changed since a reader last asked; None if none did.

        Args:
            generation: Of the reader's last piece; 0 without one.
            seen: `rows` of the reader's last piece.
            most: Most buckets; neighbours are merged until they fit.
            until: Only buckets of rows up to this step; None: all.
        """
        with self._lock:
            follower = self._sketch or self
            buckets, width = follower._buckets, follower._width
            if until is not None:
                buckets = [bucket for bucket in buckets if bucket.last <= until]
            while len(buckets) > most:
                buckets, width = _merge([bucket.copy() for bucket in buckets]), width * 2
            # The reader's own width is part of the number, because it may have asked for fewer buckets.
            present_generation = self._generation * 64 + width.bit_length()
            rows = sum(bucket.rows for bucket in buckets)
            if generation == present_generation and seen == rows and self._complete:
                return None
            start = 0
            if generation == present_generation:
                known_rows = 0
                while start < len(buckets) and known_rows + buckets[start].rows <= seen:
                    known_rows += buckets[start].rows
                    start += 1
            changed = buckets[start:]
            used = [number for number, _ in enumerate(self._names) if any(bucket.counts[number] for bucket in buckets)]
            return Piece(
                generation=present_generation,
                start=start,
                width=width,
                rows=rows,
                last_step=buckets[-1].last if buckets else 0,
                complete=self._complete,
                x=[bucket.last for bucket in changed],
                columns={self._names[number]: _bands(changed, number) for number in used},
                parts=self._parts,
            )

    def _read(self, file: Any, deadline: float | None) -> bool:
        file_stat = os.fstat(file.fileno())
        changed = False
        if self._offset and (file_stat.st_ino != self._inode or file_stat.st_size < self._offset):
            self._forget()
            changed = True
        self._inode = file_stat.st_ino
        while True:
            file.seek(self._offset)
            data = file.read(_PIECE)
            end = data.rfind(b"\n") + 1
            if end:
                self._take(file, data[:end], self._offset)
                self._offset += end
                changed = True
            elif len(data) == _PIECE:  # no row is as long; look for the next line
                self._offset += _PIECE
            self._complete, self._odd_end = len(data) < _PIECE, data[end : end + 1] not in (b"", b"{")
            if self._complete:
                if self._sketch is not None:
                    self._sketch, self._generation = None, self._generation + 1
                return changed
            if deadline is not None and time.monotonic() > deadline:
                if self._sketch is None and self._kind is not None:
                    self._sketch = self._sample()
                return changed

    def _sample(self) -> SeriesFollower:
        """Return a follower that knows some rows of the whole run."""
        follower = SeriesFollower(self._path)
        rows = []
        for row in read_history(self._path).rows:
            with suppress(msgspec.ValidationError):
                rows.append(msgspec.convert(row, self._kind))
        follower._add(rows, [row.step for row in rows], 0)
        self._generation += 1
        return follower

    def _take(self, file: Any, data: bytes, at: int) -> None:
        """Take in whole lines that begin at the offset `at`."""
        if self._decoder is None and not self._choose_columns(data):
            return
        try:
            rows = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            rows = None
        if rows is not None:
            steps = [row.step for row in rows]
            if None in steps:
                for row in rows:
                    self._check(row)
                rows = [row for row in rows if row.step is not None]
                steps = [row.step for row in rows]
            last_step = self._buckets[-1].last if self._buckets else 0
            # Sorting a sorted list is faster than comparing neighbours.
            if not steps or (steps[0] > last_step and len(set(steps)) == len(steps) and sorted(steps) == steps):
                self._add(rows, steps, at)
                return
        self._unreadable += sum(map(self._is_damaged, data.splitlines()))
        for start, row in self._rows_of(data, at):  # a torn line, or steps that were written again
            if self._buckets and row.step <= self._buckets[-1].last:
                self._rewind(file, row.step, start)
            if row.step > 0:
                self._add([row], [row.step], start)

    def _rows_of(self, data: bytes, at: int) -> Iterator[tuple[int, Any]]:
        for line in data.splitlines(keepends=True):
            try:
                row = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                row = None
            if row is not None and row.step is not None:
                yield at, row
            elif row is not None:
                self._check(row)
            at += len(line)

    def _is_damaged(self, line: bytes) -> bool:
        try:
            self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return not _is_blank_or_torn(line)
        return False

    def _check(self, row: Any) -> None:
        if row.step is None:
            check_version(self._path, {"version": row.version}, METRICS_VERSION)

    def _choose_columns(self, data: bytes) -> bool:
        """Choose the columns by the first row, whose names of parts are the environment's; False without a row."""
        damaged = 0
        for line in data.splitlines():
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                damaged += not _is_blank_or_torn(line)
                continue
            if isinstance(row, dict) and row.get("step") is None:
                check_version(self._path, row, METRICS_VERSION)
            elif isinstance(row, dict):
                part_matches = [match for name in row if (match := _PART.fullmatch(name))][:_MOST_PARTS]
                self._parts = tuple(match[1] for match in part_matches)
                sources = [*COLUMNS.values(), *(match[0] for match in part_matches)]
                self._names = [*COLUMNS, *(f"part:{number}" for number in range(len(part_matches)))]
                fields = [(f"c{number}", float | None, None) for number in range(len(sources))]
                self._kind = msgspec.defstruct(
                    "Row",
                    [("step", int | None, None), ("version", int | None, None), *fields],
                    rename={f"c{number}": source for number, source in enumerate(sources)},
                    gc=False,
                )
                self._decoder = msgspec.json.Decoder(self._kind)
                return True
        self._unreadable += damaged
        return False

    def _add(self, rows: Sequence[Any], steps: Sequence[int], at: int) -> None:
        """Add rows of ascending steps, all later than those in the buckets."""
        start = bisect_left(steps, 1)
        while start < len(rows):
            place = (steps[start] - 1) // self._width
            end = bisect_left(steps, (place + 1) * self._width + 1, start)
            if not self._buckets or self._buckets[-1].place != place:
                self._buckets.append(_Bucket(place, at))
            self._buckets[-1].add(rows[start:end])
            start = end
            while len(self._buckets) > MOST_BUCKETS:
                self._buckets, self._width = _merge(self._buckets), self._width * 2

    def _rewind(self, file: Any, step: int, upto: int) -> None:
        """Drop the rows from `step` on, because the line at the offset `upto` begins there again."""
        self._generation += 1
        place = max(step - 1, 0) // self._width
        while self._buckets and self._buckets[-1].place > place:
            self._buckets.pop()
        if not self._buckets or self._buckets[-1].place != place:
            return
        at = self._buckets.pop().at
        file.seek(at)
        rows: list[Any] = []
        bytes_left = upto - at
        for line in file:
            bytes_left -= len(line)
            if bytes_left < 0:
                break
            for _, row in self._rows_of(line, 0):
                while rows and rows[-1].step >= row.step:
                    rows.pop()
                if row.step < step and max(row.step - 1, 0) // self._width == place:
                    rows.append(row)
        self._add(rows, [row.step for row in rows], at)


class Followers:
    """The followers of many runs, so that all readers share one for each; those unused for longest are dropped.

    Args:
        most: Most followers to keep.
    """

    def __init__(self, most: int = 64) -> None:
        self._most, self._lock = most, threading.Lock()
        self._followers: OrderedDict[Path, SeriesFollower] = OrderedDict()

    def of(self, path: Path) -> SeriesFollower:
        """The follower of a metrics.jsonl."""
        with self._lock:
            follower = self._followers.setdefault(path, SeriesFollower(path))
            self._followers.move_to_end(path)
            if len(self._followers) > self._most:
                self._followers.popitem(last=False)
            return follower


def _is_blank_or_torn(line: bytes) -> bool:
    text = line.strip()
    return not text or (text.startswith(b"{") and not text.endswith(b"}"))


def _merge(buckets: Sequence[_Bucket]) -> list[_Bucket]:
    """Return the buckets at twice the width; the given ones are used up."""
    merged: list[_Bucket] = []
    for bucket in buckets:
        bucket.place //= 2
        if merged and merged[-1].place == bucket.place:
            merged[-1].join(bucket)
        else:
            merged.append(bucket)
    return merged


def _bands(buckets: Sequence[_Bucket], number: int) -> Bands:
    means = [bucket.sums[number] / bucket.counts[number] if bucket.counts[number] else None for bucket in buckets]
    return Bands(
        [_short(value) for value in means],
        [_short(bucket.lows[number]) for bucket in buckets],
        [_short(bucket.highs[number]) for bucket in buckets],
    )


def _short(value: float | None) -> float | None:
    """Five significant digits."""
    return None if value is None else float(f"{value:.5g}")
