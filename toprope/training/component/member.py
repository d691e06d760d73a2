"""A crew member's side of its connection to the keeper.

The keeper starts every program of a crew in the same way: the run's folder, the component's name and the run's secret
in environment variables, orders on standard input, reports on a file descriptor of their own. A thread reads the orders
and serves them to synchronous and asynchronous code. Standard input ends when the keeper is gone; the member must then
end too.
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
    ENV_KEYS,
    ENV_LIFE,
    ENV_REPORT_FD,
    ENV_SECRET,
    Beat,
    Keys,
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
from toprope.records.weight_file import ENV_WEIGHTS
from toprope.sdk.wall.kernel import hide_memory

_POLL_S = 0.25
_HEARTBEAT_S = 1.0


async def send_heartbeats(report: Callable[[Report], None], progresses: Callable[[], bool] = lambda: True) -> None:
    """Send a heartbeat about once a second for as long as the event loop turns.

    Args:
        report: Sends a report to the keeper.
        progresses: Checked before each heartbeat; False skips it, because something the loop depends on is stuck.
    """
    while True:
        if progresses():
            report(Beat())
        await asyncio.sleep(_HEARTBEAT_S)


class CrewMember:
    """This process as a component of a run. Create it with `CrewMember.join()`."""

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        secret: str,
        report_fd: int,
        attempt: int = 1,
        life: int = 0,
        *,
        orders_fd: int = 0,
    ) -> None:
        self.folder = folder
        self.name = name
        self.secret = secret
        self.attempt, self.life = attempt, life
        self.spec = Specification.read(folder)
        self.ending = threading.Event()
        """Set when a Stop order came or the keeper is gone."""
        self.ends_as = ""
        """The state in which the run ends, if the Stop order told it."""
        self.paused = threading.Event()
        """Set while the run is paused: finish current work, begin nothing new. See `hold`."""
        self._last_beat = float("-inf")
        self._report_fd = report_fd
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._orders: list[Order | None] = []
        self._addresses: dict[str, str] = {}
        self._listeners: list[Callable[[], None]] = []
        threading.Thread(target=self._listen, args=(orders_fd,), name="orders", daemon=True).start()

    @classmethod
    def join(cls) -> CrewMember:
        """The member described by the environment variables of this process and its first order.

        From then on no other process of this user can read its memory and variables.

        Raises:
            ComponentFailed: This process was not started by a keeper.
        """
        hide_memory()
        if os.environ.pop(ENV_KEYS, ""):
            _take_keys(0)
        try:
            folder = RunFolder(Path(os.environ[ENV_FOLDER]))
            name, secret = os.environ[ENV_COMPONENT], os.environ.pop(ENV_SECRET)
            report_fd, attempt = int(os.environ[ENV_REPORT_FD]), int(os.environ.get(ENV_ATTEMPT, "1"))
        except KeyError as missing:
            raise ComponentFailed(
                f"{missing} is not set: this program runs only as a part of a run.",
                hint="Start runs with start_training.",
            ) from None
        os.set_inheritable(report_fd, False)
        member = cls(folder, name, secret, report_fd, attempt, int(os.environ.get(ENV_LIFE, "0")))
        member.beat()  # tells the keeper to expect heartbeats
        return member

    @property
    def number(self) -> int:
        """Number among the members of its kind; only drivers can be several."""
        return int(self.name.partition("-")[2] or 1)

    @property
    def weights(self) -> Path:
        """Folder of the file through which the trainer publishes weights."""
        return Path(os.environ.get(ENV_WEIGHTS) or self.folder.crew)

    def report(self, report: Report) -> None:
        """Send a report to the keeper; do nothing if it is gone, which the end of the orders shows."""
        line = memoryview(encode_line(report))
        with self._writing:
            while line:
                try:
                    line = line[os.write(self._report_fd, line) :]
                except BrokenPipeError:
                    return

    def hold(self, beat: Callable[[], None] = lambda: None) -> float:
        """Block while the run is paused, unless it is ending; returns the seconds spent.

        Args:
            beat: Called about once a second in the meantime.
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
            await asyncio.sleep(_POLL_S)

    def beat(self) -> None:
        """Send a heartbeat of a synchronous program, at most one a second."""
        now = time.monotonic()
        if now - self._last_beat >= _HEARTBEAT_S:
            self._last_beat = now
            self.report(Beat())

    def peer(self, name: str) -> str | None:
        """The present address of a peer; None while it is away."""
        with self._changed:
            return self._addresses.get(name)

    def address(self, peer: str, timeout: float | None = None) -> str:
        """Wait until `peer` is ready; returns its address.

        Raises:
            ComponentFailed: The peer was not ready within `timeout` seconds, or the run is ending.
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
        """All orders, including those that came before this call. Ends when the keeper is gone."""
        loop, news, seen = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(wake)
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

    def _listen(self, descriptor: int) -> None:
        # os.read, because a daemon thread in a buffered read of sys.stdin aborts the interpreter at exit.
        pending = b""
        while chunk := _read_chunk(descriptor):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if (order := decode_order(line)) is not None:
                    self._handle(order)
        self._handle(None)

    def _handle(self, order: Order | None) -> None:
        with self._changed:
            self._orders.append(order)
            if isinstance(order, Peers):
                self._addresses = order.addresses
            if isinstance(order, Stop):
                self.ends_as = order.ends_as
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
            except RuntimeError:  # the listener's event loop has closed
                pass


def _read_chunk(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _take_keys(orders_fd: int) -> None:
    """Read the first order, byte by byte because the later ones are not ours, and set its variables."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(orders_fd, 1)):
        line += data
    order = decode_order(line)
    if isinstance(order, Keys):
        os.environ.update(order.variables)
