"""Admission to the HTTP server: its names in Host and Origin, and a token in each request.

Every program on a machine and every page in a browser can reach a loopback port. A page can also rebind a name of its
own to 127.0.0.1, so Host must be one of the server's names with its port, and so must Origin if it is sent. All paths
pass here, MCP and traces alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from toprope.bounded_http import admit
from toprope.settings.owner import HttpSettings
from toprope_server.http.principals import Principal, Tokens
from toprope_server.tool_specs.base import PRINCIPAL

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class AccessRequired:
    """Pass admitted requests to `app`; answer others with 401 (RFC 6750), 403 or 421.

    Args:
        app: The protected application.
        tokens: Each request must carry one of them.
        settings: The owner's `http` settings.
        host: The address on which the server listens.
        port: Its port; None accepts the names without a port only, for tests in one process.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, settings: HttpSettings, host: str, port: int | None) -> None:
        self._app, self._tokens = app, tokens
        scheme = "https" if settings.certificate else "http"
        own_names = [*_LOOPBACK, *([] if host in ("0.0.0.0", "::") else [in_url(host)])]
        suffix = "" if port is None else f":{port}"
        hosts = {f"{name}{suffix}" for name in own_names}
        if port == _DEFAULT_PORTS[scheme]:
            hosts |= set(own_names)
        for name in settings.names:  # a proxy or tunnel has a port of its own
            hosts |= {name} if _has_port(name) else {name, f"{name}{suffix}"}
        self._hosts = frozenset(name.lower() for name in hosts)
        origins = {f"{scheme}://{name}" for name in hosts} | {f"https://{name}" for name in settings.names}
        self._origins = frozenset(origin.lower().rstrip("/") for origin in {*origins, *settings.origins})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The parser leaves white space at the end of values (RFC 9110, 5.5).
        scope = {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self._hosts:
            host_names = ", ".join(sorted(self._hosts)[:6])
            refused = _refusal(421, "unknown_host", f"Host must be one of {host_names}; http.names adds others.")
            await refused(scope, receive, send)
            return
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            refused = _refusal(403, "unknown_origin", "Pages of this Origin may not call; http.origins adds others.")
            await refused(scope, receive, send)
            return
        bearer_token = _bearer(headers.get("authorization"))
        principal = self._tokens.find(bearer_token)
        if principal is None:
            text = (
                "This server needs its owner's token in the header Authorization: Bearer TOKEN. 'toprope token' prints "
                "it on the machine of the server, and 'toprope token add' makes others."
            )
            await _refusal(401, "invalid_token", text)(scope, receive, send)
            return
        admit(scope)
        scope["state"][PRINCIPAL] = principal
        # The SDK binds sessions to this user.
        scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=principal.name, scopes=[]))
        await self._app(scope, receive, self._while_valid(bearer_token, principal, send))

    def _while_valid(self, bearer_token: str | None, principal: Principal, send: Send) -> Send:
        """Send as long as the token is valid: a stream that is open ends with the token."""

        ended = False

        async def checked(message: Message) -> None:
            nonlocal ended
            if ended:
                return
            if message.get("more_body") and self._tokens.find(bearer_token) != principal:
                ended = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return checked


def in_url(host: str) -> str:
    """The host as a URL names it."""
    return f"[{host}]" if ":" in host else host


def _has_port(name: str) -> bool:
    return name.rpartition("]")[2].rpartition(":")[2].isdigit() and ":" in name.rpartition("]")[2]


def _bearer(header: str | None) -> str | None:
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _refusal(status: int, error: str, text: str) -> JSONResponse:
    headers = {"www-authenticate": 'Bearer realm="toprope"'} if status == 401 else None
    return JSONResponse({"error": error, "error_description": text}, status, headers)
