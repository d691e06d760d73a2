"""The environments that a worker has opened here; lists call only those ready.

Files tell what an environment is and not whether it loads. The shipped environments and those of reasoning-gym are
opened by this project's tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.errors import TopropeError
from toprope.records.run.folder import read_json
from toprope.records.run.specification import EnvironmentSource
from toprope.workbench.entries import Entry

FINE = ("ready", "not tried")
"""States that need no remedy."""
_VERSION = 1
_MOST = 5000
_TESTED = ("shipped", "reasoning_gym")
_FILE = re.compile(r"/[^\":@]+\.py\b")
"""A file that an adapter's target names."""


class Opened:
    """The record of a home.

    Args:
        home: The home's folder. Its file opened.json is a cache: an unreadable one counts as empty.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / "opened.json"
        self._here: dict[str, float] = {}
        """Opened by this process."""

    def state(self, entry: Entry, known: dict[str, float] | None = None) -> str:
        """Return an entry's state: `ready` only if it was opened, else `not tried`; other states as they are.

        One that keeps what it loads needs no network any more once it was opened.
        """
        if not (entry.status == "ready" or entry.keeps) or entry.source in _TESTED:
            return entry.status
        if _key(entry) in (self.read() if known is None else known):
            return "ready"
        return "not tried" if entry.status == "ready" else entry.status

    def read(self) -> dict[str, float]:
        """Return the times of opening by environment."""
        try:
            opened: Any = read_json(self._path, _VERSION).get("opened")
        except (TopropeError, OSError):
            opened = None
        return {**(opened if isinstance(opened, dict) else {}), **self._here}

    def add(self, entry: Entry) -> None:
        """Record that a worker has opened an environment."""
        self._here[_key(entry)] = time.time()
        self._write(self.read())

    def forget(self, entry: Entry) -> None:
        """Record that an environment could not be opened."""
        self._here.pop(_key(entry), None)
        opened = self.read()
        if opened.pop(_key(entry), None) is not None:
            self._write(opened)

    def _write(self, opened: dict[str, float]) -> None:
        newest = dict(sorted(opened.items(), key=lambda pair: -float(pair[1]))[:_MOST])
        try:
            if self._path.parent.is_dir():
                write_json(self._path, {"version": _VERSION, "opened": newest})
        except OSError:  # It is known until the server ends.
            pass


def changed(source: EnvironmentSource) -> list[int]:
    """Return when each of an environment's files was changed, in ns; empty if it has none."""
    times = []
    for file in [source.file] if source.file else _FILE.findall(source.target or ""):
        try:
            times.append(os.stat(file).st_mtime_ns)
        except OSError:
            times.append(0)
    return times


def _key(entry: Entry) -> str:
    source = entry.environment.model_dump(mode="json", exclude={"rewards", "split_rule"})
    text = json.dumps([source, changed(entry.environment)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
