"""The last check of each environment on this machine, kept so that a page can show it without running anything."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.errors import Corrupt
from toprope.records.run.folder import find_record

_VERSION = 1


class KeptFinding(BaseModel):
    """One finding; its words are partly the environment's."""

    rule: str
    level: str
    what: str


class KeptCheck(BaseModel):
    """A check as it came out."""

    version: int = _VERSION
    environment: str
    at: float
    verdict: str
    full: bool
    findings: list[KeptFinding] = []


class KeptChecks:
    """The checks of one home.

    Args:
        home: The home folder.
    """

    def __init__(self, home: Path) -> None:
        self._home, self._folder = home, home / "checks"

    def keep(self, environment: str, verdict: str, findings: Sequence[KeptFinding], *, full: bool) -> None:
        """Replace the check of an environment; without a home or room on the disk nothing is kept."""
        kept = KeptCheck(environment=environment, at=time.time(), verdict=verdict, full=full, findings=list(findings))
        with suppress(OSError):
            if self._home.is_dir():
                self._folder.mkdir(mode=0o700, exist_ok=True)
                write_json(self._path(environment), kept.model_dump(mode="json"))

    def find(self, environment: str) -> KeptCheck | None:
        """The last check of an environment; None if it was never checked, or the file cannot be read."""
        try:
            return find_record(self._path(environment), _VERSION, KeptCheck)
        except Corrupt:
            return None

    def _path(self, environment: str) -> Path:
        return self._folder / f"{hashlib.sha256(environment.encode()).hexdigest()[:24]}.json"
