"""The lower bound for the trajectory API's benchmark: `python -m benchmarks.trajectory_api.bare_api FOLDER PORT`.

POST reads the body and appends it to a file; GET sends the first 16 bodies that were stored, joined already. Nothing is
validated, separated or remembered: no real server can be cheaper with the same HTTP library.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

__all__ = ["main"]

_BATCH = 16


def main() -> int:
    """The program."""
    path, port = Path(sys.argv[1]) / "bodies", int(sys.argv[2])
    writer = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    stored: list[bytes] = []
    batch = b'{"batch":[]}'

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal batch
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if scope["method"] == "POST":
            body = b"".join(parts)
            os.write(writer, body)
            if len(stored) < _BATCH:
                stored.append(body)
                batch = b'{"batch":[' + b",".join(stored) + b"]}"
            answer = b'{"status":"received"}'
        else:
            answer = batch
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, lifespan="off")
    return 0


if __name__ == "__main__":
    sys.exit(main())
