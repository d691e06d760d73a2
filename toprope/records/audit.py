"""The audit trail of a home: one line of JSON for each tool call and command, chained by hashes.

    audit.jsonl            the newest lines; audit.1.jsonl to audit.7.jsonl the older ones, each at most 4 MB
    audit.head             number and hash of the newest line, number of the oldest line kept

Each line holds the hash of the one before it, so a changed, removed or inserted line breaks the chain, and the head
shows lines cut from the end. A person with the owner's rights can write a new chain; keep copies elsewhere if that
matters. Lines are written without waiting for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.errors import visible
from toprope.records.run.folder import lines_backwards
from toprope.text_format import hide, hide_keys

MOST_BYTES = 4 << 20
"""Size at which a file is put aside."""
PARTS = 7
_LONGEST_LINE = 8192
_VALUE = 200
"""Longest text of an argument."""
_SECRET_WORDS = ("key", "token", "secret", "password", "authorization")
_START = "0" * 64


@dataclass(frozen=True)
class Trail:
    """The findings of `verify`."""

    lines: int
    first: int
    """Number of the oldest line kept; earlier ones were rotated away."""
    problems: tuple[str, ...]


def shorten(arguments: Any, secrets: Iterable[str] = (), depth: int = 4) -> Any:
    """Return arguments for the trail: texts cut to 200 characters, lists to 20, secrets masked.

    Args:
        arguments: JSON values.
        secrets: Values to mask wherever they occur.
        depth: Levels to keep.
    """
    secrets = tuple(secrets)
    if isinstance(arguments, Mapping):
        if depth <= 0:
            return f"[{len(arguments)} names]"
        shortened = {}
        for name, value in list(arguments.items())[:20]:
            hidden = isinstance(value, str) and len(value) >= 8 and any(w in str(name).lower() for w in _SECRET_WORDS)
            shortened[_cut(str(name), secrets)[:80]] = "[secret]" if hidden else shorten(value, secrets, depth - 1)
        return shortened
    if isinstance(arguments, list | tuple):
        if depth <= 0:
            return f"[{len(arguments)} values]"
        return [shorten(value, secrets, depth - 1) for value in arguments[:20]]
    if isinstance(arguments, int) and abs(arguments) > 1 << 63:
        return "[large number]"
    return _cut(arguments, secrets) if isinstance(arguments, str) else arguments


def _cut(text: str, secrets: Iterable[str]) -> str:
    text = visible(hide_keys(hide(text, secrets)), _VALUE)
    return text.encode(errors="replace").decode()


class AuditTrail:
    """The trail of one home.

    Args:
        home: The home folder; made for the first line.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self.path = home / "audit.jsonl"
        self._head = home / "audit.head"

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line; `at`, `n`, `prev` and `hash` are added here.

        Raises:
            OSError: Nothing was written.
        """
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        head = os.open(self._head, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(head, fcntl.LOCK_EX)
            number, last_digest, oldest_number = _read_head(os.pread(head, 256, 0))
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                size = os.fstat(file).st_size
                tail = os.pread(file, _LONGEST_LINE, max(0, size - _LONGEST_LINE))
                last_line = _last_line(tail)
                if last_line is not None and last_line[0] > number:  # a crash came between line and head
                    number, last_digest = last_line
                if size > MOST_BYTES:
                    oldest_number = self._rotate(oldest_number)
                    _write_head(head, number, last_digest, oldest_number)  # the line below may fail
                    former, file = file, os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
                    os.close(former)
                    size, tail = 0, b""
                line, digest = _line(number + 1, last_digest, entry)
                lead = b"\n" if size and not tail.endswith(b"\n") else b""
                if os.write(file, lead + line) < len(lead + line):  # a disk that fills up takes a part
                    os.ftruncate(file, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(file)
            _write_head(head, number + 1, digest, oldest_number)
        finally:
            os.close(head)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The entries, oldest first; unreadable lines are left out."""
        for _, data, _ in self._read():
            if isinstance(data, dict):
                yield data

    def newest(self, most: int) -> list[dict[str, Any]]:
        """The newest entries, newest first, from the end of the newest file that has any."""
        entries: list[dict[str, Any]] = []
        for part in range(PARTS + 1):
            try:
                with self._part(part).open("rb") as file:
                    for raw in lines_backwards(file, most * _LONGEST_LINE, most * _LONGEST_LINE):
                        with suppress(ValueError):
                            data = json.loads(raw)
                            entries += [data] if isinstance(data, dict) else []
            except FileNotFoundError:
                continue
            if len(entries) >= most:
                break
        return entries[:most]

    def verify(self) -> Trail:
        """Check the chain from the oldest line kept to the head."""
        problems: list[str] = []
        number, last_digest, count, oldest = 0, "", 0, 0
        for place, data, raw in self._read():
            if not isinstance(data, dict) or not isinstance(data.get("n"), int):
                problems.append(f"{place} is not a line of the trail")
                continue
            count += 1
            if not last_digest:
                oldest = data["n"]
            elif data["n"] != number + 1:
                problems.append(f"lines {number + 1} to {data['n'] - 1} are missing before {place}")
            elif data.get("prev") != last_digest:
                problems.append(f"{place} does not follow line {number}")
            if _digest(raw) != data.get("hash"):
                problems.append(f"{place} (line {data['n']}) was changed")
            number, last_digest = data["n"], str(data.get("hash"))
        try:
            head_number, head_digest, head_oldest = _read_head(self._head.read_bytes())
        except OSError:
            head_number, head_digest, head_oldest = 0, _START, 0
            if count:
                problems.append(f"{self._head.name} is missing")
        if head_number > number:
            problems.append(f"lines {number + 1} to {head_number} are missing at the end")
        elif head_number == number and count and head_digest != last_digest:
            problems.append(f"line {number} is not the one that was written")
        if head_oldest and oldest > head_oldest:
            problems.append(f"lines {head_oldest} to {oldest - 1} are missing at the beginning")
        return Trail(count, oldest, tuple(problems))

    def _read(self) -> Iterator[tuple[str, Any, bytes]]:
        for part in range(PARTS, -1, -1):
            path = self._part(part)
            try:
                with path.open("rb") as file:
                    for place, raw in enumerate(file, 1):
                        try:
                            data = json.loads(raw)
                        except ValueError:
                            data = None
                        yield f"{path.name}:{place}", data, raw
            except FileNotFoundError:
                continue

    def _part(self, number: int) -> Path:
        return self.path if number == 0 else self._home / f"audit.{number}.jsonl"

    def _rotate(self, oldest_number: int) -> int:
        """Put the file aside; return the number of the oldest line kept."""
        for number in range(PARTS - 1, -1, -1):
            if self._part(number).exists():
                os.replace(self._part(number), self._part(number + 1))
        oldest = next((self._part(n) for n in range(PARTS, 0, -1) if self._part(n).exists()), None)
        if oldest is None:
            return oldest_number
        with oldest.open("rb") as file:
            try:
                return int(json.loads(file.readline())["n"])
            except (ValueError, KeyError, TypeError):
                return oldest_number


