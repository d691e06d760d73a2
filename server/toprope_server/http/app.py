"""MCP over HTTP, for clients that do not start the server themselves; on loopback unless the owner allows more.

Every request must be admitted (`http.access`). The SDK serves both eras of the protocol at one path.
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn
from mcp.server.transport_security import TransportSecuritySettings

from toprope.errors import InvalidValue, LockedField
from toprope.settings.owner import Home, HttpSettings
from toprope_server import leave
from toprope_server.http.access import AccessRequired, in_url
from toprope_server.http.principals import Tokens
from toprope_server.http.serving import listen_on, serve_on, uvicorn_config
from toprope_server.http.session_limit import SessionLimit
from toprope_server.http.trace_intake import capture_route
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role, role_of_settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PATH = "/mcp"
TOKEN_VARIABLE = "TOPROPE_TOKEN"
"""The variable from which clients' configurations take the token, so that none contains it. The server ignores it."""


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
        app.router.routes.append(capture_route(capture))
    return AccessRequired(SessionLimit(app), tokens, settings, host, port)


def serve_http(host: str, port: int | None, *, role: Role) -> None:
    """Serve until a signal; never returns.

    Args:
        host: An address of this machine to listen on.
        port: 0 for any free port; the owner's (8765 by default) if None.
        role: The tools to offer, as far as the owner's settings allow.

    Raises:
        LockedField: The address is not loopback and not in the owner's settings.
        InvalidValue: Invalid settings, token file, or host.
        NotPossibleNow: The port is taken.
    """
    home = Home.locate()
    settings = home.settings()
    _check_host(host, settings.http, home)
    tokens = Tokens(home.configuration)
    tokens.owners.ensure()
    config = _tls(settings.http, home)
    listening = listen_on(host, settings.http.port if port is None else port)
    port = listening.getsockname()[1]
    allowed = role.within(role_of_settings(settings))
    app = build_app(tokens, config, host, port, role=allowed, capture=home if allowed.runs else None)
    instructions = _instructions(settings.http, host, port, home.settings_file)
    loaded = _loaded(uvicorn_config(app, config))
    anyio.run(serve_on, loaded, listening, lambda: print(instructions, flush=True), home, allowed.read_only)
    # A worker thread that still waits must not keep the process alive.
    leave()


def url_of(settings: HttpSettings, host: str = "127.0.0.1", port: int | None = None) -> str:
    """The address that clients use; the port is the owner's if None."""
    scheme = "https" if settings.certificate else "http"
    return f"{scheme}://{in_url(host)}:{settings.port if port is None else port}{PATH}"


def _instructions(settings: HttpSettings, host: str, port: int, settings_file: Path) -> str:
    # What is installed has the port of the settings.
    first = "" if port == settings.port else f"Set http.port: {port} in {settings_file}, then "
    return (
        f"Toprope serves MCP at {url_of(settings, host, port)} until Ctrl-C.\n"
        "Every request needs the owner's token. In the shell that starts your client:\n"
        f'  export {TOKEN_VARIABLE}="$({sys.executable} -P -m toprope_server.cli token)"\n'
        "and in the client's configuration the header\n"
        f"  Authorization: Bearer ${{{TOKEN_VARIABLE}}}\n"
        f"{first}'toprope install claude-code --http' writes that for Claude Code."
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
