"""Waiting for a condition over the queue without polling it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Signal"]


class Signal:
    """Wakes those who wait for a condition when it may have come true."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self.closed = False

    def notify(self) -> None:
        """Looks at every waiter's condition and wakes those whose holds."""
        if self._waiters:
            for future in [future for future, ready in self._waiters.items() if ready()]:
                self._wake(future)

    def close(self) -> None:
        """Wakes everybody, now and from now on."""
        self.closed = True
        for future in list(self._waiters):
            self._wake(future)

    def waiter(self, ready: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done when `ready` held at a notification, or already holds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = ready
        if self.closed or ready():
            self._wake(future)
        return future

    def forget(self, future: asyncio.Future[None]) -> None:
        """Stops waiting."""
        self._waiters.pop(future, None)
        future.cancel()

    def _wake(self, future: asyncio.Future[None]) -> None:
        del self._waiters[future]
        if not future.done():
            future.set_result(None)
