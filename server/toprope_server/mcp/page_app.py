"""The page inside clients: an MCP App (extension `io.modelcontextprotocol/ui`, 2026-01-26).

Clients that declared the extension are listed `show`, `look` and the page's resource; for others there are the tools
that answer in text. The SDK's own `Apps` lists app-only tools to every client, and reads the page when a server starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyio import Path as AsyncPath
from mcp.server.apps import APP_MIME_TYPE, EXTENSION_ID
from mcp.server.extension import Extension
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.types import Resource

from toprope_server.tool_specs.page import PAGE_URI

_FILE = "app.html"
_META = {"ui": {"prefersBorder": False}}


class PageExtension(Extension):
    """Says that this server has apps; their tools are among the server's own."""

    identifier = EXTENSION_ID

    def settings(self) -> dict[str, Any]:
        return {"mimeTypes": [APP_MIME_TYPE]}


def is_built(bundle: Path) -> bool:
    """True if the page was built into this folder."""
    return (bundle / _FILE).is_file()


def page_resource() -> Resource:
    """The page as clients list it."""
    return Resource(
        uri=PAGE_URI,
        name="page",
        title="Toprope",
        description="The page that the tool show opens.",
        mime_type=APP_MIME_TYPE,
        _meta=_META,
    )


async def read_page(bundle: Path) -> list[ReadResourceContents]:
    """The page's one file.

    Raises:
        ResourceNotFoundError: It was removed since the server started.
    """
    try:
        text = await AsyncPath(bundle / _FILE).read_text(encoding="utf-8")
    except OSError:
        raise ResourceNotFoundError(f"{PAGE_URI} is not there any more: build the page again (make page).") from None
    return [ReadResourceContents(content=text, mime_type=APP_MIME_TYPE, meta=_META)]


def is_of_a_page(listed: Mapping[str, Any]) -> bool:
    """True if a listed tool or resource belongs to the page."""
    if str(listed.get("uri", "")).startswith("ui://"):
        return True
    return "resourceUri" in ((listed.get("_meta") or {}).get("ui") or {})
