"""The dashboard's door: a key that works once, a token after that, and no request from another page or name.

The key is in the fragment of the address, which browsers send to no server and keep out of referrers; the page
exchanges it for a token and keeps that in the tab's own storage. A cookie would be sent to every port of this machine
(RFC 6265, 8.5). Every program here can reach the port, and every web page can send requests to it: Host, Origin and
Sec-Fetch-Site tell the page's own requests from theirs. A key with which a browser is started can be read by every user
of this machine, in the list of processes: it is taken from the owner's and root's programs alone.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from toprope.bounded_http import admit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
ENTER = "/api/enter"
_API = "/api/"
_LONGEST_BODY = 1 << 16
_MOST_KEYS, _MOST_TOKENS = 16, 64
_ESTABLISHED = "01"


class Keys:
    """Keys that work once, and the tokens that they were exchanged for. Kept in memory: both end with the process."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, int | None] = OrderedDict()
        self._tokens: OrderedDict[str, None] = OrderedDict()

    def make(self, user: int | None = None) -> str:
        """A fresh key; of many unused ones the oldest is dropped.

        Args:
            user: The user whose programs may use it, beside root's; None: everybody's.
        """
        key = secrets.token_urlsafe(32)
        self._keys[key] = user
        if len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)
        return key

    def exchange(self, key: str, user: int | None = None) -> str | None:
        """The token for a key, which is used up; None for any other text, or if it is another user's key.

        Args:
            user: The user whose program asks; None: not known.
        """
        known_key = next(
            (candidate for candidate in self._keys if hmac.compare_digest(candidate.encode(), key.encode())), None
        )
        if known_key is None or (user and self._keys[known_key] not in (None, user)):
            return None
        del self._keys[known_key]
        token = secrets.token_urlsafe(32)
        self._tokens[token] = None
        if len(self._tokens) > _MOST_TOKENS:
            self._tokens.popitem(last=False)
        return token

    def admits(self, token: str) -> bool:
        """True if the token was given out."""
        return any([hmac.compare_digest(known_token.encode(), token.encode()) for known_token in self._tokens])


class Door:
    """Pass the page's own requests to `app`, and answer others with 401, 403, 413, 415 or 421.

    Args:
        port: The port of all accepted values of Host; None accepts the names without a port, for tests in one process.
    """

    def __init__(self, app: ASGIApp, keys: Keys, port: int | None) -> None:
        self._app, self._keys = app, keys
        suffix = "" if port is None else f":{port}"
        self._hosts = {f"{name}{suffix}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, code, text = refusal
            headed = {"www-authenticate": 'Bearer realm="toprope"'} if status == 401 else None
            answer = JSONResponse({"error": {"code": code, "message": text, "hint": ""}}, status, headed)
            await answer(scope, receive, guarded)
            return
        if _needs_token(scope["path"]):
            admit(scope)
        await self._app(scope, receive, guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        """The status, code and text of a refusal; None for a request that may pass."""
        path, method = scope["path"], scope["method"]
        host = headers.get("host", "").lower()
        if host not in self._hosts:
            return 421, "unknown_host", "Host must be a name of this machine with the dashboard's port."
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host}":
            return 403, "unknown_origin", "Pages of other origins may not call."
        site = headers.get("sec-fetch-site", "none" if not path.startswith(_API) else "same-origin")
        if site != "same-origin" and (path.startswith(_API) or site != "none"):
            return 403, "foreign_site", "Only the dashboard's own page may call, and only a person opens it."
        if method not in ("GET", "HEAD", "POST") or (method == "POST" and not path.startswith(_API)):
            return 405, "invalid", "There is nothing for this method here."
        if not path.startswith(_API):
            return None
        if method == "POST":
            if headers.get("x-toprope") != "1":
                return 403, "needs_header", "The header X-Toprope: 1 is missing."
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return 415, "needs_header", "The body must be application/json."
            length = headers.get("content-length", "")
            if not length.isdecimal() or int(length) > _LONGEST_BODY:
                return 413, "invalid", f"The body must have at most {_LONGEST_BODY} bytes, and say how many."
        if not _needs_token(path):
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self._keys.admits(token.strip()):
            text = "This page's key is not known any more: run toprope dashboard again."
            return 401, "no_token", text
        return None


def _needs_token(path: str) -> bool:
    return path.startswith(_API) and path != ENTER


def user_of(scope: Scope) -> int | None:
    """The user whose program is at the other end of a loopback connection; None where the kernel does not tell, and
    nobody (-1) if that end was closed: the kernel shows root as its owner then."""
    try:
        ends = [
            f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
            for host, port in (scope["client"], scope["server"])
        ]
        lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    except (OSError, TypeError, KeyError):
        return None
    for fields in map(str.split, lines):
        if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]) and fields[3] == _ESTABLISHED:
            return int(fields[7])
    return -1
