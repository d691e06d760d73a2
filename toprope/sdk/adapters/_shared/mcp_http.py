"""Tools of an MCP server over HTTP, with headers of their own for each rollout, and the standard library only.

`toprope.sdk.orchestration.mcp_tools` holds one session for all rollouts; a server that knows a rollout by a header
needs one for each. https://modelcontextprotocol.io/specification/2025-06-18/basic/transports
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toprope.sdk.adapters._shared.json_http import Answer, JsonServer
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest

__all__ = ["McpSession"]

_VERSION = "2025-06-18"
_MOST_PAGES = 50


class McpSession:
    """A session with an MCP server.

    Args:
        server: The server.
        path: Path of its MCP endpoint.
        headers: Headers of every request.

    Raises:
        EnvironmentMistake: The server refuses the session.
    """

    def __init__(self, server: JsonServer, path: str, headers: Mapping[str, str]) -> None:
        self._server, self._path, self._number = server, path, 0
        self._headers = {**headers, "Accept": "application/json, text/event-stream"}
        client = {"name": "toprope", "version": "1"}
        self._ask("initialize", {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": client})
        self._headers["MCP-Protocol-Version"] = _VERSION
        self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools: name, description, inputSchema."""
        listed: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = self._ask("tools/list", cursor)
            listed += [dict(tool) for tool in page.get("tools") or () if isinstance(tool, Mapping) and tool.get("name")]
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return listed

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return the text of its result.

        Raises:
            InvalidRequest: The tool failed; the text says why.
        """
        result = self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        parts = [part for part in result.get("content") or () if isinstance(part, Mapping)]
        text = "\n".join(str(part["text"]) for part in parts if part.get("text"))
        if not text and result.get("structuredContent") is not None:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        if result.get("isError"):
            raise InvalidRequest(text or f"{name} failed.")
        return text or "(no text)"

    def _ask(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        request = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": dict(parameters)}
        answer = self._post(request)
        response = _response_of(answer, method)
        if isinstance(error := response.get("error"), Mapping):
            raise InvalidRequest(f"{method}: {error.get('message') or error}")
        result = response.get("result")
        return dict(result) if isinstance(result, Mapping) else {}

    def _post(self, body: Mapping[str, Any]) -> Answer:
        answer = self._server.post(self._path, body, headers=self._headers)
        if session := answer.headers.get("mcp-session-id"):
            self._headers["Mcp-Session-Id"] = session
        return answer


def _response_of(answer: Answer, method: str) -> dict[str, Any]:
    """Return the JSON-RPC response of an answer, which is JSON or a stream of events."""
    if "text/event-stream" not in answer.headers.get("content-type", "") or answer.status != 200:
        response = answer.value(f"MCP's {method}")
        return response if isinstance(response, dict) else {}
    for event in answer.text.replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line.removeprefix("data:").strip() for line in event.split("\n") if line.startswith("data:"))
        try:
            response = json.loads(data) if data else None
        except ValueError:
            continue
        if isinstance(response, dict) and ("result" in response or "error" in response):
            return response
    raise EnvironmentMistake(f"MCP's {method} was answered without a result.")
