"""Reaches from a worker's own network to addresses of its caller, one port at a time.

The worker's network has loopback only. For a port of the caller's loopback, a socket is made that listens on the same
port inside; this process accepts on it and copies bytes to and from the real address. So a URL means the same on both
sides, and nothing but the ports that were asked for can be reached.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from urllib.parse import urlsplit

from toprope.sdk.errors import WorkerDied

__all__ = ["Relay", "join"]

_CHUNK = 1 << 16
_ANSWER_S = 10.0


class Relay:
    """The ports that a worker with a network of its own may use. `theirs` goes to the worker as `listener_maker`."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs.detach()
        self._ours.settimeout(_ANSWER_S)
        self._servers: dict[int, asyncio.Server] = {}
        self._busy = asyncio.Lock()

    async def reach(self, url: str) -> None:
        """Let the worker use the port of a URL of this machine's loopback interface; harmless for other URLs.

        Raises:
            WorkerDied: The worker's network cannot have it.
        """
        parts = urlsplit(url)
        if parts.hostname not in ("127.0.0.1", "localhost") or parts.port is None:
            return
        async with self._busy:
            if parts.port in self._servers:
                return
            try:
                listener = await asyncio.to_thread(self._ask, parts.port)
            except OSError as error:
                raise WorkerDied(f"{url} cannot be reached from the worker's network: {error}") from error
            self._servers[parts.port] = await asyncio.start_server(_copier(parts.port), sock=listener)

    def _ask(self, port: int) -> socket.socket:
        self._ours.send(struct.pack("!H", port))
        reply, descriptors, _, _ = socket.recv_fds(self._ours, 256, 1)
        if not descriptors:
            raise OSError(reply[1:].decode(errors="replace") or "the worker has ended")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        """Close every port; the sockets inside end with the worker."""
        self._ours.close()
        for server in self._servers.values():
            server.close()


def _copier(port: int):  # type: ignore[no-untyped-def]
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            outer_reader, outer_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await join(reader, writer, outer_reader, outer_writer)

    return copy


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    outer_reader: asyncio.StreamReader,
    outer_writer: asyncio.StreamWriter,
) -> None:
    """Copy bytes between two connections, both ways, then close them.

    They end when both directions have; a direction that cannot be ended alone (TLS) ends the other with it.
    """
    directions = {asyncio.create_task(_pump(reader, outer_writer)), asyncio.create_task(_pump(outer_reader, writer))}
    pending, goes_on = directions, True
    try:
        while pending and goes_on:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            goes_on = all(task.result() for task in done)
    finally:
        for task in directions:
            task.cancel()
        writer.close()
        outer_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Copy until the end; False if the other direction cannot go on alone."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if not writer.can_write_eof():
            return False
        writer.write_eof()
    except OSError:
        return False
    return True
