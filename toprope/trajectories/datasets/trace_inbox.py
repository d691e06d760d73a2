"""The inbox of a data set: traces that an agent framework posts, kept until a version is built.

A post is accepted as a whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from toprope.atomic import append
from toprope.errors import DiskFull, InvalidValue
from toprope.records.run.full_disk import NO_ROOM
from toprope.trajectories.datasets.store import DatasetStore, check_name
from toprope.trajectories.items import TrajectoryItem, item_from, items_of

MOST_BYTES = 64 << 20
"""Largest post in bytes."""
_OURS = ("origin", "run", "split")
"""Metadata that says where an item comes from; only Toprope and the owner may set it."""
_MOST_INBOX = 4 << 30
_FLOOR = 64 << 20

_encode = msgspec.json.Encoder(order="deterministic").encode


class Inbox:
    """The inbox of one data set.

    Args:
        datasets: Folder of all data sets.
        name: Name of the data set.

    Raises:
        InvalidValue: Not a valid data set name.
    """

    def __init__(self, datasets: Path, name: str) -> None:
        check_name(name)
        self.name, self.path = name, DatasetStore(datasets).inbox(name)

    def take(self, lines: Iterable[bytes], where: str) -> int:
        """Add the items of a file and return their number.

        Args:
            lines: JSON lines, which are parsed one by one, or those of a body as `items_of_body` takes it.
            where: Name of the file in error messages.

        Raises:
            InvalidValue: A line is not an item; nothing was added.
            DiskFull: The disk is full.
        """
        lines, begun = iter(lines), list[bytes]()
        for line in lines:
            begun.append(line)
            if line.strip():
                break
        if not begun or _is_item(begun[-1]):
            return self.keep(items_of(itertools.chain(begun, lines), where), trusted=True)
        return self.keep(items_of_body(b"".join([*begun, *lines]), where), trusted=True)

    def keep(self, items: Iterable[TrajectoryItem], *, trusted: bool = False) -> int:
        """Add items and return their number.

        Args:
            trusted: The owner gives them. What others say about an item's origin, run and split is kept as a claim.
        """
        packed = []
        for number, item in enumerate(items, 1):
            metadata = dict(item.metadata)
            if not trusted and (claims := {name: metadata.pop(name) for name in _OURS if name in metadata}):
                metadata["claimed"] = claims
            item.metadata = {"text": "messages", **metadata, "origin": metadata.get("origin", "outside")}
            try:
                packed.append(_encode(item) + b"\n")
            except (ValueError, RecursionError) as error:  # lone surrogates, or nesting that is too deep
                raise InvalidValue(f"Item {number} cannot be written: {error}.", hint="Nothing was taken.") from None
        if not packed:
            raise InvalidValue("The post contains no item.", hint="Write one JSON object per line.")
        data = b"".join(packed)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(self.path.parent).free < _FLOOR + len(data):
            raise DiskFull(f"There is no room left for {self.path}.", hint="Make room; nothing was taken.")
        size = 0
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
        if size + len(data) > _MOST_INBOX:
            raise InvalidValue(f"{self.path} is full.", hint=f"Build a version of {self.name}, and remove it.")
        try:
            append(self.path, data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(f"There is no room left for {self.path}.", hint="Nothing was taken.") from None
            raise
        return len(packed)


def _is_item(line: bytes) -> bool:
    """True if the line is a JSON object by itself, and not a list of items."""
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(data, dict) and "items" not in data


def items_of_body(body: bytes, source: str = "The post") -> list[TrajectoryItem]:
    """Parse a body: one item, a list, {"items": [...]}, or JSON lines.

    Args:
        source: Name of the body in error messages.

    Raises:
        InvalidValue: The body has none of these forms.
    """
    try:
        data: Any = json.loads(body)
    except RecursionError:
        raise InvalidValue(f"{source} is nested too deeply.", hint="Nothing was taken.") from None
    except ValueError:
        return list(items_of(body.splitlines(), source))
    if isinstance(data, dict) and "items" in data:
        data = data["items"]
    data = data if isinstance(data, list) else [data]
    return [item_from(entry, f"item {number}") for number, entry in enumerate(data, 1)]
