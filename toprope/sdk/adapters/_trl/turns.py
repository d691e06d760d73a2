"""Turns of a script's code: one rollout at a time, in a thread of its own.

The rollouts of a script share what it made at its start, such as one client of a server, and TRL runs them one after
another.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from toprope.sdk.authoring.env_managed import off_the_clock
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["Turns"]

_LONGEST_GOING_S = 60.0
"""Seconds that others wait for code that goes on after its rollout ended."""
_LOOK_S = 0.05


class Turns:
    """Hands out turns in the order of requests; all at a time must be on one event loop."""

    longest_going_s = _LONGEST_GOING_S

    def __init__(self) -> None:
        self._lock: tuple[asyncio.AbstractEventLoop | None, asyncio.Lock] = None, asyncio.Lock()
        """The lock of a turn, and the event loop that it belongs to."""
        self._late: tuple[threading.Thread, float] | None = None
        """A thread that has not ended with its rollout, and when it should have."""
        self._own_loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it within the block.

        Raises:
            EnvironmentMistake: The code of an earlier rollout does not end.
        """
        loop = asyncio.get_running_loop()
        if self._lock[0] is not loop:
            self._lock = loop, asyncio.Lock()
        _, lock = self._lock
        with off_the_clock():
            await lock.acquire()
        try:
            with off_the_clock():
                await self._ended()
            yield
        finally:
            lock.release()

    async def run(self, work: Callable[[], Any], end: Callable[[], None]) -> Any:
        """Do work in a thread during a turn; the result, or what it raises.

        Args:
            work: The script's code.
            end: Called if the rollout ends before the work, which must end soon after it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(method: Callable[[Any], None], value: Any) -> None:
            if not done.done():
                method(value)

        def tell(method: Callable[[Any], None], value: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, method, value)

        def worked() -> None:
            asyncio.set_event_loop(self._loop())  # which scripts ask for where they run asynchronous clients
            try:
                result = context.run(work)
            except (StopIteration, asyncio.CancelledError) as error:  # which mean something else to a future
                tell(done.set_exception, RuntimeError(f"the script raised {error!r}"))
            except BaseException as error:
                tell(done.set_exception, error)
            else:
                tell(done.set_result, result)

        thread = threading.Thread(target=worked, daemon=True, name="rollout")
        thread.start()
        try:
            return await done
        except asyncio.CancelledError:
            self._late = thread, time.monotonic()
            end()
            raise

    async def _ended(self) -> None:
        """Wait for a late thread."""
        while self._late is not None:
            thread, since = self._late
            if not thread.is_alive():
                self._late = None
            elif time.monotonic() - since > self.longest_going_s:
                raise EnvironmentMistake(
                    f"the rollout function of an earlier rollout, which ran out of time, is still at work after "
                    f"{self.longest_going_s:g} s. The script's rollouts share its clients, so none can begin: give "
                    "its requests a time limit, or restart the run"
                )
            else:
                await asyncio.sleep(_LOOK_S)

    def _loop(self) -> asyncio.AbstractEventLoop:
        """The script's own event loop, on which its clients stay."""
        if self._own_loop is None or self._own_loop.is_closed() or self._own_loop.is_running():
            self._own_loop = asyncio.new_event_loop()
            weakref.finalize(self, self._own_loop.close)
        return self._own_loop
