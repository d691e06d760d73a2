"""A seal on what a worker prints: everything up to a mark that the worker is then asked to print is dropped."""

from __future__ import annotations

import asyncio
import secrets

__all__ = ["Seal"]

_MARK_S = 5.0
"""The longest that a mark takes from a worker's standard error to its caller."""
_NO_MARK = b"[toprope] the environment redirected its standard error: what it prints from now on is not kept\n"


class Seal:
    """Drops everything printed before `mark`."""

    def __init__(self) -> None:
        self.mark = f"seal {secrets.token_hex(16)}"
        self.broken = asyncio.Event()
        """Set once the mark was printed."""
        self._line, self._held, self._dropped = f"{self.mark}\n".encode(), b"", 0

    async def wait(self) -> bytes:
        """Wait until the mark was printed; return a notice for the worker's log if it does not come out."""
        try:
            await asyncio.wait_for(self.broken.wait(), _MARK_S)
        except TimeoutError:
            return _NO_MARK
        return b""

    def kept_of(self, chunk: bytes) -> bytes:
        """Return the output after the mark, behind a line that counts the dropped bytes; empty before the mark."""
        self._held += chunk
        before, mark, after = self._held.partition(self._line)
        if not mark:
            self._dropped += max(0, len(self._held) - len(self._line))
            self._held = self._held[-len(self._line) :]
            return b""
        self.broken.set()
        dropped = self._dropped + len(before)
        notice = b"[toprope] %d bytes printed while held-out tasks were sampled are not kept\n" % dropped
        return (notice if dropped else b"") + after
