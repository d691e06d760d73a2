"""Awaits coroutines from code that is none: one event loop in one thread, for as long as the process lives.

Users' clients (sessions of aiohttp, locks) belong to the loop that they were first used on; a new loop for every call
would break the second one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

__all__ = ["BackgroundLoop"]


class BackgroundLoop:
    """A loop that is started when it is first needed. Not to be used from within a coroutine on it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def result(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """What a coroutine returns.

        Args:
            work: The coroutine.
            timeout_s: Seconds after which it is cancelled.

        Raises:
            TimeoutError: It took longer.
            BaseException: Whatever it raises.
        """
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._started()).result()

    def results(self, works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """What coroutines return that go on beside each other; an exception in the place of one that raises."""

        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*works, return_exceptions=True))

        return self.result(all_of_them()) if works else []

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True, name="awaiting").start()
            return self._loop
