"""Approvals of starts that the owner wants a person to confirm.

A refused start leaves a request, named by the hash of its preview. A person turns it into an approval, with `toprope
approve HASH` or in the dashboard, or refuses it there; what an agent types confirms nothing. An approval is used by one
start and expires.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.errors import Corrupt, InvalidValue, NotFound, NotPossibleNow, shown
from toprope.records.run.folder import read_json
from toprope.settings.owner import Home

EXPIRES_S = 24 * 3600.0
"""Seconds after which a request or an approval is void."""
_HASH = re.compile(r"[0-9a-f]{8,64}")
_MOST_REQUESTS, _MOST_OF_A_DRAFT = 100, 10
_LISTS = "toprope approve lists them."


@dataclass(frozen=True)
class Request:
    """A start that waits for a person."""

    hash: str
    text: str
    """The start in words, with its cost."""
    at: float
    """Time of the question, seconds since the epoch."""
    approved: bool = False
    refused: bool = False
    """A person decided against it; the same start is refused until the request expires or is approved after all."""
    details: dict[str, Any] = field(default_factory=dict)
    """The start and its costs, for a page: see `toprope.workbench.launch.preview.details_of`."""
    decided_at: float | None = None
    """Time of the decision, if a person has decided."""

    @property
    def since(self) -> float:
        """Time since which it waits or counts, and from which it expires."""
        return self.at if self.decided_at is None else self.decided_at

    @property
    def expires_at(self) -> float:
        """Time at which it is void."""
        return self.since + EXPIRES_S


class Approvals:
    """The requests and approvals of one home."""

    def __init__(self, home: Home) -> None:
        self._folder = home.path / "approvals"

    def ask(self, hash: str, text: str, details: Mapping[str, Any] | None = None) -> bool:
        """Note a start that waits for a person; return whether nobody was asked about it yet.

        A draft's newest requests replace its oldest, never another draft's, one without a draft, nor what a person
        decided.

        Raises:
            NotPossibleNow: Too many other starts wait.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        request, draft = self._find(hash), (details or {}).get("draft_id")
        undecided = [waiting for waiting in self._requests() if not (waiting.approved or waiting.refused)]
        of_draft = [waiting for waiting in undecided if draft and waiting.details.get("draft_id") == draft]
        if request is None:
            for old in of_draft[_MOST_OF_A_DRAFT - 1 :]:
                self.forget(old.hash)
            if len(of_draft) < _MOST_OF_A_DRAFT and len(undecided) >= _MOST_REQUESTS:
                raise NotPossibleNow(
                    f"Nothing was started: the owner wants this confirmed ({hash}), and {len(undecided)} starts wait "
                    "for that already.",
                    hint=f"Ask the owner to decide about them first; {_LISTS}",
                )
        if request is None or not (request.approved or request.refused):
            write_json(
                self._path(hash), {"text": text, "at": time.time(), "approved": False, "details": dict(details or {})}
            )
        return request is None

    def pending(self) -> list[Request]:
        """The requests and unused approvals that have not expired, newest first, without those that were refused."""
        return [request for request in self._requests() if not request.refused]

    def approve(self, hash: str) -> Request:
        """Approve a start, once. Only the command line and the dashboard call this, for the person there.

        Raises:
            InvalidValue: Not a hash.
            NotFound: No start with this hash waits.
        """
        return self._decide(hash, approved=True)

    def refuse(self, hash: str) -> Request:
        """Refuse a start, approved or not. Raises: as `approve`."""
        return self._decide(hash, approved=False)

    def refused(self, hash: str) -> bool:
        """True if a person refused the start with this hash."""
        request = self._find(hash)
        return request is not None and request.refused

    def named(self, prefix: str) -> Request:
        """The request with this hash, or the only undecided one whose hash begins so.

        Two starts whose hashes begin alike can be found by trying, so a person must see the start before it is
        approved by a prefix.

        Raises:
            InvalidValue: Not 8 or more digits of a hash, or several that wait begin so.
            NotFound: No such start waits.
        """
        if not _HASH.fullmatch(prefix):
            raise InvalidValue(
                f"{shown(prefix)} is not the hash of a start, nor its first 8 digits or more.", hint=_LISTS
            )
        requests = self._requests()
        undecided = [request for request in requests if not (request.approved or request.refused)]
        found = [request for request in requests if request.hash == prefix] or [
            request for request in undecided if request.hash.startswith(prefix)
        ]
        if len(found) > 1:
            raise InvalidValue(f"{len(found)} starts that wait begin with {prefix}.", hint=f"Give all digits: {_LISTS}")
        if not found:
            raise NotFound(
                f"No start with the hash {prefix} waits for approval; requests expire after {EXPIRES_S / 3600:.0f} h.",
                hint=_LISTS,
            )
        return found[0]

    def _decide(self, hash: str, *, approved: bool) -> Request:
        request = self.named(hash)
        if request.hash != hash:
            raise InvalidValue(f"{shown(hash)} is only a part of a hash.", hint=_LISTS)
        decided = {"approved": approved, "refused": not approved}
        times = {"at": request.at, "decided_at": time.time()}
        entry = {"text": request.text, "details": request.details, **times, **decided}
        write_json(self._path(hash), entry)
        return request

    def has(self, hash: str) -> bool:
        """True if an approval with this hash is unused and valid."""
        request = self._find(hash)
        return request is not None and request.approved

    def use(self, hash: str) -> bool:
        """Use up the approval with this hash; False without one."""
        if not self.has(hash):
            return False
        try:
            self._path(hash).unlink()
        except FileNotFoundError:  # another start was faster
            return False
        return True

    def forget(self, hash: str) -> None:
        """Remove the request or approval with this hash, as after its start."""
        self._path(hash).unlink(missing_ok=True)

    def _find(self, hash: str) -> Request | None:
        return next((request for request in self._requests() if request.hash == hash), None)

    def _path(self, hash: str) -> Path:
        return self._folder / f"{hash}.json"

    def _requests(self) -> list[Request]:
        requests = []
        for path in self._folder.glob("*.json"):
            try:
                entry = read_json(path)
                details, decided_at = entry.get("details"), entry.get("decided_at")
                request = Request(
                    path.stem,
                    str(entry["text"]),
                    float(entry["at"]),
                    entry["approved"] is True,
                    entry.get("refused") is True,
                    details if isinstance(details, dict) else {},
                    None if decided_at is None else float(decided_at),
                )
            except (NotFound, Corrupt, KeyError, TypeError, ValueError, AttributeError):
                continue
            if not -60.0 <= time.time() - request.since < EXPIRES_S:
                path.unlink(missing_ok=True)
            elif _HASH.fullmatch(request.hash):
                requests.append(request)
        return sorted(requests, key=lambda request: request.at, reverse=True)
