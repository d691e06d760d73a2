"""Receiving large bodies cheaply: a uvicorn protocol over httptools that has the kernel put a body where it is wanted.

uvicorn takes a body in the pieces in which it arrives: a body of 128 KB wakes the event loop several times, each piece
is copied four times, and reading is stopped and resumed at 64 KB. Here, once the head of a request has said how long
its body is, the rest is read straight into one buffer of that size, and the kernel is told (SO_RCVLOWAT) to wake us
when all of it is there. Requests that do not say their length, or a very large one, take uvicorn's way.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

__all__ = ["direct"]

_SCRATCH = 32_768
_DIRECT_LIMIT = 16 * 1024 * 1024
"""Bytes of the largest body that is read this way: it is in memory before anybody looks at it."""
_WAKE_AT = 1024 * 1024
"""Bytes for which the kernel is asked to wait at most."""


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
        _seen = 0
        _low_water = 1

        def get_buffer(self, sizehint: int) -> memoryview:
            return scratch if self._body is None else memoryview(self._body)[self._have :]

        def buffer_updated(self, count: int) -> None:
            if self._body is None:
                self.data_received(scratch[:count])
                if self._announced > self._seen and not self.pipeline and not self.transport.is_closing():
                    self._go_direct(self._announced - self._seen)
                return
            self._have += count
            if self._have < len(self._body):
                self._wake_when(len(self._body) - self._have)
                return
            body, self._body, self._have, self._announced = self._body, None, 0, -1
            self._wake_when(1)
            self._new_parser()  # the old one still waits for the body
            cycle = self.cycle
            if not cycle.response_complete:
                cycle.body = cycle.body + body if cycle.body else body
            self.on_message_complete()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._announced, self._seen = -1, 0

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(name) == 14 and name.lower() == b"content-length" and value.isdigit():
                self._announced = int(value)

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            if self._announced > _DIRECT_LIMIT or self.parser.should_upgrade():
                self._announced = -1

        def on_body(self, body: bytes) -> None:
            self._seen += len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._announced = -1
            super().on_message_complete()

        def _go_direct(self, rest: int) -> None:
            if self.cycle is None or self.scope is not self.cycle.scope:
                return  # the head itself is not complete
            self._body, self._have = bytearray(rest), 0
            self._wake_when(rest)

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
