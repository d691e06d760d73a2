"""TRL's conventions: batch reward functions, and environment classes whose public methods are tools.

Code written for GRPOTrainer runs unchanged. The target is a JSON object:

    {"file": "/path/rewards.py",        the user's file
     "reward_funcs": ["accuracy"],      functions f(prompts, completions, completion_ids, **columns), sync or async
     "weights": [1.0],                  one for each; 1 by default
     "environment": "Game",             GRPOTrainer's environment_factory: a class or function; or an object of
                                        several by name, selected by the rows' column `environment`
     "tools": ["search"],               functions that the policy may call besides the environment's methods
     "rows": "train.jsonl",             see toprope.sdk.adapters._shared.user_files; optional with an environment
     "tasks": 1000,                     number of tasks without rows
     "ranges": {"accuracy": [0, 1]},    bounds of a reward, 0 to 1 by default; a value outside is an error,
     "clip": false,                     or is clipped
     "script": true,                    a training script: everything else is what it passes to its trainer,
     "arguments": ["--env-url", "..."], run with these arguments; see toprope.sdk.adapters._trl.script
     "success": "accuracy",             the reward whose highest value counts as solved; the total by default
     "reference": "solution",           column of the right answer, for people and checks
     "max_turns": 10,                   most answers with tools; 100 for a script without a limit of its own
     "name": "...", "description": "..."}

As in TRL 1.16: rewards of a group are computed in one call, None means that a function does not apply, an environment
is created once and reset often, the result of `reset(**row)` is appended to the last user message, and `get_reward()`
is a further reward with weight 1. Differences: `trainer_state` is not available, and images are not supported.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.sdk.adapters._shared.bounds import Bounds
from toprope.sdk.adapters._shared.keys import keyed
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.rows import chat_of, text_of
from toprope.sdk.adapters._shared.user_files import UserFile, is_async, parsed, public_name
from toprope.sdk.adapters._trl.listing import TURNS, declared
from toprope.sdk.adapters._trl.messages import as_trl, is_content, observed, text_of_result
from toprope.sdk.adapters._trl.script import run_script
from toprope.sdk.authoring.environment import Environment, Messages, Part, Task
from toprope.sdk.authoring.event_loop import BackgroundLoop
from toprope.sdk.authoring.knobs import knob, nearest
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.orchestration.tools import Tool
from toprope.sdk.tooled import TOOL_PARTS, Call, ToolEnvironment

__all__ = ["KEYS", "Trl", "declared", "make"]

KEYS = ("file", "reward_funcs", "weights", "environment", "tools", "rows", "tasks", "ranges", "clip", "success",
         "reference", "max_turns", "name", "description", "script", "arguments")  # fmt: skip
"""Keys of a target, and of an owner's YAML file."""
_REFERENCES = ("solution", "answer", "reference", "ground_truth", "label")
_TASKS = 1000
_SCRIPT_TURNS = 100
"""Most answers of a rollout with tools, if a script sets no limit: TRL's own is the context."""
_LARGEST_LIMIT = 1000
_ANY = (-1e6, 1e6)
"""Bounds of the rewards of a script."""


