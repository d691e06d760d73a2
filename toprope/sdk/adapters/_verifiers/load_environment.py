"""Environments of verifiers before 0.2: packages with a function `load_environment`.

The arguments of that function are knobs. verifiers runs the rollouts with the session's key; other models that they
ask are led to the rollout's judge (see judges.py), so that no outside account is needed. Each reward function is a part
with its author's weight, and each function of weight 0 a metric.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from toprope.sdk.adapters._shared.bounds import bounds_of, within
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._verifiers.harness import loopback_client
from toprope.sdk.adapters._verifiers.judges import ask_for, rollout_of
from toprope.sdk.adapters._verifiers.keyword_arguments import listed_keywords
from toprope.sdk.adapters._verifiers.older_interface import adapt_hooks
from toprope.sdk.adapters._verifiers.older_names import adopt_functions, provide_older_names
from toprope.sdk.adapters._verifiers.prompts import messages_of_row, plain_messages, with_texts
from toprope.sdk.adapters._verifiers.reward_errors import Raised, note_errors, noted
from toprope.sdk.authoring.env_managed import REWARD_ERRORS, OwnLoop, Played, Session, timed
from toprope.sdk.authoring.environment import Part, Task, copy_for
from toprope.sdk.authoring.knobs import REQUIRED, allows_null, knob, settable
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError

__all__ = [
    "BEFORE",
    "RANGE",
    "SUCCESS",
    "TURNS",
    "LoadedEnvironment",
    "bounded",
    "bounds",
    "is_solved",
    "loads_environment",
]

BEFORE = ("verifiers>=0.1.11,<0.2", "mcp<2", "prime-sandboxes<0.2.37")
"""The requirements of such packages: they import the server of mcp before 2, and start sandboxes by a text. Earlier
versions of verifiers have no clients of their own."""
TURNS = 32
"""Most answers in a rollout whose author names no limit."""
_METRIC_LIMIT = 1e6
_WHOLE = "reward"
SUCCESS = "reward that counts as solved; null: the parts of the largest weight at their largest value"
RANGE: tuple[tuple[str, Any, Any], ...] = (
    ("reward_low", float | None, knob(None, help="smallest value of a reward; null: penalties down to -1000")),
    ("reward_high", float, knob(1.0, help="largest value of a reward")),
)
_PENALTY = 1000.0
"""Largest size of a penalty whose bounds the owner does not set."""
_OURS = ("turns", "reward_low", "reward_high", "success_reward", "arguments")
_KEY = re.compile(r"(\w*?)(?:api_)?key(_var)?$")
"""Names of a model's key, or of its environment variable, beside `<the same>model` or `<the same>base_url`."""
_REFERENCES = ("answer", "reference", "solution", "target")


def loads_environment(module: str) -> bool:
    """Return True if an importable module has the function; verifiers itself is imported on the way.

    Raises:
        LoadError: This verifiers is too old.
    """
    import verifiers

    base = getattr(verifiers, "Environment", None)
    if base is not None and not hasattr(base, "_normalize_tool_defs"):
        version = getattr(verifiers, "__version__", "?")
        raise LoadError(f"verifiers {version} is too old. Add the environment again with -r '{BEFORE[0]}'.")
    provide_older_names()
    return callable(getattr(importlib.import_module(module), "load_environment", None))


