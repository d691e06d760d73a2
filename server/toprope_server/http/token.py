"""The bearer token of the HTTP door: whoever has it may do what an agent may.

It lies in one file of the owner's configuration folder, which nobody else may read, and nowhere else: not in argv, not
in a log, not in an environment that a crew inherits. The door reads it anew at each request, so that a new token holds
at once, and a file that is gone or that others may read lets nobody in.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from toprope.atomic import write_text
from toprope.errors import InvalidValue, NotFound

__all__ = ["TokenFile"]

_BYTES = 32
_OTHERS = 0o077


class TokenFile:
    """The token in a file.

    Args:
        configuration: The owner's configuration folder; made, readable by the owner alone, with the first token.
    """

    def __init__(self, configuration: Path) -> None:
        self.path = configuration / "http-token"

    def read(self) -> str:
        """The token.

        Raises:
            NotFound: There is none yet.
            InvalidValue: The file is empty, cannot be read, or may be read by others.
        """
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(4096).decode("ascii", errors="replace").strip()
        except FileNotFoundError:
            raise NotFound(f"There is no token in {self.path}.", hint="'toprope token' makes one.") from None
        except OSError as error:
            raise InvalidValue(f"{self.path} cannot be read: {error.strerror or error}.") from None
        if os.name == "posix" and mode & _OTHERS:
            raise InvalidValue(
                f"{self.path} may be read by others (mode {mode & 0o777:o}), so the token in it is not trusted.",
                hint=f"Run: chmod 600 {self.path}; toprope token --rotate",
            )
        if len(text) < 16 or not text.isascii() or not text.isprintable():
            raise InvalidValue(f"{self.path} holds no token.", hint="'toprope token --rotate' makes a new one.")
        return text

    def ensure(self) -> str:
        """The token, made where there is none.

        Raises:
            InvalidValue: See `read`; or the file cannot be made.
        """
        try:
            return self.read()
        except NotFound:
            return self._make(replace=False)

    def rotate(self) -> str:
        """A new token in place of the old one, which is refused from the next request on.

        Raises:
            InvalidValue: The file cannot be made.
        """
        return self._make(replace=True)

    def admits(self, given: str | None) -> bool:
        """Whether `given` is the token, compared in constant time. Without a sound file: no."""
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
        except FileExistsError:  # another server was quicker
            return self.read()
        except OSError as error:
            raise InvalidValue(
                f"The token's file {self.path} cannot be made: {error.strerror or error}.",
                hint="Set TOPROPE_CONFIG to a folder that you may write to.",
            ) from None
        return token
