"""Tools of the surface: what an agent does before anything runs: find environments, make drafts, edit them.

What a model knows of these tools is what stands here. The work is done in `tools`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import base as answers
from toprope_tools.answers import check_answers

from toprope_server.tool_specs.base import DraftId, Part

__all__ = ["Planning"]


class Planning(Part):
    """See the module."""

    async def list_environments(
        self,
        query: Annotated[
            str | None, Field(description="Words that name or summary must contain, e.g. 'arithmetic'; omit for all.")
        ] = None,
        cursor: Annotated[str | None, Field(description="next_cursor of the page before; omit for the first.")] = None,
    ) -> Annotated[CallToolResult, answers.Environments]:
        """Finds environments to train on, from every source, without loading any of them.

        The first call of an experiment. Answers 20 a page: name, one-line summary and state (ready, or why not), with
        next_cursor while there are more. Changes nothing. For the settings and an example of one, call
        describe_environment with its name.
        """
        return await self._do("planning.environments", "list_environments", query=query, cursor=cursor)

    async def describe_environment(
        self,
        name: Annotated[str, Field(description="The environment's name exactly as list_environments gives it.")],
        knobs: Annotated[
            dict[str, Any] | None,
            Field(description='Its own settings to look at it with, e.g. {"path": "my.jsonl"}; omit for the defaults.'),
        ] = None,
    ) -> Annotated[CallToolResult, answers.Description]:
        """Loads one environment in its own process and tells what it is.

        Use it before select_environment, to learn whether the environment works and what may be set. Answers its knobs
        (type, default, bounds), an example task, reward parts with their range, sizes of the splits, and presets.
        Takes up to a minute for a slow environment; one that cannot load is an error that says why. Keeps nothing.
        """
        return await self._do("planning.environments", "describe_environment", name=name, knobs=knobs)

    async def check_environment(
        self,
        name: Annotated[str, Field(description="An environment's name, or a draft_id: then with its settings.")],
        full: Annotated[bool, Field(description="true: look at more, and at memory; 45 s.")] = False,
    ) -> Annotated[CallToolResult, check_answers.CheckAnswer]:
        """Tries whether an environment can teach: scores right, empty, junk and nearly right answers, compares splits
        and processes.

        Use it before training where nobody here has trained. Answers findings with what to do: rewarded junk, failing
        references, leaks, chance, slowness. Changes nothing.
        """
        return await self._do("planning.environment_check", "check_environment", name=name, full=full)

    async def select_environment(
        self,
        name: Annotated[str, Field(description="The environment's name exactly as list_environments gives it.")],
        preset: Annotated[
            str | None,
            Field(description="Starting values: cpu-embedded (tiny policy, CPU), single-gpu, or one of the owner's."),
        ] = None,
    ) -> Annotated[CallToolResult, answers.DraftAnswer]:
        """Makes a new draft (an experiment to edit) of an environment and answers its draft_id.

        Every call makes another draft; earlier ones stay. Starts nothing. The preset's values hold with the owner's
        locks applied, and the answer names what is locked. Next: get_config to read it, edit_config to change it,
        test_inference or start_training to run it.
        """
        return await self._do("planning.environments", "select_environment", name=name, preset=preset)

    async def get_config(
        self,
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

        Use it to learn field names before edit_config. Without a section it answers short lines for all fields; with
        one, what each field means. Also names fields that do not fit each other. Changes nothing. For what a started
        run used, call get_results.
        """
        return await self._do("planning.config", "get_config", draft_id=draft_id, section=section)

    async def edit_config(
        self,
        draft_id: DraftId,
        changes: Annotated[
            dict[str, Any],
            Field(
                description='New values by dotted field name: {"optimizer.learning_rate": 1e-4, "rollout.group_size": '
                '16}. The environment\'s own: "environment.knobs.<name>".'
            ),
        ],
    ) -> Annotated[CallToolResult, answers.EditAnswer]:
        """Changes fields of a draft, all or none, and answers old and new values with the draft's new revision.

        Values are converted to each field's type ("1e-4", "true", "null" work). An unknown field, a wrong type, a
        value out of bounds, a locked field or fields that do not fit each other refuse the whole edit, and every
        problem is named. Runs that were started before keep what they had. Next: start_training or test_inference.
        """
        return await self._do("planning.config", "edit_config", draft_id=draft_id, changes=changes)
