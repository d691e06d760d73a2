"""Traces posted by agent frameworks, beside MCP on the HTTP server: `POST /trajectories/NAME`.

The body is an item, a list of items, {"items": [...]}, or JSON lines; an item is OpenAI-style ({"messages": [...],
"reward": 1.0}) or has state and action. Items wait in the data set's inbox until `build_dataset` reads `NAME@inbox`.
Requests without the owner's token do not get here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from toprope.errors import DiskFull, LockedField, TopropeError
from toprope_server.tool_specs.base import PRINCIPAL

if TYPE_CHECKING:
    from toprope.settings.owner import Home

CAPTURE_PATH = "/trajectories/{name}"


def capture_route(home: Home) -> Route:
    """The route to the data sets of a home."""

    async def post(request: Request) -> JSONResponse:
        from toprope.trajectories.datasets.trace_inbox import MOST_BYTES, items_of_body
        from toprope.workbench.data import inbox_of

        role = request.scope["state"][PRINCIPAL].role
        if not role.runs:
            return _refusal(403, "This token's role does not allow to store traces; nothing was stored.")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return _refusal(413, f"The body exceeds {MOST_BYTES} bytes; nothing was stored.")

        def take() -> int:
            return inbox_of(home, request.path_params["name"]).keep(items_of_body(bytes(body)))

        try:
            taken = await to_thread.run_sync(take)
        except TopropeError as error:
            status = 403 if isinstance(error, LockedField) else 507 if isinstance(error, DiskFull) else 422
            return _refusal(status, str(error))
        name = request.path_params["name"]
        return JSONResponse({"taken": taken, "waits_in": f"{name}@inbox"}, status_code=201)

    return Route(CAPTURE_PATH, post, methods=["POST"])


def _refusal(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status)
