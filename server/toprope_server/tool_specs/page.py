"""The tools of the page in a client: `show` for the model and the page, `look` for the page alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from anyio import to_thread
from mcp.server.mcpserver import Context
from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel, Field

from toprope_server.tool_specs.base import READS, ToolGroup, may_call, workshop_of

if TYPE_CHECKING:
    from toprope_tools.page.source import PageSource

PAGE_URI = "ui://toprope/page"
FIRST_LOOK = "toprope/page"
"""Key of a result's `_meta` with what the page shows first: hosts pass it on to the page, and not to the model."""
_SHOW = {"ui": {"resourceUri": PAGE_URI, "visibility": ["model", "app"]}}
_LOOK = {"ui": {"resourceUri": PAGE_URI, "visibility": ["app"]}}

page_tools = ToolGroup()


class Shown(BaseModel):
    """The view that the page shows."""

    screen: Literal["now", "run"]
    run_id: str | None = None


class Looked(BaseModel):
    """An answer to the page."""

    version: int
    what: str
    at: float


@page_tools.tool("Show the page", READS, toolset="read", on_failure="list_runs lists the runs.", meta=_SHOW)
async def show(
    ctx: Context,
    run_id: Annotated[str | None, Field(max_length=64, description="A run to open; without, all that goes on.")] = None,
) -> Annotated[CallToolResult, Shown]:
    """Opens a page for the person: live runs, or one run with its curves, findings and rollouts.

    The page follows runs by itself; check_status tells you the same numbers. The owner has `toprope dashboard`.
    """
    from toprope_tools.page import now, shapes
    from toprope_tools.page.run import text_of

    question = {"what": "now"} if run_id is None else {"what": "run", "run_id": run_id}
    answer = await to_thread.run_sync(_source(ctx).ask, question)
    text = ""
    if isinstance(answer, shapes.Run) and answer.live is not None:
        text = text_of(answer.live)
    elif isinstance(answer, shapes.Now):
        text = now.text_of(answer)
    screen = Shown(screen="now" if run_id is None else "run", run_id=run_id)
    return CallToolResult(
        content=[TextContent(type="text", text=f"{text}\nThe owner's view: toprope dashboard.")],
        structured_content=screen.model_dump(),
        _meta={FIRST_LOOK: _plain(answer)},
    )


@page_tools.tool("Look", READS, toolset="read", on_failure="Ask without after.", meta=_LOOK)
async def look(
    ctx: Context,
    what: Annotated[
        Literal["now", "runs", "run", "rollouts", "group", "compare", "sweep"], Field(description="The question.")
    ],
    run_id: Annotated[str | None, Field(max_length=64, description="The run.")] = None,
    after: Annotated[str | None, Field(max_length=64, description="The cursor of the last answer.")] = None,
    cursor: Annotated[str | None, Field(max_length=120, description="The next page of a list.")] = None,
    state: Annotated[str | None, Field(max_length=10, description="any, live or ended.")] = None,
    query: Annotated[str | None, Field(max_length=200, description="Words of a run.")] = None,
    order: Annotated[str | None, Field(max_length=20, description="Order of rollouts.")] = None,
    task: Annotated[str | None, Field(max_length=200, description="Part of a task's id.")] = None,
    part: Annotated[str | None, Field(max_length=120, description="A part of the reward.")] = None,
    failed: Annotated[bool, Field(description="Only failed rollouts.")] = False,
    group: Annotated[int | None, Field(ge=0, description="Number of a group.")] = None,
    a: Annotated[list[str] | None, Field(max_length=32, description="Runs of side a.")] = None,
    b: Annotated[list[str] | None, Field(max_length=32, description="Runs of side b.")] = None,
) -> Annotated[CallToolResult, Looked]:
    """Answers the page, which polls it while a run is live. Not for models: check_status and browse_rollouts are."""
    question: dict[str, Any] = {
        "what": what,
        "run_id": run_id,
        "after": after,
        "cursor": cursor,
        "state": state,
        "query": query,
        "order": order,
        "task": task,
        "part": part,
        "failed": failed,
        "group": group,
        "a": a,
        "b": b,
    }
    answer = await to_thread.run_sync(_source(ctx).ask, question)
    return CallToolResult(content=[TextContent(type="text", text=what)], structured_content=_plain(answer))


def _source(ctx: Context) -> PageSource:
    """The source of this server's pages, made at the first call. Stopping is all that they can do."""
    from toprope_tools.page.source import source_of

    return source_of(workshop_of(ctx), read_only=not may_call(ctx, "stop_training"))


def _plain(answer: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(msgspec.json.encode(answer))
    return plain
