"""Serve the real HTTP server to the conformance suite, which cannot send a header: a wrapper adds the token.

The token is made, checked and compared as always; the server cannot run without one. Prints the URL.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from toprope_server.http.app import PATH, build_app
from toprope_server.http.principals import Tokens
from toprope_server.http.serving import uvicorn_config

from toprope.settings.owner import HttpSettings


class AddsToken:
    """Add the owner's token to each request to `app`."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._header = (b"authorization", f"Bearer {token}".encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [*scope["headers"], self._header]}
        await self._app(scope, receive, send)


def main(configuration: Path) -> None:
    """Serve on a free port of 127.0.0.1 until killed."""
    tokens = Tokens(configuration)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    app = AddsToken(build_app(tokens, HttpSettings(), port=port), tokens.owners.ensure())
    print(f"http://127.0.0.1:{port}{PATH}", flush=True)
    uvicorn.Server(uvicorn_config(app)).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
