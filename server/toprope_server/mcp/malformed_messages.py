"""Answer lines that are not valid messages, so that no client waits until its time-out.

The SDK skips a line that its parser refuses: nested too deeply, half of a surrogate pair, a raw control character. Here
such a line gets a JSON-RPC error with the cause, under the id of the request if one can be found in the line.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError
from pydantic import ValidationError

_ID = re.compile(r'"id"\s*:\s*(?:(-?[0-9]{1,15})(?![0-9.eE])|"((?:[^"\\]){1,200})")')
_LONGEST_SEARCH = 10_000


class _Sender(Protocol):
    async def send(self, message: SessionMessage, /) -> None: ...


def refusal(error: Exception) -> JSONRPCError | None:
    """The answer to an unreadable line; None if it was not a request and nobody waits for an answer."""
    if not isinstance(error, ValidationError):
        return None
    found = error.errors(include_url=False, include_context=False)[0]
    if found["type"] != "json_invalid":
        return None  # valid JSON, but not a message: nothing in it can be called
    line = found["input"].decode(errors="replace") if isinstance(found["input"], bytes) else str(found["input"])
    sent = _ID.search(line, 0, _LONGEST_SEARCH)
    if sent is None:
        return None
    number = int(sent.group(1)) if sent.group(1) else sent.group(2)
    cause = found["msg"].removeprefix("Invalid JSON: ")
    return JSONRPCError(
        jsonrpc="2.0",
        id=number,
        error=ErrorData(
            code=PARSE_ERROR,
            message=f"The request could not be read: {cause}. Nothing was called and nothing was changed. Send plain "
            "JSON: at most about 190 levels deep, whole Unicode characters, numbers of up to 4,000 digits.",
        ),
    )


@asynccontextmanager
async def answering_unreadable(incoming: Any, outgoing: _Sender) -> AsyncIterator[Any]:
    """The messages of `incoming`, without unreadable ones, which are answered on `outgoing`."""
    write, read = anyio.create_memory_object_stream[Any](0)

    async def relay() -> None:
        async with write:
            async for message in incoming:
                if isinstance(message, Exception) and (answer := refusal(message)) is not None:
                    await outgoing.send(SessionMessage(answer))
                else:
                    await write.send(message)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(relay)
        async with read:
            yield read
        tasks.cancel_scope.cancel()
