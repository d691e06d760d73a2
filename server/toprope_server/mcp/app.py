"""The MCP server: the surface behind the official SDK, with failures that a model can act on.

The SDK shows a model only "Error executing tool X" for whatever a tool raises. Here every failure becomes an answer:
what failed, why, whether anything changed, what to do next. What nobody foresaw gets an id, under which its traceback
stands in the server's log on standard error.

Nothing is read or made when a server starts: clients start disposable copies only to see the list of tools. One that
stays looks at the runs now and then (`caretaker`).
"""

from __future__ import annotations

import difflib
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, InputRequiredResult, TextContent

import toprope
from toprope.errors import ComponentFailed, TopropeError
from toprope.records.run.lines import NO_ROOM
from toprope_server.mcp.arguments import check
from toprope_server.mcp.auto_resume import look_after_runs
from toprope_server.mcp.prompts import complete, prompts_for
from toprope_server.mcp.resources import TEMPLATES, Resources
from toprope_server.mcp.roles import Role, owners_role
from toprope_server.mcp.tool_registry import INSTRUCTIONS, Surface

if TYPE_CHECKING:
    from mcp.server.lowlevel.helper_types import ReadResourceContents
    from mcp.types import Resource, ResourceTemplate
    from pydantic import AnyUrl
    from toprope_tools.workshop import Workshop

__all__ = ["TopropeServer", "create_server", "leave", "serve_stdio"]

logger = logging.getLogger("toprope.server")

_NEXT = {
    "list_environments": "Call list_environments() for the first page.",
    "describe_environment": "list_environments names the environments there are.",
    "add_environment": "list_environments names what needs install.",
    "select_environment": "list_environments names the environments there are.",
    "get_config": "select_environment makes a draft.",
    "edit_config": "get_config shows fields, types, bounds and locks.",
    "test_inference": "get_config shows the draft.",
    "start_training": "get_config shows the draft.",
    "start_sweep": "get_config shows the fields of the draft.",
    "stop_training": 'list_runs(state="live") names the live runs.',
    "resume_training": 'list_runs(state="ended") names the runs that ended.',
    "check_status": "check_status() names the open runs.",
    "list_runs": "Call list_runs() for the first page.",
    "get_results": "list_runs names the runs there are.",
    "compare_runs": "list_runs names the runs there are.",
    "read_logs": "list_runs names the runs there are.",
    "ask_checkpoint": "list_runs names the runs there are.",
    "undo_edit": "get_config lists the revisions of a draft.",
    "diff_config": "get_config reads a draft, list_runs names the runs.",
    "fork_config": "list_runs names the runs there are.",
    "reproduce_run": "list_runs names the runs there are.",
    "browse_rollouts": "list_runs names the runs there are.",
    "export_trajectories": "list_runs names the runs there are.",
    "build_dataset": "list_runs names the runs there are.",
    "note_experiment": "get_handoff lists the experiments.",
    "get_handoff": "list_runs names the runs there are.",
}
"""Where to go on after a failure that says nothing of it itself."""


