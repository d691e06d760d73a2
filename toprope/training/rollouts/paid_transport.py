"""Pays every HTTP request to a priced model before it is sent.

The retries of the `openai` package are requests, too: each may be billed, so each is paid.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

from toprope.records.purse import Purse

if TYPE_CHECKING:
    from toprope.settings.endpoints import Endpoint

_ENTRY = "toprope_entry"
_OVERHEAD_TOKENS = 512
"""Tokens that an endpoint may add to a prompt: marks of messages, a preamble."""


def most_usd(endpoint: Endpoint, body: bytes) -> float | None:
    """Return the most that a request can cost by the owner's prices; None if that is unknown.

    A token stands for one byte at least, so a prompt has at most as many tokens as the request has bytes. Images and
    sounds are counted otherwise, and their cost is unknown.
    """
    if endpoint.prompt_usd is None or endpoint.completion_usd is None:
        return None
    request = json.loads(body)
    if any(_has_media(message) for message in request.get("messages") or ()):
        return None
    tokens = len(body) + _OVERHEAD_TOKENS
    return (tokens * endpoint.prompt_usd + int(request["max_tokens"]) * endpoint.completion_usd) / 1e6


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        not isinstance(part, dict) or part.get("type") != "text" for part in content
    )


def settle(purse: Purse | None, response: httpx.Response, usd: float | None) -> None:
    """Replace what was paid for a request by its cost; what was paid stands if the cost is unknown."""
    entry = response.extensions.get(_ENTRY)
    if purse is not None and entry is not None and usd is not None:
        purse.settle(entry, usd)


class PaidTransport(httpx.AsyncBaseTransport):
    """Sends requests that the purse has paid. A request that surely was not billed is refunded.

    Args:
        inner: Sends them.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, endpoint: Endpoint, purse: Purse) -> None:
        self._inner, self._endpoint, self._purse = inner, endpoint, purse

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises: toprope.records.purse.LimitReached: Nothing was sent."""
        entry = self._purse.reserve(most_usd(self._endpoint, await request.aread()))
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol):
            self._purse.settle(entry, 0.0)
            raise
        if response.status_code >= 300:
            self._purse.settle(entry, 0.0)
        else:
            response.extensions[_ENTRY] = entry
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()