class LoadedEnvironment(OwnLoop):
    """The environment that a package's `load_environment` returns."""

    guessed_reference = True
    listed = finite = True
    packages = ("verifiers",)
    tags = ("verifiers", "model-roles")

    def __init__(self, module: str) -> None:
        import verifiers

        note_errors(verifiers.Rubric)
        loaded = importlib.import_module(module)
        self._make = loaded.load_environment
        self.files = tuple(filter(None, [getattr(loaded, "__file__", None)]))
        self.name = f"verifiers/{module}"
        self.__doc__ = first_line(loaded.__doc__) or first_line(self._make.__doc__) or f"The environment {module}"
        self._fields, self.Knobs = _knobs(self._make)
        self._env: Any = None
        self._routed = False
        """True if the functions' weights do not tell the reward; the whole reward is then a part."""

    def setup(self) -> None:
        knobs = self.knobs
        arguments = {field: getattr(knobs, name) for name, field in self._fields.items()}
        arguments |= knobs.arguments
        for name, value in arguments.items():  # Other models are the rollout's judge, which has a key of its own.
            of_model = _KEY.match(name)
            endpoint = of_model and [arguments.get(of_model[1] + suffix) for suffix in ("model", "base_url")]
            if of_model is None or not (name.startswith("judge") or any(endpoint or ())):
                continue
            if of_model[2] and isinstance(value, str):
                os.environ.setdefault(value, "none")
            elif not of_model[2] and value is None:
                arguments[name] = "none"
        with OwnRandom("tasks"):  # every worker has to find the same tasks
            self._env = self._make(**arguments)
        if not hasattr(self._env, "rubric"):
            raise EnvironmentMistake(f"load_environment returned {type(self._env).__name__}, not an environment.")
        adapt_hooks(self._env)
        for member in (getattr(self._env, "env_map", None) or {"": self._env}).values():
            adopt_functions(member.rubric)
        self.parts = self._parts()
        self.max_turns = _limit_turns(self._env, knobs.turns)

    def tasks(self) -> Iterator[Task]:
        with OwnRandom("tasks"):  # some make their data only now
            table = self._rows()
        rows = ({**row, "example_id": row.get("example_id", number)} for number, row in enumerate(table))
        for messages, row in with_texts(rows, messages_of_row):
            reference = next((row[name] for name in _REFERENCES if isinstance(row.get(name), str | int | float)), None)
            yield Task(
                messages,
                reference=None if reference in (None, "") else str(reference),
                data={"row": row},
                key=json.dumps([messages, str(reference), row.get("info")], sort_keys=True, default=str),
            )

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return is_solved(self.knobs, self.parts, parts, reward)

    async def group(self, task: Task, sessions: Sequence[Session]) -> list[Played | BaseException]:
        """Sample and score a group as one, because some rubrics compare its rollouts."""
        copies = [copy_for(self, task) for _ in sessions]
        playing = [timed(member.rolled(session), session) for member, session in zip(copies, sessions, strict=True)]
        results: list[Any] = list(await asyncio.gather(*playing, return_exceptions=True))
        states = [result for result in results if not isinstance(result, BaseException) and result.get("error") is None]
        try:
            with noted() as raised:
                if states:
                    await self._score(states, sessions[0])
        except Exception as error:
            return [result if isinstance(result, BaseException) else error for result in results]
        return [result if isinstance(result, BaseException) else self._result_of(result, raised) for result in results]

    async def rolled(self, session: Session) -> Any:
        """Return the state of one rollout of `self.task`, not scored."""
        in_vain = ask_for(session)
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        sampling = session.sampling
        own_stop = (getattr(self._env, "sampling_args", None) or {}).get("stop") or ()
        if stop := [*session.stop, *([own_stop] if isinstance(own_stop, str) else own_stop)]:
            sampling["stop"] = stop
        async with loopback_client() as http:
            api = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http, max_retries=0)
            client = OpenAIChatCompletionsClient(api)
            client.raise_from_native_response = _accept
            state = await self._env.rollout(self.task.data["row"], client, session.model, sampling)
        if in_vain:
            raise in_vain[0]
        if state.get("prompt_too_long") and not state.get("trajectory"):
            raise InvalidRequest("The task's prompt leaves no room for an answer within policy.max_context.")
        return state

    async def _score(self, states: list[Any], session: Session) -> None:
        rollout_of.set(session)
        await self._env.rubric.score_group(states)
        for state in states:
            await self._env.rubric.cleanup(state)

    def _rows(self) -> Any:
        """Return the rows of the training data, or else of the evaluation data."""
        if self._env.build_dataset() is not None:
            return self._env.get_dataset()
        return self._env.get_eval_dataset()

    def _parts(self) -> dict[str, Part]:
        names, weights = self._env.rubric._get_reward_func_names(), self._env.rubric._get_reward_weights()
        functions = {function.__name__: function for function in self._env.rubric._get_reward_funcs()}
        parts: dict[str, Part] = {}
        weighted = [name for name, weight in zip(names, weights, strict=False) if weight]
        self._routed = len(names) != len(weights) or any(names.count(name) > 1 for name in weighted)
        self._routed |= any(map(_scores_itself, _rubrics_in(self._env.rubric)))
        # A group routes a task to the rubric of one of its environments, two functions share a name, or an author's
        # rubric makes the reward.
        if self._routed:
            low, high = _range(self._env.rubric, self.knobs)
            parts[_WHOLE] = Part(1.0, low, high, "the reward by the rubric of the task's environment")
            weights = [0.0] * len(names)
        for name, weight in zip(names, weights, strict=True):
            description = first_line(getattr(functions.get(name), "__doc__", None))
            low, high = bounds(self.knobs, weight) if weight else (-_METRIC_LIMIT, _METRIC_LIMIT)
            parts.setdefault(name, Part(float(weight), low, high, description if weight else description or "a metric"))
        if not parts:
            raise EnvironmentMistake("Its rubric has no reward functions, so there is nothing to learn from.")
        parts.setdefault(REWARD_ERRORS, Part(0.0, 0.0, _METRIC_LIMIT, "reward functions that raised, which gives 0"))
        return parts

    def _result_of(self, state: Any, raised: Iterable[Raised] = ()) -> Played:
        trajectory = state.get("trajectory") or []
        turns = max(len(trajectory), 1)
        truncated = bool(state.get("is_truncated")) or any(step.get("is_truncated") for step in trajectory)
        if state.get("error") is not None:
            error = state["error"]
            text = str(error) or str(error.__cause__ or "")
            return Played({}, turns=turns, truncated=truncated, error=f"{type(error).__name__}: {text}")
        own_errors = [reward_error for reward_error in raised if any(scored is state for scored in reward_error.states)]
        if unanswered := next(filter(None, (reward_error.unanswered() for reward_error in own_errors)), None):
            return Played({}, turns=turns, truncated=truncated, error=unanswered)
        parts = dict.fromkeys(self.parts, 0.0)
        parts[REWARD_ERRORS] = float(len(own_errors))
        for name, value in (state.get("metrics") or {}).items():
            part = self.parts.get(name)
            if part is None or value is None:
                continue
            parts[name] = bounded(name, float(value), part)
        if self._routed:
            parts[_WHOLE] = bounded(_WHOLE, float(state.get("reward") or 0.0), self.parts[_WHOLE])
        conversation = [*plain_messages(state.get("prompt")), *plain_messages(state.get("completion"))]
        return Played(parts, messages=[_wire(message) for message in conversation], turns=turns, truncated=truncated)


