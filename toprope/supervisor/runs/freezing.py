"""The owner's stop of everything: while the file `frozen` lies in a home, no run starts or resumes in it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from toprope.atomic import write_json
from toprope.errors import NotPossibleNow, visible
from toprope.text_format import moment

_NAME = "frozen"


def freeze(home: Path, reason: str = "") -> None:
    """Refuse starts and resumes in a home from now on.

    Raises:
        OSError: The file cannot be written.
    """
    write_json(home / _NAME, {"at": time.time(), "reason": reason})


def thaw(home: Path) -> bool:
    """Allow starts again; return False if they were not refused."""
    try:
        (home / _NAME).unlink()
    except FileNotFoundError:
        return False
    return True


def require_thawed(home: Path) -> None:
    """Refuse a start while the home is frozen.

    Raises:
        NotPossibleNow: It is frozen.
    """
    try:
        raw = (home / _NAME).read_bytes()
    except FileNotFoundError:
        return
    except OSError:
        raw = b""
    since, reason = "", ""
    try:
        told = json.loads(raw)
        since, reason = f" since {moment(told['at'])}", visible(str(told["reason"]), 300)
    except (ValueError, KeyError, TypeError):
        pass  # the file's presence decides
    raise NotPossibleNow(
        f"The owner froze this home{since}: nothing starts or resumes{f' ({reason})' if reason else ''}.",
        hint="Only the owner lifts that, with: toprope thaw",
    )
