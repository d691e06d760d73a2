"""Tool that measures a policy, or other models in its place, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import to_thread

from toprope.errors import InvalidValue
from toprope.records.run.specification import ModelUnderTest, TestPlan
from toprope.settings.endpoints import BASE
from toprope.text_format import call, plural
from toprope.workbench.endpoints import require_keys, resolve_models
from toprope.workbench.fit import Misfit, unknown_task, warning_lines
from toprope.workbench.launch.start import StartRequest
from toprope_tools.answers import runs as answers
from toprope_tools.answers.answer import Answer
from toprope_tools.planning.fit import misfits_of, remember_tasks

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_ROLLOUTS = 100_000
_FEW_TOKENS = 512
_LOADS_S = 2.0
"""Seconds in which a test has most likely loaded its policy."""


async def test_inference(
    workshop: Workshop,
    *,
    draft_id: str,
    models: list[str] | None = None,
    tasks: int | None = None,
    group_size: int | None = None,
    max_new_tokens: int | None = None,
) -> Answer:
    """Start a run of kind `test` on validation tasks.

    Args:
        draft_id: Id of the draft with the environment and the policy.
        models: Models to test one by one: `base` for the draft's policy, or names from the owner or a preset. Only the
            draft's policy if None.
        tasks: Number of tasks; evaluation.validation_tasks if None.
        group_size: Answers per task; rollout.group_size if None.
        max_new_tokens: Longest answer of models given by name; rollout.max_new_tokens if None.

    Raises:
        NotFound, LockedField, InvalidValue: The draft cannot run, there is no such model, or its key is missing;
            nothing was started.
    """
    draft = await to_thread.run_sync(workshop.drafts.get, draft_id)
    config = draft.config
    if max_new_tokens is not None and not models:
        raise InvalidValue(
            "max_new_tokens applies only to models given by name.",
            hint=f'edit_config sets rollout.max_new_tokens for the draft\'s policy; models=["{BASE}"] names it.',
        )
    plan = TestPlan(
        tasks=config.evaluation.validation_tasks if tasks is None else tasks,
        group_size=config.rollout.group_size if group_size is None else group_size,
        models=await to_thread.run_sync(lambda: _models(workshop, models)) if models is not None else [],
        max_new_tokens=max_new_tokens,
    )
    rollouts = plan.tasks * plan.group_size * max(len(plan.models), 1)
    if plan.tasks < 1 or plan.group_size < 1 or rollouts > _MOST_ROLLOUTS:
        raise InvalidValue(
            f"tasks times group_size must give 1 to {_MOST_ROLLOUTS} rollouts, not {rollouts}.",
            hint="64 tasks with 8 answers each are enough.",
        )
    tests_base = any(model.endpoint is None for model in plan.models)
    if tests_base and max_new_tokens is not None and not 1 <= max_new_tokens < config.policy.max_context:
        raise InvalidValue(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt within policy.max_context "
            f"({config.policy.max_context}) of the draft's policy.",
            hint=f"Leave {BASE!r} out, or lower max_new_tokens.",
        )
    misfits: list[Misfit] = []
    if not plan.models:
        await remember_tasks(workshop, config)
        misfits = await to_thread.run_sync(misfits_of, workshop, config)
    request = StartRequest(draft, plan, unknown_task=unknown_task(misfits))
    started = await to_thread.run_sync(workshop.starter.start, request)
    workshop.expect_run(config, _LOADS_S)  # most often the draft's training comes next
    specification = started.specifications[0]
    whom = f"policy {config.policy.model}"
    if plan.models:
        whom = "models " + ", ".join(model.name for model in plan.models)
    text = (
        f"Started {specification.run_id}: {plural(plan.tasks, 'validation task')} of {draft.environment.name}, "
        f"{plural(plan.group_size, 'answer')} each, {whom}. Nothing is trained.\n"
    )
    limit = config.rollout.max_new_tokens if max_new_tokens is None else max_new_tokens
    if any(model.endpoint for model in plan.models) and limit < _FEW_TOKENS:
        text += (
            f"Answers are cut off at {limit} tokens; models that think before they answer need thousands (set "
            "max_new_tokens).\n"
        )
    text += "".join(f"{line}\n" for line in warning_lines(misfits, 2))
    text += (
        f"Next: {call('check_status', run_ids=[specification.run_id], wait_s=45)}, then "
        f"{call('get_results', run_id=specification.run_id)}"
    )
    data = answers.Started(
        run_id=specification.run_id, kind=plan.kind, draft_id=draft.id, revision=draft.revision, state="queued"
    )
    return Answer(text, data)


def _models(workshop: Workshop, names: list[str]) -> list[ModelUnderTest]:
    settings = workshop.settings()
    models = resolve_models(names, settings, workshop.home.preset_folders)
    require_keys(models, settings, workshop.home.settings_file)
    return models


test_inference.__test__ = False  # type: ignore[attr-defined]  # a tool, not a test
