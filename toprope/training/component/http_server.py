"""Runs an ASGI application as a component: a port of the system's choice on loopback, reported once it listens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

__all__ = ["serve"]


async def serve(
    app: Any,
    started: Callable[[str], None],
    ending: asyncio.Event,
    *,
    port: int = 0,
    listener: socket.socket | None = None,
    **options: Any,
) -> None:
    """Serves `app` until `ending` is set, which SIGTERM does too: a stop asks that way.

    Args:
        app: An ASGI application.
        started: Called with the base URL (`http://127.0.0.1:<port>`) when connections are accepted.
        ending: Set by the caller to end in order; open requests get a second.
        port: The one to take if it is free: a program that comes back is found where it was.
        listener: A TCP socket that is bound already, to serve on instead.
        options: More of `uvicorn.Config`.
    """
    listener = listener or _bound(port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, backlog=2048, **options
    )
    server = uvicorn.Server(config)
    # uvicorn would end by raising the signal again: what is left to say after serving would not be said.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    if threading.current_thread() is threading.main_thread():  # elsewhere Python has no signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.002)
        if server.started:
            started(f"http://127.0.0.1:{listener.getsockname()[1]}")
            waiter = asyncio.create_task(ending.wait())
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
    finally:
        server.should_exit = True
        await task
        listener.close()


def _bound(port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it every answer on a kept
    # connection takes 44 ms, the other side's delayed acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its own old connections do not keep a port
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    return listener
