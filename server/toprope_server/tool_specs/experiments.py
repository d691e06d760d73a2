"""Tools to keep notes of experiments and to hand work over."""

from __future__ import annotations

from typing import Annotated, Literal

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import results as answers

from toprope_server.tool_specs.base import ADDS, READS, NamesOrNone, ToolGroup, result_of, workshop_of

experiment_tools = ToolGroup()


@experiment_tools.tool("Note an experiment", ADDS, toolset="plan", on_failure="get_handoff lists the experiments.")
async def note_experiment(
    ctx: Context,
    hypothesis: Annotated[
        str | None, Field(max_length=2000, description="The change to try and why it should help.")
    ] = None,
    run_ids: Annotated[NamesOrNone, Field(description="Its runs or seed groups.")] = None,
    draft_id: Annotated[str | None, Field(description="The draft it is tried with.")] = None,
    experiment_id: Annotated[str | None, Field(description="Amends this one, such as exp-7f3k.")] = None,
    outcome: Annotated[str | None, Field(max_length=2000, description="The result, in words.")] = None,
    decision: Annotated[
        Literal["keep", "discard", "repeat", "undecided"] | None,
        Field(description="The consequence of the outcome."),
    ] = None,
    question: Annotated[str | None, Field(max_length=1000, description="A question that it leaves open.")] = None,
    goal: Annotated[str | None, Field(max_length=1000, description="The aim in this environment.")] = None,
) -> Annotated[CallToolResult, answers.ExperimentAnswer]:
    """Records an experiment: hypothesis, runs, outcome, decision; measured figures are added.

    Note it before its run and amend it after. Says when the last experiments moved accuracy less than noise.
    """
    from toprope_tools.experiments import ledger

    return result_of(
        await ledger.note_experiment(
            workshop_of(ctx),
            experiment_id=experiment_id,
            hypothesis=hypothesis,
            run_ids=run_ids,
            draft_id=draft_id,
            outcome=outcome,
            decision=decision,
            question=question,
            goal=goal,
        )
    )


@experiment_tools.tool("Get the handoff", READS, toolset="plan", on_failure="list_runs lists the runs.")
async def get_handoff(ctx: Context) -> Annotated[CallToolResult, answers.Handoff]:
    """Reports all that is needed to continue without earlier context: goal, live runs, what was learned, open
    questions, next calls. The first call of a new conversation about work that was begun."""
    from toprope_tools.experiments import ledger

    return result_of(await ledger.get_handoff(workshop_of(ctx)))