def _limit_turns(env: Any, turns: int) -> int:
    """Bound the answers in a rollout of an environment, or of each environment of a group, and return the most.

    Args:
        turns: The most; 0: the author's number, or `TURNS` without one.
    """
    if members := getattr(env, "env_map", None):
        return max(_limit_turns(member, turns) for member in members.values())
    declared = getattr(env, "max_turns", None)
    limit = declared if isinstance(declared, int) and declared > 0 else 0
    env.max_turns = min(limit, turns) if limit and turns else limit or turns or TURNS
    return int(env.max_turns)


def _range(rubric: Any, knobs: Any) -> tuple[float, float]:
    """Return the smallest and the largest reward by a rubric, or by those of a group."""
    if members := getattr(rubric, "env_map", None):
        lows, highs = zip(*(_range(member.rubric, knobs) for member in members.values()), strict=True)
        return min(lows), max(highs)
    if members := getattr(rubric, "rubrics", None):
        ends = [list(_range(member, knobs)) for member in members]
    else:
        ends = [sorted(weight * end for end in bounds(knobs, weight)) for weight in rubric._get_reward_weights()]
    low, high = sum(pair[0] for pair in ends), sum(pair[1] for pair in ends)
    return bounds(knobs, 1.0) if low == high and _scores_itself(rubric) else (low, high)


def _rubrics_in(rubric: Any) -> Iterator[Any]:
    """Yield a rubric and those that it consists of."""
    yield rubric
    of_environments = (member.rubric for member in (getattr(rubric, "env_map", None) or {}).values())
    for member in (*(getattr(rubric, "rubrics", None) or ()), *of_environments):
        yield from _rubrics_in(member)


def _scores_itself(rubric: Any) -> bool:
    """Return True if the author of a rubric, and not verifiers, wrote how it scores."""
    return str(rubric.score_group.__module__).partition(".")[0] != "verifiers"


