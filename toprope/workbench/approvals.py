"""Approvals of starts that the owner wants a person to confirm.

A refused start leaves a request, named by the hash of its preview. `toprope approve HASH` turns it into an approval,
and nothing else does: what an agent types confirms nothing. An approval is used by one start and expires.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from toprope.atomic import write_json
from toprope.errors import Corrupt, InvalidValue, NotFound, shown
from toprope.records.run.folder import read_json
from toprope.settings.owner import Home

EXPIRES_S = 24 * 3600.0
"""Seconds after which a request or an approval is void."""
_HASH = re.compile(r"[0-9a-f]{8,64}")
_MOST_REQUESTS = 100


@dataclass(frozen=True)
class Request:
    """A start that waits for a person."""

    hash: str
    text: str
    """The start in words, with its cost."""
    at: float
    """Seconds since the epoch."""
    approved: bool = False


class Approvals:
    """The requests and approvals of one home."""

    def __init__(self, home: Home) -> None:
        self._folder = home.path / "approvals"

    def ask(self, hash: str, text: str) -> None:
        """Note a start that waits for a person."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in self._read()[_MOST_REQUESTS:]:
            self._path(old.hash).unlink(missing_ok=True)
        if not self.has(hash):
            write_json(self._path(hash), {"text": text, "at": time.time(), "approved": False})

    def pending(self) -> list[Request]:
        """The requests and unused approvals that have not expired, newest first."""
        return self._read()

    def approve(self, hash: str) -> Request:
        """Approve a start, once. Only the command line calls this, for the person who types it.

        Raises:
            InvalidValue: Not a hash.
            NotFound: No start with this hash waits.
        """
        if not _HASH.fullmatch(hash):
            raise InvalidValue(f"{shown(hash)} is not the hash of a start.", hint="toprope approve lists them.")
        found = next((one for one in self._read() if one.hash == hash), None)
        if found is None:
            raise NotFound(
                f"No start with the hash {hash} waits for approval; requests expire after {EXPIRES_S / 3600:.0f} h.",
                hint="toprope approve lists them.",
            )
        write_json(self._path(hash), {"text": found.text, "at": time.time(), "approved": True})
        return found

    def has(self, hash: str) -> bool:
        """True if an approval with this hash is unused and valid."""
        return any(one.hash == hash and one.approved for one in self._read())

    def use(self, hash: str) -> bool:
        """Use up the approval with this hash; False if there is none."""
        if not self.has(hash):
            return False
        try:
            self._path(hash).unlink()
        except FileNotFoundError:  # another start was faster
            return False
        return True

    def _path(self, hash: str) -> Path:
        return self._folder / f"{hash}.json"

    def _read(self) -> list[Request]:
        found = []
        for path in self._folder.glob("*.json"):
            try:
                entry = read_json(path)
                one = Request(path.stem, str(entry["text"]), float(entry["at"]), entry["approved"] is True)
            except (NotFound, Corrupt, KeyError, TypeError, ValueError):
                continue
            if not -60.0 <= time.time() - one.at < EXPIRES_S:
                path.unlink(missing_ok=True)
            elif _HASH.fullmatch(one.hash):
                found.append(one)
        return sorted(found, key=lambda one: one.at, reverse=True)
