"""The half of TRL's conventions that does not depend on who samples: rewards, rows, and training scripts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toprope.sdk.adapters._shared.bounds import Bounds
from toprope.sdk.adapters._shared.keys import keyed
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.rows import chat_of
from toprope.sdk.adapters._shared.user_files import UserFile, is_async, public_name
from toprope.sdk.adapters._trl.listing import TURNS
from toprope.sdk.adapters._trl.script import Recorded, recorded_of
from toprope.sdk.authoring.environment import Environment, Part, Task
from toprope.sdk.authoring.event_loop import BackgroundLoop
from toprope.sdk.authoring.knobs import knob, nearest
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, LoadError

__all__ = ["UserRewards", "arguments_of", "names_of", "script_of"]

_REFERENCES = ("solution", "answer", "reference", "ground_truth", "label")
_TASKS = 1000
_SCRIPT_TURNS = 100
"""Most answers of a rollout with tools, if a script sets no limit: TRL's own is the context."""
_LARGEST_LIMIT = 1000
_ANY = (-1e6, 1e6)
"""Bounds of the rewards of a script."""


class NoTrainer:
    """Placeholder for the trainer's state, which is unknown in the environment's process."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known to an environment's process. Weights that change during training are "
            "set by environment.reward_weights_end."
        )


class UserRewards(Environment):
    """Named rewards over the rows of a user's file, or of a training script.

    Args:
        target: See `toprope.sdk.adapters.trl`.
        recorded: The arguments of a script's trainer, or the error with which the script failed.
    """

    listed = finite = True
    tags = ("trl",)
    samples: ClassVar[bool] = False
    """True if the script's own function samples the rollouts."""

    def __init__(self, target: Mapping[str, Any], recorded: Recorded | LoadError | None = None) -> None:
        self._target, self._script = dict(target), recorded is not None
        self._failed: LoadError | None = None
        self._factories: dict[str | None, Callable[[], Any]] = {}
        if isinstance(recorded, LoadError):
            self._failed = recorded  # until the knob gives the arguments that it needs
            self.files, self.name = (str(script_of(target)),), str(target.get("name") or script_of(target).stem)
        else:
            self._load(recorded)
        if self._script:
            self._arguments = " ".join(map(shlex.quote, arguments_of(target)))
            self.Knobs = _script_knobs(self._arguments, limited=bool(self._is_played or self._failed))

    @property
    def _is_played(self) -> bool:
        """True if a rollout may have several answers."""
        raise NotImplementedError

    def _take(self, recorded: Recorded | None) -> None:
        """Take over from the trainer of a script, or from the names in the target, what is not a reward or a row."""
        raise NotImplementedError

    def _load(self, recorded: Recorded | None) -> None:
        """Take rewards, environments, tools and rows from the names in the target, or from the script's trainer."""
        target = self._target
        if recorded is not None:
            self._user = user = UserFile(str(script_of(target)), recorded.module)
            self._functions = [_checked_reward(function) for function in recorded.reward_funcs]
            self._rows = target.get("rows") or recorded.rows
            target = {"weights": recorded.weights, "max_turns": recorded.max_turns, **target}
        else:
            self._user = user = UserFile(str(target.get("file") or ""))
            self._functions = [_checked_reward(user.callable(name, "a reward function"))
                               for name in names_of(target, "reward_funcs")]  # fmt: skip
            self._rows = target.get("rows") or user.own_rows()
        self._take(recorded)
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
        self.max_turns = most if self._is_played else 1
        self.name = str(target.get("name") or user.path.stem)
        self.__doc__ = str(target.get("description") or first_line(user.module.__doc__) or self._described())

    def setup(self) -> None:
        if self._script and self.knobs.arguments != self._arguments:
            self._arguments = self.knobs.arguments
            recorded = recorded_of(script_of(self._target), shlex.split(self._arguments))
            if (recorded.rollout_func is not None) != self.samples:
                raise LoadError(
                    "With these arguments the script samples its rollouts in another way. Give them in a YAML file of "
                    "the environment folder: adapter: trl, file, script: true, and the list `arguments`."
                )
            self._load(recorded)
            self._failed = None
        elif self._failed:
            raise self._failed
        if self._is_played:
            self.max_turns = getattr(self.knobs, "turns", 0) or self.max_turns
        super().setup()

    def tasks(self) -> Iterator[Task]:
        if self._rows in (None, ""):
            for number in range(self._count):
                empty = [{"role": "user", "content": ""}]
                yield Task(f"Task {number} of {self.name}", data={"row": {"prompt": empty}, "own": True})
            return
        yield from keyed(self._row_tasks(), played=self.samples or bool(self._factories))

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
                data={"row": row, "number": number},
            )

    def success(self, parts: dict[str, float], reward: float) -> bool:
        if self._success:
            return parts[self._success] >= min(self._bounds[self._success].high, self._solved) - 1e-9
        if self._script:
            return reward >= self._solved - 1e-9
        return super().success(parts, reward)

    def _name_rewards(self, target: Mapping[str, Any]) -> None:
        """Set the parts of the reward: one per function, and one per class with `get_reward`."""
        self._solved = 1.0 if self._script else float("inf")
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

    def _rewards_of(self, rows: Sequence[Mapping[str, Any]], **columns: Any) -> dict[str, list[Any]]:
        """Call each reward function once for several rollouts; the values by its name.

        Args:
            rows: The columns of each rollout's row.
            **columns: Further columns: `prompts`, `completions` and `completion_ids` at least.
        """
        names = dict.fromkeys(key for row in rows for key in row)
        given: dict[str, Any] = {
            name: [row.get(name) for row in rows]
            for name in names
            if name not in ("prompt", "completion", "completion_ids")
        }
        given |= columns | {"trainer_state": NoTrainer(), "log_extra": _unlogged, "log_metric": _unlogged}
        values: dict[str, list[Any]] = {}
        waiting = []
        for name, function in self._functions_by_name.items():
            if is_async(function):
                waiting.append((name, function(**given)))
            else:
                values[name] = function(**given)
        for (name, _), returned in zip(waiting, self._loop.run_all([work for _, work in waiting]), strict=True):
            if isinstance(returned, BaseException):
                raise returned
            values[name] = returned
        for name, rewards in values.items():
            if not hasattr(rewards, "__len__") or len(rewards) != len(rows):
                described = f"{len(rewards)} rewards" if hasattr(rewards, "__len__") else f"{rewards!r:.40}"
                raise EnvironmentMistake(f"{name} returned {described}, but there are {len(rows)} completions.")
        return values

    def _result(self, values: Mapping[str, Any]) -> dict[str, float] | EnvironmentMistake:
        """Return the parts of a rollout's reward, or the reason why it has none."""
        try:
            applicable = {name: value for name, value in values.items() if value is not None and value == value}
            if not applicable:
                raise EnvironmentMistake("no reward applies to this rollout: all returned None")
            return {
                name: self._bounds[name].value(applicable[name], name) if name in applicable else 0.0 for name in values
            }
        except EnvironmentMistake as error:
            return error

    def _described(self) -> str:
        return f"{self._user.path.name}, written for TRL: {', '.join(self._bounds)}"


