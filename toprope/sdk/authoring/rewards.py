"""Reward functions that a configuration adds to an environment: named, weighted, from a file of the owner.

    def brevity(*, answer, reference, **_):
        return 1.0 if len(answer) <= len(str(reference)) else 0.0

    async def judged(*, prompt, answer):
        return await ask_a_judge(prompt, answer)

A function is called once per rollout, after the environment has scored it. It takes any of these arguments by name:
`prompt` (the task's messages), `messages` (the whole conversation), `answer` (the newest answer), `reference` and
`data` (of the task), `parts` (values from the environment's own scoring), `turns`, `truncated`. A function of one
argument named `output` gets the newest answer, too. It returns a number between its `low` and `high`. If it raises, the
rollout ends with that error, as if `score` had raised it. Async functions of many rollouts run concurrently.

The environment alone decides whether a rollout counts as solved: functions change the reward, not the accuracy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toprope.sdk.authoring.definitions import CALL, defined_object
from toprope.sdk.authoring.environment import Environment, Messages, Outcome, Part, Scoring, Task, finite
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import EnvironmentMistake, Failure, InvalidRequest, LoadError

__all__ = [
    "FIELDS",
    "RewardFunction",
    "RewardFunctions",
    "Scored",
    "load_rewards",
    "rewarded",
    "functions_of",
    "seen_of",
]

FIELDS = ("prompt", "messages", "answer", "reference", "data", "parts", "turns", "truncated")
"""Names of the arguments that a function can take."""

_OUTPUT = "output"
"""Another name of `answer`, which `**` does not get."""
_T = TypeVar("_T")
_LONGEST_ERROR = 500
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RewardFunction:
    """A function with its part of the reward."""

    name: str
    part: Part
    call: Callable[..., Any]
    takes: tuple[str, ...]
    near: str
    """Folder of its file, for error messages."""

    def read(self, value: Any) -> float:
        """Validate a returned value.

        Raises:
            EnvironmentMistake: Not a number, or outside the declared range.
        """
        number, part = finite(value, "it returned"), self.part
        if not part.low - _TOLERANCE <= number <= part.high + _TOLERANCE:
            raise EnvironmentMistake(
                f"it returned {number:g}, outside its range of {part.low:g} to {part.high:g}; low and high declare it."
            )
        return number


def load_rewards(specifications: Sequence[Mapping[str, Any]]) -> tuple[RewardFunction, ...]:
    """Load reward functions.

    Args:
        specifications: Each with `name`, `weight`, `low`, `high`, `file` and `attribute`.

    Raises:
        LoadError: A file does not load or has no such function, or the function has an unknown parameter.
    """
    return tuple(_load(one) for one in specifications)


def _load(one: Mapping[str, Any]) -> RewardFunction:
    file = Path(str(one["file"]))
    found = defined_object(file, str(one["attribute"]), [CALL])
    where = f"{one['attribute']} of {file.name}"
    if not callable(found):
        raise LoadError(f"{where} is of type {type(found).__name__}, not a function.", f"{file}:1")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"The parameters of {where} cannot be read: {error}", f"{file}:1") from None
    takes: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes = list(FIELDS)
            break
        if parameter.name in (*FIELDS, _OUTPUT) and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            known = nearest(parameter.name, FIELDS, "A reward function can take")
            raise LoadError(f"{where} has an unknown parameter {parameter.name!r}. {known}", f"{file}:1")
    part = Part(float(one["weight"]), float(one["low"]), float(one["high"]), f"{one['attribute']} of {file.name}")
    return RewardFunction(str(one["name"]), part, found, tuple(takes), str(file.parent))


class RewardFunctions:
    """The reward functions of an environment, with the weights of all parts.

    Args:
        own: The environment's own parts with the weights in force.
        functions: The functions, in the order of their calls.
        weights: Weights by name of an own part or a function; the others keep theirs.

    Raises:
        InvalidRequest: A function has the name of an own part, or a weight is invalid.
    """

    def __init__(
        self, own: Mapping[str, Part], functions: Sequence[RewardFunction], weights: Mapping[str, float]
    ) -> None:
        self._functions = tuple(functions)
        for one in functions:
            if one.name in own:
                raise InvalidRequest(f"The environment already has a reward part {one.name!r}: choose another name.")
        self._scoring = Scoring.weighted({**own, **{one.name: one.part for one in functions}}, weights)

    @property
    def parts(self) -> dict[str, Part]:
        """The environment's own parts and those of the functions."""
        return self._scoring.parts

    def with_weights(self, weights: Mapping[str, float]) -> RewardFunctions:
        """A copy in which `weights` replaces the weights of the parts that it names."""
        other = copy.copy(self)
        other._scoring = Scoring.weighted(self.parts, weights)
        return other

    def apply(self, outcome: Outcome, seen: Mapping[str, Any]) -> Outcome | Awaitable[Outcome]:
        """Add the functions' parts to an outcome; an awaitable if a function is async.

        If a function raises or returns an invalid value, the rollout ends with that error.

        Args:
            outcome: The result of the environment's own scoring. If it has an error, it is returned unchanged.
            seen: `prompt`, `messages`, `answer`, `reference`, `data`.
        """
        if outcome.error is not None:
            return outcome
        given = {
            **seen,
            _OUTPUT: seen["answer"],
            "parts": outcome.parts,
            "turns": outcome.turns,
            "truncated": outcome.truncated,
        }
        values: dict[str, Any] = {}
        for one in self._functions:
            try:
                value = one.call(**{name: copy.copy(given[name]) for name in one.takes})
                values[one.name] = value if inspect.isawaitable(value) else one.read(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # an author's code may raise anything
                for pending in filter(inspect.iscoroutine, values.values()):
                    pending.close()
                return _failed(one, error, outcome)
        if any(map(inspect.isawaitable, values.values())):
            return self._awaited(outcome, values)
        return self._combined(outcome, values)

    async def _awaited(self, outcome: Outcome, values: dict[str, Any]) -> Outcome:
        import asyncio

        waiting = [one for one in self._functions if inspect.isawaitable(values[one.name])]
        found = await asyncio.gather(*(_settled(values[one.name]) for one in waiting), return_exceptions=True)
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


Scored = tuple["Outcome | None", "RewardFunctions | None", Callable[[], Mapping[str, Any]]]
"""An outcome of the environment's own scoring, the functions to add, and a callable for their arguments."""


def rewarded(scored: Sequence[Scored], convert: Callable[[list[Outcome | None]], _T]) -> _T | Coroutine[Any, Any, _T]:
    """Add reward functions to outcomes.

    Args:
        scored: The outcomes.
        convert: Converts the finished outcomes to the result.

    Returns:
        The result, or a coroutine for it if functions are async; those of all rollouts run concurrently.
    """
    found = [
        outcome if outcome is None or functions is None else functions.apply(outcome, seen())
        for outcome, functions, seen in scored
    ]

    async def finish() -> _T:
        import asyncio

        return convert(list(await asyncio.gather(*map(_settled, found))))

    if any(map(inspect.isawaitable, found)):
        return finish()
    return convert([one for one in found if one is None or isinstance(one, Outcome)])


def seen_of(task: Task, messages: Messages, first: int | None = None) -> dict[str, Any]:
    """Arguments of reward functions for a rollout with this conversation, whose first messages are the prompt."""
    answers = (number for number, one in enumerate(messages) if one.get("role") == "assistant")
    place = first or next(answers, len(messages))
    said = [str(one.get("content", "")) for one in messages if one.get("role") == "assistant"]
    return {
        "prompt": messages[:place] or task.messages,
        "messages": messages,
        "answer": said[-1] if said else "",
        "reference": task.reference,
        "data": task.data,
    }


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _failed(function: RewardFunction, error: BaseException, outcome: Outcome) -> Outcome:
    said = Failure.of(error, function.near).line()
    # The kind comes first, as in every error of a rollout; the seal of held-out tasks relies on it.
    kind, _, rest = said.partition(":")
    told = f"{kind}: reward function {function.name!r}:{rest}"[:_LONGEST_ERROR]
    return Outcome(0.0, turns=outcome.turns, truncated=outcome.truncated, error=told, seat=outcome.seat)


def functions_of(
    environment: Environment, functions: Sequence[RewardFunction], weights: Mapping[str, float]
) -> RewardFunctions | None:
    """Reward functions for an environment that was configured without weights; None if there are no functions.

    Weights of the environment's own parts are set on the environment too, unless that would make its own reward
    constant: its `success` depends on that reward.
    """
    if not functions:
        return None
    own = Scoring.weighted(environment.parts, {}).parts
    added = RewardFunctions(own, functions, weights)
    with contextlib.suppress(InvalidRequest):
        environment.parts = Scoring.weighted(own, {name: weights[name] for name in weights if name in own}).parts
    return added
