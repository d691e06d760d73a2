"""Tools of the surface: what was: configurations over time, rollouts, experiments and how to go on from them.

What a model knows of these tools is what stands here. The work is done in `tools`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import memory_answers as answers

from toprope_server.tool_specs.base import DraftId, Names, Part, RunId

__all__ = ["Memory"]


class Memory(Part):
    """See the module."""

    async def browse_rollouts(
        self,
        run_id: RunId,
        order: Annotated[
            Literal["best", "worst", "most_changed", "newest"],
            Field(description="most_changed: tasks by how far their reward moved since they were first played."),
        ] = "newest",
        task: Annotated[str | None, Field(description="Only tasks whose id contains this.")] = None,
        part: Annotated[str | None, Field(description="Order by this part of the reward.")] = None,
        failed: Annotated[bool, Field(description="Only answers with an error or that could not be read.")] = False,
        cursor: Annotated[str | None, Field(description="next_cursor of the page before.")] = None,
    ) -> Annotated[CallToolResult, answers.RolloutPage]:
        """Shows what a training run's policy was asked and answered, with rewards: live or ended, training tasks only.

        Use it to see why reward moves: a hacked scorer, a wrong format, tasks too hard. Texts are cut, and untrusted.
        """
        return await self._do(
            "results.rollouts",
            "browse_rollouts",
            run_id=run_id,
            order=order,
            task=task,
            part=part,
            failed=failed,
            cursor=cursor,
        )

    async def diff_config(
        self,
        a: Annotated[str, Field(description="A draft (draft-7f3k), its revision (draft-7f3k@2), a run or 'preset X'.")],
        b: Annotated[str | None, Field(description="The other; omit for the preset of a.")] = None,
    ) -> Annotated[CallToolResult, answers.ConfigDiff]:
        """Names the fields in which two configurations differ, with both values: of drafts, revisions, runs, presets.

        Use it to see what an edit, a fork or another run changed. Changes nothing.
        """
        return await self._do("experiments.config_history", "diff_config", a=a, b=b)

    async def undo_edit(
        self,
        draft_id: DraftId,
        revision: Annotated[int, Field(ge=1, description="To go back to; get_config lists them, 1 is the first.")],
    ) -> Annotated[CallToolResult, answers.Undone]:
        """Sets a draft back to an earlier revision by a new edit, so that no history is lost. The owner's locks hold.

        Answers what changed. Next: start_training or edit_config.
        """
        return await self._do("experiments.config_history", "undo_edit", draft_id=draft_id, revision=revision)

    async def fork_config(self, run_id: RunId) -> Annotated[CallToolResult, answers.Forked]:
        """Makes a new draft with a run's configuration and environment, to change and run again.

        The owner's locks are applied as they are now; what they change is named. Next: edit_config, start_training.
        """
        return await self._do("experiments.config_history", "fork_config", run_id=run_id)

    async def note_experiment(
        self,
        hypothesis: Annotated[
            str | None, Field(max_length=2000, description="What is tried and why it should help; for a new one.")
        ] = None,
        run_ids: Annotated[Names, Field(description="Ids of the runs or seed groups that belong to it.")] = None,
        draft_id: Annotated[str | None, Field(description="The draft it is tried with.")] = None,
        experiment_id: Annotated[
            str | None, Field(description="Amends this one (exp-7f3k); omit for a new one.")
        ] = None,
        outcome: Annotated[str | None, Field(max_length=2000, description="What came of it, in words.")] = None,
        decision: Annotated[
            Literal["keep", "discard", "repeat", "undecided"] | None,
            Field(description="What follows from the outcome."),
        ] = None,
        question: Annotated[str | None, Field(max_length=1000, description="A question that it leaves open.")] = None,
        goal: Annotated[
            str | None, Field(max_length=1000, description="What is to be reached in this environment.")
        ] = None,
    ) -> Annotated[CallToolResult, answers.ExperimentAnswer]:
        """Keeps an experiment in the ledger: hypothesis, runs, outcome, decision; measured figures are added.

        Note it before its run and amend it after. Says when the last experiments moved accuracy less than noise.
        """
        return await self._do(
            "experiments.ledger",
            "note_experiment",
            experiment_id=experiment_id,
            hypothesis=hypothesis,
            run_ids=run_ids,
            draft_id=draft_id,
            outcome=outcome,
            decision=decision,
            question=question,
            goal=goal,
        )

    async def get_handoff(self) -> Annotated[CallToolResult, answers.Handoff]:
        """Tells all that is needed to go on without earlier context: goal, live runs, what was learned, what is open,
        next calls. The first call of a new conversation about work that was begun."""
        return await self._do("experiments.ledger", "get_handoff")