class TopropeServer(MCPServer[Any]):
    """An MCP server whose failures are answers. See the module."""

    def __init__(self, surface: Surface, role: Role | None = None, **options: Any) -> None:
        self.surface, role = surface, role or Role()
        everything = surface.tools()
        tools = [tool for tool in everything if role.allows(tool)]
        self._by_name = {tool.name: tool for tool in tools}
        self._left_out = {tool.name for tool in everything} - self._by_name.keys()
        super().__init__(
            name="toprope",
            title="Toprope",
            description="Reinforcement learning of language models, planned by an agent, held by its owner.",
            instructions=role.says + INSTRUCTIONS,
            version=toprope.__version__,
            tools=tools,
            **options,
        )
        self._resources = Resources(surface)
        self._resources.serve(self._lowlevel_server)
        for prompt in prompts_for(self._by_name):
            self.add_prompt(prompt)
        self.completion()(lambda ref, argument, context: complete(surface, ref, argument, context))

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Calls a tool. Every failure comes back as an `is_error` result; only protocol errors are raised."""
        tool = self._by_name.get(name)
        if tool is None and name in self._left_out:
            return _failure(
                f"{name} is not offered here: the owner started this server with fewer tools. Nothing was changed.\n"
                f"There are: {', '.join(self._by_name)}."
            )
        if tool is None:
            near = difflib.get_close_matches(name[:80], self._by_name, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}? " if near else ""
            hint += f"There are: {', '.join(self._by_name)}."
            return _failure(f"There is no tool {name[:80]!r}. {hint}")
        reads = bool(tool.annotations and tool.annotations.read_only_hint)
        if problems := check(tool, arguments):
            hints = await self._open_ones(tool.parameters.get("required", []), arguments)
            text = f"{name} was not called:" + (
                f" {problems[0]}" if len(problems) == 1 else "".join(f"\n- {problem}" for problem in problems)
            )
            return _failure("\n".join([text, *hints, *([] if reads else ["Nothing was changed."])]))
        try:
            return await super().call_tool(name, arguments, context)
        except MCPError:
            raise
        except ToolError as wrapped:
            cause = wrapped.__cause__ or wrapped
            if isinstance(cause, TopropeError):
                hint = cause.hint or _NEXT[name]
                # A component that failed has left a run behind; its own message says in which state.
                changed = [] if reads or isinstance(cause, ComponentFailed) else ["Nothing was changed."]
                return _failure("\n".join([f"{name} failed: {cause.message}", hint, *changed]))
            return self._unforeseen(name, cause, reads)

    async def list_resources(self) -> list[Resource]:
        """Runs, the newest by name."""
        return await self._resources.listed()

    async def list_resource_templates(self) -> list[ResourceTemplate]:
        """What there is of every run."""
        return list(TEMPLATES)

    async def read_resource(
        self, uri: AnyUrl | str, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents]:
        """A resource's content. Raises: see `Resources.read`."""
        return await self._resources.read(str(uri))

    async def run_stdio_async(self) -> None:
        """Serves on standard input and output; lines that are no messages are answered, too."""
        from mcp.server.stdio import stdio_server

        from toprope_server.mcp.malformed_messages import answering_unreadable

        async with stdio_server() as (incoming, outgoing), answering_unreadable(incoming, outgoing) as readable:
            options = self._lowlevel_server.create_initialization_options()
            await self._lowlevel_server.run(readable, outgoing, options)

    def _unforeseen(self, name: str, cause: BaseException, reads: bool) -> CallToolResult:
        error_id = f"E-{secrets.token_hex(3)}"
        logger.error("%s: %s failed unexpectedly", error_id, name, exc_info=cause)
        state = (
            "Nothing was changed." if reads else "Whether anything changed is not known: list_runs and get_config tell."
        )
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            return _failure(
                f"{name} failed: there is no room on the disk ({cause}).\n`toprope prune` shows what old runs "
                f"hold; runs that are paused go on by themselves when there is room.\n{state}"
            )
        return _failure(
            f"{name} failed unexpectedly (error {error_id}, {type(cause).__name__}). This is a fault of Toprope, not "
            f"of your call; the details are in the server's log under that id.\n{state}\nTry once more; if it "
            "fails again, tell the owner the error id."
        )

    async def _open_ones(self, required: list[str], arguments: dict[str, Any]) -> list[str]:
        """For a call that lacks its handle: the drafts or runs there are. Handles are never guessed."""
        hints = []
        try:
            if "draft_id" in required and "draft_id" not in arguments:
                from toprope_tools.planning.config import open_drafts

                hints.append(await open_drafts(self.surface.workshop))
            if "run_id" in required and "run_id" not in arguments:
                from toprope_tools.status.status import open_runs

                hints.append(await open_runs(self.surface.workshop))
        except TopropeError as error:
            hints.append(str(error))
        return hints


def _failure(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def create_server(
    open_workshop: Callable[[], Workshop] | None = None, role: Role | None = None, **options: Any
) -> TopropeServer:
    """A server over a workshop that is opened at the first call that needs it.

    Args:
        open_workshop: Opens it; the owner's own home by default.
        role: Which tools it offers; all when None.
        options: Of MCPServer.
    """
    return TopropeServer(Surface(open_workshop or _owners_workshop), role, **options)


def _owners_workshop() -> Workshop:
    from toprope_tools.workshop import Workshop

    return Workshop.open()


@asynccontextmanager
async def _ending_on_signals(_: MCPServer[Any]) -> AsyncIterator[None]:
    """Ends the process at once on the signals that clients send.

    Some give a tenth of a second before they kill. There is nothing to clean up, by design: runs have keepers of their
    own, and the index holds nothing open between operations. A normal exit would wait for the thread that reads stdin.
    """

    async def watch() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
            async for _ in received:
                leave()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        tasks.start_soon(look_after_runs)
        yield
        tasks.cancel_scope.cancel()


def leave() -> None:
    """Ends the process at once, whatever its threads wait for. See `_ending_on_signals`."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def serve_stdio(role: Role | None = None) -> None:
    """Serves on standard input and output until the client closes them or sends a signal; does not return.

    Args:
        role: Which tools it offers, as far as the owner's settings allow.
    """
    allowed = (role or Role()).within(owners_role())
    create_server(role=allowed, lifespan=_ending_on_signals, log_level="WARNING").run("stdio")
    # A worker thread that still waits (for a stopping run, say) must not keep the process of a client that is gone.
    leave()
