"""MCP over HTTP, for clients that do not start the server themselves; on loopback unless the owner allows more.

Every request must be admitted (`http.access`). The SDK serves both eras of the protocol at one path.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from toprope.bounded_http import ACCEPTED_AT_ONCE, bounded, listen_long, most_connections
from toprope.errors import InvalidValue, LockedField, NotPossibleNow
from toprope.settings.owner import Home, HttpSettings
from toprope_server.http.access import AccessRequired, in_url
from toprope_server.http.principals import Tokens
from toprope_server.http.trace_intake import capture_route
from toprope_server.mcp.app import TopropeServer, leave
from toprope_server.mcp.auto_resume import resume_lost_runs
from toprope_server.mcp.roles import Role, role_of_settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PATH = "/mcp"
TOKEN_VARIABLE = "TOPROPE_TOKEN"
"""The variable from which clients' configurations take the token, so that none contains it. The server ignores it."""

_KEEP_ALIVE_S = 120
_GRACE_S = 1
"""Seconds for calls in progress at the end; runs have keepers of their own and need none."""


def build_app(
    tokens: Tokens,
    settings: HttpSettings,
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    capture: Home | None = None,
    **options: Any,
) -> ASGIApp:
    """The ASGI application.

    Args:
        tokens: Each request must carry one of them.
        settings: The owner's `http` settings.
        host: The address to listen on, which is also an allowed Host.
        port: The port of all allowed Hosts.
        capture: The home whose data sets accept traces; None to accept none.
        options: Of `TopropeServer`.
    """
    server = TopropeServer(log_level="WARNING", **options)
    # Host and Origin are checked by `AccessRequired`, for all paths.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(streamable_http_path=PATH, transport_security=security, host=host)
    if capture is not None:
        app.router.routes.append(capture_route(lambda: capture))
    return AccessRequired(app, tokens, settings, host, port)


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


def serve_http(
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    home: Home | None = None,
    role: Role | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal; never returns.

    Args:
        host: An address of this machine to listen on.
        port: 0 for any free port; the owner's (8765 by default) if None.
        home: The home with settings and token; the owner's by default.
        role: The tools to offer, as far as the owner's settings allow.
        say: Called once the server is ready with the URL and how to pass the token; prints by default.

    Raises:
        LockedField: The address is not loopback and not in the owner's settings.
        InvalidValue: Invalid settings, token file, or host.
        NotPossibleNow: The port is taken.
    """
    home = home or Home.locate()
    settings = home.settings()
    _check_host(host, settings.http, home)
    tokens = Tokens(home.configuration)
    tokens.owners.ensure()
    config = _tls(settings.http, home)
    listening = listen_on(host, settings.http.port if port is None else port)
    port = listening.getsockname()[1]
    allowed = (role or Role()).within(role_of_settings(settings))
    app = build_app(tokens, config, host, port, role=allowed, capture=home if allowed.runs else None)
    url = f"{'https' if config.certificate else 'http'}://{in_url(host)}:{port}{PATH}"
    anyio.run(
        serve_on, _loaded(uvicorn_config(app, config)), listening, lambda: (say or _print)(_instructions(url)), home
    )
    # A worker thread that still waits must not keep the process alive.
    leave()


async def serve_on(config: uvicorn.Config, listening: socket.socket, ready: Callable[[], None], home: Home) -> None:
    """Serve on a socket until a signal.

    Args:
        ready: Called once the server answers.
        home: Lost runs in it are resumed if the owner's limits allow it.
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
        tasks.start_soon(resume_lost_runs, home)
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


def _print(text: str) -> None:
    print(text, flush=True)


def _instructions(url: str) -> str:
    return (
        f"Toprope serves MCP at {url} until Ctrl-C.\n"
        "Every request needs the owner's token. In the shell that starts your client:\n"
        f'  export {TOKEN_VARIABLE}="$({sys.executable} -P -m toprope_server.cli token)"\n'
        "and in the client's configuration the header\n"
        f"  Authorization: Bearer ${{{TOKEN_VARIABLE}}}\n"
        "'toprope install claude-code --http' writes that for Claude Code."
    )


def _tls(settings: HttpSettings, home: Home) -> HttpSettings:
    """The settings with absolute paths of certificate and key.

    Raises:
        InvalidValue: One of the two is missing.
    """
    if bool(settings.certificate) != bool(settings.key):
        raise InvalidValue(f"{home.settings_file}: http.certificate and http.key belong together; give both or none.")
    paths = {name: str(home.configuration / Path(value).expanduser()) for name, value in settings.tls.items()}
    for path in paths.values():
        if not Path(path).is_file():
            raise InvalidValue(f"{home.settings_file}: there is no file {path}.", hint="Correct http.certificate, key.")
    return settings.model_copy(update=paths)


def _loaded(config: uvicorn.Config) -> uvicorn.Config:
    """The configuration with its certificate read.

    Raises:
        InvalidValue: Certificate and key do not fit each other.
    """
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise InvalidValue(f"http.certificate and http.key cannot be used: {error}.") from None
    return config


def _check_host(host: str, settings: HttpSettings, home: Home) -> None:
    if host == "localhost" or host in settings.hosts:
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        allowed = ", ".join(["127.0.0.1", "::1", "localhost", *settings.hosts])
        raise LockedField(
            f"Other machines can reach {host}, and the owner's settings do not allow that. Allowed: {allowed}.",
            hint=f"The owner may add it to http.hosts in {home.settings_file}; over a network, prefer an SSH tunnel to "
            "127.0.0.1: the token would travel unencrypted.",
        )


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
