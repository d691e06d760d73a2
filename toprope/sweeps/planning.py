"""Turns an agent's request into the plan of a sweep: checks the space against fields and locks, and computes the cost.

Every error is found here, before anything starts: an unknown field, bounds that the field or the owner does not allow,
an unknown strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toprope.errors import InvalidValue, LockedField, NotFound, shown
from toprope.records.run.specification import Dimension, SweepPlan
from toprope.sdk.authoring.definitions import definition_problem
from toprope.sdk.errors import LoadError
from toprope.sdk.evolution import STRATEGIES, Evolution
from toprope.settings.changes import NOT_EDITABLE
from toprope.settings.fields import Field, find_field
from toprope.settings.locks import Locks
from toprope.workbench.drafts import Draft

MOST_POPULATION, MOST_EPOCHS, _MOST_RUNS = 64, 50, 999
OPTUNA = "optuna"
STRATEGY_METHODS = ("start", "evaluate", "select", "advance", "mutate")
"""Methods of the owner's own strategies, one of which a class must have."""
_CONTINUING = ("pbt", "halving")
_SHAPE_OF_ADAPTERS = ("policy.lora", "policy.lora_rank", "policy.lora_alpha", "policy.lora_target_modules")
_KEYS = ("min", "max", "log", "choices")
_OWN = re.compile(r"^(?P<file>[A-Za-z0-9_][A-Za-z0-9_-]{0,63}):(?P<name>[A-Za-z_][A-Za-z0-9_]{0,63})$")
_NOT_VARIED = {
    "budget.steps": "the argument steps of start_sweep sets the steps of a candidate",
    "evaluation.heldout_tasks": "held-out tasks measure only the winner",
    "evaluation.validation_tasks": "all candidates are measured on the same tasks",
    "algorithm.seed": "all candidates use the draft's seed, because a lucky seed is not a better setting",
    "algorithm.name": "candidates are compared by their steps",
    "policy.model": "PBT and halving continue from weights by themselves",
    "launcher.kind": "it is the same for all candidates",
}
_MEASURING = ("knobs", "max_turns", "opponent", "model_roles", "mixture", "curriculum", "rewards", "reward_weights")
"""Fields of `environment` that decide what a candidate is measured on, and by which rewards it succeeds."""
SAMPLING = ("temperature", "top_p", "max_new_tokens", "stop")
"""Fields of `rollout` that do so, too."""
_EXAMPLE = (
    '{"optimizer.learning_rate": {"min": 1e-5, "max": 1e-2, "log": true}, '
    '"rollout.groups_per_step": {"choices": [4, 8]}}'
)


def _is_measuring(name: str) -> bool:
    """Return True for a field that decides what candidates are measured on."""
    section, _, field = name.partition(".")
    return section == "environment" and field.partition(".")[0] in _MEASURING


def measured_differently(plan: SweepPlan) -> list[str]:
    """Return the fields that make the candidates' scores measurements under different conditions.

    Candidates that train are measured alike: with the draft's sampling, on the draft's tasks.
    """
    if plan.evaluate == "train":
        return []
    return [name for name in plan.space if _is_measuring(name) or name.removeprefix("rollout.") in SAMPLING]


def parse_space(space: Mapping[str, Any], draft: Draft, locks: Locks, evaluate: str) -> dict[str, Dimension]:
    """Check and convert the space of a sweep over a draft's fields.

    Args:
        space: `{"min": .., "max": .., "log": true}` or `{"choices": [..]}` by dotted field.
        draft: The draft with these fields.
        evaluate: See `make_plan`.

    Raises:
        NotFound: A field does not exist.
        LockedField: The owner does not allow a part of the space; the message has the reason.
        InvalidValue: The space is empty, or bounds or choices do not fit the field.
    """
    if not space:
        raise InvalidValue("space is empty: nothing would be varied.", hint=f"For example {_EXAMPLE}")
    dimensions = {}
    for name, definition in space.items():
        field = find_field(name, draft.fields)
        why = _NOT_VARIED.get(field.name) or NOT_EDITABLE.get(field.name)
        if why:
            raise InvalidValue(f"space: {name} cannot be varied: {why}.")
        if evaluate == "train" and _is_measuring(field.name):
            raise InvalidValue(
                f"space: {name} cannot be varied between candidates that train: each would be measured by rewards or "
                "on tasks of its own, and the easiest would win.",
                hint='options={"evaluate": "test"} measures one policy under each value.',
            )
        dimensions[name] = _parse_dimension(name, field, definition, locks)
    return dimensions


