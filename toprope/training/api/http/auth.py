"""Who may speak to a component over HTTP, and who heard its answer.

`Gate` lets in whoever holds the run's secret, as `Authorization: Bearer <secret>` or as the first part of the path, so
that programs which know nothing of secrets can carry it in their base URL; and only under a loopback name, so that a
web page cannot reach a run by rebinding a name of its own to this machine. `watched` tells a handler that its client
went away before it had read the whole answer: the kernel then resets the connection, which HTTP servers do not pass on.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from toprope.training.api.http.errors import Refused

__all__ = ["LOOPBACK", "Gate", "on_undelivered", "watched"]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_UNDELIVERED = "toprope.undelivered"
_LOST = "toprope.lost"


class Gate:
    """ASGI middleware: checks the Host header and the run's secret.

    Args:
        app: What it guards.
        secret: The run's secret.
        hosts: Names under which it may be addressed, any port.
        open_paths: What needs no secret.
    """

    def __init__(
        self, app: ASGIApp, secret: str, *, hosts: Iterable[str] = LOOPBACK, open_paths: Iterable[str] = ("/",)
    ) -> None:
        if not secret:
            raise ValueError("a secret cannot be empty")
        self._app = app
        self._secret = secret.encode()
        self._bearer = b"bearer " + self._secret
        self._hosts = frozenset(host.encode() for host in hosts)
        self._open = frozenset(open_paths)

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
        if (bare if colon and port.isdigit() else host).lower() not in self._hosts:
            names = ", ".join(sorted(name.decode() for name in self._hosts))
            await _refuse(send, Refused("unknown_host", f"The Host header must be one of {names}.", status=421))
            return
        known = hmac.compare_digest(authorization[:7].lower() + authorization[7:], self._bearer)
        first, slash, rest = scope["path"][1:].partition("/")
        if hmac.compare_digest(first.encode("utf-8", "replace"), self._secret):
            known = True
            # In place: the connection's watcher looks at this very scope.
            scope["path"] = "/" + rest
            scope["raw_path"] = scope["path"].encode()
        if not known and scope["path"] not in self._open:
            message = "The run's secret is missing or wrong: send it as 'Authorization: Bearer <secret>'."
            await _refuse(send, Refused("unauthorized", message, status=401))
            return
        await self._app(scope, receive, send)


async def _refuse(send: Send, refusal: Refused) -> None:
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def on_undelivered(scope: Scope, callback: Callable[[], None]) -> None:
    """Has `callback` called if the client of this request goes away before it has read the whole answer. Needs a
    server whose protocol is `watched`; under others it is never called."""
    if _LOST in scope:
        callback()
    else:
        scope[_UNDELIVERED] = callback


def watched(protocol: type[Any]) -> type[Any]:
    """A uvicorn HTTP protocol that carries out `on_undelivered`.

    A connection that ends with an error (reset: the peer closed it with bytes unread, or was killed) or before its
    answer was written did not deliver that answer. One that ends in order after it did, as far as can be known.
    """

    class Watched(protocol):  # type: ignore[misc]
        def connection_lost(self, exc: Exception | None) -> None:
            cycle = self.cycle
            super().connection_lost(exc)
            if cycle is not None and (exc is not None or not cycle.response_complete):
                cycle.scope[_LOST] = True
                callback = cycle.scope.pop(_UNDELIVERED, None)
                if callback is not None:
                    callback()

    return Watched
