"""The real HTTP door for the conformance suite, which cannot send a header: something before it adds the token.

The token is made, checked and compared as always; there is no way to serve without one. Prints the URL.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from toprope_server.http import app as http_door
from toprope_server.http.token import TokenFile


class AddsToken:
    """Puts the owner's token on each request to `app`."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._header = (b"authorization", f"Bearer {token}".encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [*scope["headers"], self._header]}
        await self._app(scope, receive, send)


def main(configuration: Path) -> None:
    """Serves on a free port of 127.0.0.1 until it is ended."""
    token = TokenFile(configuration)
    app = AddsToken(http_door.build_app(token, http_door.HttpDoor()), token.ensure())
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}{http_door.PATH}", flush=True)
    uvicorn.Server(http_door.uvicorn_config(app)).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
