"""What front ends ask of a keeper: files in the run's folder, renamed into place, removed when they have been read.

A file can be seen by a keeper on another machine, outlives the front end that wrote it, and needs nobody to listen.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field

import msgspec

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.full_disk import NO_ROOM

__all__ = ["Orders", "StopOrder", "write_stop_order", "take_orders"]


class StopOrder(msgspec.Struct, tag="stop", tag_field="order"):
    """End the run, with so many seconds for a last checkpoint."""

    grace_s: float | None = None
    reason: str = "stopped on request"


_STOP = "stop-"


def write_stop_order(folder: RunFolder, grace_s: float | None) -> None:
    """Leaves a stop for the run's keeper. On a disk without room it is an empty file, which needs none.

    Raises:
        OSError: Not even that could be made.
    """
    path = folder.orders / f"{_STOP}{uuid.uuid4().hex[:8]}.json"
    try:
        write_json(path, {"order": "stop", "grace_s": grace_s})
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


@dataclass
class Orders:
    """What lay there. `complaints` name files that were not understood; `folder_gone`: somebody deleted the run."""

    stops: list[StopOrder] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    folder_gone: bool = False


def take_orders(folder: RunFolder) -> Orders:
    """Reads and removes the orders of a run, the oldest name first."""
    found = Orders()
    try:
        names = sorted(os.listdir(folder.orders))
    except FileNotFoundError:
        if folder.path.is_dir():
            folder.orders.mkdir(mode=0o700, exist_ok=True)
        else:
            found.folder_gone = True
        return found
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        path = folder.orders / name
        try:
            found.stops.append(msgspec.convert(read_json(path), StopOrder))
        except NotFound:
            continue
        except (Corrupt, msgspec.ValidationError) as error:
            if name.startswith(_STOP) and path.exists() and not path.stat().st_size:
                found.stops.append(StopOrder())  # from a front end that had no room for more
                path.unlink(missing_ok=True)
                continue
            found.complaints.append(f"an order was not understood: {name}: {error}")
        path.unlink(missing_ok=True)
    return found
