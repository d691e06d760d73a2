"""Run coroutines from synchronous code: one event loop in one thread for as long as the process lives.

Clients that users create (aiohttp sessions, locks) belong to the loop on which they were first used, so a new loop for
every call would break the second call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

__all__ = ["BackgroundLoop"]

_T = TypeVar("_T")


class BackgroundLoop:
    """An event loop in a thread, started on first use. Do not call it from a coroutine that runs on it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run a coroutine and wait for its result.

        Args:
            work: The coroutine.
            timeout_s: Seconds after which it is cancelled.

        Raises:
            TimeoutError: It took longer.
            BaseException: Whatever it raises.
        """
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._running()).result()

    def run_all(self, works: Sequence[Coroutine[Any, Any, _T]]) -> list[_T | BaseException]:
        """Run coroutines concurrently; results in their order, with an exception in place of a result it replaces."""

        async def gather() -> list[_T | BaseException]:
            return list(await asyncio.gather(*works, return_exceptions=True))

        return self.run(gather()) if works else []

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True, name="background-loop").start()
            return self._loop
