"""Tools to follow and find runs."""

from __future__ import annotations

from typing import Annotated, Literal

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import runs as answers

from toprope_server.tool_specs.base import READS, NamesOrNone, ToolGroup, client_of, result_of, workshop_of

status_tools = ToolGroup()


@status_tools.tool("Check or await runs", READS, toolset="run", on_failure="check_status() lists the open runs.")
async def check_status(
    ctx: Context,
    run_ids: Annotated[
        NamesOrNone,
        Field(description="Ids of one or more runs (at most 20); omit for the cursor's, or to see the open ones."),
    ] = None,
    wait_s: Annotated[
        float | None,
        Field(
            ge=0,
            le=3600,
            description="Wait up to this many seconds for news; omit to answer at once. A wait longer than your "
            "client allows (45 if unknown) is cut, and the answer says so.",
        ),
    ] = None,
    until: Annotated[
        NamesOrNone,
        Field(
            description="What ends the wait: 'end', 'evaluation', 'finding', 'stall', 'step 200', or a state such "
            "as 'training'; several are alternatives, for any of the runs; 'all ended' waits for the last one. "
            "Omit for any news."
        ),
    ] = None,
    cursor: Annotated[
        str | None,
        Field(description="cursor of your last answer, to get every event since, even if others asked meanwhile."),
    ] = None,
) -> Annotated[CallToolResult, answers.StatusAnswer]:
    """Reports the state of live runs, or waits for news of any: state, step, reward, speed, ETA, new events.

    Use it with wait_s and the last answer's cursor instead of calling often. Fresh numbers of a run come at most
    once per interval (2 % of its expected length, 30 s to 30 min); within it one line repeats the last ones with
    their age. Changes of state, evaluations, findings, stalls and the end always come through and end a wait; met
    says which run met which condition of until. Sends progress while waiting. Changes nothing. For final figures call
    get_results, for all runs list_runs.
    """
    from toprope_tools.status import status

    return result_of(
        await status.check_status(
            workshop_of(ctx),
            run_ids=run_ids,
            wait_s=wait_s,
            until=until,
            cursor=cursor,
            progress=ctx.report_progress,
            client=client_of(ctx),
        )
    )


@status_tools.tool("List runs", READS, toolset="read", on_failure="Call list_runs() for the first page.")
async def list_runs(
    ctx: Context,
    state: Annotated[
        Literal["any", "live", "ended"],
        Field(description="live: not ended yet; ended: completed, stopped, failed or lost."),
    ] = "any",
    query: Annotated[
        str | None, Field(description="Text that the run's id, environment, kind or state must contain.")
    ] = None,
    cursor: Annotated[str | None, Field(description="next_cursor of the previous page; omit for the first.")] = None,
) -> Annotated[CallToolResult, answers.Runs]:
    """Finds runs on this machine, newest first, whoever started them: id, kind, environment, state, one line.

    Use it to find a run_id again, for instance in a new conversation. Returns 20 a page, with next_cursor while
    there are more. Changes nothing. For a live run's numbers call check_status, for an ended one's get_results.
    """
    from toprope_tools.status import run_list

    return result_of(await run_list.list_runs(workshop_of(ctx), state=state, query=query, cursor=cursor))