def _write_head(head: int, number: int, digest: str, oldest_number: int) -> None:
    os.pwrite(head, f"{number} {digest} {max(oldest_number, 1)}\n".ljust(120).encode(), 0)


def _line(number: int, previous_digest: str, entry: Mapping[str, Any]) -> tuple[bytes, str]:
    at = {"n": number, "at": round(time.time(), 3)}
    body = {**at, **entry, "prev": previous_digest}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str)
    if len(text.encode()) > _LONGEST_LINE - 200:
        body = {
            **at,
            **{name: entry[name] for name in ("by", "did", "outcome") if name in entry},
            "prev": previous_digest,
        }
        text = json.dumps(body | {"arguments": "[too long]"}, ensure_ascii=False, separators=(",", ":"), default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]},"hash":"{digest}"}}\n'.encode(), digest


def _digest(raw: bytes) -> str:
    body = raw.rstrip(b"\n").rpartition(b',"hash":"')[0] + b"}"
    return hashlib.sha256(body).hexdigest()


def _last_line(tail: bytes) -> tuple[int, str] | None:
    try:
        data = json.loads(tail.rstrip(b"\n").rpartition(b"\n")[2])
        return int(data["n"]), str(data["hash"])
    except (ValueError, KeyError, TypeError):
        return None


def _read_head(raw: bytes) -> tuple[int, str, int]:
    try:
        number, digest, oldest_number = raw.split()
        return int(number), digest.decode(), int(oldest_number)
    except ValueError:
        return 0, _START, 0