class _NoTrainer:
    """Placeholder for the trainer's state, which is unknown in the environment's process."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known to an environment's process. Weights that change during training are "
            "set by environment.reward_weights_end."
        )


class Trl(ToolEnvironment):
    """Reward functions and environments written for TRL."""

    listed = finite = True
    tags = ("trl",)

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._target, self._script = dict(target), bool(target.get("script"))
        if self._script:
            self._path = Path(os.path.abspath(Path(str(target.get("file") or "")).expanduser()))
            self._arguments = " ".join(map(shlex.quote, _names_of(target, "arguments")))
        self._failed: LoadError | None = None
        self._factories: dict[str | None, Callable[[], Any]] = {}
        try:
            self._load()
        except LoadError as error:
            if not self._script:
                raise
            self._failed = error  # until the knob gives the arguments that it needs
            self.files, self.name = (str(self._path),), str(target.get("name") or self._path.stem)
        if self._script:
            self.Knobs = _script_knobs(self._arguments, limited=bool(self._factories or self.tools or self._failed))

    def _load(self) -> None:
        """Take rewards, environments, tools and rows from the names in the target, or from the script's trainer."""
        target = self._target
        if self._script:
            captured = run_script(self._path, shlex.split(self._arguments))
            self._user = user = UserFile(str(self._path), captured.module)
            self._factories = _passed_factories(captured.environment)
            self._functions = [_checked_reward(function) for function in captured.reward_funcs]
            self.tools = captured.tools  # type: ignore[misc]
            self._rows = target.get("rows") or captured.rows
            target = {"weights": captured.weights, "max_turns": captured.max_turns, **target}
        else:
            self._user = user = UserFile(str(target.get("file") or ""))
            self._factories = _factories(user, target.get("environment"))
            self._functions = [_checked_reward(_callable(user, name, "a reward function"))
                               for name in _names_of(target, "reward_funcs")]  # fmt: skip
            self.tools = [_callable(user, name, "a tool") for name in _names_of(target, "tools")]  # type: ignore[misc]
            self._rows = target.get("rows") or user.own_rows()
        if self._rows in (None, "") and (not self._factories or None not in self._factories):
            raise LoadError(
                f"{user.path.name}: the target needs `rows`, a data file or the name of a list or data set."
            )
        self.files = user.files(self._rows)
        self._count = int(target.get("tasks") or _TASKS)
        self._loop = BackgroundLoop()
        self._pool: dict[str | None, list[Any]] = {name: [] for name in self._factories}
        self._name_rewards(target)
        self._success = str(target.get("success") or "")
        if self._success and self._success not in self._bounds:
            raise LoadError(f"`success` names {self._success!r}. {nearest(self._success, self._bounds, 'Rewards')}")
        self._reference = str(target.get("reference") or "")
        self.guessed_reference = not self._reference
        most = int(target.get("max_turns") or (_SCRIPT_TURNS if self._script else TURNS))
        self.max_turns = most if self._factories or self.tools else 1
        self.wants_tokens = bool(self._functions)
        self.name = str(target.get("name") or user.path.stem)
        self.__doc__ = str(target.get("description") or first_line(user.module.__doc__) or _describe(self))

    def setup(self) -> None:
        if self._script and self.knobs.arguments != self._arguments:
            self._arguments = self.knobs.arguments
            self._load()
            self._failed = None
        elif self._failed:
            raise self._failed
        if self._factories or self.tools:
            self.max_turns = getattr(self.knobs, "turns", 0) or self.max_turns
        self._most_turns = self.max_turns if self._script else math.inf
        super().setup()
        self._own_random = OwnRandom(0)

    def tasks(self) -> Iterator[Task]:
        if self._rows in (None, ""):
            for number in range(self._count):
                empty = [{"role": "user", "content": ""}]
                yield Task(f"Task {number} of {self.name}", data={"row": {"prompt": empty}, "own": True})
            return
        yield from keyed(self._row_tasks(), played=bool(self._factories))

    def _row_tasks(self) -> Iterator[Task]:
        for number, row in enumerate(self._user.rows(self._rows), 1):
            prompt = row.get("prompt")
            if prompt is None and not self._factories:
                raise EnvironmentMistake(f"Row {number} has no column 'prompt'; it has {', '.join(map(str, row))}.")
            if row.get("image") or row.get("images"):  # which TRL shows the policy
                raise EnvironmentMistake(f"Row {number} has an image in its columns; only text is supported.")
            column = self._reference or next((name for name in _REFERENCES if name in row), "")
            reference = row.get(column)
            yield Task(
                chat_of(prompt, f"Row {number}") if prompt else "(the environment says)",
                reference=reference if isinstance(reference, str | int | float | None) else str(reference),
                data={"row": row},
            )

    def reset(self, task: Task) -> Messages:
        row, self._chosen = task.data["row"], None
        self._shared, self._lists = {}, dict[int, list[Any]]()  # tools tell this rollout of their results
        self._environment: Any = None
        self._own_random = OwnRandom(f"{self.seed}:{task.id}")  # equal within a group, whose rollouts get the same task
        messages = chat_of(row.get("prompt") or [{"role": "user", "content": ""}], "the row")
        self._plain = isinstance(messages, str)
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if self._factories:
            self._chosen = row.get("environment") if None not in self._factories else None
            with self._own_random:
                self._environment = self._take_environment(self._chosen)
                columns = {key: value for key, value in row.items() if key != "environment" or None in self._factories}
                observation = self._resolve(self._environment.reset(**copy.deepcopy(columns)))
            if observation is not None:
                messages = [*messages[:-1], observed(messages[-1], observation)]
        self._prompt_messages = messages
        if not any(message.get("content") for message in messages):
            raise EnvironmentMistake("Neither the row nor reset() gives a prompt: one of them must.")
        opening = self.with_tools(messages)
        self._first = len(opening)
        return opening

    def step(self, text: str) -> tuple[Messages | None, bool]:
        if self.max_turns == 1 and not self.toolbox.tools:
            return None, True
        if self.turns >= self._most_turns:  # TRL does not carry out the calls of the last answer
            return None, True
        with self._own_random:
            return super().step(text)

    def own_tools(self) -> list[Tool]:
        environment = self.__dict__.get("_environment")
        if environment is None:
            return []
        return [self.as_tool(getattr(environment, name)) for name in _methods(type(environment))]

    def tell(self, value: Any) -> str:
        text = text_of_result(value)
        if isinstance(value, list):
            self._told.append((text, value))
        return text

    def tell_failure(self, why: str) -> str:
        return str({"error": why})

    def _carry_out(self, call: Call, place: int) -> dict[str, Any]:
        self._told: list[tuple[str, list[Any]]] = []
        message = super()._carry_out(call, place)
        for text, value in self._told:
            if message["content"].startswith(text[: self.longest_result]):  # not that of an earlier call, which is late
                if is_content(value):
                    text_of(value, f"The result of {call.name}")
                self._lists[len(self.calls) - 1] = value
        return message

    def score_group(self, rollouts: Sequence[Environment]) -> list[Any]:
        """Compute all rewards of all rollouts, with one call per function."""
        played: list[Trl] = [rollout for rollout in rollouts if isinstance(rollout, Trl)]
        columns = self._columns(played)
        values: dict[str, list[Any]] = {}
        waiting = []
        with OwnRandom(f"{self.seed}:{self.task.id}:score"):
            for name, function in self._functions_by_name.items():
                if is_async(function):
                    waiting.append((name, function(**columns)))
                else:
                    values[name] = function(**columns)
            for (name, _), returned in zip(waiting, self._loop.run_all([work for _, work in waiting]), strict=True):
                if isinstance(returned, BaseException):
                    raise returned
                values[name] = returned
            own_rewards = [rollout._own_rewards() for rollout in played]
        for name, rewards in values.items():
            if not hasattr(rewards, "__len__") or len(rewards) != len(played):
                described = f"{len(rewards)} rewards" if hasattr(rewards, "__len__") else f"{rewards!r:.40}"
                raise EnvironmentMistake(f"{name} returned {described}, but there are {len(played)} completions.")
        results: list[Any] = []
        for place, mine in enumerate(own_rewards):
            rollout_values = {name: rewards[place] for name, rewards in values.items()}
            results.append(mine if isinstance(mine, Exception) else self._result(rollout_values | mine))
        for rollout in played:
            rollout._give_back()
        return results

    def success(self, parts: dict[str, float], reward: float) -> bool:
        if self._success:
            return parts[self._success] >= min(self._bounds[self._success].high, self._solved) - 1e-9
        if self._script:
            return reward >= self._solved - 1e-9
        return super().success(parts, reward)

    def _name_rewards(self, target: Mapping[str, Any]) -> None:
        """Set the parts of the reward: one per function, and one per class with `get_reward`."""
        self._solved = 1.0 if self._script else math.inf
        weights = target.get("weights")
        if weights is not None and (not isinstance(weights, list) or len(weights) != len(self._functions)):
            raise LoadError(f"`weights` must have a number for each of {len(self._functions)} reward functions.")
        ranges, clip = target.get("ranges") or {}, bool(target.get("clip"))
        self._functions_by_name: dict[str, Callable[..., Any]] = {}
        described: dict[str, tuple[float, str]] = {}
        for place, function in enumerate(self._functions):
            name = plain = public_name(function)
            while name in self._functions_by_name:
                name = f"{plain}_{len(self._functions_by_name) + 1}"
            self._functions_by_name[name] = function
            described[name] = float(weights[place] if weights else 1.0), first_line(inspect.getdoc(function) or "")
        self._classes: list[type] = []
        for chosen in self._factories:
            kind: Any = self._factories[chosen]
            if not isinstance(kind, type):  # a function, which alone knows the class
                with OwnRandom(0):
                    probe = kind()
                self._pool[chosen].append(probe)
                kind = type(probe)
            if not callable(getattr(kind, "reset", None)):
                raise LoadError(f"{kind.__name__} must define reset(**row), as TRL's environments do.")
            if hasattr(kind, "get_reward") and kind not in self._classes:
                self._classes.append(kind)
                described[kind.__name__] = 1.0, "get_reward() of the environment"
        if not described:
            raise LoadError("No reward: give `reward_funcs`, or an environment with a get_reward() method.")
        for name in ranges:
            if name not in described:
                raise LoadError(f"`ranges` names {name!r}. {nearest(name, described, 'Rewards')}")
        default = _ANY if self._script else None  # TRL knows no bounds
        self._bounds = {name: Bounds(ranges.get(name, default), clip, f"`ranges`.{name}") for name in described}
        self.parts = {name: self._bounds[name].part(*described[name]) for name in described}
        for name, part in self.parts.items():  # 0 means that a reward does not apply
            self.parts[name] = Part(part.weight, min(part.low, 0.0), max(part.high, 0.0), part.description)
        if self._factories or self.tools:
            self.parts |= {name: part for name, part in TOOL_PARTS.items() if name not in self.parts}

    def _columns(self, played: Sequence[Trl]) -> dict[str, Any]:
        """Return the arguments of a reward function for these rollouts."""
        rows = [rollout.task.data["row"] for rollout in played]
        keys = [key for key in rows[0] if key not in ("prompt", "completion", "completion_ids")]
        columns: dict[str, Any] = {key: [row.get(key) for row in rows] for key in keys}
        columns["prompts"] = [
            rollout._prompt_messages[-1]["content"] if rollout._plain else copy.deepcopy(rollout._prompt_messages)
            for rollout in played
        ]
        columns["completions"] = [rollout._completion() for rollout in played]
        columns["completion_ids"] = [list(rollout.tokens) or list(rollout.answer.encode()) for rollout in played]
        columns |= {"trainer_state": _NoTrainer(), "log_extra": _unlogged, "log_metric": _unlogged}
        if self._factories:
            columns["environments"] = [rollout._environment for rollout in played]
        return columns

    def _completion(self) -> Any:
        """Return the completion in the form of the prompt: text, or messages with tool calls and lists as results."""
        if self._plain:
            return self.answer
        return as_trl(self.messages[self._first :], self._lists)

    def _own_rewards(self) -> dict[str, Any] | Exception:
        """Return the reward of the rollout's environment by class; None for other classes."""
        rewards: dict[str, Any] = {}
        try:
            for kind in self._classes:
                mine = type(self._environment) is kind
                rewards[kind.__name__] = self._resolve(self._environment.get_reward()) if mine else None
        except Exception as error:
            return error
        return rewards

    def _result(self, values: Mapping[str, Any]) -> Any:
        try:
            applicable = {name: value for name, value in values.items() if value is not None and value == value}
            if not applicable:
                raise EnvironmentMistake("no reward applies to this rollout: all returned None")
            return {
                name: self._bounds[name].value(applicable[name], name) if name in applicable else 0.0 for name in values
            }
        except EnvironmentMistake as error:
            return error

    def _resolve(self, value: Any) -> Any:
        return self._loop.run(value) if inspect.iscoroutine(value) else value

    def _take_environment(self, chosen: str | None) -> Any:
        """Return an environment for a rollout: created once, reset often."""
        if chosen not in self._factories:
            hint = nearest(str(chosen), [str(name) for name in self._factories], "There are")
            raise EnvironmentMistake(f"The row has environment={chosen!r}. {hint}")
        pool = self._pool[chosen]
        return pool.pop() if pool else self._factories[chosen]()

    def _give_back(self) -> None:
        """Return an environment to the pool, unless a timed-out call may still use it."""
        late = any(call.failed and "did not answer within" in call.content for call in self.__dict__.get("calls", ()))
        if self._environment is not None and not late:
            self._pool[self._chosen].append(self._environment)
        self._environment = None


