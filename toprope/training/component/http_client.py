"""Requests to the servers of a crew over connections that stay open, for asyncio.

The driver makes sixteen small requests for each step of a small policy, and libraries spend most of its processor time
on what such requests do not need: redirects, cookies, proxies, compression. This client speaks HTTP/1.1 to plain-http
addresses and hands out whole bodies; httptools, which the servers use as well, parses the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpConnections:
    """A pool of connections to one server after another. Create, use and close it within one event loop.

    Args:
        headers: Headers of every request.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._url = self._prefix = self._head = self._host = ""
        self._port = 80

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> HttpAnswer:
        """Send a request and read its answer. If it is cancelled, the server sees the connection end.

        Args:
            method: In upper case.
            url: Address of the server, `http://host:port` and perhaps the first part of a path.
            path: Appended to it.
            body: Sent with its length.
            headers: Further headers.
            timeout_s: Seconds until the whole answer is there, without those to connect.

        Raises:
            OSError: The connection broke, or none could be made. It may be repeated.
            TimeoutError: No answer came in time; a kind of OSError.
        """
        if url != self._url:
            self._use(url)
        lines = [f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"]
        lines += [f"{name}: {value}\r\n" for name, value in (headers or {}).items()]
        if body is not None:
            lines.append(f"content-length: {len(body)}\r\n")
        data = "".join([*lines, "\r\n"]).encode("latin-1") + (body or b"")
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answer = await connection.exchange(data, timeout_s)
        except BaseException:
            connection.abort()
            raise
        if connection.reusable and url == self._url:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    async def close(self) -> None:
        """Close the connections; requests that are under way break."""
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)  # the loop closes the sockets

    def _use(self, url: str) -> None:
        parts = urlsplit(url)
        for connection in self._idle:
            connection.abort()
        self._idle = []
        self._url, self._prefix = url, parts.path
        self._host, self._port = parts.hostname or "", parts.port or 80
        lines = {"host": parts.netloc, **self._headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(lambda: _Connection(self._lost), self._host, self._port)
        except TimeoutError:
            raise ConnectionError(f"no connection within {_CONNECT_S:g} s") from None
        self._open.add(connection)
        return connection

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection, for one request after another."""

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.reusable = False
        """True between a complete answer and the next request, if the server keeps the connection."""

    async def exchange(self, data: bytes, timeout_s: float) -> HttpAnswer:
        """Send a whole request; see `HttpConnections.request`."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server has closed the connection")
        loop = asyncio.get_running_loop()
        self._answer, self.reusable = loop.create_future(), False
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        late = loop.call_later(timeout_s, self._fail, TimeoutError(f"no answer within {timeout_s:g} s"))
        self._transport.write(data)
        try:
            return await self._answer
        finally:
            late.cancel()
            self._answer = None

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # Calls of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the server does not speak HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(ConnectionResetError("the connection ended before the answer"))
        self._on_lost(self)

    # Calls of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        if 100 <= self._parser.get_status_code() < 200:  # the answer itself is still to come
            self._headers, self._parts = {}, []
            return
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked for it
            return
        self.reusable = self._parser.should_keep_alive()
        self._answer.set_result(HttpAnswer(self._parser.get_status_code(), self._headers, b"".join(self._parts)))
