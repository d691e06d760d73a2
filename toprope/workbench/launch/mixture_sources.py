"""What a draft's environments are made of: the others beside the selected one, and the owner's reward functions.

A name becomes a source as the catalog has it, so that each environment reads only the folders that it may; a function's
file lies in one of the owner's folders with environments, and nowhere else. The owner's locks hold for every one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toprope.errors import InvalidValue, LockedField, NotFound, shown
from toprope.records.run.specification import EnvironmentSource, RewardSource
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.discovery import parse
from toprope.settings.environment import MemberPlan, members_of
from toprope.settings.fields import KNOBS, all_fields
from toprope.settings.locks import Locks
from toprope.settings.mixture import RewardFunction
from toprope.settings.schema import Config
from toprope.workbench.drafts import Draft
from toprope.workbench.entries import Entry

__all__ = ["Ingredients", "blend", "hold_locks", "own_source", "reward_source"]


@dataclass(frozen=True)
class Ingredients:
    """What a specification says of a draft's environments."""

    environment: EnvironmentSource
    mixture: list[EnvironmentSource] = field(default_factory=list)


def blend(draft: Draft, find: Callable[[str], Entry], folders: Sequence[Path]) -> Ingredients:
    """Finds the environments of a draft's mixture, and the functions that are added to their rewards.

    Args:
        draft: What is to start.
        find: The catalog's, by name.
        folders: The owner's folders with environments.

    Raises:
        NotFound: There is no such environment, file or function.
        InvalidValue: One is not ready, or a file lies elsewhere.
    """
    first, *others = members_of(draft.config.environment)
    own = own_source(draft, folders)
    mixture = []
    for plan in others:
        entry = find(plan.name)
        if not entry.usable:
            raise InvalidValue(f"environment.mixture has {plan.name}, which is {entry.status}.", hint=entry.problem)
        source = entry.environment.model_copy(update={"rewards": _rewards(plan, folders)})
        if source.model_dump() == own.model_dump() and plan.section.knobs == first.section.knobs:
            raise InvalidValue(
                f"environment.mixture has {plan.label}, which is the selected environment with the same knobs.",
                hint="Give it other knobs, or leave it out and set environment.weight.",
            )
        mixture.append(source)
    return Ingredients(own, mixture)


def own_source(draft: Draft, folders: Sequence[Path]) -> EnvironmentSource:
    """The selected environment of a draft with its reward functions. Raises: as `blend`."""
    first = members_of(draft.config.environment)[0]
    return draft.environment.model_copy(update={"rewards": _rewards(first, folders)})


def hold_locks(config: Config, locks: Locks) -> None:
    """Passes a configuration whose environments beside the selected one, and whose levels, the owner's locks allow.
    Knobs that an entry does not name are held to them when its worker has opened it.

    Raises:
        LockedField: One is not allowed; the message names it with the owner's reason.
    """
    for place, plan in enumerate(members_of(config.environment)):
        curriculum = plan.curriculum
        for level in curriculum.levels if curriculum is not None else ():
            if refusal := locks.refusal(f"{KNOBS}.{curriculum.knob}", level):  # type: ignore[union-attr]
                raise LockedField(f"{plan.label}: a level of its curriculum: {refusal}")
        if not place:
            continue
        given = [{"name": name, "default": value} for name, value in plan.section.knobs.items()]
        fields = {name: one for name, one in all_fields(given).items() if name.startswith("environment.")}
        # Which environments there may be is what a lock on the mixture says; weights and shares are of the whole.
        for name in ("mixture", "weight", "min_share"):
            fields.pop(f"environment.{name}", None)
        try:
            locks.enforce(config.model_copy(update={"environment": plan.section}), fields)
        except LockedField as refused:
            raise LockedField(f"{plan.label}, in environment.mixture: {refused.message}") from None


def _rewards(plan: MemberPlan, folders: Sequence[Path]) -> list[RewardSource]:
    return [reward_source(one, folders) for one in plan.rewards]


def reward_source(function: RewardFunction, folders: Iterable[Path]) -> RewardSource:
    """Where a worker finds a reward function.

    Args:
        function: As the configuration has it.
        folders: The owner's folders with environments, searched in this order.

    Raises:
        NotFound: There is no such file or function.
        InvalidValue: The file lies elsewhere, or is no Python.
    """
    folders = list(dict.fromkeys(folder.absolute() for folder in folders))
    named = Path(function.file)
    allowed = ", ".join(map(str, folders))
    outside = InvalidValue(
        f"The reward function {function.name} is in {shown(function.file)}, which is not in a folder with the owner's "
        "environments.",
        hint=f"Put the file into one of them: {allowed}.",
    )
    if ".." in named.parts:
        raise outside
    for folder in folders:
        file = folder / named  # of an absolute path nothing but the path itself is left
        if named.is_absolute() and not file.is_relative_to(folder):
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
    if named.is_absolute():
        raise outside
    raise NotFound(
        f"The reward function {function.name} is in {shown(function.file)}, and there is no such file.",
        hint=f"Looked for in {allowed}.",
    )


def _require_function(file: Path, function: RewardFunction) -> None:
    try:
        tree = parse(file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidValue(f"{file} cannot be read as Python: {error}.", hint="Mend the file.") from None
    defined: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            defined += [(one.asname or one.name).partition(".")[0] for one in node.names]
    if function.function not in defined:
        raise NotFound(
            f"{file} defines no {function.function}.",
            hint=nearest(function.function, [name for name in defined if not name.startswith("_")], "It defines"),
        )
