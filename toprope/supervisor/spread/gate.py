"""The gate of a member: what its node's loopback interface means on the other nodes.

Members serve and call addresses of their own loopback interface only. Where a member announces such an address to the
keeper, its gate listens on the node's address, and the announcement names that. Where an announcement reaches a member
of another node, its gate listens on loopback and passes connections on. Between nodes all bytes go through TLS, to
which both sides show the run's certificate; on a network that the owner calls trusted they go in clear.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from toprope.sdk.wall.relay import join

_SCHEME = "toprope"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0
_BACKLOG = 1024


@dataclass(frozen=True)
class Place:
    """A served port, as the members of a spread crew tell each other: toprope://HOST:GATE/NODE/PORT."""

    host: str
    gate: int
    """Port of the gate on `host`."""
    node: str
    port: int
    """Port on the node's own loopback interface."""

    def __str__(self) -> str:
        return f"{_SCHEME}://{self.host}:{self.gate}/{self.node}/{self.port}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """Return the place in an announced address; None for addresses of other kinds."""
        parts = urlsplit(text)
        _, node, port = f"{parts.path}//".split("/")[:3]
        if parts.scheme != _SCHEME or parts.hostname is None or parts.port is None or not port.isdecimal():
            return None
        return cls(parts.hostname, parts.port, node, int(port))


class Gate:
    """Listeners of one member's process.

    Args:
        node: Name of this node.
        address: Its address, to listen on.
        tls: Contexts of servers and clients; None on a trusted network.
    """

    def __init__(self, node: str, address: str, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> None:
        self._node, self._address = node, address
        self._server_tls = None if tls is None else tls[0]
        self._client_tls = None if tls is None else tls[1]
        self._listeners: dict[tuple[str, int], asyncio.Server] = {}

    async def announce(self, url: str) -> str:
        """Return the address under which members of other nodes reach a URL of this node's loopback interface;
        addresses of other kinds stay as they are.

        Raises:
            OSError: The gate cannot listen on the node's address.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname != _LOOPBACK or parts.port is None:
            return url
        gate = await self._listen(("", parts.port), self._address, self._server_tls, _LOOPBACK, parts.port, None)
        return str(Place(self._address, gate, self._node, parts.port))

    async def reach(self, address: str) -> str:
        """Return the URL under which this node's members reach an announced address.

        Raises:
            OSError: The gate cannot listen on loopback.
        """
        place = Place.parse(address)
        if place is None:
            return address
        if place.node == self._node:
            return f"http://{_LOOPBACK}:{place.port}"
        key = (place.host, place.gate)
        port = await self._listen(key, _LOOPBACK, None, place.host, place.gate, self._client_tls)
        return f"http://{_LOOPBACK}:{port}"

    def close(self) -> None:
        """Stop listening."""
        for server in self._listeners.values():
            server.close()

    async def _listen(
        self,
        key: tuple[str, int],
        host: str,
        tls: ssl.SSLContext | None,
        to_host: str,
        to_port: int,
        to_tls: ssl.SSLContext | None,
    ) -> int:
        """Pass connections to `host` on to another address; return the port, the same for the same `key`."""
        if key not in self._listeners:

            async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    connecting = asyncio.open_connection(to_host, to_port, ssl=to_tls)
                    outer_reader, outer_writer = await asyncio.wait_for(connecting, _CONNECT_S)
                except (OSError, TimeoutError):
                    writer.transport.abort()  # the client sees a broken connection and tries again
                    return
                await join(reader, writer, outer_reader, outer_writer)

            self._listeners[key] = await asyncio.start_server(pass_on, host, 0, ssl=tls, backlog=_BACKLOG)
        port: int = self._listeners[key].sockets[0].getsockname()[1]
        return port
