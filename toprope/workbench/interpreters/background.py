"""Installations that outlive the call that asked for them: clients give up on a call long before a download is done."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from toprope.workbench.interpreters.adding import Interpreters, Order, Outcome

__all__ = ["Installation", "Installations"]


@dataclass
class Installation:
    """One that runs in a thread of its own."""

    order: Order
    news: str = "beginning"
    """What it does now."""
    count: int = 0
    """Grows with every piece of news."""
    outcome: Outcome | None = None
    error: Exception | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, waited for that long."""
        return self._ended.wait(seconds)

    def run(self, interpreters: Interpreters) -> None:
        """Carries it out; whatever it raises is kept for whoever asks."""
        try:
            self.outcome = interpreters.add(self.order, self._heard)
        except Exception as error:
            self.error = error
        finally:
            self._ended.set()

    def _heard(self, text: str) -> None:
        self.news, self.count = text, self.count + 1


class Installations:
    """Those of one server, by what was asked for: whoever asks for the same waits for the same."""

    def __init__(self) -> None:
        self._running: dict[Order, Installation] = {}
        self._lock = threading.Lock()

    def of(self, order: Order, interpreters: Interpreters) -> Installation:
        """The installation of an order: a new one, or the one that runs or has ended and was not told yet."""
        with self._lock:
            found = self._running.get(order)
            if found is None:
                found = self._running[order] = Installation(order)
                threading.Thread(target=found.run, args=(interpreters,), daemon=True, name="install").start()
            return found

    def told(self, order: Order) -> None:
        """Forgets one whose end was told."""
        with self._lock:
            self._running.pop(order, None)
