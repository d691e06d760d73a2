"""Tools to make, read, edit and compare drafts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import planning as answers

from toprope_server.tool_specs.base import ADDS, READS, DraftId, RunId, ToolGroup, result_of, workshop_of

draft_tools = ToolGroup()


@draft_tools.tool("Make a draft", ADDS, toolset="plan", on_failure="list_environments lists the environments.")
async def select_environment(
    ctx: Context,
    name: Annotated[str, Field(description="The environment's name exactly as list_environments gives it.")],
    preset: Annotated[
        str | None,
        Field(description="Starting values: cpu-embedded (tiny policy, CPU), single-gpu, or one of the owner's."),
    ] = None,
) -> Annotated[CallToolResult, answers.DraftAnswer]:
    """Makes a new draft (an experiment to edit) for an environment and returns its draft_id.

    Every call makes another draft; earlier ones stay. Starts nothing. The draft has the preset's values with the
    owner's locks applied; the answer names what is locked. Next: get_config to read it, edit_config to change it,
    test_inference or start_training to run it.
    """
    from toprope_tools.planning import environments

    return result_of(await environments.select_environment(workshop_of(ctx), name=name, preset=preset))


@draft_tools.tool("Read a draft", READS, toolset="plan", on_failure="select_environment makes a draft.")
async def get_config(
    ctx: Context,
    draft_id: DraftId,
    section: Annotated[
        Literal[
            "environment",
            "policy",
            "algorithm",
            "optimizer",
            "sft",
            "ppo",
            "rollout",
            "evaluation",
            "logging",
            "launcher",
            "budget",
        ]
        | None,
        Field(description="Only this section, with each field's description; omit for all values at a glance."),
    ] = None,
) -> Annotated[CallToolResult, answers.ConfigAnswer]:
    """Reads a draft: each field's value, type, bounds and lock with the owner's reason, and the edits so far.

    Use it to learn field names before edit_config. Without a section it lists all fields in short lines; with one, it
    explains each field. Also names fields that conflict. Changes nothing. For what a started run used, call
    get_results.
    """
    from toprope_tools.planning import config

    return result_of(await config.get_config(workshop_of(ctx), draft_id=draft_id, section=section))


@draft_tools.tool(
    "Edit a draft",
    ADDS | {"idempotent_hint": True},
    toolset="plan",
    on_failure="get_config shows fields, types, bounds and locks.",
)
async def edit_config(
    ctx: Context,
    draft_id: DraftId,
    changes: Annotated[
        dict[str, Any],
        Field(
            description='New values by dotted field name: {"optimizer.learning_rate": 1e-4, "rollout.group_size": '
            '16}. The environment\'s own: "environment.knobs.<name>".'
        ),
    ],
) -> Annotated[CallToolResult, answers.EditAnswer]:
    """Changes fields of a draft, all or none, and returns old and new values with the draft's new revision.

    Values are converted to each field's type ("1e-4", "true", "null" work). An unknown field, a wrong type, a
    value out of bounds, a locked field or fields that conflict refuse the whole edit, and every problem is named.
    Runs that were started before keep their configuration. Next: start_training or test_inference.
    """
    from toprope_tools.planning import config

    return result_of(await config.edit_config(workshop_of(ctx), draft_id=draft_id, changes=changes))


@draft_tools.tool(
    "Undo edits",
    ADDS | {"idempotent_hint": True},
    toolset="plan",
    on_failure="get_config lists the revisions of a draft.",
)
async def undo_edit(
    ctx: Context,
    draft_id: DraftId,
    revision: Annotated[int, Field(ge=1, description="To go back to; get_config lists them, 1 is the first.")],
) -> Annotated[CallToolResult, answers.Undone]:
    """Sets a draft back to an earlier revision by a new edit, so that no history is lost. The owner's locks hold.

    Returns what changed. Next: start_training or edit_config.
    """
    from toprope_tools.experiments import config_history

    return result_of(await config_history.undo_edit(workshop_of(ctx), draft_id=draft_id, revision=revision))


@draft_tools.tool(
    "Compare configurations",
    READS,
    toolset="plan",
    on_failure="get_config reads a draft, list_runs lists the runs.",
)
async def diff_config(
    ctx: Context,
    a: Annotated[str, Field(description="A draft (draft-7f3k), its revision (draft-7f3k@2), a run or 'preset X'.")],
    b: Annotated[str | None, Field(description="The other; omit for the preset of a.")] = None,
) -> Annotated[CallToolResult, answers.ConfigDiff]:
    """Names the fields in which two configurations differ, with both values: of drafts, revisions, runs, presets.

    Use it to see what an edit, a fork or another run changed. Changes nothing.
    """
    from toprope_tools.experiments import config_history

    return result_of(await config_history.diff_config(workshop_of(ctx), a=a, b=b))


@draft_tools.tool("Fork a run's configuration", ADDS, toolset="plan", on_failure="list_runs lists the runs.")
async def fork_config(ctx: Context, run_id: RunId) -> Annotated[CallToolResult, answers.Forked]:
    """Makes a new draft with a run's configuration and environment, to change and run again.

    The owner's locks are applied as they are now; the answer names what they changed. Next: edit_config,
    start_training.
    """
    from toprope_tools.experiments import config_history

    return result_of(await config_history.fork_config(workshop_of(ctx), run_id=run_id))
