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
    return tuple(_load(specification) for specification in specifications)


def _load(specification: Mapping[str, Any]) -> RewardFunction:
    file = Path(str(specification["file"]))
    function = defined_object(file, str(specification["attribute"]), [CALL])
    place = f"{specification['attribute']} of {file.name}"
    if not callable(function):
        raise LoadError(f"{place} is of type {type(function).__name__}, not a function.", f"{file}:1")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"The parameters of {place} cannot be read: {error}", f"{file}:1") from None
    takes: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes = [*FIELDS, *(name for name in takes if name == _OUTPUT)]
            break
        if parameter.name in (*FIELDS, _OUTPUT) and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            hint = nearest(parameter.name, FIELDS, "A reward function can take")
            raise LoadError(f"{place} has an unknown parameter {parameter.name!r}. {hint}", f"{file}:1")
    part = Part(
        float(specification["weight"]),
        float(specification["low"]),
        float(specification["high"]),
        f"{specification['attribute']} of {file.name}",
    )
    return RewardFunction(str(specification["name"]), part, function, tuple(takes), str(file.parent))


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
        for function in functions:
            if function.name in own:
                raise InvalidRequest(
                    f"The environment already has a reward part {function.name!r}: choose another name."
                )
        self._scoring = Scoring.weighted({**own, **{function.name: function.part for function in functions}}, weights)

    @property
    def parts(self) -> dict[str, Part]:
        """The environment's own parts and those of the functions."""
        return self._scoring.parts

    def with_weights(self, weights: Mapping[str, float]) -> RewardFunctions:
        """A copy in which `weights` replaces the weights of the parts that it names."""
        changed = copy.copy(self)
        changed._scoring = Scoring.weighted(self.parts, weights)
        return changed

    def apply(self, outcome: Outcome, seen: Mapping[str, Any]) -> Outcome | Awaitable[Outcome]:
        """Add the functions' parts to an outcome; an awaitable if a function is async.

        If a function raises or returns an invalid value, the rollout ends with that error.

        Args:
            outcome: The result of the environment's own scoring. If it has an error, it is returned unchanged.
            seen: `prompt`, `messages`, `answer`, `reference`, `data`.
        """
        if outcome.error is not None:
            return outcome
        arguments = {
            **seen,
            _OUTPUT: seen["answer"],
            "parts": outcome.parts,
            "turns": outcome.turns,
            "truncated": outcome.truncated,
        }
        values: dict[str, Any] = {}
        for function in self._functions:
            try:
                value = function.call(**{name: copy.copy(arguments[name]) for name in function.takes})
                values[function.name] = value if inspect.isawaitable(value) else function.read(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # an author's code may raise anything
                for pending in filter(inspect.iscoroutine, values.values()):
                    pending.close()
                return _failed(function, error, outcome)
        if any(map(inspect.isawaitable, values.values())):
            return self._awaited(outcome, values)
        return self._combined(outcome, values)

    async def _awaited(self, outcome: Outcome, values: dict[str, Any]) -> Outcome:
        import asyncio

        waiting = [function for function in self._functions if inspect.isawaitable(values[function.name])]
        results = await asyncio.gather(
            *(_settled(values[function.name]) for function in waiting), return_exceptions=True
        )
        for function, value in zip(waiting, results, strict=True):
            try:
                if isinstance(value, BaseException):
                    raise value
                values[function.name] = function.read(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as above
                return _failed(function, error, outcome)
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
    outcomes = [
        outcome if outcome is None or functions is None else functions.apply(outcome, arguments())
        for outcome, functions, arguments in scored
    ]

    async def finish() -> _T:
        import asyncio

        return convert(list(await asyncio.gather(*map(_settled, outcomes))))

    if any(map(inspect.isawaitable, outcomes)):
        return finish()
    return convert([outcome for outcome in outcomes if outcome is None or isinstance(outcome, Outcome)])


def seen_of(task: Task, messages: Messages, first: int | None = None) -> dict[str, Any]:
    """Arguments of reward functions for a rollout with this conversation, whose first messages are the prompt."""
    places = (number for number, message in enumerate(messages) if message.get("role") == "assistant")
    place = first or next(places, len(messages))
    answers = [str(message.get("content", "")) for message in messages if message.get("role") == "assistant"]
    return {
        "prompt": messages[:place] or task.messages,
        "messages": messages,
        "answer": answers[-1] if answers else "",
        "reference": task.reference,
        "data": task.data,
    }


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _failed(function: RewardFunction, error: BaseException, outcome: Outcome) -> Outcome:
    line = Failure.of(error, function.near).line()
    # The kind comes first, as in every error of a rollout; the seal of held-out tasks relies on it.
    kind, _, message = line.partition(":")
    text = f"{kind}: reward function {function.name!r}:{message}"[:_LONGEST_ERROR]
    return Outcome(0.0, turns=outcome.turns, truncated=outcome.truncated, error=text, seat=outcome.seat)


def functions_of(
    environment: Environment, functions: Sequence[RewardFunction], weights: Mapping[str, float]
) -> RewardFunctions | None:
    """Reward functions for an environment that was configured without weights; None if there are no functions.

    Weights of the environment's own parts are set on the environment too, unless that would make its own reward
    constant: its `success` depends on that reward.
    """
    if not functions:
        return None
    own_parts = Scoring.weighted(environment.parts, {}).parts
    added = RewardFunctions(own_parts, functions, weights)
    with contextlib.suppress(InvalidRequest):
        environment.parts = Scoring.weighted(
            own_parts, {name: weights[name] for name in weights if name in own_parts}
        ).parts
    return added