def make(target: str) -> Trl:
    """Make the environment of a target. See the module.

    Raises:
        LoadError: Not a valid target, or the file lacks a name in it.
    """
    return Trl(parsed(target, "trl", KEYS))


def _names_of(target: Mapping[str, Any], key: str) -> list[str]:
    value = target.get(key) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LoadError(f"`{key}` must be a list of names, not {value!r:.80}.")
    return names


def _callable(user: UserFile, name: str, role: str) -> Callable[..., Any]:
    value = user.get(name, role)
    if not callable(value):
        raise LoadError(f"{user.path.name}: {name} is {type(value).__name__}, not {role} that can be called.")
    function: Callable[..., Any] = value
    return function


def _checked_reward(reward: Any) -> Callable[..., Any]:
    models = (kind.__name__ == "Module" and kind.__module__.startswith("torch") for kind in type(reward).__mro__)
    if isinstance(reward, str) or any(models):
        name = reward if isinstance(reward, str) else public_name(reward)
        raise LoadError(f"{name} is a model. Reward models are not run in an environment; give a function.")
    if not callable(reward):
        raise LoadError(f"A reward function is {type(reward).__name__}, which cannot be called.")
    function: Callable[..., Any] = reward
    return function


def _passed_factories(value: Any) -> dict[str | None, Callable[[], Any]]:
    """The factories that a script passes to its trainer."""
    factories = {str(name): factory for name, factory in value.items()} if isinstance(value, Mapping) else {None: value}
    return {name: factory for name, factory in factories.items() if factory is not None}


