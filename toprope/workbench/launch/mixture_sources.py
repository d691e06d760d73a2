"""Sources of a draft's environments: its mixture, and the owner's reward functions.

The catalog resolves the names of environments, so that each reads only the folders it may read. Files of reward
functions must be in one of the owner's folders with environments; those that an agent saved are for environments that
an agent saved, because they run where answers are scored. The owner's locks apply to every environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toprope.errors import InvalidValue, LockedField, NotFound, shown
from toprope.records.run.specification import EnvironmentSource, RewardSource
from toprope.records.walls import Walls
from toprope.sdk.authoring.definitions import CALL, definition_problem, fitting_definitions
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import LoadError
from toprope.settings.fields import KNOBS, all_fields
from toprope.settings.locks import Locks
from toprope.settings.schema import Config
from toprope.settings.sections.environment import MemberPlan, members_of
from toprope.settings.sections.mixture import RewardFunction
from toprope.text_format import call
from toprope.training.rollouts.workers.walls import is_of_agent
from toprope.workbench.drafts import Draft
from toprope.workbench.entries import Entry


@dataclass(frozen=True)
class Ingredients:
    """Sources of a draft's environments, as a specification stores them."""

    environment: EnvironmentSource
    mixture: list[EnvironmentSource] = field(default_factory=list)


def blend(draft: Draft, find: Callable[[str], Entry], folders: Sequence[Path], walls: Walls) -> Ingredients:
    """Find the environments of a draft's mixture, and the functions added to their rewards.

    Args:
        draft: The draft to start.
        find: Resolves a name in the catalog.
        folders: The owner's folders with environments.
        walls: The owner's decisions, which tell the files that agents wrote.

    Raises:
        NotFound: There is no such environment, file or function.
        InvalidValue: An environment is not ready, a file is in another folder, or an agent wrote it and not the
            environment.
    """
    first, *others = members_of(draft.config.environment)
    selected = own_source(draft, folders, walls)
    mixture = []
    for plan in others:
        entry = find(plan.name)
        if not entry.usable:
            raise InvalidValue(f"environment.mixture: {plan.name} is {entry.status}.", hint=entry.problem)
        source = _rewarded(entry.environment, plan, folders, walls)
        if source.model_dump() == selected.model_dump() and plan.section.knobs == first.section.knobs:
            raise InvalidValue(
                f"environment.mixture contains {plan.label}, which is the selected environment with the same knobs.",
                hint="Give it other knobs, or leave it out and set environment.weight.",
            )
        mixture.append(source)
    return Ingredients(selected, mixture)


def own_source(draft: Draft, folders: Sequence[Path], walls: Walls) -> EnvironmentSource:
    """Return the selected environment of a draft with its reward functions. Raises: as `blend`."""
    first = members_of(draft.config.environment)[0]
    return _rewarded(draft.environment, first, folders, walls)


def hold_locks(config: Config, locks: Locks) -> None:
    """Enforce the owner's locks on the other environments of a mixture, on levels of curricula, and on all drivers.

    Knobs that an entry does not name are checked when its worker has opened it.

    Raises:
        LockedField: An environment, a level or so many drivers are not allowed; the message has the owner's reason.
    """
    if refusal := locks.refusal("launcher.drivers", config.launcher.driver_count):  # launcher.nodes adds drivers
        raise LockedField(refusal)
    for place, plan in enumerate(members_of(config.environment)):
        curriculum = plan.curriculum
        for level in curriculum.levels if curriculum is not None else ():
            if refusal := locks.refusal(f"{KNOBS}.{curriculum.knob}", level):  # type: ignore[union-attr]
                raise LockedField(f"{plan.label}: a level of its curriculum: {refusal}")
        if not place:
            continue
        knobs = [{"name": name, "default": value} for name, value in plan.section.knobs.items()]
        fields = {name: setting for name, setting in all_fields(knobs).items() if name.startswith("environment.")}
        # A lock on the mixture decides which environments it may contain; weights and shares concern the whole.
        for name in ("mixture", "weight", "min_share"):
            fields.pop(f"environment.{name}", None)
        try:
            locks.enforce(config.model_copy(update={"environment": plan.section}), fields)
        except LockedField as refused:
            raise LockedField(f"{plan.label}, in environment.mixture: {refused.message}") from None


def _rewarded(source: EnvironmentSource, plan: MemberPlan, folders: Sequence[Path], walls: Walls) -> EnvironmentSource:
    """Return an environment with its reward functions."""
    rewards = [reward_source(reward, folders) for reward in plan.rewards if reward.fn]
    saved = next((reward for reward in rewards if walls.wrote_agent(reward.file)), None)
    if saved is not None and not is_of_agent(walls, source.model_copy(update={"rewards": []})):
        raise InvalidValue(
            f"The reward function {saved.name} is in a file that an agent saved, and would run where {source.name} "
            "scores its held-out tasks; only environments that an agent saved take such functions.",
            hint=f"{call('save_environment', name='...', code='...')} saves an environment whose score has it, or the "
            f"owner moves {Path(saved.file).name} into a folder of theirs.",
        )
    return source.model_copy(update={"rewards": rewards})


def reward_source(function: RewardFunction, folders: Iterable[Path]) -> RewardSource:
    """Find the file of a reward function.

    Args:
        function: Its entry in the configuration.
        folders: The owner's folders with environments, in search order.

    Raises:
        NotFound: There is no such file or function.
        InvalidValue: The file is in another folder, or not valid Python.
    """
    folders = list(dict.fromkeys(folder.absolute() for folder in folders))
    path = Path(function.file)
    allowed = ", ".join(map(str, folders))
    outside = InvalidValue(
        f"The reward function {function.name} is in {shown(function.file)}, outside the owner's folders with "
        "environments.",
        hint=f"Move the file into one of these folders: {allowed}.",
    )
    if ".." in path.parts:
        raise outside
    for folder in folders:
        file = folder / path  # an absolute path replaces the folder
        if path.is_absolute() and not file.is_relative_to(folder):
            continue
        if not file.is_file():
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            raise outside
        _require_function(file, function)
        return RewardSource(
            name=function.name,
            weight=function.weight,
            low=function.low,
            high=function.high,
            file=str(file.resolve()),
            attribute=function.function,
        )
    if path.is_absolute():
        raise outside
    raise NotFound(
        f"The reward function {function.name} is in {shown(function.file)}, which does not exist.",
        hint=f"Searched folders: {allowed}.",
    )


def _require_function(file: Path, function: RewardFunction) -> None:
    try:
        problem = definition_problem(file, function.function, [CALL])
        fitting = fitting_definitions(file, [CALL]) if problem else []
    except LoadError as error:
        raise InvalidValue(str(error), hint="Correct the file.") from None
    if problem:
        raise NotFound(problem, hint=nearest(function.function, fitting, "It defines"))
