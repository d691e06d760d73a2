"""Tools to find, examine and install environments."""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import planning as answers

from toprope_server.tool_specs.base import (
    ADDS,
    READS,
    STARTS,
    Cursor,
    KnobsOrNone,
    ToolGroup,
    caller_of,
    client_of,
    result_of,
    workshop_of,
)

environment_tools = ToolGroup()

_LISTED = "list_environments lists the environments."


@environment_tools.tool(
    "List environments", READS, toolset="plan", on_failure="Call list_environments() for the first page."
)
async def list_environments(
    ctx: Context,
    query: Annotated[str | None, Field(description="Words that name or summary contain, such as arithmetic.")] = None,
    cursor: Cursor = None,
) -> Annotated[CallToolResult, answers.Environments]:
    """Finds environments to train on, from every source, without loading any: name, summary, state; 20 a page.

    The first call of an experiment. Next: describe_environment.
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
    name: Annotated[str, Field(description="Its name as list_environments gives it.")],
    knobs: KnobsOrNone = None,
) -> Annotated[CallToolResult, answers.Description]:
    """Loads one environment in a process of its own and describes it: knobs with their bounds, example tasks, parts of
    the reward, sizes of the splits, presets.

    Use it before select_environment. If it cannot load, the error says why; if it still loads, repeat the call.
    """
    from toprope_tools.planning import environments

    return result_of(
        await environments.describe_environment(workshop_of(ctx), name=name, knobs=knobs, caller=caller_of(ctx))
    )


@environment_tools.tool("Check an environment", READS, toolset="plan", on_failure=_LISTED)
async def check_environment(
    ctx: Context,
    name: Annotated[str, Field(description="An environment's name, or a draft_id to check with its settings.")],
    knobs: KnobsOrNone = None,
    full: Annotated[bool, Field(description="Check more tasks, and memory; 45 s.")] = False,
) -> Annotated[CallToolResult, answers.CheckAnswer]:
    """Checks that an environment can teach: scores right, empty, junk and nearly right answers, compares splits and
    processes.

    Use it before the first training on an environment. Returns findings (rewarded junk, failing references, leaks,
    chance, slowness) and what to do.
    """
    from toprope_tools.planning import environment_check

    return result_of(
        await environment_check.check_environment(
            workshop_of(ctx), name=name, knobs=knobs, full=full, caller=caller_of(ctx)
        )
    )


@environment_tools.tool(
    "Save an environment",
    ADDS | {"idempotent_hint": True},
    toolset="plan",
    on_failure="The prompt write_an_environment has a template.",
)
async def save_environment(
    ctx: Context,
    name: Annotated[str, Field(max_length=64, description="Of the file, without .py: back-words.")],
    code: Annotated[str, Field(max_length=20_000, description="The file: a class of toprope.sdk.Environment.")],
) -> Annotated[CallToolResult, answers.SavedEnvironment]:
    """Saves an environment that you wrote into the owner's folder for such files; a version before is kept.

    The text is checked and not run; toprope://docs/environments is the guide. Next: check_environment.
    """
    from toprope_tools.planning import authoring

    return result_of(await authoring.save_environment(workshop_of(ctx), name=name, code=code))


@environment_tools.tool(
    "Install an environment", STARTS, toolset="plan", on_failure="list_environments names what needs install."
)
async def add_environment(
    ctx: Context,
    what: Annotated[str, Field(description="An ecosystem that needs install, or a requirement, such as textarena.")],
) -> Annotated[CallToolResult, answers.Installed]:
    """Installs an ecosystem or package of environments into an interpreter of its own.

    May take minutes: repeat the call to keep waiting. A failure leaves nothing behind. Next: list_environments.
    """
    from toprope_tools.planning import installation

    return result_of(
        await installation.add_environment(
            workshop_of(ctx), what=what, progress=ctx.report_progress, client=client_of(ctx)
        )
    )
