"""Bearer tokens: of the HTTP server, which permits all that an agent may do, and of a served model.

Each is in one private file of the owner's configuration folder and nowhere else: not in argv, not in a log, not in an
environment that a crew inherits. The server reads the file at each request, so a new token holds at once, and a file
that is missing or readable by others admits nobody.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from toprope.atomic import write_text
from toprope.errors import InvalidValue, NotFound

_BYTES = 32
_OTHERS = 0o077


class TokenFile:
    """The token in a file.

    Args:
        configuration: The owner's configuration folder; created with mode 0700 for the first token.
        name: Name of the file.
    """

    def __init__(self, configuration: Path, name: str = "http-token") -> None:
        self.path = configuration / name

    def read(self) -> str:
        """The token.

        Raises:
            NotFound: There is no token yet.
            InvalidValue: The file is empty, unreadable, or readable by others.
        """
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(4096).decode("ascii", errors="replace").strip()
        except FileNotFoundError:
            raise NotFound(f"There is no token in {self.path}.", hint="'toprope token' makes one.") from None
        except OSError as error:
            raise InvalidValue(f"{self.path} cannot be read: {error.strerror or error}.") from None
        if mode & _OTHERS:
            raise InvalidValue(
                f"Others can read {self.path} (mode {mode & 0o777:o}), so its token is not trusted.",
                hint=f"Run: chmod 600 {self.path}; toprope token --rotate",
            )
        if len(text) < 16 or not text.isascii() or not text.isprintable():
            raise InvalidValue(f"{self.path} contains no token.", hint="'toprope token --rotate' makes a new one.")
        return text

    def ensure(self) -> str:
        """The token; make one if there is none.

        Raises:
            InvalidValue: See `read`; or the file cannot be written.
        """
        try:
            return self.read()
        except NotFound:
            return self._make(replace=False)

    def rotate(self) -> str:
        """Replace the token; the old one is refused from the next request on.

        Raises:
            InvalidValue: The file cannot be written.
        """
        return self._make(replace=True)

    def admits(self, given: str | None) -> bool:
        """True if `given` is the token, compared in constant time; False without a valid file."""
        try:
            token = self.read()
        except (NotFound, InvalidValue):
            return False
        return given is not None and hmac.compare_digest(given.encode(), token.encode())

    def _make(self, *, replace: bool) -> str:
        token = secrets.token_urlsafe(_BYTES)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_text(self.path, token + "\n", replace=replace)
        except FileExistsError:  # another server made one first
            return self.read()
        except OSError as error:
            raise InvalidValue(
                f"Cannot write the token file {self.path}: {error.strerror or error}.",
                hint="Set TOPROPE_CONFIG to a folder that you may write to.",
            ) from None
        return token