def bounds(knobs: Any, weight: float) -> tuple[float, float]:
    """Return the smallest and the largest value of a reward with a weight.

    Authors punish bad answers by values below 0, or by a large value with a negative weight. Neither makes an answer
    count as solved, so without `reward_low` their bounds are wide.

    Raises:
        InvalidRequest: The smallest is not below the largest.
    """
    if knobs.reward_low is None and weight < 0:
        return 0.0, _PENALTY
    return bounds_of(knobs, -_PENALTY, _PENALTY)


def bounded(name: str, value: float, part: Part) -> float:
    """Return a reward within its bounds; see `within`.

    Raises:
        EnvironmentMistake: It is outside: on another scale, any answer could count as solved.
    """
    if (reward := within(value, part.low, part.high)) is None:
        raise EnvironmentMistake(
            f"Reward {name!r} is {value:g}, outside {part.low:g} to {part.high:g}: set the knobs reward_low and "
            "reward_high; the largest value of the heaviest part counts as solved unless success_reward is set."
        )
    return reward


def is_solved(
    knobs: Any,
    parts: Mapping[str, Part],
    values: Mapping[str, float],
    reward: float,
    unnamed: Collection[str] = (),
) -> bool:
    """Return True if a rollout solved its task.

    Without `success_reward`, the parts with the largest weight have to be as large as they can be: further parts reward
    formats, or punish, and cannot all be at their best. Nor can functions called penalties, which give 0 at most; one
    that outweighs all others is a reward with a penalty in it.

    Args:
        unnamed: Parts whose rewards have names of their own; if one has the largest weight, the reward has to be as
            large as it can be.
    """
    if knobs.success_reward is not None:
        return bool(reward >= knobs.success_reward - 1e-9)
    weighted = [name for name, part in parts.items() if part.weight > 0]
    if not weighted:  # penalties alone, or no part with a name
        return bool(reward >= (0.0 if any(part.weight for part in parts.values()) else 1.0) - 1e-9)
    most = max(parts[name].weight for name in weighted)
    heaviest = [name for name in weighted if parts[name].weight >= most - 1e-9]
    main = [name for name in heaviest if "penalty" not in name.lower()] or heaviest
    if any(name in unnamed for name in main):
        weighted = [name for name in weighted if name in main or "penalty" not in name.lower()]
        return bool(reward >= sum(parts[name].weight * parts[name].high for name in weighted) - 1e-9)
    return all(values.get(name, 0.0) >= parts[name].high - 1e-9 for name in main)


async def _accept(response: Any) -> None:
    """Accept an empty answer: it is the policy's, and rewards judge it. verifiers takes it for a failed request."""


def _knobs(function: Any) -> tuple[dict[str, str], type]:
    """Return the function's arguments with JSON values by knob, and a dataclass of our knobs and these."""
    further = "further arguments of load_environment"
    if keywords := listed_keywords(function):
        further += f", with defaults: {keywords}"
    definitions: list[tuple[str, Any, Any]] = [
        ("turns", int, knob(0, ge=0, le=1000, help=f"most answers; 0: the author's limit, or {TURNS} without one")),
        *RANGE,
        ("success_reward", float | None, knob(None, help=SUCCESS)),
        ("arguments", dict, knob({}, help=further)),
    ]
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation may name what exists for type checkers only
        hints = {}
    fields: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        plain = type(default) if isinstance(default, bool | int | float | str) else Any
        hint = hints.get(name, Any | None if default is REQUIRED else plain)
        if hint not in (Any, Any | None) and not settable(hint):
            if default is not REQUIRED:
                continue  # JSON cannot say it; the author's default holds.
            hint = Any | None if allows_null(hint) else Any
        knob_name = f"environment_{name}" if name in _OURS or name.startswith("_") else name
        fields[knob_name] = name
        definitions.append((knob_name, hint, knob(default, help="an argument of load_environment")))
    return fields, dataclasses.make_dataclass("Knobs", definitions, kw_only=True)


def _wire(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI has it; verifiers keeps the parts of a tool call beside each other."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        flat = {name: call.get(name) for name in ("name", "arguments")}
        calls.append({"id": call.get("id", ""), "type": "function", "function": call.get("function") or flat})
    return {**message, "tool_calls": calls}
