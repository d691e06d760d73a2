"""Tools of the surface: runs while they live: measure, start, stop, resume, follow.

What a model knows of these tools is what stands here. The work is done in `tools`.
"""

from __future__ import annotations

from typing import Annotated

from mcp.server.elicitation import ElicitationResult
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Resolve
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import base as answers
from toprope_tools.answers import memory_answers

from toprope_server.tool_specs.base import DraftId, Names, Part, RunId, RunIds, client_of
from toprope_server.tool_specs.consent import Consent, Preview, agreed, ask_consent, shown_first

__all__ = ["Running"]


class Running(Part):
    """See the module."""

    async def test_inference(
        self,
        draft_id: DraftId,
        models: Annotated[
            Names,
            Field(
                description="Whom to test: 'base' (the draft's policy), models that the owner named, or a preset's, "
                "such as 'openrouter' (a small, a medium and a large one). At most 8. Omit for the draft's policy."
            ),
        ] = None,
        tasks: Annotated[
            int | None,
            Field(ge=1, le=10_000, description="Validation tasks to try; omit for evaluation.validation_tasks."),
        ] = None,
        group_size: Annotated[
            int | None, Field(ge=1, le=1024, description="Answers sampled per task; omit for rollout.group_size.")
        ] = None,
        max_new_tokens: Annotated[
            int | None,
            Field(
                ge=1,
                le=131_072,
                description="Longest answer of the models given; thinking ones need thousands. Omit for the draft's.",
            ),
        ] = None,
    ) -> Annotated[CallToolResult, answers.Started]:
        """Starts a short run that measures a draft's policy, or other models, on the draft's tasks; answers its run_id.

        Use it before start_training to see that the environment works and that rewards vary: where all answers to
        every task score the same, nothing can be learned. Other models show whether the tasks can be solved at all;
        each is reported by itself, one that fails with its reason. Trains nothing and leaves held-out tasks alone.
        Next: check_status with wait_s, then get_results for accuracy, reward parts, pass rates and example answers.
        """
        return await self._do(
            "runs.inference",
            "test_inference",
            draft_id=draft_id,
            models=models,
            tasks=tasks,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
        )

    async def start_training(
        self,
        shown: Annotated[Preview | None, Resolve(shown_first)],
        consent: Annotated[ElicitationResult[Consent], Resolve(ask_consent)],
        draft_id: DraftId,
        name: Annotated[
            str | None, Field(max_length=64, description="Begins the run's id; omit for the environment's name.")
        ] = None,
        again: Annotated[
            bool, Field(description="true: start although a run of this same draft revision is live.")
        ] = False,
        key: Annotated[
            str | None,
            Field(
                min_length=1,
                max_length=80,
                description="Any text that names this start: a call repeated with it, after a time-out, answers the "
                "same run.",
            ),
        ] = None,
        seeds: Annotated[
            int, Field(ge=1, le=16, description="So many runs, differing in algorithm.seed alone, as one seed group.")
        ] = 1,
        preview: Annotated[
            bool, Field(description="true: start nothing; answer what it would take, from measured runs.")
        ] = False,
        confirm: Annotated[
            str | None, Field(max_length=64, description="The hash that a refusal named, once a person agreed to it.")
        ] = None,
    ) -> Annotated[CallToolResult, answers.Started]:
        """Freezes a draft with the owner's locks, starts training from it, and answers the run_id within a second.

        Takes the machine's time until budget.steps or budget.max_train_seconds; the run lives on when client or server
        end. Loading, held-out evaluation before and after and a last checkpoint are part of it. Later edits of the
        draft do not touch it. While the machine is taken the run is queued, and check_status says behind what. A draft
        revision whose run is live is refused unless again=true; so is what the owner's limits leave no room for. With
        seeds it answers a group_id, which check_status, stop_training, compare_runs and note_experiment take. Next:
        check_status with wait_s. To measure without training, call test_inference.
        """
        if shown is not None:
            confirm = agreed(shown, consent)
        return await self._do(
            "runs.training",
            "start_training",
            draft_id=draft_id,
            name=name,
            again=again,
            key=key,
            seeds=seeds,
            preview=preview,
            confirm=confirm,
        )

    async def stop_training(self, run_id: RunId) -> Annotated[CallToolResult, answers.Stopped]:
        """Stops a live run of any kind, or a seed group by its id; training writes a last checkpoint if that fits.

        Use it when check_status shows that a run is not worth its time. Logs, metrics and checkpoints stay, and
        resume_training goes on from the last one; steps after it are lost. Answers the state it ended in. A run that
        has ended already is no error and nothing happens. Next: get_results.
        """
        return await self._do("runs.training", "stop_training", run_id=run_id)

    async def resume_training(self, run_id: RunId) -> Annotated[CallToolResult, answers.Resumed]:
        """Goes on with a run that was stopped, failed or lost: same run_id, next attempt, from its newest checkpoint.

        Use it after a crash, or when a stopped run was worth its time after all. Step, optimizer, schedule, used budget
        and rollouts continue; the configuration stays as it was frozen. Without a checkpoint it starts again at step 0.
        A live or completed run is refused. Next: check_status with wait_s.
        """
        return await self._do("runs.training", "resume_training", run_id=run_id)

    async def reproduce_run(self, run_id: RunId) -> Annotated[CallToolResult, memory_answers.Reproducing]:
        """Starts a run of the same specification as one that ended; takes as long as that did.

        When it has ended, get_results says whether both are the same, or which input differs (code, versions,
        environment, seed, hardware). With algorithm.deterministic metrics must be equal, else held-out accuracy within
        noise.
        """
        return await self._do("experiments.config_history", "reproduce_run", run_id=run_id)

    async def check_status(
        self,
        ctx: Context,
        run_ids: Annotated[
            RunIds,
            Field(description="Ids of one or more runs (at most 20); omit for the cursor's, or to see the open ones."),
        ] = None,
        wait_s: Annotated[
            float | None,
            Field(
                ge=0,
                le=3600,
                description="Wait up to this many seconds for news; omit to answer at once. More than your client "
                "holds out (45 where unknown) is cut, and the answer says so.",
            ),
        ] = None,
        until: Annotated[
            Names,
            Field(
                description="What ends the wait: 'end', 'evaluation', 'finding', 'stall', 'step 200', or a state such "
                "as 'training'; several are alternatives, for any of the runs; 'all ended' waits for the last one. "
                "Omit for any news."
            ),
        ] = None,
        cursor: Annotated[
            str | None,
            Field(description="cursor of your last answer: then every event since is told, whoever asked meanwhile."),
        ] = None,
    ) -> Annotated[CallToolResult, answers.StatusAnswer]:
        """Tells how live runs stand, or waits for news of any of them: state, step, reward, speed, ETA, new events.

        Use it with wait_s and the last answer's cursor instead of calling often. Fresh numbers of a run come at most
        once per interval (2 % of its expected length, 30 s to 30 min); within it one line repeats the last ones with
        their age. Changes of state, evaluations, findings, stalls and the end always come through and end a wait; met
        says which run met what of until. Progress is sent while waiting. Changes nothing. For final figures call
        get_results, for all runs list_runs.
        """
        return await self._do(
            "status.status",
            "check_status",
            run_ids=run_ids,
            wait_s=wait_s,
            until=until,
            cursor=cursor,
            progress=ctx.report_progress,
            client=client_of(ctx),
        )