def _parse_dimension(name: str, field: Field, definition: Any, locks: Locks) -> Dimension:
    if isinstance(definition, list | tuple):
        definition = {"choices": list(definition)}
    if not isinstance(definition, Mapping) or set(definition) - set(_KEYS) or not definition:
        raise InvalidValue(f"space: {name}: {shown(definition)} is not a range.", hint=f"For example {_EXAMPLE}")
    if "choices" in definition:
        choices = definition["choices"]
        if not isinstance(choices, list) or len(choices) < 2 or len(definition) > 1:
            raise InvalidValue(f"space: {name}: choices must be a list of at least two values, without other keys.")
        typed = [field.coerce(choice) for choice in choices]
        for choice in typed:
            _require_allowed(name, choice, locks)
        if any(choice in typed[:place] for place, choice in enumerate(typed)):
            raise InvalidValue(f"space: {name}: a choice is listed twice.")
        return Dimension(choices=typed)
    if field.kind not in ("integer", "number") or field.choices is not None:
        raise InvalidValue(f"space: {name} is a {field.type_text}: give choices.", hint=f"Allowed: {field.bounds}.")
    low, high = field.coerce(definition.get("min")), field.coerce(definition.get("max"))
    if low is None or high is None or not low < high:
        raise InvalidValue(f"space: {name}: min must be below max, and both must be given.")
    for bound in (low, high):
        _require_allowed(name, bound, locks)
    log = definition.get("log", False)
    if not isinstance(log, bool) or (log and low <= 0):
        raise InvalidValue(f"space: {name}: log is true or false, and true needs a min above 0.")
    return Dimension(low=float(low), high=float(high), log=log, integer=field.kind == "integer")


def _require_allowed(name: str, value: Any, locks: Locks) -> None:
    if (refusal := locks.refusal(name, value)) is not None:
        raise LockedField(f"space: {refusal}", hint="Leave the field out, or narrow it to what is allowed.")


def make_plan(
    draft: Draft,
    locks: Locks,
    *,
    space: Mapping[str, Any],
    strategy: str,
    population: int,
    epochs: int,
    selection_ratio: float,
    mutation_rate: float,
    steps: int | None,
    evaluate: Literal["train", "test"],
    strategies: Path,
) -> SweepPlan:
    """Make the plan of a sweep, with its highest possible cost.

    Args:
        draft: The configuration to vary.
        space: See `parse_space`.
        strategy: One of STRATEGIES, `optuna`, or `file:Class` for a strategy of the owner's own.
        population: Number of candidates per epoch.
        epochs: Number of epochs.
        selection_ratio: Share of candidates that survives an epoch.
        mutation_rate: How much new candidates differ from their parents, from 0 to 1.
        steps: Optimizer steps of a candidate in the first epoch; the draft's budget when None.
        evaluate: Measure a candidate by training, or by a test of the policy as it is.
        strategies: The folder with the owner's own strategies.

    Raises:
        NotFound: A field or the strategy does not exist.
        LockedField: See `parse_space`.
        InvalidValue: See `parse_space`; also for numbers out of range and combinations that cannot work.
    """
    built_in = (*STRATEGIES, OPTUNA)
    for argument, value, highest in (("population", population, MOST_POPULATION), ("epochs", epochs, MOST_EPOCHS)):
        if not 1 <= value <= highest:
            raise InvalidValue(f"{argument} must be from 1 to {highest}, not {value}.")
    if population * epochs < 2:
        raise InvalidValue("A population of 1 for 1 epoch compares nothing.", hint="start_training starts a run.")
    if not 0 < selection_ratio <= 1 or not 0 <= mutation_rate <= 1:
        raise InvalidValue("selection_ratio must be above 0 and at most 1, mutation_rate from 0 to 1.")
    if strategy == "halving" and selection_ratio > 0.5:
        raise InvalidValue("Halving with a selection_ratio above 0.5 leaves out too few.", hint="Use 0.5 or 0.33.")
    if evaluate == "test" and strategy in _CONTINUING:
        raise InvalidValue(
            f"{strategy} continues from weights; a test has none.", hint="Use evolution, random or optuna."
        )
    if draft.config.algorithm.name == "sft":
        raise InvalidValue(
            "A sweep compares runs by reward; this draft fine-tunes.", hint="Set algorithm.name to grpo."
        )
    if steps is not None and steps < 1:
        raise InvalidValue(f"steps must be at least 1, not {steps}.")
    file, name = None, strategy
    if reference := _OWN.fullmatch(strategy):
        path = strategies / f"{reference['file']}.py"
        if not path.is_file():
            available = ", ".join(sorted(entry.stem for entry in strategies.glob("*.py"))) or "none"
            raise NotFound(
                f"There is no {reference['file']}.py in {strategies}.",
                hint=f"Strategies there: {available}. Built-in: {', '.join(built_in)}.",
            )
        try:
            problem = definition_problem(path, reference["name"], STRATEGY_METHODS)
        except LoadError as error:
            problem = str(error)
        if problem:
            raise InvalidValue(problem, hint="docs/sweeps.md shows a strategy.")
        file, name = str(path.resolve()), reference["name"]
    elif strategy not in built_in:
        raise NotFound(
            f"There is no strategy {shown(strategy)}.",
            hint=f"Use one of {', '.join(built_in)}, or file:Class for a strategy in {strategies}.",
        )
    plan = SweepPlan(
        space=parse_space(space, draft, locks, evaluate),
        strategy=name,
        file=file,
        evaluate=evaluate,
        population=population,
        epochs=epochs,
        selection_ratio=selection_ratio,
        mutation_rate=mutation_rate,
        steps=draft.config.budget.steps if steps is None else steps,
        seed=draft.config.algorithm.seed,
        runs=1,
        total_steps=0,
        knobs=draft.knobs,
    )
    _require_continuable(plan, draft)
    # No user code runs in this process, so the owner's own strategy may use a whole population per epoch.
    stages = [(population, plan.steps)] * epochs if file else create_strategy(plan).plan()
    runs = sum(count for count, _ in stages)
    if runs > _MOST_RUNS:
        raise InvalidValue(
            f"{runs} runs are too many for a sweep.",
            hint=f"At most {_MOST_RUNS}: use a smaller population.",
        )
    steps_in_all = sum(count * stage_steps for count, stage_steps in stages) if evaluate == "train" else 0
    return plan.model_copy(update={"runs": runs + 1, "total_steps": steps_in_all})


