"""A crew member's side of the conversation with its keeper.

The keeper starts every program of this room in the same way: the run's folder, the member's name and the run's secret
in the environment, orders on standard input, reports on a descriptor of their own. A member reads its orders in one
thread and serves them to synchronous and asynchronous code alike. When the keeper is gone, standard input ends, and the
member is to end too.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from toprope.errors import ComponentFailed
from toprope.records.messages import (
    ENV_ATTEMPT,
    ENV_COMPONENT,
    ENV_FOLDER,
    ENV_LIFE,
    ENV_REPORT_FD,
    ENV_SECRET,
    Beat,
    Order,
    Pause,
    Peers,
    Proceed,
    Report,
    Stop,
    decode_order,
    encode_line,
)
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification

__all__ = ["Member", "beating"]

_LOOK_EVERY_S = 0.25
_BEAT_S = 1.0


async def beating(report: Callable[[Report], None], moves: Callable[[], bool] = lambda: True) -> None:
    """Gives a sign of life about once a second from the event loop that it runs in, for as long as that turns.

    Args:
        report: How the keeper is told.
        moves: Asked before each; false: what the loop depends on is stuck, and nothing is said.
    """
    while True:
        if moves():
            report(Beat())
        await asyncio.sleep(_BEAT_S)


class Member:
    """One program of a crew. Make it with `Member.join()`."""

    def __init__(
        self, folder: RunFolder, name: str, secret: str, report_fd: int, attempt: int = 1, life: int = 0
    ) -> None:
        self.folder = folder
        self.name = name
        self.secret = secret
        self.attempt, self.life = attempt, life
        self.spec = Specification.read(folder)
        self.ending = threading.Event()
        """Set when a Stop order came or the keeper is gone."""
        self.paused = threading.Event()
        """Set while the run is held: finish what is at hand, begin nothing new. See `hold`."""
        self._beaten = float("-inf")
        self._report_fd = report_fd
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._orders: list[Order | None] = []
        self._addresses: dict[str, str] = {}
        self._listeners: list[Callable[[], None]] = []
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @classmethod
    def join(cls) -> Member:
        """The member that the environment variables of this process describe.

        Raises:
            ComponentFailed: This process was not started by a keeper.
        """
        try:
            folder = RunFolder(Path(os.environ[ENV_FOLDER]))
            name, secret = os.environ[ENV_COMPONENT], os.environ.pop(ENV_SECRET)
            report_fd, attempt = int(os.environ[ENV_REPORT_FD]), int(os.environ.get(ENV_ATTEMPT, "1"))
        except KeyError as missing:
            raise ComponentFailed(
                f"{missing} is not set: this program is a part of a run.", hint="Start runs with start_training."
            ) from None
        os.set_inheritable(report_fd, False)
        member = cls(folder, name, secret, report_fd, attempt, int(os.environ.get(ENV_LIFE, "0")))
        member.beat()  # says that it can: from when it serves the keeper counts on it
        return member

    def report(self, report: Report) -> None:
        """Tells the keeper; silently does nothing when the keeper is gone (the orders' end says so)."""
        line = memoryview(encode_line(report))
        with self._writing:
            while line:
                try:
                    line = line[os.write(self._report_fd, line) :]
                except BrokenPipeError:
                    return

    def hold(self, beat: Callable[[], None] = lambda: None) -> float:
        """Blocks while the run is held, and returns for how many seconds; at once when it is to end.

        Args:
            beat: Called about once a second meanwhile.
        """
        if not self.paused.is_set() or self.ending.is_set():
            return 0.0
        began = time.monotonic()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self.paused.is_set() or self.ending.is_set(), 1.0):
                    return time.monotonic() - began
            beat()

    async def hold_async(self) -> None:
        """`hold` without blocking the event loop."""
        while self.paused.is_set() and not self.ending.is_set():
            await asyncio.sleep(_LOOK_EVERY_S)

    def beat(self) -> None:
        """A sign of life of a synchronous program: said at most once a second, however often this is called."""
        now = time.monotonic()
        if now - self._beaten >= _BEAT_S:
            self._beaten = now
            self.report(Beat())

    def peer(self, name: str) -> str | None:
        """Where a peer is now; None while it is away."""
        with self._changed:
            return self._addresses.get(name)

    def address(self, peer: str, timeout: float | None = None) -> str:
        """Blocks until `peer` is ready and returns its address.

        Raises:
            ComponentFailed: It did not get ready within `timeout` seconds, or the run is ending.
        """
        with self._changed:
            self._changed.wait_for(lambda: peer in self._addresses or self.ending.is_set(), timeout)
            if peer not in self._addresses:
                why = "the run is ending" if self.ending.is_set() else f"it was not ready within {timeout} s"
                raise ComponentFailed(f"{self.name} needs {peer}, but {why}.")
            return self._addresses[peer]

    async def address_async(self, peer: str) -> str:
        """`address` without blocking the event loop."""
        return await asyncio.to_thread(self.address, peer)

    async def orders(self) -> AsyncIterator[Order]:
        """Every order from the first on, also those that came before this call. Ends when the keeper is gone."""
        loop, news, seen = asyncio.get_running_loop(), asyncio.Event(), 0
        with self._changed:
            self._listeners.append(lambda: loop.call_soon_threadsafe(news.set))
        while True:
            with self._changed:
                fresh, seen = self._orders[seen:], len(self._orders)
            for order in fresh:
                if order is None:
                    return
                yield order
            if not fresh:
                await news.wait()
                news.clear()

    def _listen(self) -> None:
        # os.read rather than sys.stdin: a daemon thread inside a buffered read aborts the interpreter at its exit.
        pending = b""
        while chunk := _read(0):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if (order := decode_order(line)) is not None:
                    self._take(order)
        self._take(None)

    def _take(self, order: Order | None) -> None:
        with self._changed:
            self._orders.append(order)
            if isinstance(order, Peers):
                self._addresses = order.addresses
            if order is None or isinstance(order, Stop):
                self.ending.set()
            elif isinstance(order, Pause):
                self.paused.set()
            elif isinstance(order, Proceed):
                self.paused.clear()
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener()
            except RuntimeError:  # its event loop has closed: nobody listens there any more
                pass


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
