"""Receiving large bodies cheaply: a uvicorn protocol over httptools that has the kernel put a body where it is wanted.

uvicorn takes a body in the pieces in which it arrives: a body of 128 KB wakes the event loop several times, each piece
is copied four times, and reading is stopped and resumed at 64 KB. Here, once the head of a request has said how long
its body is, the rest is read straight into one buffer of that size, the kernel is told (SO_RCVLOWAT) to wake us when
all of it is there, and only then the application is started: it need not wait, and takes that very buffer
(`body_of`). Requests that do not say their length, or a very large one, take uvicorn's way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from typing import Any

__all__ = ["body_of", "direct"]

_TAKE = "toprope.take_body"
_SCRATCH = 4096
"""Bytes of the first read of a request: its head, and as little as may be of what must then be copied."""
_DIRECT_LIMIT = 16 * 1024 * 1024
"""Bytes of the largest body that is read this way: it is in memory before anybody looks at it."""
_WAKE_AT = 1024 * 1024
"""Bytes for which the kernel is asked to wait at most."""


def body_of(scope: MutableMapping[str, Any]) -> bytearray | None:
    """The whole body of a request that was read in one piece, without another copy; None where it has to be received.
    It is the caller's from then on."""
    take = scope.pop(_TAKE, None)
    return None if take is None else take()


def direct(protocol: type[Any], parser: type[Any]) -> type[Any]:
    """uvicorn's HttpToolsProtocol, made to read bodies in one piece.

    Args:
        protocol: `uvicorn.protocols.http.httptools_impl.HttpToolsProtocol`, or a class on top of it.
        parser: `httptools.HttpRequestParser`.
    """
    scratch = memoryview(bytearray(_SCRATCH))  # filled and emptied within one callback, so all connections share it

    class Direct(protocol, asyncio.BufferedProtocol):  # type: ignore[misc]
        _body: bytearray | None = None
        _have = 0
        _announced = -1
        _low_water = 1
        _held: tuple[Any, Any] | None = None
        """The request whose body is awaited, and the application."""

        def get_buffer(self, sizehint: int) -> memoryview:
            return scratch if self._body is None else memoryview(self._body)[self._have :]

        def buffer_updated(self, count: int) -> None:
            if self._body is None:
                self.data_received(scratch[:count])
                if self._held is not None:
                    self._read_on()
                return
            self._have += count
            if self._have < len(self._body):
                self._wake_when(len(self._body) - self._have)
                return
            body, self._body = self._body, None
            self._wake_when(1)
            self._new_parser()  # the old one still waits for the body
            cycle = self.cycle
            cycle.body = body
            cycle.scope[_TAKE] = lambda: _take(cycle)
            self.on_message_complete()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._announced = -1

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(name) == 14 and name.lower() == b"content-length" and value.isdigit():
                self._announced = int(value)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if self._held is not None:
                held, self._held = self._held, None
                super()._start_asgi_task(*held)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            if (
                cycle is self.cycle
                and cycle.more_body
                and 0 < self._announced <= _DIRECT_LIMIT
                and not cycle.waiting_for_100_continue
                and not self.parser.should_upgrade()
            ):
                self._held = cycle, app
            else:
                super()._start_asgi_task(cycle, app)

        def _read_on(self) -> None:
            """What has come of the body moves into the buffer into which the rest is read."""
            begun = self.cycle.body
            self._body, self._have = bytearray(self._announced), len(begun)
            self._body[: self._have] = begun
            self._wake_when(self._announced - self._have)
            self.flow.resume_reading()  # a body that came behind other requests may have grown until uvicorn paused

        def _wake_when(self, count: int) -> None:
            count = min(count, _WAKE_AT)
            if count != self._low_water:
                self._low_water = count
                kernel = self.transport.get_extra_info("socket")
                if kernel is not None:
                    try:
                        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
                    except OSError:  # the connection has just gone, or this system has no such option
                        pass

        def _new_parser(self) -> None:
            self.parser = parser(self)
            try:
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except AttributeError:  # httptools < 0.6.3
                pass

    return Direct


def _take(cycle: Any) -> bytearray:
    body, cycle.body = cycle.body, bytearray()
    cycle.message_event.clear()  # what is received from now on is that the client has gone
    return body