def _require_continuable(plan: SweepPlan, draft: Draft) -> None:
    """Refuse a strategy whose later candidates could not begin with the weights of earlier ones.

    Raises:
        InvalidValue: vLLM would begin with adapters, or adapters would change their shape.
    """
    if plan.file or plan.strategy not in _CONTINUING:
        return
    fixed = [name for name in _SHAPE_OF_ADAPTERS if name in plan.space]
    if plan.strategy == "pbt" and fixed:
        raise InvalidValue(
            f"space: {fixed[0]} cannot be varied by pbt: it continues from adapters of the same shape.",
            hint="Leave it out, or use evolution, random or optuna.",
        )

    def possible(name: str, current: Any) -> list[Any]:
        return (plan.space[name].choices or []) if name in plan.space else [current]

    engines = possible("inference.engine", draft.config.inference.engine)
    if "vllm" in engines and True in possible("policy.lora", draft.config.policy.lora):
        raise InvalidValue(
            f"{plan.strategy} continues from adapters, and vLLM begins with a whole model.",
            hint="Set inference.engine to embedded or transformers, or use evolution, random or optuna.",
        )


def strategy_arguments(plan: SweepPlan) -> dict[str, Any]:
    """Return the arguments of a strategy's class."""
    return {
        "space": {name: dimension.model_dump(exclude_none=True) for name, dimension in plan.space.items()},
        "population": plan.population,
        "epochs": plan.epochs,
        "selection_ratio": plan.selection_ratio,
        "mutation_rate": plan.mutation_rate,
        "steps": plan.steps,
        "seed": plan.seed,
        **plan.options,
    }


def create_strategy(plan: SweepPlan) -> Evolution:
    """Create a built-in strategy; for the owner's own, the one that provides the methods it lacks."""
    if plan.file is None and plan.strategy == OPTUNA:
        from toprope.sweeps.optuna_search import OptunaSearch

        return OptunaSearch(**strategy_arguments(plan))
    return STRATEGIES.get(plan.strategy if plan.file is None else "", Evolution)(
        **strategy_arguments(plan.model_copy(update={"options": {}}) if plan.file else plan)
    )


def longest_run_steps(plan: SweepPlan) -> int:
    """Return the optimizer steps of the longest single run."""
    if plan.file or plan.evaluate == "test":
        return plan.steps
    return max(steps for _, steps in create_strategy(plan).plan())
