"""The owner's stop of everything: while the file `frozen` lies in a home, no run starts or resumes in it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from toprope.atomic import write_json
from toprope.errors import NotPossibleNow, visible
from toprope.records.run.full_disk import NO_ROOM
from toprope.text_format import moment

_NAME = "frozen"


def freeze(home: Path, reason: str = "") -> None:
    """Refuse starts and resumes in a home from now on. On a full disk the file is empty, which needs no room.

    Raises:
        OSError: Not even an empty file can be created.
    """
    try:
        write_json(home / _NAME, {"at": time.time(), "reason": reason})
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        (home / _NAME).touch(mode=0o600)


def thaw(home: Path) -> bool:
    """Allow starts again; return False if they were not refused."""
    try:
        (home / _NAME).unlink()
    except FileNotFoundError:
        return False
    return True


def frozen_since(home: Path) -> tuple[float, str] | None:
    """Return since when a home is frozen, and the owner's reason; None if it is not. Both are 0 and empty if the file
    cannot be read: its presence decides."""
    try:
        raw = (home / _NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        raw = b""
    try:
        record = json.loads(raw)
        return float(record["at"]), visible(str(record["reason"]), 300)
    except (ValueError, KeyError, TypeError):
        return 0.0, ""


def require_thawed(home: Path) -> None:
    """Refuse a start while the home is frozen.

    Raises:
        NotPossibleNow: It is frozen.
    """
    frozen = frozen_since(home)
    if frozen is None:
        return
    at, reason = frozen
    since = f" since {moment(at)}" if at else ""
    raise NotPossibleNow(
        f"The owner froze this home{since}: nothing starts or resumes{f' ({reason})' if reason else ''}.",
        hint="Only the owner lifts that, with: toprope thaw",
    )