def _script_knobs(arguments: str, *, limited: bool) -> type:
    help_text = "arguments of the script's command line, such as --env-url http://127.0.0.1:8000"
    fields: list[tuple[str, Any, Any]] = [("arguments", str, knob(arguments, help=help_text))]
    if limited:
        help_text = f"most answers; 0: the script's own limit, {_SCRIPT_TURNS} if it has none"
        fields.append(("turns", int, knob(0, ge=0, le=_LARGEST_LIMIT, help=help_text)))
    return dataclasses.make_dataclass("Knobs", fields)


def _factories(user: UserFile, value: Any) -> dict[str | None, Callable[[], Any]]:
    if not value:
        return {}
    if isinstance(value, Mapping):
        return {str(name): _callable(user, str(factory_name), "an environment") for name, factory_name in value.items()}
    return {None: _callable(user, str(value), "an environment")}


def _methods(kind: type) -> list[str]:
    """Return the tool methods: all public ones but `reset` and `get_reward`."""
    return [
        name
        for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


def _unlogged(*arguments: Any, **named: Any) -> None:
    """Ignore TRL's log_extra and log_metric."""


def _describe(environment: Trl) -> str:
    rewards = ", ".join(environment._bounds)
    return f"{environment._user.path.name}, written for TRL: {rewards}"
