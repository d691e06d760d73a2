"""MCP over HTTP, for clients that do not start the server themselves; on loopback unless the owner allows more.

Every program on a machine and every page in a browser can reach a loopback port. Therefore each request needs the
owner's token (`http.token`), and its Host and Origin must be names of this server, which stops pages that rebind a name
to 127.0.0.1. The SDK serves both eras of the protocol at one path.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers

from toprope.errors import InvalidValue, LockedField, NotPossibleNow
from toprope.settings.owner import Home, HttpSettings
from toprope_server.http.token import TokenFile
from toprope_server.http.trace_intake import capture_route
from toprope_server.mcp.app import TopropeServer, leave
from toprope_server.mcp.auto_resume import resume_lost_runs
from toprope_server.mcp.roles import Role, role_of_settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/mcp"
TOKEN_VARIABLE = "TOPROPE_TOKEN"
"""The variable from which clients' configurations take the token, so that none contains it. The server ignores it."""

_KEEP_ALIVE_S = 120
_GRACE_S = 1
"""Seconds for calls in progress at the end; runs have keepers of their own and need none."""
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class _TokenRequired:
    """Pass requests with the owner's token to `app`; answer others with 401 (RFC 6750)."""

    def __init__(self, app: ASGIApp, token: TokenFile) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._token.admits(_bearer(Headers(scope=scope).get("authorization"))):
            body = json.dumps(
                {
                    "error": "invalid_token",
                    "error_description": "This server needs its owner's token in the header Authorization: Bearer "
                    "TOKEN. 'toprope token' prints it on the machine of the server.",
                }
            ).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            headers.append((b"www-authenticate", b'Bearer realm="toprope"'))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)


class _TrimmedHeaders:
    """Strip header values: the parser leaves white space at their end (RFC 9110, 5.5)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}
        await self._app(scope, receive, send)


def _bearer(header: str | None) -> str | None:
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def build_app(
    token: TokenFile, settings: HttpSettings, host: str = "127.0.0.1", *, capture: Home | None = None, **options: Any
) -> ASGIApp:
    """The ASGI application.

    Args:
        token: Each request must carry it.
        settings: The owner's `http` settings.
        host: The address to listen on, which is also an allowed Host.
        capture: The home whose data sets accept traces; None to accept none.
        options: Of `TopropeServer`.
    """
    server = TopropeServer(log_level="WARNING", **options)
    names = [*_LOOPBACK, *([] if _any(host) else [_in_url(host)]), *settings.names]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=[*names, *(f"{name}:*" for name in names)],
        allowed_origins=[
            *(f"{scheme}://{name}{port}" for name in names for scheme in ("http", "https") for port in ("", ":*")),
            *settings.origins,
        ],
    )
    app = server.streamable_http_app(streamable_http_path=PATH, transport_security=security, host=host)
    if capture is not None:
        app.router.routes.append(capture_route(lambda: capture))
    return _TrimmedHeaders(_TokenRequired(app, token))


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """Serve quietly, without waiting for open streams at the end.

    Connections stay open longer than clients keep them: otherwise a call may arrive just as its connection is closed.
    """
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
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
    token = TokenFile(home.configuration)
    token.ensure()
    listening = _listen(host, settings.http.port if port is None else port)
    allowed = (role or Role()).within(role_of_settings(settings))
    accepts_traces = not allowed.read_only and (allowed.sets is None or "run" in allowed.sets)
    app = build_app(token, settings.http, host, role=allowed, capture=home if accepts_traces else None)
    url = f"http://{_in_url(host)}:{listening.getsockname()[1]}{PATH}"
    anyio.run(_serve, uvicorn_config(app), listening, lambda: (say or _print)(_instructions(url)), home)
    # A worker thread that still waits must not keep the process alive.
    leave()


async def _serve(config: uvicorn.Config, listening: socket.socket, ready: Callable[[], None], home: Home) -> None:
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


def _listen(host: str, port: int) -> socket.socket:
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


def _any(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
