"""Hold a run to the owner's present locks: its configuration, and the values that its plan sets beside it.

Every start passes here, and so does every resumption: of a draft, a repeated run, a question, a member of a sweep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toprope.errors import Corrupt, LockedField, NotFound, shown
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import AskPlan, Specification, TestPlan
from toprope.settings.fields import all_fields
from toprope.settings.locks import Locks
from toprope.settings.owner import OwnerSettings
from toprope.settings.sections.environment import RUN
from toprope.workbench.launch.lineage import with_variables_of
from toprope.workbench.launch.mixture_sources import hold_locks


def plan_values(plan: object) -> dict[str, Any]:
    """Return the values that a plan sets in place of fields of the configuration, by field."""
    values: dict[str, Any] = {}
    if isinstance(plan, TestPlan):
        values["evaluation.heldout_tasks" if plan.heldout else "evaluation.validation_tasks"] = plan.tasks
        if not plan.heldout:  # one answer to each held-out task, as in every evaluation
            values["rollout.group_size"] = plan.group_size
        if plan.max_new_tokens is not None:
            values["rollout.max_new_tokens"] = plan.max_new_tokens
    elif isinstance(plan, AskPlan):
        values |= {"rollout.temperature": plan.temperature, "rollout.max_new_tokens": plan.max_new_tokens}
        if plan.answers > 1:
            values["rollout.group_size"] = plan.answers
        if plan.standard is not None:
            values["environment.network"] = plan.standard.network
    return values


def hold_run(run: Specification, locks: Locks, runs: Path) -> None:
    """Require that the owner allows a frozen run today.

    The weights of an ended run may be asked whatever the locks for training are; what asking costs is held. A lock on
    `policy.model` is about the model that the first of several runs began with, or about the run that it names.

    Args:
        run: As stored.
        locks: The owner's present locks.
        runs: The folder of runs, with those that this one descends from.

    Raises:
        LockedField: The message has the owner's reasons.
    """
    config = run.config if run.ask is not None else with_variables_of(run.config.policy.model, run.config, locks)
    if run.base_run is not None and locks.refusal("policy.model", config.policy.model):
        # It was frozen as the folder of the weights.
        base = f"{RUN}{run.base_run}"
        model = base if locks.refusal("policy.model", base) is None else _first_model(run, runs)
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"model": model})})
    knobs = [{"name": name, "default": value} for name, value in config.environment.knobs.items()]
    fields = all_fields(knobs)
    if run.ask is not None:
        fields = {name: field for name, field in fields.items() if name.startswith(("launcher.", "rollout."))}
    locks.enforce(config, fields)
    if run.ask is None:
        hold_locks(config, locks)
    for plan in (run.test, run.ask):
        locks.require(plan_values(plan))


def require_policies(settings: OwnerSettings, repository: str = "") -> None:
    """Pass an agent's wish to give a trained policy to other programs.

    Args:
        repository: Of the Hub, for an upload.

    Raises:
        LockedField: `data.policies` or `data.hub` forbids it.
    """
    if not settings.data.policies:
        raise LockedField("The owner does not allow it (data.policies in settings.yaml).", hint="Ask the owner.")
    account = repository.partition("/")[0]
    if repository and not {repository, account} & set(settings.data.hub):
        allowed = ", ".join(settings.data.hub) or "none"
        raise LockedField(
            f"The owner does not allow uploads to {shown(repository)}. Nothing was started.",
            hint=f"data.hub in settings.yaml names accounts and repositories for uploads: {allowed}. Ask the owner.",
        )


def _first_model(run: Specification, runs: Path) -> str:
    """Return the model that the earliest known ancestor of a run began with."""
    seen = {run.run_id}
    while run.base_run is not None and run.base_run not in seen:
        seen.add(run.base_run)
        try:
            run = Specification.read(RunFolder(runs / run.base_run))
        except (NotFound, Corrupt):
            break
    return run.config.policy.model
