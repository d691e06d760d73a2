"""A limit on the time that a chat template takes: it is a program that comes with a model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toprope.errors import InvalidValue

RENDER_S = 10.0
"""Seconds that a template may take; a long conversation takes milliseconds."""


class TemplateTooSlow(InvalidValue):
    """The chat template did not end in time."""


@contextmanager
def render_limit(seconds: float = RENDER_S) -> Iterator[None]:
    """Interrupt the block after `seconds`, if this is the main thread, where programs render templates.

    Jinja's sandbox bounds a single `range`, but not loops within loops.

    Raises:
        TemplateTooSlow: The block took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise TemplateTooSlow(
            f"The chat template of the policy did not end within {seconds:g} s.",
            hint="Its model folder is damaged or hostile: choose another policy.model.",
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
