"""Traces from outside: what an agent framework posts for a data set, kept as it comes until somebody builds a version.

Lines are checked all before one is kept: a post is taken in whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors import DiskFull, InvalidValue
from toprope.records.run.lines import NO_ROOM
from toprope.trajectories.datasets.store import DatasetStore, check_name
from toprope.trajectories.items import TrajectoryItem, item_from

__all__ = ["MOST_BYTES", "Inbox", "items_of_body"]

MOST_BYTES = 64 << 20
"""Of one post."""
_MOST_INBOX = 4 << 30
_FLOOR = 64 << 20

_encode = msgspec.json.Encoder(order="deterministic").encode


class Inbox:
    """The inbox of one data set.

    Args:
        datasets: The folder of data sets.
        name: The data set's.

    Raises:
        InvalidValue: The name is none.
    """

    def __init__(self, datasets: Path, name: str) -> None:
        check_name(name)
        self.name, self.path = name, DatasetStore(datasets).inbox(name)

    def take(self, lines: Iterable[bytes], where: str) -> int:
        """Takes JSON lines in; returns how many items they are.

        Raises:
            InvalidValue: A line is no item; nothing was taken.
            DiskFull: There is no room.
        """
        items = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                items.append(item_from(_decoded(line, f"{where}, line {number}"), f"{where}, line {number}"))
        return self.keep(items)

    def keep(self, items: Iterable[TrajectoryItem]) -> int:
        """Keeps items; returns how many."""
        packed = []
        for number, item in enumerate(items, 1):
            item.metadata = {"text": "messages", **item.metadata, "origin": item.metadata.get("origin", "outside")}
            try:
                packed.append(_encode(item) + b"\n")
            except (ValueError, RecursionError) as error:  # half a character, lists in lists in lists
                raise InvalidValue(f"Item {number} cannot be written: {error}.", hint="Nothing was taken.") from None
        if not packed:
            raise InvalidValue("There is no item in it.", hint="One JSON object a line.")
        data = b"".join(packed)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(self.path.parent).free < _FLOOR + len(data):
            raise DiskFull(f"There is no room left for {self.path}.", hint="Make room; nothing was taken.")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size + len(data) > _MOST_INBOX:
                raise InvalidValue(f"{self.path} is full.", hint=f"Build a version of {self.name}, and remove it.")
            try:
                done = 0
                while done < len(data):
                    done += os.write(descriptor, data[done:])
                os.fsync(descriptor)
            except OSError as error:
                os.ftruncate(descriptor, size)
                if error.errno in NO_ROOM:
                    raise DiskFull(f"There is no room left for {self.path}.", hint="Nothing was taken.") from None
                raise
        finally:
            os.close(descriptor)
        return len(packed)


def items_of_body(body: bytes) -> list[TrajectoryItem]:
    """The items of a posted body: one, a list, {"items": [...]}, or JSON lines.

    Raises:
        InvalidValue: It is none of these.
    """
    try:
        given: Any = json.loads(body)
    except RecursionError:
        raise InvalidValue("It is nested too deeply.", hint="Nothing was taken.") from None
    except ValueError:
        given = [_decoded(line, f"line {number}") for number, line in enumerate(body.splitlines(), 1) if line.strip()]
    if isinstance(given, dict) and "items" in given:
        given = given["items"]
    given = given if isinstance(given, list) else [given]
    return [item_from(one, f"item {number}") for number, one in enumerate(given, 1)]


def _decoded(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidValue(f"{where} is no JSON.", hint="One JSON object a line.") from None
