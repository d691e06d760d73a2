"""What the parts of the surface share: how a tool reaches its work, and parameters that several tools take."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult, ImageContent, TextContent
from pydantic import BeforeValidator, Field
from toprope_tools.answers import base as answers
from toprope_tools.client_timeouts import Client

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = ["DraftId", "Names", "Part", "Prompts", "RunId", "RunIds", "client_of", "listed"]

DraftId = Annotated[str, Field(description="The draft's id, as select_environment gave it (draft-7f3k).")]
RunId = Annotated[str, Field(description="The run's id, as start_training, test_inference or list_runs gave it.")]


def listed(value: Any) -> Any:
    """A lone id counts as a list of one."""
    return [value] if isinstance(value, str) and value and not value.lstrip().startswith("[") else value


RunIds = Annotated[list[str] | None, BeforeValidator(listed)]
Names = Annotated[list[str] | None, BeforeValidator(listed)]
Prompts = Annotated[list[str | list[dict[str, str]]], BeforeValidator(listed)]


def client_of(ctx: Context) -> Client:
    """Who calls: the name of its handshake or, without handshakes (2026-07-28), of this very request, where it may be
    left out."""
    told = ctx.session.client_params
    return Client(told.client_info.name if told is not None else "", ctx.headers is not None)


class Part:
    """A part of the surface: its tools are the public methods, over a workshop that is opened at the first call."""

    def __init__(self, open_workshop: Callable[[], Workshop]) -> None:
        self._open = open_workshop
        self._workshop: Workshop | None = None

    @property
    def workshop(self) -> Workshop:
        """The one workshop of this server."""
        if self._workshop is None:
            self._workshop = self._open()
        return self._workshop

    async def _do(self, module: str, tool: str, **arguments: Any) -> CallToolResult:
        work: Callable[..., Awaitable[answers.Answer]] = getattr(import_module(f"toprope_tools.{module}"), tool)
        answer = await work(self.workshop, **arguments)
        content: list[TextContent | ImageContent] = [TextContent(type="text", text=answer.text)]
        if answer.picture is not None:
            data = base64.b64encode(answer.picture).decode()
            content.append(ImageContent(type="image", data=data, mime_type="image/png"))
        return CallToolResult(
            content=content,
            structured_content=answer.data.model_dump(mode="json", exclude_defaults=answer.brief),
        )
