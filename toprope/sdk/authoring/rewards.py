"""Reward functions that are added to an environment by configuration: named, weighted, in a file of the owner's.

    def brevity(*, answer, reference, **_):
        return 1.0 if len(answer) <= len(str(reference)) else 0.0

    async def judged(*, prompt, answer):
        return await ask_a_judge(prompt, answer)

A function is called once for each rollout, when the environment has scored it, with those of these that it takes by
name: `prompt` (the task's messages), `messages` (the whole conversation), `answer` (the newest answer), `reference`,
`data` (of the task), `parts` (what the environment's own scoring gave), `turns`, `truncated`. It returns a number
between its `low` and `high`. What it raises is the rollout's error, as what `score` raises is. Async functions of many
rollouts wait beside each other.

Whether a rollout counts as solved stays the environment's own affair: functions shape the reward, not the accuracy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.sdk.authoring.environment import Environment, Messages, Outcome, Part, Scoring, Task
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.authoring.loading import attribute_of
from toprope.sdk.errors import EnvironmentMistake, Failure, InvalidRequest, LoadError

__all__ = ["FIELDS", "RewardFunction", "Rewarding", "Scored", "load_rewards", "rewarded", "rewarding_of", "seen_of"]

FIELDS = ("prompt", "messages", "answer", "reference", "data", "parts", "turns", "truncated")
"""What a function may take, by name."""

_LONGEST_ERROR = 500
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RewardFunction:
    """A function, and the part of the reward that it gives."""

    name: str
    part: Part
    call: Callable[..., Any]
    takes: tuple[str, ...]
    near: str
    """Folder of its file, for error messages."""

    def read(self, value: Any) -> float:
        """What it returned, as a number of its range.

        Raises:
            EnvironmentMistake: It is none.
        """
        if isinstance(value, str | bytes | complex) or not hasattr(type(value), "__float__"):
            raise EnvironmentMistake(f"it returned {value!r:.40}, which is not a number.")
        number, part = float(value), self.part
        if not math.isfinite(number) or not part.low - _TOLERANCE <= number <= part.high + _TOLERANCE:
            raise EnvironmentMistake(
                f"it returned {number:g}, outside its range of {part.low:g} to {part.high:g}; low and high declare it."
            )
        return number


def load_rewards(specifications: Sequence[Mapping[str, Any]]) -> tuple[RewardFunction, ...]:
    """Loads functions.

    Args:
        specifications: Each with `name`, `weight`, `low`, `high`, `file` and `attribute`.

    Raises:
        LoadError: A file does not load, has no such function, or the function takes what there is not.
    """
    return tuple(_load(one) for one in specifications)


def _load(one: Mapping[str, Any]) -> RewardFunction:
    file = Path(str(one["file"]))
    found = attribute_of(file, str(one["attribute"]))
    where = f"{one['attribute']} of {file.name}"
    if not callable(found):
        raise LoadError(f"{where} is {type(found).__name__}, and no function.", f"{file}:1")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"{where} does not say what it takes: {error}", f"{file}:1") from None
    takes: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes = list(FIELDS)
            break
        if parameter.name in FIELDS and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            known = nearest(parameter.name, FIELDS, "A reward function may take, by name")
            raise LoadError(f"{where} takes {parameter.name!r}, which there is not. {known}", f"{file}:1")
    part = Part(float(one["weight"]), float(one["low"]), float(one["high"]), f"{one['attribute']} of {file.name}")
    return RewardFunction(str(one["name"]), part, found, tuple(takes), str(file.parent))


class Rewarding:
    """The functions of one environment, and what all parts of its reward weigh.

    Args:
        own: The environment's own parts, with the weights in force.
        functions: In the order in which they are called.
        weights: Weights by part, of the environment's own and of functions; the others keep theirs.

    Raises:
        InvalidRequest: A function has the name of an own part, or the weights do not fit.
    """

    def __init__(
        self, own: Mapping[str, Part], functions: Sequence[RewardFunction], weights: Mapping[str, float]
    ) -> None:
        self._functions = tuple(functions)
        for one in functions:
            if one.name in own:
                raise InvalidRequest(f"The environment has a reward part {one.name!r} of its own: choose another name.")
        self._scoring = Scoring.weighted({**own, **{one.name: one.part for one in functions}}, weights)

    @property
    def parts(self) -> dict[str, Part]:
        """The environment's own parts and those of the functions."""
        return self._scoring.parts

    def weighed(self, weights: Mapping[str, float]) -> Rewarding:
        """The same with other weights where they are named."""
        other = copy.copy(self)
        other._scoring = Scoring.weighted(self.parts, weights)
        return other

    def rewarded(self, outcome: Outcome, seen: Mapping[str, Any]) -> Outcome | Awaitable[Outcome]:
        """The outcome with the functions' parts: at once, or to be awaited where a function is async.

        What a function raises, or returns that is no value of its part, is the rollout's error.

        Args:
            outcome: What the environment's own scoring gave. One with an error stays as it is.
            seen: `prompt`, `messages`, `answer`, `reference`, `data`.
        """
        if outcome.error is not None:
            return outcome
        given = {**seen, "parts": outcome.parts, "turns": outcome.turns, "truncated": outcome.truncated}
        values: dict[str, Any] = {}
        for one in self._functions:
            try:
                value = one.call(**{name: copy.copy(given[name]) for name in one.takes})
                values[one.name] = value if inspect.isawaitable(value) else one.read(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # an author's code may raise anything
                for left in filter(inspect.iscoroutine, values.values()):
                    left.close()
                return _failed(one, error, outcome)
        if any(map(inspect.isawaitable, values.values())):
            return self._awaited(outcome, values)
        return self._combined(outcome, values)

    async def _awaited(self, outcome: Outcome, values: dict[str, Any]) -> Outcome:
        import asyncio

        waiting = [one for one in self._functions if inspect.isawaitable(values[one.name])]
        found = await asyncio.gather(*(_own(values[one.name]) for one in waiting), return_exceptions=True)
        for one, value in zip(waiting, found, strict=True):
            try:
                if isinstance(value, BaseException):
                    raise value
                values[one.name] = one.read(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as above
                return _failed(one, error, outcome)
        return self._combined(outcome, values)

    def _combined(self, outcome: Outcome, values: Mapping[str, float]) -> Outcome:
        parts = {name: {**outcome.parts, **values}[name] for name in self.parts}
        return dataclasses.replace(outcome, parts=parts, reward=self._scoring.reward(parts))


Scored = tuple["Outcome | None", "Rewarding | None", Callable[[], Mapping[str, Any]]]
"""An outcome of the environment's own scoring, what is added to it, and what functions see of the rollout."""


def rewarded(scored: Sequence[Scored], said: Callable[[list[Any]], Any]) -> Any:
    """Outcomes with what reward functions add, as `said` says them; a coroutine of it where functions are async: those
    of all these rollouts go on beside each other."""
    found = [
        outcome if outcome is None or rewarding is None else rewarding.rewarded(outcome, seen())
        for outcome, rewarding, seen in scored
    ]
    if not any(map(inspect.isawaitable, found)):
        return said(found)

    async def later() -> Any:
        import asyncio

        waiting = [place for place, one in enumerate(found) if inspect.isawaitable(one)]
        for place, one in zip(waiting, await asyncio.gather(*(found[place] for place in waiting)), strict=True):
            found[place] = one
        return said(found)

    return later()


def seen_of(task: Task, messages: Messages) -> dict[str, Any]:
    """What functions see of a rollout with this conversation."""
    place = next((number for number, one in enumerate(messages) if one.get("role") == "assistant"), len(messages))
    said = [str(one.get("content", "")) for one in messages if one.get("role") == "assistant"]
    return {
        "prompt": messages[:place] or task.messages,
        "messages": messages,
        "answer": said[-1] if said else "",
        "reference": task.reference,
        "data": task.data,
    }


async def _own(value: Awaitable[Any]) -> Any:
    return await value


def _failed(function: RewardFunction, error: BaseException, outcome: Outcome) -> Outcome:
    said = Failure.of(error, function.near).line()
    # The kind comes first, as in every error of a rollout: held-out texts are sealed by it.
    kind, _, rest = said.partition(":")
    told = f"{kind}: reward function {function.name!r}:{rest}"[:_LONGEST_ERROR]
    return Outcome(0.0, turns=outcome.turns, truncated=outcome.truncated, error=told)


def rewarding_of(
    environment: Environment, functions: Sequence[RewardFunction], weights: Mapping[str, float]
) -> Rewarding | None:
    """What functions add to an environment that was configured without weights; None where there are none.

    The environment's own parts get those of the weights that are theirs, but where that leaves them worth nothing: by
    its own reward it says what is solved.
    """
    if not functions:
        return None
    own = Scoring.weighted(environment.parts, {}).parts
    rewarding = Rewarding(own, functions, weights)
    with contextlib.suppress(InvalidRequest):
        environment.parts = Scoring.weighted(own, {name: weights[name] for name in weights if name in own}).parts
    return rewarding
