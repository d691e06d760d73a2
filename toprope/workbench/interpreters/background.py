"""Installations that outlive the call: clients give up on a call long before a download has finished."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from toprope.workbench.interpreters.adding import Interpreters, Order, Outcome


@dataclass
class Installation:
    """An installation in a thread of its own."""

    order: Order
    news: str = "beginning"
    """Present activity."""
    count: int = 0
    """Number of progress messages so far."""
    outcome: Outcome | None = None
    error: Exception | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds; return True if it has ended."""
        return self._ended.wait(seconds)

    def run(self, interpreters: Interpreters) -> None:
        """Run the installation and keep its result or exception."""
        try:
            self.outcome = interpreters.add(self.order, self._note_progress)
        except Exception as error:
            self.error = error
        finally:
            self._ended.set()

    def _note_progress(self, text: str) -> None:
        self.news, self.count = text, self.count + 1


class Installations:
    """The installations of one server by order; equal orders share one."""

    def __init__(self) -> None:
        self._running: dict[Order, Installation] = {}
        self._lock = threading.Lock()

    def of(self, order: Order, interpreters: Interpreters) -> Installation:
        """Return the installation of an order: a running one, an ended one not reported yet, or a new one."""
        with self._lock:
            installation = self._running.get(order)
            if installation is None:
                installation = self._running[order] = Installation(order)
                threading.Thread(target=installation.run, args=(interpreters,), daemon=True, name="install").start()
            return installation

    def told(self, order: Order) -> None:
        """Forget an installation whose result was reported."""
        with self._lock:
            self._running.pop(order, None)
