"""Orders from front ends to a keeper: files in the run's folder, renamed into place, removed after reading.

A file reaches a keeper on another machine, outlives the front end that wrote it, and needs no open connection.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.status import Status


class StopOrder(msgspec.Struct, tag="stop", tag_field="order"):
    """Stops the run, with `grace_s` seconds for a last checkpoint."""

    grace_s: float | None = None
    reason: str = "stopped on request"
    lost: bool = False
    """Nobody wants the run to stop, but its place is taken away: it ends as lost and may resume elsewhere."""


_STOP, END_ORDER = "stop-", "end-"


def write_stop_order(folder: RunFolder, grace_s: float | None) -> None:
    """Order the run's keeper to stop. On a full disk the order is an empty file, which needs no room.

    Raises:
        OSError: Not even an empty file can be created.
    """
    path = folder.orders / f"{_STOP}{uuid.uuid4().hex[:8]}.json"
    try:
        write_json(path, {"order": "stop", "grace_s": grace_s})
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def write_end_order(folder: RunFolder, attempt: int, reason: str) -> None:
    """Order the keeper of an attempt to end, because its engine has given up its job. The run ends as lost. Does
    nothing if the run has another attempt by now."""
    with suppress(OSError, Corrupt, NotFound):  # the next look repeats it
        if Status.read(folder).attempt == attempt:
            write_json(folder.orders / f"{END_ORDER}{attempt}.json", {"order": "stop", "reason": reason, "lost": True})


@dataclass
class Orders:
    """The orders that were found."""

    stops: list[StopOrder] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Messages about files that are not valid orders."""
    folder_gone: bool = False
    """The run folder was deleted."""


def take_orders(folder: RunFolder, attempt: int) -> Orders:
    """Read and remove the orders of a run, sorted by file name. An order to end another attempt is only removed."""
    orders = Orders()
    try:
        _take(folder, attempt, orders)
    except OSError as error:  # a shared file system has a moment of trouble; the next look finds what is left
        orders.complaints.append(f"orders could not be read, and are read again: {error}")
    return orders


def _take(folder: RunFolder, attempt: int, orders: Orders) -> None:
    try:
        names = sorted(os.listdir(folder.orders))
    except FileNotFoundError:
        if folder.path.is_dir():
            folder.orders.mkdir(mode=0o700, exist_ok=True)
        else:
            orders.folder_gone = True
        return
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        path = folder.orders / name
        if name.startswith(END_ORDER) and name != f"{END_ORDER}{attempt}.json":
            path.unlink(missing_ok=True)
            continue
        try:
            orders.stops.append(msgspec.convert(read_json(path), StopOrder))
        except NotFound:
            continue
        except (Corrupt, msgspec.ValidationError) as error:
            if name.startswith(_STOP) and path.exists() and not path.stat().st_size:
                orders.stops.append(StopOrder())  # written on a full disk
                path.unlink(missing_ok=True)
                continue
            orders.complaints.append(f"an order is not valid: {name}: {error}")
        path.unlink(missing_ok=True)
