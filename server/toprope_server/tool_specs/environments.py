"""Tools to find, examine and install environments."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import planning as answers

from toprope_server.tool_specs.base import READS, STARTS, ToolGroup, client_of, result_of, workshop_of

environment_tools = ToolGroup()

_LISTED = "list_environments lists the environments."


@environment_tools.tool(
    "List environments", READS, toolset="plan", on_failure="Call list_environments() for the first page."
)
async def list_environments(
    ctx: Context,
    query: Annotated[
        str | None, Field(description="Words that name or summary must contain, e.g. 'arithmetic'; omit for all.")
    ] = None,
    cursor: Annotated[str | None, Field(description="next_cursor of the previous page; omit for the first.")] = None,
) -> Annotated[CallToolResult, answers.Environments]:
    """Finds environments to train on, from every source, without loading any of them.

    The first call of an experiment. Returns 20 a page: name, one-line summary and state (ready, or why not), with
    next_cursor while there are more. Changes nothing. For the settings and an example of one, call
    describe_environment with its name.
    """
    from toprope_tools.planning import environments

    return result_of(await environments.list_environments(workshop_of(ctx), query=query, cursor=cursor))


@environment_tools.tool(
    "Describe an environment",
    READS,
    toolset="plan",
    on_failure=_LISTED,
)
async def describe_environment(
    ctx: Context,
    name: Annotated[str, Field(description="The environment's name exactly as list_environments gives it.")],
    knobs: Annotated[
        dict[str, Any] | None,
        Field(description='Its own settings to load it with, e.g. {"path": "my.jsonl"}; omit for the defaults.'),
    ] = None,
) -> Annotated[CallToolResult, answers.Description]:
    """Loads one environment in its own process and describes it.

    Use it before select_environment, to learn whether the environment works and what can be set. Returns its knobs
    (type, default, bounds), an example task, reward parts with their range, sizes of the splits, and presets.
    Takes up to a minute for a slow environment; if it cannot load, the error says why. Keeps nothing.
    """
    from toprope_tools.planning import environments

    return result_of(await environments.describe_environment(workshop_of(ctx), name=name, knobs=knobs))


@environment_tools.tool("Check an environment", READS, toolset="plan", on_failure=_LISTED)
async def check_environment(
    ctx: Context,
    name: Annotated[str, Field(description="An environment's name, or a draft_id to check with its settings.")],
    full: Annotated[bool, Field(description="true: check more tasks, and memory; 45 s.")] = False,
) -> Annotated[CallToolResult, answers.CheckAnswer]:
    """Checks that an environment can teach: scores right, empty, junk and nearly right answers, compares splits and
    processes.

    Use it before the first training on an environment. Returns findings and what to do: rewarded junk, failing
    references, leaks, chance, slowness. Changes nothing.
    """
    from toprope_tools.planning import environment_check

    return result_of(await environment_check.check_environment(workshop_of(ctx), name=name, full=full))


@environment_tools.tool(
    "Install an environment", STARTS, toolset="plan", on_failure="list_environments names what needs install."
)
async def add_environment(
    ctx: Context,
    what: Annotated[str, Field(description="An ecosystem that needs install, or a requirement: 'textarena'.")],
) -> Annotated[CallToolResult, answers.Installed]:
    """Installs an ecosystem or package of environments into an interpreter of its own.

    For entries of list_environments that need it. May take minutes: repeat the call with the same argument to keep
    waiting. A failure leaves nothing behind and names the requirement. Next: list_environments.
    """
    from toprope_tools.planning import installation

    return result_of(
        await installation.add_environment(
            workshop_of(ctx), what=what, progress=ctx.report_progress, client=client_of(ctx)
        )
    )
