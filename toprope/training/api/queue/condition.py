"""A condition variable for asyncio with a predicate per waiter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Condition:
    """Wakes each waiter once its predicate holds. `len()` is the number of waiters."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiters)

    def notify(self) -> None:
        """Check the predicate of every waiter and wake those for which it holds."""
        if self._waiters:
            for future in [future for future, ready in self._waiters.items() if ready()]:
                self._wake(future)

    def close(self) -> None:
        """Wake all waiters, now and from now on."""
        self.closed = True
        for future in list(self._waiters):
            self._wake(future)

    def add_waiter(self, ready: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that completes at once if `ready` holds, else at the first notification at which it does."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = ready
        if self.closed or ready():
            self._wake(future)
        return future

    def remove_waiter(self, future: asyncio.Future[None]) -> None:
        """Cancel a future of `add_waiter`; does nothing if it is complete."""
        self._waiters.pop(future, None)
        future.cancel()

    def _wake(self, future: asyncio.Future[None]) -> None:
        del self._waiters[future]
        if not future.done():
            future.set_result(None)
