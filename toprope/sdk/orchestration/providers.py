"""Search providers on the web, by key. Each is a function from query and number to pairs of title and text.

The key comes from a variable of the owner's settings, never from a configuration.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from toprope.sdk.errors import InvalidRequest

__all__ = ["KEYS", "provider"]

KEYS = {"brave": "BRAVE_API_KEY", "tavily": "TAVILY_API_KEY"}
"""The variable with each provider's key."""

_URLS = {"brave": "https://api.search.brave.com/res/v1/web/search", "tavily": "https://api.tavily.com/search"}
_TIMEOUT_S = 15.0
_LONGEST = 4 << 20


def provider(name: str, url: str = "") -> Callable[[str, int], list[tuple[str, str]]]:
    """The search of a provider.

    Args:
        name: `brave` (api.search.brave.com) or `tavily` (api.tavily.com).
        url: Another address that speaks its dialect: a proxy.

    Raises:
        InvalidRequest: There is no such provider, or its key is not set.
    """
    if name not in KEYS:
        raise InvalidRequest(f"There is no search provider {name!r}; there are: {', '.join(KEYS)}.")
    key = os.environ.get(KEYS[name], "")
    if not key:
        raise InvalidRequest(f"{name} needs {KEYS[name]} in the owner's settings, variables of environment.")
    address = url or _URLS[name]

    def search(query: str, most: int) -> list[tuple[str, str]]:
        if name == "brave":
            asked = urllib.parse.urlencode({"q": query[:400], "count": most})
            answer = _fetch(urllib.request.Request(f"{address}?{asked}", headers={"X-Subscription-Token": key}))
            rows = (answer.get("web") or {}).get("results") or []
            return [(str(row.get("title", "")), str(row.get("description", ""))) for row in rows[:most]]
        body = json.dumps({"query": query[:400], "max_results": most}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        answer = _fetch(urllib.request.Request(address, data=body, headers=headers))
        return [
            (str(row.get("title", "")), str(row.get("content", ""))) for row in (answer.get("results") or [])[:most]
        ]

    return search


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirect could carry the key elsewhere: it is a refusal."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _fetch(request: urllib.request.Request) -> dict[str, Any]:
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read(_LONGEST))
    except urllib.error.HTTPError as error:
        error.close()
        raise InvalidRequest(f"The search provider answered {error.code}.") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"The search provider could not be asked: {getattr(error, 'reason', error)}.") from None
    return answer if isinstance(answer, dict) else {}
