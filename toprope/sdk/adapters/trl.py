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
is a further reward with weight 1. Differences: `trainer_state` is not available, and images are not supported. Scripts
that sample by a `rollout_func` are played by `toprope.sdk.adapters._trl.rollouts`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.rows import chat_of, text_of
from toprope.sdk.adapters._shared.user_files import UserFile, parsed
from toprope.sdk.adapters._trl.listing import declared
from toprope.sdk.adapters._trl.messages import as_trl, is_content, observed, text_of_result
from toprope.sdk.adapters._trl.rollouts import TrlRollouts
from toprope.sdk.adapters._trl.script import Recorded, recorded_of, samples_itself
from toprope.sdk.adapters._trl.user_rewards import UserRewards, arguments_of, names_of, script_of
from toprope.sdk.authoring.environment import Environment, Messages, Task
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.orchestration.tools import Tool
from toprope.sdk.tooled import TOOL_PARTS, Call, ToolEnvironment

__all__ = ["KEYS", "Trl", "declared", "make"]

KEYS = ("file", "reward_funcs", "weights", "environment", "tools", "rows", "tasks", "ranges", "clip", "success",
         "reference", "max_turns", "name", "description", "script", "arguments")  # fmt: skip
"""Keys of a target, and of an owner's YAML file."""


class Trl(UserRewards, ToolEnvironment):
    """Reward functions and environments written for TRL."""

    @property
    def _is_played(self) -> bool:
        return bool(self._factories or self.tools)

    def _take(self, recorded: Recorded | None) -> None:
        if recorded is not None:
            self._factories = _passed_factories(recorded.environment)
            self.tools = recorded.tools  # type: ignore[misc]
        else:
            self._factories = _factories(self._user, self._target.get("environment"))
            self.tools = [self._user.callable(name, "a tool") for name in names_of(self._target, "tools")]  # type: ignore[misc]
        self.wants_tokens = bool(self._functions)

    def _name_rewards(self, target: Mapping[str, Any]) -> None:
        super()._name_rewards(target)
        if self._is_played:
            self.parts |= {name: part for name, part in TOOL_PARTS.items() if name not in self.parts}

    def setup(self) -> None:
        super().setup()
        self._most_turns = self.max_turns if self._script else math.inf
        self._own_random = OwnRandom(0)

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
        with OwnRandom(f"{self.seed}:{self.task.id}:score"):
            values = self._rewards_of([rollout.task.data["row"] for rollout in played], **self._columns(played))
            own_rewards = [rollout._own_rewards() for rollout in played]
        results: list[Any] = []
        for place, mine in enumerate(own_rewards):
            rollout_values = {name: rewards[place] for name, rewards in values.items()}
            results.append(mine if isinstance(mine, Exception) else self._result(rollout_values | mine))
        for rollout in played:
            rollout._give_back()
        return results

    def _columns(self, played: Sequence[Trl]) -> dict[str, Any]:
        """Return what reward functions get of these rollouts besides the columns of their rows."""
        columns: dict[str, Any] = {
            "prompts": [
                rollout._prompt_messages[-1]["content"] if rollout._plain else copy.deepcopy(rollout._prompt_messages)
                for rollout in played
            ],
            "completions": [rollout._completion() for rollout in played],
            "completion_ids": [list(rollout.tokens) or list(rollout.answer.encode()) for rollout in played],
        }
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


def make(target: str) -> Trl | TrlRollouts:
    """Make the environment of a target. See the module.

    Raises:
        LoadError: Not a valid target, or the file lacks a name in it.
    """
    values = parsed(target, "trl", KEYS)
    if not values.get("script"):
        return Trl(values)
    script = script_of(values)
    try:
        recorded = recorded_of(script, arguments_of(values))
        return (Trl if recorded.rollout_func is None else TrlRollouts)(values, recorded)
    except LoadError as error:  # the knob may give the arguments that it needs
        return (TrlRollouts if samples_itself(script) else Trl)(values, error)


def _passed_factories(value: Any) -> dict[str | None, Callable[[], Any]]:
    """The factories that a script passes to its trainer."""
    factories = {str(name): factory for name, factory in value.items()} if isinstance(value, Mapping) else {None: value}
    return {name: factory for name, factory in factories.items() if factory is not None}


def _factories(user: UserFile, value: Any) -> dict[str | None, Callable[[], Any]]:
    if not value:
        return {}
    if isinstance(value, Mapping):
        return {str(name): user.callable(str(factory_name), "an environment") for name, factory_name in value.items()}
    return {None: user.callable(str(value), "an environment")}


def _methods(kind: type) -> list[str]:
    """Return the tool methods: all public ones but `reset` and `get_reward`."""
    return [
        name
        for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]