def script_of(target: Mapping[str, Any]) -> Path:
    """Return the absolute path of a target's script."""
    return Path(os.path.abspath(Path(str(target.get("file") or "")).expanduser()))


def arguments_of(target: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a target's script.

    Raises:
        LoadError: They are no list of texts.
    """
    return names_of(target, "arguments")


def names_of(target: Mapping[str, Any], key: str) -> list[str]:
    """Return the names under a key of a target.

    Raises:
        LoadError: They are no list of texts.
    """
    value = target.get(key) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LoadError(f"`{key}` must be a list of names, not {value!r:.80}.")
    return names


def _checked_reward(reward: Any) -> Callable[..., Any]:
    models = (kind.__name__ == "Module" and kind.__module__.startswith("torch") for kind in type(reward).__mro__)
    if isinstance(reward, str) or any(models):
        name = reward if isinstance(reward, str) else public_name(reward)
        raise LoadError(f"{name} is a model. Reward models are not run in an environment; give a function.")
    if not callable(reward):
        raise LoadError(f"A reward function is {type(reward).__name__}, which cannot be called.")
    function: Callable[..., Any] = reward
    return function


def _script_knobs(arguments: str, *, limited: bool) -> type:
    help_text = "arguments of the script's command line, such as --env-url http://127.0.0.1:8000"
    fields: list[tuple[str, Any, Any]] = [("arguments", str, knob(arguments, help=help_text))]
    if limited:
        help_text = f"most answers; 0: the script's own limit, {_SCRIPT_TURNS} if it has none"
        fields.append(("turns", int, knob(0, ge=0, le=_LARGEST_LIMIT, help=help_text)))
    return dataclasses.make_dataclass("Knobs", fields)


def _unlogged(*arguments: Any, **named: Any) -> None:
    """Ignore TRL's log_extra and log_metric."""
