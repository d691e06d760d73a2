"""Warnings of the fit check in answers: draft, environment and policy, before a start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from toprope.settings.schema import Config
from toprope.workbench.catalog.describe import Description
from toprope.workbench.drafts import Draft
from toprope.workbench.fit import Misfit, TaskSample, misfits
from toprope.workbench.launch.baseline import baseline_of

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop


def sample_of(described: Description) -> TaskSample:
    """Return the tasks of a description for the fit check."""
    return TaskSample(
        prompts=tuple(tuple(dict(message) for message in task.messages) for task in described.tasks),
        references=tuple(str(task.reference) for task in described.tasks if task.reference is not None),
        max_turns=described.card.max_turns,
    )


def remember(workshop: Workshop, environment: str, knobs: dict[str, Any], described: Description) -> TaskSample:
    """Keep the tasks of a description, so that a start need not load the environment to check its fit."""
    workshop.samples[_key(environment, knobs)] = found = sample_of(described)
    return found


def misfits_of(workshop: Workshop, draft: Draft, *, step_s: float | None = None) -> list[Misfit]:
    """Return what speaks against starting a draft, from what is known without running anything.

    Args:
        step_s: Measured seconds per step.
    """
    return misfits_of_config(workshop, draft.environment.name, draft.config, step_s=step_s)


def misfits_of_config(
    workshop: Workshop, environment: str, config: Config, *, step_s: float | None = None
) -> list[Misfit]:
    """Return what speaks against starting a configuration in an environment."""
    tasks = workshop.samples.get(_key(environment, config.environment.knobs))
    return misfits(config, tasks, baseline_of(environment, workshop.home.runs), step_s)


def _key(environment: str, knobs: dict[str, Any]) -> str:
    return json.dumps([environment, knobs], sort_keys=True, default=str)
