"""Named tokens of the HTTP server, each with a role and an end: `tokens.json` in the owner's configuration folder.

The file holds a digest of each token and never the token, which is shown once. Tokens are random and long, so a plain
SHA-256 cannot be searched. The server reads the file at each request: a revoked token is refused at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from toprope.atomic import write_json
from toprope.errors import InvalidValue, NotFound, shown
from toprope_server.http.token import TokenFile
from toprope_server.mcp.roles import Role

OWNER = "owner"
"""The name of the token in `http-token`."""
ROLES = ("all", "read", "plan", "run")
"""Roles of tokens: every tool, those that change nothing, or a set of tools beside them."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")
_MOST = 200
_VERSION = 1


@dataclass(frozen=True)
class Principal:
    """A holder of a token: its name, and the tools that it may call."""

    name: str
    role: Role


@dataclass(frozen=True)
class NamedToken:
    """A line of the file; times are seconds since the epoch."""

    name: str
    role: str
    sha256: str
    made_at: float
    ends_at: float | None = None

    @property
    def ended(self) -> bool:
        """True if its time is over."""
        return self.ends_at is not None and time.time() >= self.ends_at

    @property
    def principal(self) -> Principal:
        """Its holder."""
        if self.role == "read":
            return Principal(self.name, Role(read_only=True))
        return Principal(self.name, Role(sets=None if self.role == "all" else frozenset({self.role, "read"})))


class Tokens:
    """The owner's token and the named ones.

    Args:
        configuration: The owner's configuration folder.
    """

    def __init__(self, configuration: Path) -> None:
        self.owners = TokenFile(configuration)
        self.path = configuration / "tokens.json"

    def find(self, text: str | None) -> Principal | None:
        """The holder of a token; None if it is not valid, or if a file cannot be trusted."""
        if not text:
            return None
        if self.owners.admits(text):
            return Principal(OWNER, Role())
        digest = _digest(text)
        try:
            tokens = self.all()
        except InvalidValue:
            return None
        for named_token in tokens:
            if hmac.compare_digest(named_token.sha256, digest) and not named_token.ended:
                return named_token.principal
        return None

    def all(self) -> list[NamedToken]:
        """The named tokens.

        Raises:
            InvalidValue: The file cannot be read, or others can write it.
        """
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = json.loads(file.read(1 << 20))
            if mode & 0o077:
                raise InvalidValue(f"Others can read {self.path}, so its tokens are not trusted.", hint="chmod 600")
            if data["version"] != _VERSION:
                raise ValueError
            return [NamedToken(**fields) for fields in data["tokens"] if fields["role"] in ROLES]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidValue(f"{self.path} cannot be read as tokens: {error}.", hint="Remove it.") from None

    def add(self, name: str, role: str, days: float | None = None) -> str:
        """Make a token and return it; only its digest is stored.

        Raises:
            InvalidValue: Not a name, a role or a number of days, or the name is taken.
        """
        if not _NAME.fullmatch(name) or name == OWNER:
            raise InvalidValue(
                f"{shown(name)} cannot name a token.", hint="Use up to 40 of a-z, 0-9, '.', '_', '-'; not 'owner'."
            )
        if role not in ROLES:
            raise InvalidValue(f"There is no role {shown(role)}.", hint=f"Roles: {', '.join(ROLES)}.")
        if days is not None and not 0 < days <= 3660:
            raise InvalidValue("--days must be above 0 and at most 3660.")
        token = secrets.token_urlsafe(32)
        with self._changing() as tokens:
            if any(other.name == name and not other.ended for other in tokens):
                raise InvalidValue(
                    f"There is a token {name!r} already; nothing was changed.",
                    hint=f"toprope token revoke {name} ends it; or choose another name.",
                )
            tokens[:] = [other for other in tokens if other.name != name and not other.ended]
            if len(tokens) >= _MOST:
                raise InvalidValue(f"There are {_MOST} tokens, which is the limit.", hint="Revoke one.")
            now = time.time()
            tokens.append(NamedToken(name, role, _digest(token), now, None if days is None else now + days * 86_400))
        return token

    def revoke(self, name: str) -> None:
        """Remove a token; the next request with it is refused.

        Raises:
            NotFound: There is no such token.
            InvalidValue: The file cannot be read or written.
        """
        with self._changing() as tokens:
            if all(named_token.name != name for named_token in tokens):
                names = ", ".join(named_token.name for named_token in tokens) or "none"
                raise NotFound(
                    f"There is no token {shown(name)}; nothing was changed.",
                    hint=f"Tokens: {names}. 'toprope token --rotate' replaces the owner's.",
                )
            tokens[:] = [named_token for named_token in tokens if named_token.name != name]

    @contextmanager
    def _changing(self) -> Iterator[list[NamedToken]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise InvalidValue(f"{self.path} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = self.all()
            yield tokens
            try:
                write_json(
                    self.path,
                    {"version": _VERSION, "tokens": [asdict(named_token) for named_token in tokens]},
                    indent=1,
                )
            except OSError as error:
                raise InvalidValue(f"{self.path} cannot be written: {error.strerror or error}.") from None
        finally:
            os.close(lock)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
