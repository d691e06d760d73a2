"""The bound on sessions of the older protocol, which a client opens and may never end.

The SDK ends a session that was idle for 30 minutes. Until then each takes 40 kB, so a client that opens one after the
other would fill the server's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcp.server.streamable_http import MCP_SESSION_ID_HEADER
from starlette.datastructures import Headers

from toprope_server.tool_specs.base import PRINCIPAL

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_SESSIONS = 200
"""Sessions of one token."""


class SessionLimit:
    """Pass requests to `app`; a session beyond a token's limit ends the session that the token used least recently.

    Args:
        app: The MCP application, behind `AccessRequired`.
        most: Sessions of one token.
    """

    def __init__(self, app: ASGIApp, most: int = MOST_SESSIONS) -> None:
        self._app, self._most = app, most
        self._sessions: dict[str, dict[str, None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sessions = self._sessions.setdefault(scope["state"][PRINCIPAL].name, {})

        async def noting(message: Message) -> None:
            # A refusal may name a session that the SDK opened for this request alone and has ended.
            if message["type"] == "http.response.start" and message["status"] < 400:
                session = Headers(raw=message["headers"]).get(MCP_SESSION_ID_HEADER)
                if session is not None:
                    sessions.pop(session, None)
                    if scope["method"] != "DELETE":
                        sessions[session] = None
            await send(message)

        await self._app(scope, receive, noting)
        while len(sessions) > self._most:
            least_recent = next(iter(sessions))
            del sessions[least_recent]
            headers = [(MCP_SESSION_ID_HEADER.encode(), least_recent.encode())]
            await self._app({**scope, "method": "DELETE", "headers": headers}, _no_body, _ignore)


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _ignore(message: Message) -> None:
    pass
