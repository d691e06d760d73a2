"""Read runs for `comparison`: results by task, conditions and cost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from toprope.analysis.reports.headline import HELDOUT, named_split
from toprope.analysis.statistics.comparison import Answers, Cost, Measured
from toprope.errors import Corrupt, NotFound, NotPossibleNow
from toprope.records.run.folder import REPAIR_HINT, RunFolder, read_json
from toprope.records.run.metrics import last_row
from toprope.records.run.specification import Specification
from toprope.records.run.usage import Usage
from toprope.records.sweep_journal import members_in
from toprope.settings.endpoints import BASE
from toprope.settings.sections.environment import EnvironmentSection, members_of, rewards_of
from toprope.text_format import call, clip


def measured(folder: RunFolder, state: str) -> Measured:
    """Read the samples of a run: its final held-out evaluation, or the validation tasks of a test.

    Args:
        state: The run's state, for the error message.

    Raises:
        NotPossibleNow: The run has nothing to compare; the message gives the reason and the next step.
        Corrupt: Its files do not have the expected form.
    """
    specification = Specification.read(folder)
    kind = specification.run_kind
    label = kind.final_evaluation if kind.measures else None
    if kind.starts_runs:
        members = members_in(folder.path.parent, folder.run_id)
        named_members = " or ".join(dict.fromkeys([*members[-1:], *members[:1]]))
        raise NotPossibleNow(
            f"{folder.run_id} is a sweep; its runs have the answers to compare.",
            hint=f"Name {named_members} instead." if members else "It started no run.",
        )
    if label is None or (specification.test is not None and specification.test.models):
        activity = "puts questions to a policy" if label is None else "measures several models at once"
        raise NotPossibleNow(
            f"{folder.run_id} {activity}, so it has nothing to compare.",
            hint="Name training runs, seed groups of them, or tests of a single policy.",
        )
    try:
        evaluation = read_json(folder.evaluation(label))
    except NotFound:
        raise _not_evaluated(folder.run_id, specification, state, label) from None
    try:
        sampled = Answers.of(evaluation["sampled"])
        if sampled is None:
            if ((evaluation["sampled"] or {}).get("by_task") or {}).get("unjudged"):
                raise NotPossibleNow(
                    f"{folder.run_id} has nothing to compare: of no task was every answer judged.",
                    hint=f"{call('read_logs', run_id=folder.run_id, component='environment')} shows why; mend that and "
                    "start it again.",
                )
            raise NotPossibleNow(
                f"{folder.run_id} was evaluated by a version that did not keep results by task.",
                hint="Start it again from its draft to compare it.",
            )
        greedy = Answers.of(evaluation.get("greedy"))
        conditions = _conditions(specification, evaluation)
        temperature = str(evaluation.get("temperature"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"{folder.evaluation(label)} does not have the form that the driver writes: {error!r}.", hint=REPAIR_HINT
        ) from None
    config = specification.config
    functions = rewards_of(config.environment.rewards)
    shared = {} if specification.member is None else specification.member.sampling
    rollout = config.rollout.model_copy(update=shared)
    loose = {
        "temperature of the sampled answers": temperature,
        "rollout.max_new_tokens": str(rollout.max_new_tokens),
        "rollout.top_p": str(rollout.top_p),
        "environment.reward_weights": json.dumps(config.environment.reward_weights, sort_keys=True)[:200],
        **({"environment.rewards": ", ".join(function.fn for function in functions)[:200]} if functions else {}),
        "starting policy": _base(folder, config.policy.model),
    }
    ancestors, lost = ancestors_of(folder, specification)
    return Measured(
        folder.run_id,
        config.algorithm.seed,
        conditions,
        loose,
        sampled,
        greedy,
        cost_of(folder),
        ancestors,
        lost,
    )


def ancestors_of(folder: RunFolder, specification: Specification) -> tuple[dict[str, Cost], tuple[str, ...]]:
    """Return the costs of all runs that a run builds on, and the ids of those whose records are gone.

    Ancestors are the run that the policy starts from and the runs whose rollouts the data set contains, and theirs.
    """
    costs: dict[str, Cost] = {}
    lost: list[str] = []
    waiting = _parents(specification)
    while waiting:
        run_id = waiting.pop(0)
        if run_id in costs or run_id in lost or run_id == folder.run_id:
            continue
        ancestor_folder = RunFolder(folder.path.parent / run_id)
        try:
            parent = Specification.read(ancestor_folder)
        except (NotFound, Corrupt, ValueError):
            lost.append(run_id)
            continue
        costs[run_id] = cost_of(ancestor_folder)
        waiting += _parents(parent)
    return costs, tuple(lost)


def _parents(specification: Specification) -> list[str]:
    parents = [] if specification.base_run is None else [specification.base_run]
    if specification.dataset is not None:
        parents += _runs_behind(Path(specification.dataset.file).parent)
    return parents


def _runs_behind(version: Path, depth: int = 8) -> list[str]:
    """Return the runs whose rollouts the version of a data set contains, also by way of other data sets."""
    try:
        lineage = read_json(version / "dataset.json")["lineage"]
        runs, datasets = list(map(str, lineage.get("runs") or ())), list(map(str, lineage.get("datasets") or ()))
    except (NotFound, Corrupt, KeyError, TypeError, AttributeError):
        return []
    for name, _, number in (dataset.partition("@") for dataset in datasets if depth and "/" not in dataset):
        runs += _runs_behind(version.parent.parent / name / number, depth - 1)
    return runs


def cost_of(folder: RunFolder) -> Cost:
    """Return the measured cost of a run; in USD that of models that were called, too."""
    row = last_row(folder.metrics)
    try:
        usage = Usage.read(folder)
    except Corrupt:
        usage = None
    return Cost(
        steps=int(row.get("step") or 0),
        rollouts=int(row.get("rollouts") or 0),
        train_s=row.get("train_seconds"),
        wall_s=usage.wall_s if usage else None,
        cpu_s=usage.cpu_s if usage else None,
        gpu_s=usage.gpu_s if usage else None,
        usd=usage.cost_usd if usage else None,
    )


def _conditions(specification: Specification, evaluation: dict[str, Any]) -> dict[str, str]:
    """Return the conditions that must be equal, by a name for messages."""
    loaded = (evaluation.get("evaluator") or {}).get("loaded") or {}
    versions = (evaluation.get("evaluator") or {}).get("versions") or {}
    packages = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    trains = specification.run_kind.trains
    split = (evaluation.get("sampled") or {}).get("split") or (HELDOUT if trains else "validation")
    return {
        "kind of measurement": f"{named_split(split)} tasks {'after training' if trains else 'of a test'}",
        **{name: _short(value) for name, value in measured_tasks(specification).items()},
        "the environment's source (hash)": str(loaded.get("environment", "unknown")),
        "the environment's packages": packages or "none",
        "the evaluator's source (hash)": str(loaded.get("toprope", "unknown")),
    }


def _short(text: str) -> str:
    """Cut a long text; a digest of the whole keeps unequal ones apart."""
    return text if len(text) <= 200 else f"{clip(text, 180)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def measured_tasks(specification: Specification) -> dict[str, str]:
    """Return the settings that decide which tasks are measured, by a name for messages."""
    section = specification.config.environment
    return {
        "environment": specification.environment.name,
        "environment.knobs": json.dumps(section.knobs, sort_keys=True, ensure_ascii=False),
        "environment.max_turns": str(section.max_turns),
        **_others(specification),
        **_levels_and_mixture(section),
    }


def _others(specification: Specification) -> dict[str, str]:
    """Return who plays against the policy and who grades it; nothing for an environment without others."""
    section, others = specification.config.environment, {}
    if section.opponent:
        helper = specification.helpers.get(section.opponent)
        weights = specification.config.policy.model if section.opponent == BASE else specification.opponent_policy
        model = helper.endpoint.model if helper is not None and helper.endpoint is not None else weights
        others["environment.opponent"] = f"{section.opponent} {model or ''}".strip()
    if section.model_roles:
        others["environment.model_roles"] = json.dumps(section.model_roles, sort_keys=True, ensure_ascii=False)
    return others


def _levels_and_mixture(section: EnvironmentSection) -> dict[str, str]:
    """Return what else selects the measured tasks: other environments and curriculum levels."""
    first_member, *others = members_of(section)
    selections = {}
    for plan in (first_member, *others):
        if (curriculum := plan.curriculum) is not None:
            measured = curriculum.levels[curriculum.measured]
            selections[f"level of {plan.label} that is measured"] = f"{curriculum.knob} {measured!r}"
    if others:
        members = [[plan.label, plan.name, plan.section.knobs, plan.section.max_turns] for plan in others]
        selections["environment.mixture"] = json.dumps(members, sort_keys=True, ensure_ascii=False)
    return selections


def _base(folder: RunFolder, model: str) -> str:
    """Return the hash of the starting weights, or their name if the manifest has no hash."""
    try:
        digest = read_json(folder.path / "manifest.json")["policy"]["sha256"]
    except (NotFound, Corrupt, KeyError, TypeError):
        digest = None
    if digest:
        return f"{Path(model).name} {str(digest)[:12]}"
    return Path(model).name if len(model) < 80 else hashlib.sha256(model.encode()).hexdigest()[:12]


def _not_evaluated(run_id: str, specification: Specification, state: str, label: str) -> NotPossibleNow:
    if specification.run_kind.trains and not specification.config.evaluation.heldout_tasks:
        return NotPossibleNow(
            f"{run_id} measured no held-out tasks: its evaluation.heldout_tasks is 0.",
            hint="Set evaluation.heldout_tasks and start another run.",
        )
    hint = {
        "stopped": f'resume_training(run_id="{run_id}") lets it finish.',
        "failed": f'resume_training(run_id="{run_id}") continues from its checkpoint once the cause is fixed.',
        "lost": f'resume_training(run_id="{run_id}") lets it finish.',
    }.get(state, f'check_status(run_ids=["{run_id}"], wait_s=45) waits for it.')
    return NotPossibleNow(f"{run_id} is {state} and has no evaluation {label!r} yet.", hint=hint)
