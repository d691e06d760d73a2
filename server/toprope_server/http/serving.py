"""Serve an ASGI application until a signal, for MCP over HTTP and for the dashboard.

This module does without the SDK of MCP, which takes longer to import than all of the dashboard.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from toprope.bounded_http import ACCEPTED_AT_ONCE, bounded, listen_long, most_connections
from toprope.errors import InvalidValue, NotPossibleNow
from toprope_server import leave
from toprope_server.mcp.auto_resume import resume_lost_runs

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from toprope.settings.owner import Home, HttpSettings

_KEEP_ALIVE_S = 120
_GRACE_S = 1
"""Seconds for calls in progress at the end; runs have keepers of their own and need none."""


def uvicorn_config(app: ASGIApp, settings: HttpSettings | None = None) -> uvicorn.Config:
    """Serve quietly, without waiting for open streams at the end.

    Connections stay open longer than clients keep them: otherwise a call may arrive just as its connection is closed.
    """
    return uvicorn.Config(
        app,
        http=bounded(AutoHTTPProtocol, most_connections()),
        backlog=ACCEPTED_AT_ONCE,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=(settings.certificate or None) if settings else None,
        ssl_keyfile=(settings.key or None) if settings else None,
    )


async def serve_on(
    config: uvicorn.Config, listening: socket.socket, ready: Callable[[], None], home: Home, read_only: bool
) -> None:
    """Serve on a socket until a signal.

    Args:
        ready: Called once the server answers.
        home: Lost runs in it are resumed if the owner's limits allow it.
        read_only: They are only marked.
    """
    server = _Server(config, ready)

    async def watch() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
            async for _ in received:
                if server.should_exit:
                    leave()
                server.should_exit = True
                # Open streams are cut off now; uvicorn would log that as an error.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        tasks.start_soon(partial(resume_lost_runs, home, read_only=read_only))
        await server.serve(sockets=[listening])
        tasks.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """Uvicorn that reports when it is ready, and leaves signals to us: it would raise them again at its end."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        listen_long(sockets or ())
        self._ready()


def listen_on(host: str, port: int) -> socket.socket:
    """Listen on an address; 0 for any free port.

    Raises:
        InvalidValue: Not an address.
        NotPossibleNow: The port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidValue(f"Not an address: {host}: {error.strerror or error}.", hint="Use 127.0.0.1.") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise NotPossibleNow(
            f"Cannot listen on {host}:{port}: {error.strerror or error}.",
            hint="Another program may use it: give another --port, or --port 0 for any free port.",
        ) from None
    return listening
