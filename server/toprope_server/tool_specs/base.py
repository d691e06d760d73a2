"""Shared by the tool definitions: how one is declared, common parameter types, and the result sent to the client."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, cast, get_args, get_type_hints

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent, ToolAnnotations
from pydantic import BaseModel, BeforeValidator, Field
from toprope_tools.answers.answer import sent
from toprope_tools.clients import Client

from toprope_server.mcp.arguments import strict

if TYPE_CHECKING:
    from toprope_tools.answers.answer import Answer
    from toprope_tools.openings import Caller
    from toprope_tools.workshop import Workshop

# Hints at MCP's defaults are left out, because every client pays for the list; read-only tools have the first and the
# last alone. https://modelcontextprotocol.io/specification/2025-11-25/schema#toolannotations
READS = {"read_only_hint": True, "open_world_hint": False}
ADDS = {"destructive_hint": False, "open_world_hint": False}
STARTS = {"destructive_hint": False}


def as_list(value: Any) -> Any:
    """Accept a single id as a list of one; leave JSON lists alone."""
    return [value] if isinstance(value, str) and value and not value.lstrip().startswith("[") else value


DraftId = Annotated[str, Field(description="The draft's id, such as draft-7f3k.")]
RunId = Annotated[str, Field(description="The run's id; list_runs finds it.")]
Cursor = Annotated[str | None, Field(description="next_cursor of the previous page.")]
Names = Annotated[list[str], BeforeValidator(as_list)]
NamesOrNone = Annotated[list[str] | None, BeforeValidator(as_list)]
Prompts = Annotated[list[str | list[dict[str, str]]], BeforeValidator(as_list)]
KnobsOrNone = Annotated[
    dict[str, Any] | None, Field(description='The environment\'s own settings: {"path": "my.jsonl"}.')
]
Filters = Annotated[
    dict[str, Any] | None,
    Field(description="Any of success, min_reward, max_reward, task, environment, min_version, per_task (best n)."),
]

PRINCIPAL = "toprope.principal"
"""The key of a request's principal in the state of its scope."""

ToolFunction = Callable[..., Awaitable[CallToolResult]]
Toolset = Literal["plan", "run", "read", "hermes"]
F = TypeVar("F", bound=ToolFunction)


@dataclass(frozen=True)
class ToolSpec:
    """One tool: its function and all that is declared beside it.

    Attributes:
        function: Its name, parameters and docstring are what clients see.
        title: For people, in a client's menus.
        hints: MCP annotations that differ from MCP's defaults.
        toolset: Offered by servers started with `--tools plan` or `--tools run`; tools that only read are offered by
            `--tools read` in any case, and those of hermes by `--tools hermes` alone.
        on_failure: The next step to suggest if a failure suggests none itself.
    """

    function: ToolFunction
    title: str
    hints: dict[str, bool]
    toolset: Toolset
    on_failure: str
    meta: dict[str, Any] | None = None
    """Sent with the tool; an app's tools name its page there."""

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.function.__name__

    @property
    def reads_only(self) -> bool:
        """True if it changes nothing."""
        return self.hints.get("read_only_hint", False)

    @property
    def for_pages(self) -> bool:
        """True if it belongs to a page, and only clients that show pages are listed it."""
        return bool(self.meta)

    @property
    def polled(self) -> bool:
        """True if a page alone calls it, every few seconds."""
        return self.for_pages and "model" not in (self.meta or {})["ui"]["visibility"]

    @property
    def structure(self) -> type[BaseModel]:
        """The structure of its answers. Clients are not sent its schema, which costs them more than it tells."""
        returned = get_type_hints(self.function, include_extras=True)["return"]
        return cast(type[BaseModel], get_args(returned)[1])

    def build(self) -> Tool:
        """The SDK's tool, with a strict schema of its parameters and none of its answers."""
        return strict(
            Tool.from_function(
                self.function,
                title=self.title,
                description=inspect.cleandoc(self.function.__doc__ or ""),
                annotations=ToolAnnotations(**self.hints),
                structured_output=False,
                meta=self.meta,
            )
        )


class ToolGroup(list[ToolSpec]):
    """The tools of one module, in the order in which clients list them."""

    def tool(
        self,
        title: str,
        hints: dict[str, bool],
        *,
        toolset: Toolset,
        on_failure: str,
        meta: dict[str, Any] | None = None,
    ) -> Callable[[F], F]:
        """Decorator: add a function to this group. See `ToolSpec`."""

        def add(function: F) -> F:
            self.append(ToolSpec(function, title, hints, toolset, on_failure, meta))
            return function

        return add


class _WorkshopServer(Protocol):
    @property
    def workshop(self) -> Workshop: ...

    def offers(self, tool: str, principal: Any) -> bool: ...


def workshop_of(ctx: Context) -> Workshop:
    """The server's workshop, opened at the first call."""
    return cast(_WorkshopServer, ctx.mcp_server).workshop


def client_of(ctx: Context) -> Client:
    """The calling client, by the name in its handshake or (2026-07-28) in this request, which may omit it."""
    params = ctx.session.client_params
    return Client(params.client_info.name if params is not None else "", ctx.headers is not None)


def name_of(ctx: Context) -> str:
    """The caller's token and name, which tell clients of one server apart."""
    return f"{getattr(_principal_of(ctx), 'name', '')}/{client_of(ctx).name}"


def may_call(ctx: Context, tool: str) -> bool:
    """True if the caller is offered another tool, too."""
    return cast(_WorkshopServer, ctx.mcp_server).offers(tool, _principal_of(ctx))


def _principal_of(ctx: Context) -> Any:
    """The Principal of a token, which modules of tools do not know; None without tokens."""
    return getattr(ctx.request_context.request, "scope", {}).get("state", {}).get(PRINCIPAL)


def caller_of(ctx: Context) -> Caller:
    """The calling client, with its way to hear of progress."""
    from toprope_tools.openings import Caller

    return Caller(client_of(ctx), ctx.report_progress)


def result_of(answer: Answer) -> CallToolResult:
    """A tool's answer as an MCP result: text, structured content, and the picture if there is one."""
    content: list[ContentBlock] = [TextContent(type="text", text=answer.text)]
    if answer.picture is not None:
        data = base64.b64encode(answer.picture).decode()
        content.append(ImageContent(type="image", data=data, mime_type="image/png"))
    return CallToolResult(content=content, structured_content=sent(answer.data))
