"""Openings of environments that go on while a client's calls come back to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anyio import CapacityLimiter

from toprope.errors import EnvironmentFailed, NotPossibleNow
from toprope.machine import processor_count
from toprope_tools.clients import UNKNOWN, Client

T = TypeVar("T")

_TOLD_EVERY_S = 5.0
_KEPT_S = 600.0
"""Seconds that a result waits for the call that asks again."""


@dataclass(frozen=True)
class Caller:
    """A caller that waits for an environment.

    Attributes:
        client: It decides how long the call may take; None for a caller without a limit, such as the command line.
        progress: Called with the seconds so far, their limit (None if not known) and a sentence.
    """

    client: Client | None = UNKNOWN
    progress: Callable[[float, float | None, str | None], Awaitable[Any]] | None = None


CALLER = Caller()


@dataclass
class _Opening:
    asked: float
    began: float | None = None
    """When its turn came."""
    waiting: int = 0
    task: asyncio.Task[Any] = field(init=False)

    def so_far(self, limit_s: float) -> str:
        """Its time so far, in words."""
        if self.began is None:
            return f"waits for its turn: {time.monotonic() - self.asked:.0f} s so far"
        return f"goes on: {time.monotonic() - self.began:.0f} of at most {limit_s:.0f} s"


@dataclass
class Openings:
    """Openings in progress, and results that no call has fetched yet.

    Args:
        most: Openings that run at the same time, each with workers of its own; others wait for their turn.
    """

    most: int = field(default_factory=lambda: max(4, processor_count()))
    _turns: CapacityLimiter = field(init=False)
    _known: dict[str, _Opening] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._turns = CapacityLimiter(self.most)

    async def result(
        self, key: str, make: Callable[[], Awaitable[T]], *, what: str, limit_s: float, wait_s: float, caller: Caller
    ) -> T:
        """Return what `make` returns, or its error.

        Args:
            key: Calls with the same key share one opening.
            make: Opens the environment. It is cancelled `limit_s` after its turn came, or if its only caller gives up.
            what: The opening in words, for messages.
            wait_s: The longest that this call waits.

        Raises:
            NotPossibleNow: It goes on; the same call waits further.
            EnvironmentFailed: It took longer than `limit_s`.
        """
        self._forget_old()
        opening = self._known.get(key)
        if opening is None or opening.task.get_loop() is not asyncio.get_running_loop():
            opening = self._known[key] = _Opening(time.monotonic())
            opening.task = asyncio.get_running_loop().create_task(self._take_turn(opening, make, what, limit_s))
        until = time.monotonic() + wait_s
        opening.waiting += 1
        try:
            while not opening.task.done() and time.monotonic() < until:
                seconds_left = until - time.monotonic()
                await asyncio.wait([opening.task], timeout=min(_TOLD_EVERY_S, seconds_left))
                if caller.progress is not None and not opening.task.done():
                    most_s = None if opening.began is None else opening.began - opening.asked + limit_s
                    told = f"{what} {opening.so_far(limit_s)}"
                    await caller.progress(time.monotonic() - opening.asked, most_s, told)
        except asyncio.CancelledError:
            if opening.waiting == 1:
                self._known.pop(key, None)
                opening.task.cancel()
                await asyncio.wait([opening.task])
            raise
        finally:
            opening.waiting -= 1
        if not opening.task.done():
            raise NotPossibleNow(f"{what} {opening.so_far(limit_s)}.", hint="Repeat the same call to keep waiting.")
        self._known.pop(key, None)
        result: T = opening.task.result()
        return result

    async def _take_turn(self, opening: _Opening, make: Callable[[], Awaitable[T]], what: str, limit_s: float) -> T:
        async with self._turns:
            opening.began = time.monotonic()
            return await _limited(make, what, limit_s)

    def _forget_old(self) -> None:
        for key, opening in list(self._known.items()):
            if opening.task.done() and time.monotonic() - (opening.began or opening.asked) > _KEPT_S:
                if not opening.task.cancelled():
                    opening.task.exception()  # retrieved, so that asyncio does not report it
                del self._known[key]


async def _limited(make: Callable[[], Awaitable[T]], what: str, limit_s: float) -> T:
    try:
        return await asyncio.wait_for(make(), limit_s)
    except TimeoutError:
        raise EnvironmentFailed(
            f"{what} did not end within {limit_s:.0f} s.",
            hint="Look for downloads or slow tasks in the environment's code; environment.load_timeout_s is the limit.",
        ) from None
