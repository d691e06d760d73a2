"""Access control of the API, and notice of answers that a client did not receive.

`AuthMiddleware` admits requests that carry the run's secret, either as `Authorization: Bearer <secret>` or as the first
part of the path. The second form lets programs that cannot set a header carry the secret in their base URL. The Host
header must be a loopback name: otherwise a web page could reach a run by rebinding a name of its own to this machine.
`track_delivery` makes a uvicorn protocol report a client that left before it had read the whole answer; the kernel
resets such a connection, and ASGI servers do not pass that on.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from toprope.bounded_http import admit
from toprope.training.api.http.errors import Refused

_LOOPBACK = (b"127.0.0.1", b"[::1]", b"localhost")
_CALLBACK = "toprope.on_undelivered"
_LOST = "toprope.connection_lost"


class AuthMiddleware:
    """ASGI middleware that checks the Host header and the run's secret, which GET / alone does not need."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        if not secret:
            raise ValueError("a secret cannot be empty")
        self._app = app
        self._secret = secret.encode()
        self._bearer = b"bearer " + self._secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        host = authorization = b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"authorization":
                authorization = value
        bare, colon, port = host.rpartition(b":")
        if (bare if colon and port.isdigit() else host).lower() not in _LOOPBACK:
            names = ", ".join(name.decode() for name in _LOOPBACK)
            refusal = Refused("unknown_host", f"The Host header must be one of {names}.", status=421)
            await _answer(refusal)(scope, receive, send)
            return
        authorized = hmac.compare_digest(authorization[:7].lower() + authorization[7:], self._bearer)
        first_segment, _, remainder = scope["path"][1:].partition("/")
        if hmac.compare_digest(first_segment.encode("utf-8", "replace"), self._secret):
            authorized = True
            # Change the scope in place: delivery tracking refers to this very object.
            scope["path"] = "/" + remainder
            scope["raw_path"] = scope["path"].encode()
        if not authorized and scope["path"] != "/":
            message = "The run's secret is missing or wrong: send it as 'Authorization: Bearer <secret>'."
            await _answer(Refused("unauthorized", message, status=401))(scope, receive, send)
            return
        if authorized:
            admit(scope)
        await self._app(scope, receive, send)


def _answer(refusal: Refused) -> Response:
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else None
    return Response(refusal.body(), refusal.status, headers, "application/json")


def on_undelivered(scope: Scope, callback: Callable[[], None]) -> None:
    """Call `callback` if the client leaves before it has read the whole answer to this request.

    Needs a server whose protocol went through `track_delivery`; other servers never call it.
    """
    if _LOST in scope:
        callback()
    else:
        scope[_CALLBACK] = callback


def track_delivery(protocol: type[Any]) -> type[Any]:
    """Extend a uvicorn HTTP protocol so that it carries out `on_undelivered`.

    An answer counts as undelivered if the connection ends with an error (a reset: the peer was killed, or closed it
    with bytes unread) or before the answer was written.
    """

    class DeliveryTracking(protocol):  # type: ignore[misc]
        def connection_lost(self, exc: Exception | None) -> None:
            cycle = self.cycle
            super().connection_lost(exc)
            if cycle is not None and (exc is not None or not cycle.response_complete):
                cycle.scope[_LOST] = True
                callback = cycle.scope.pop(_CALLBACK, None)
                if callback is not None:
                    callback()

    return DeliveryTracking
