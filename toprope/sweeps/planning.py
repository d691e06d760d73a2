"""From what an agent asks for to the plan of a sweep: the space held against fields and locks, the cost known before.

Everything that can be wrong is found here, before anything starts: a field that is none, bounds that field or owner do
not allow, a strategy that nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toprope.errors import InvalidValue, LockedField, NotFound, shown
from toprope.records.run.specification import Dimension, SweepPlan
from toprope.sdk.evolution import STRATEGIES, Evolution
from toprope.settings.changes import NOT_EDITABLE
from toprope.settings.fields import Field, find_field
from toprope.settings.locks import Locks
from toprope.workbench.drafts import Draft

__all__ = [
    "MOST_EPOCHS",
    "MOST_POPULATION",
    "OPTUNA",
    "parse_space",
    "create_strategy",
    "make_plan",
    "strategy_arguments",
]

MOST_POPULATION, MOST_EPOCHS, _MOST_RUNS = 64, 50, 999
OPTUNA = "optuna"
_KEYS = ("min", "max", "log", "choices")
_OWN = re.compile(r"^(?P<file>[A-Za-z0-9_][A-Za-z0-9_-]{0,63}):(?P<name>[A-Za-z_][A-Za-z0-9_]{0,63})$")
_NOT_VARIED = {
    "budget.steps": "steps of start_sweep is what a candidate trains for",
    "evaluation.heldout_tasks": "held-out tasks measure the winner alone",
    "evaluation.validation_tasks": "all candidates are measured on the same tasks",
    "algorithm.seed": "all candidates have the draft's; a lucky seed is no setting",
    "algorithm.name": "candidates are compared by their steps",
    "policy.model": "PBT and halving go on with weights by themselves",
    "launcher.kind": "it is the same for all",
}
_EXAMPLE = (
    '{"optimizer.learning_rate": {"min": 1e-5, "max": 1e-2, "log": true}, '
    '"rollout.groups_per_step": {"choices": [4, 8]}}'
)


def parse_space(space: Mapping[str, Any], draft: Draft, locks: Locks) -> dict[str, Dimension]:
    """The space of a sweep over a draft's fields.

    Args:
        space: By dotted field `{"min": .., "max": .., "log": true}` or `{"choices": [..]}`.
        draft: Whose fields they are.
        locks: The owner's.

    Raises:
        NotFound: A field is none.
        LockedField: The owner does not allow some of it, with the reason.
        InvalidValue: It is empty, or bounds or choices do not fit the field.
    """
    if not space:
        raise InvalidValue("space is empty: nothing would be varied.", hint=f"For example {_EXAMPLE}")
    found = {}
    for name, given in space.items():
        field = find_field(name, draft.fields)
        why = _NOT_VARIED.get(field.name) or NOT_EDITABLE.get(field.name)
        if why:
            raise InvalidValue(f"space: {name} cannot be varied: {why}.")
        found[name] = _dimension(name, field, given, locks)
    return found


def _dimension(name: str, field: Field, given: Any, locks: Locks) -> Dimension:
    if isinstance(given, list | tuple):
        given = {"choices": list(given)}
    if not isinstance(given, Mapping) or set(given) - set(_KEYS) or not given:
        raise InvalidValue(f"space: {name}: {shown(given)} is no range.", hint=f"For example {_EXAMPLE}")
    if "choices" in given:
        choices = given["choices"]
        if not isinstance(choices, list) or len(choices) < 2 or len(given) > 1:
            raise InvalidValue(f"space: {name}: choices must be a list of two values or more, and stand alone.")
        typed = [field.coerce(one) for one in choices]
        for one in typed:
            _require_allowed(name, one, locks)
        if any(one in typed[:place] for place, one in enumerate(typed)):
            raise InvalidValue(f"space: {name}: a choice stands there twice.")
        return Dimension(choices=typed)
    if field.kind not in ("integer", "number") or field.choices is not None:
        raise InvalidValue(f"space: {name} is a {field.type_text}: give choices.", hint=f"Allowed: {field.bounds}.")
    low, high = field.coerce(given.get("min")), field.coerce(given.get("max"))
    if low is None or high is None or not low < high:
        raise InvalidValue(f"space: {name}: min must be below max, and both must be given.")
    for one in (low, high):
        _require_allowed(name, one, locks)
    log = given.get("log", False)
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
    """The plan of a sweep, with what it may cost at most.

    Args:
        draft: What is varied.
        locks: The owner's.
        space: See `dimensions`.
        strategy: One of STRATEGIES, `optuna`, or `file:Class` for one of the owner's.
        population: Candidates of an epoch.
        epochs: How many.
        selection_ratio: Share that survives an epoch.
        mutation_rate: How much new candidates differ.
        steps: Optimizer steps of a candidate in the first epoch; the draft's budget when None.
        evaluate: By training, or by a test of the policy as it is.
        strategies: The folder with the owner's own strategies.

    Raises:
        NotFound, LockedField, InvalidValue: See `dimensions`, and for numbers and strategies that are none.
    """
    known = (*STRATEGIES, OPTUNA)
    for what, value, most in (("population", population, MOST_POPULATION), ("epochs", epochs, MOST_EPOCHS)):
        if not 1 <= value <= most:
            raise InvalidValue(f"{what} must be from 1 to {most}, not {value}.")
    if population * epochs < 2:
        raise InvalidValue("A population of 1 for 1 epoch compares nothing.", hint="start_training starts a run.")
    if not 0 < selection_ratio <= 1 or not 0 <= mutation_rate <= 1:
        raise InvalidValue("selection_ratio must be above 0 and at most 1, mutation_rate from 0 to 1.")
    if strategy == "halving" and selection_ratio > 0.5:
        raise InvalidValue("Halving with a selection_ratio above 0.5 leaves out too few.", hint="0.5 or 0.33.")
    if evaluate == "test" and strategy in ("pbt", "halving"):
        raise InvalidValue(f"{strategy} trains on from weights; a test has none.", hint="evolution, random or optuna.")
    if draft.config.algorithm.name == "sft":
        raise InvalidValue(
            "A sweep compares runs by reward; this draft fine-tunes.", hint="Set algorithm.name to grpo."
        )
    if steps is not None and steps < 1:
        raise InvalidValue(f"steps must be at least 1, not {steps}.")
    file, name = None, strategy
    if own := _OWN.fullmatch(strategy):
        path = strategies / f"{own['file']}.py"
        if not path.is_file():
            there = ", ".join(sorted(one.stem for one in strategies.glob("*.py"))) or "none"
            raise NotFound(
                f"There is no {own['file']}.py in {strategies}.",
                hint=f"Strategies there: {there}. Ours: {', '.join(known)}.",
            )
        file, name = str(path.resolve()), own["name"]
    elif strategy not in known:
        raise NotFound(
            f"There is no strategy {shown(strategy)}.",
            hint=f"There are {', '.join(known)}, and file:Class for one in {strategies}.",
        )
    plan = SweepPlan(
        space=parse_space(space, draft, locks),
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
    # A strategy of a user's own cannot be asked here, where no code of users runs: it may have a population an epoch.
    stages = [(population, plan.steps)] * epochs if file else create_strategy(plan).plan()
    runs = sum(many for many, _ in stages)
    if runs > _MOST_RUNS:
        raise InvalidValue(
            f"{runs} runs are too many for a sweep.", hint=f"At most {_MOST_RUNS}: a smaller population."
        )
    steps_in_all = sum(many * each for many, each in stages) if evaluate == "train" else 0
    return plan.model_copy(update={"runs": runs + 1, "total_steps": steps_in_all})


def strategy_arguments(plan: SweepPlan) -> dict[str, Any]:
    """What the class of a strategy is made with."""
    return {
        "space": {name: one.model_dump(exclude_none=True) for name, one in plan.space.items()},
        "population": plan.population,
        "epochs": plan.epochs,
        "selection_ratio": plan.selection_ratio,
        "mutation_rate": plan.mutation_rate,
        "steps": plan.steps,
        "seed": plan.seed,
        **plan.options,
    }


def create_strategy(plan: SweepPlan) -> Evolution:
    """One of our own strategies; for a user's the one whose methods fill in what theirs lacks."""
    if plan.file is None and plan.strategy == OPTUNA:
        from toprope.sweeps.optuna_search import OptunaSearch

        return OptunaSearch(**strategy_arguments(plan))
    return STRATEGIES.get(plan.strategy if plan.file is None else "", Evolution)(
        **strategy_arguments(plan.model_copy(update={"options": {}}) if plan.file else plan)
    )


def longest_run_steps(plan: SweepPlan) -> int:
    """Optimizer steps of the longest single run."""
    if plan.file or plan.evaluate == "test":
        return plan.steps
    return max(each for _, each in create_strategy(plan).plan())
