"""Environments with `reset` and `step`, as Gymnasium has them, whose observations and actions are text.

Classes written for Gymnasium, GEM, SkyRL-gym, RLVE-Gym or for no library run unchanged. The target is a JSON object:

    {"file": "/path/maze.py", "class": "Maze",      a class (or function) that makes an environment; or
     "registry": "gem", "id": "game:Sokoban-v0-easy",    a module with make(id, **arguments)
     "arguments": {"size": 4},     arguments of the class; those with a plain value are knobs, as are the fields of a
                                   dataclass that the class requires
     "rows": "train.jsonl",        see toprope.sdk.adapters._shared.user_files; needed for `init(prompt)`
     "range": [-1, 1],             bounds to which the sum of the rewards is clipped
     "success": 1.0,               last reward, or sum, from which an ended rollout counts as solved
     "max_turns": 50, "name": "...", "description": "..."}

Forms of the interface that are recognised (https://gymnasium.farama.org/api/env, docs of gym before 0.26, GEM and
SkyRL-gym):

- `reset(seed=...)` gives an observation, or a pair of it and a dict; `step(action)` gives observation, reward,
  terminated, truncated and a dict, the older four values with one `done`, or the first three.
- RLVE-Gym: `generator(seed, parameter)`, `prompt_generator()`, `verifier(output)`, see `_gymnasium/verifiable.py`.
- SkyRL-gym: the class takes `extras`, a row; `init(prompt)` gives messages and a dict, and `step` gives a dict with
  observations, reward and done.

Task n is the environment after a reset with seed n, or row n. The environment tells of success by `success`,
`is_success`, `correct` or `won` in the last dict. An action space of n numbers is answered with a number, as is
`step(action: int)` of a class that counts its actions (`action_size`).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from toprope.sdk.adapters._gymnasium import verifiable
from toprope.sdk.adapters._gymnasium.games import COMPARED, Games
from toprope.sdk.adapters._gymnasium.listing import TAGS, declared
from toprope.sdk.adapters._gymnasium.spaces import (
    LARGEST_LIMIT,
    LIMITS,
    UNKNOWN_LIMIT,
    count_of,
    limit_of,
    messages_of,
    numbers,
    pair_of,
    parameters_of,
    start_of,
    stepped,
    takes,
)
from toprope.sdk.adapters._shared.bounds import Bounds
from toprope.sdk.adapters._shared.keys import held, keyed
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.rows import chat_of, rows_of
from toprope.sdk.adapters._shared.user_files import ROWS, UserFile, parsed
from toprope.sdk.authoring.environment import Environment, Messages, Part, Task, as_messages
from toprope.sdk.authoring.knobs import REQUIRED, is_required, knob
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.worker.splits import KEYED_RULE

__all__ = ["KEYS", "Gymnasium", "declared", "make"]

KEYS = ("file", "class", "registry", "id", "arguments", "rows", "range", "success", "max_turns", "name", "description")
"""Keys of a target, and of an owner's YAML file."""
_TOLD = ("success", "is_success", "correct", "won")
_PLAIN = (bool, int, float, str)
_PLAIN_NAMES = {kind.__name__: kind for kind in _PLAIN}
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_CONFIGURATION = "env_config"
"""SkyRL-gym's argument for the settings of an environment; empty if its trainer is given none."""
_MOST = 1e9


class Gymnasium(Environment):
    """An environment with `reset` and `step`."""

    listed = True
    tags = TAGS
    copied = False
    """True if copies of its games are games of their own, which its generator makes without end."""

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._maker, self._user = _maker(target)
        self._fixed = dict(target.get("arguments") or {})
        self._rows = target.get("rows")
        if self._user is not None:
            self._rows = self._rows or next((name for name in ROWS if hasattr(self._user.module, name)), None)
            self.files = self._user.files(self._rows)
        whole = str(target.get("class") or target.get("id"))
        self.name = str(target.get("name") or whole.lower())
        description = target.get("description") or first_line(inspect.getdoc(self._maker) or "")
        self.__doc__ = str(description or f"{whole}, an environment with reset and step")
        self._bounds = Bounds(target.get("range") or [-1.0, 1.0], True, "`range`")
        self._solved = float(target.get("success", self._bounds.high))
        self._limit, self._turns = target.get("max_turns"), 0
        self.parts = {
            "reward": self._bounds.part(1.0, "sum of the rewards of all steps, clipped"),
            "return": Part(0.0, -_MOST, _MOST, "the same sum, not clipped; shown"),
        }
        self.Knobs = _knobs(self._maker, self._fixed, rows=bool(self._rows))

    def setup(self) -> None:
        knobs = {field.name: getattr(self.knobs, field.name) for field in dataclasses.fields(self.knobs)}
        most = self._turns = knobs.pop("turns")
        for name, kind in _configurations(self._maker, self._fixed).items():
            fields = [field.name for field in dataclasses.fields(kind) if field.name in knobs]
            knobs[name] = kind(**{field_name: knobs.pop(field_name) for field_name in fields})
        self._arguments = {**self._fixed, **{name: value for name, value in knobs.items() if value is not None}}
        if _CONFIGURATION in _required(self._maker) and takes(self._maker, "extras"):
            self._arguments.setdefault(_CONFIGURATION, _empty())
        self._games = Games(self.name, self._maker, self._arguments, copied=self.copied)
        if self._rows:
            self.finite, self.key_rule = True, KEYED_RULE
            self.max_turns = most or int(self._limit or UNKNOWN_LIMIT)
            if (first := next(self._row_tasks(), None)) is not None:  # what the class refuses is told here
                with OwnRandom(0):
                    self._games.discard(self._made_of(first.data["row"]))
            return
        probe = self._games.first()
        self._asks = isinstance(probe, verifiable.Verifiable)
        if not callable(getattr(probe, "reset", None)) or not callable(getattr(probe, "step", None)):
            raise LoadError(
                f"{type(probe).__name__} has no reset and step. An environment with init(prompt) needs rows: give "
                "`rows` in the target, with a column prompt."
            )
        self._check_actions(probe)
        drawn = any(self._arguments.get(name, 0) is None for name in LIMITS)  # at each reset
        limits = [limit for _, limit in self._openings] if drawn else [limit_of(probe)]
        self.max_turns = most or int(self._limit or max(limits))

    def tasks(self) -> Iterator[Task]:
        if self._rows:
            yield from keyed(self._row_tasks(), played=False)
            return
        first = [messages for messages, _ in self._openings]
        texts = [_key(messages) for messages in first]
        # The prompt is all of a question of RLVE, which keeps its seed.
        alike = not self._asks and (len(set(texts)) == 1 or self._hides(texts))
        if self.copied and (alike or len(set(texts)) == COMPARED):
            self.listed = False  # GEM's generators have more, and may take many seconds for each.
        for seed in itertools.count():
            messages = first[seed] if seed < COMPARED else self._games.begin(seed)[0]
            # If games begin alike, what they hide tells them apart: use seeds as keys.
            yield Task(messages, data={"seed": seed}, key=f"{_key(messages)} {seed}" if alike else None)

    @cached_property
    def _openings(self) -> list[tuple[Messages, int]]:
        """The first messages of the first games, some of which take many seconds to make, and their limits of turns."""
        return [(messages, limit_of(game)) for messages, game, _ in map(self._games.begin, range(COMPARED))]

    def reset(self, task: Task) -> Messages:
        self._return, self._last = 0.0, 0.0
        self._success: bool | None = None
        self._talk: Any = None
        if self._rows:
            self._luck = OwnRandom(f"{self.seed}:{task.id}")
            with self._luck:
                self._game = self._made_of(task.data["row"])
                self._talk, _ = pair_of(self._game.init(copy.deepcopy(task.messages)))
            return as_messages(self._talk, "what init() returned")
        messages, self._game, self._luck = self._games.begin(task.data["seed"], keep=True)
        return messages

    def step(self, text: str) -> tuple[Messages | None, bool]:
        action = self._action(text)
        if action is None:
            return [{"role": "user", "content": numbers(self._game)}], False
        with self._luck:
            observation, reward, done, info = stepped(self._game.step(action))
        if isinstance(self._talk, list):  # SkyRL-gym's environments may hold on to the conversation that they began
            observed = observation if isinstance(observation, list) else []
            self._talk += [{"role": "assistant", "content": text}, *observed]
        self._return, self._last = self._return + reward, reward if done else 0.0
        self._success = next((bool(info[name]) for name in _TOLD if name in info), self._success)
        return (None if done else messages_of(observation, info)), done

    def score(self) -> dict[str, float]:
        if not self._rows and self._games.is_reused:  # others are closed
            self._games.give_back(self._game)
            self._game = None
        total = max(-_MOST, min(_MOST, self._return))
        return {"reward": self._bounds.value(total, "the sum of rewards"), "return": total}

    def close(self) -> None:
        if (game := self.__dict__.get("_game")) is not None:
            with self._luck:
                self._games.discard(game)

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return self._success if self._success is not None else max(self._last, parts["return"]) >= self._solved - 1e-9

    def _hides(self, texts: list[str]) -> bool:
        """Return True if games of these seeds that begin alike differ in what they hide."""
        states: dict[int, dict[str, Any]] = {}
        for seed, text in enumerate(texts):
            if (earlier := texts.index(text)) < seed:
                if earlier not in states:
                    states[earlier] = self._hidden_state(earlier)
                state, other = states[earlier], self._hidden_state(seed)
                differing = {name for name in state.keys() & other.keys() if state[name] != other[name]}
                # Gymnasium's own base stores the seed.
                seeds = [(earlier + start, seed + start) for start in (0, self._games.start)]
                differing -= {name for name in differing if (state[name], other[name]) in seeds}
                if differing:
                    again = self._hidden_state(earlier)  # after the other, so that times and counters differ, too
                    if any(name in again and state[name] == again[name] for name in differing):
                        return True
                    states[earlier] = {name: state[name] for name in state.keys() - differing}
        return False

    def _hidden_state(self, seed: int) -> dict[str, Any]:
        game = self._games.begin(seed, anew=True)[1]
        state = getattr(getattr(game, "unwrapped", game), "__dict__", {})
        return {name: held(value, 4) for name, value in state.items()}

    def _row_tasks(self) -> Iterator[Task]:
        if self._user is None:
            path = Path(str(self._rows)).expanduser()
            rows = rows_of(str(path), [path.parent], [path])
        else:
            rows = self._user.rows(self._rows)
        for number, row in enumerate(rows, 1):
            if "prompt" not in row:
                raise EnvironmentMistake(f"Row {number} has no column 'prompt'; it has {', '.join(map(str, row))}.")
            truth = row.get("reward_spec")
            reference = truth.get("ground_truth") if isinstance(truth, Mapping) else row.get("answer")
            plain = reference if isinstance(reference, str | int | float) else None
            yield Task(chat_of(row["prompt"], f"Row {number}"), reference=plain, data={"row": row})

    def _made_of(self, row: Mapping[str, Any]) -> Any:
        extras = {**row, **({"max_turns": self._turns} if self._turns else {})}
        return self._games.make(**({"extras": extras} if takes(self._maker, "extras") else row))

    def _action(self, text: str) -> Any:
        """The answer in the form of the action space; None if it names no action."""
        count = count_of(self._game)
        if count is None:
            return text
        start = start_of(self._game)
        found = re.findall(r"-?\d+", text)
        return int(found[-1]) if found and start <= int(found[-1]) < start + count else None

    def _check_actions(self, game: Any) -> None:
        space = getattr(game, "action_space", None)
        texts = isinstance(space, list | tuple | set | frozenset) and all(isinstance(action, str) for action in space)
        if space is None or texts or count_of(game) is not None or "text" in type(space).__name__.lower():
            return
        raise LoadError(
            f"The actions of {self.name} are of type {type(space).__name__}. Texts and single numbers (Text, Discrete) "
            "are supported: wrap it in a class whose step takes a text."
        )


def make(target: str) -> Gymnasium:
    """Make the environment of a target. See the module.

    Raises:
        LoadError: Not a valid target, or the file or the registry lacks a name in it.
    """
    return Gymnasium(parsed(target, "gymnasium", KEYS))


def _maker(target: Mapping[str, Any]) -> tuple[Callable[..., Any], UserFile | None]:
    if target.get("file"):
        user = UserFile(str(target["file"]))
        maker = user.get(str(target.get("class") or ""), "the environment") if target.get("class") else None
        if not callable(maker):
            raise LoadError(f"The target needs `class`, a class of {user.path.name} with reset and step.")
        if any(base.__name__ == verifiable.BASE for base in getattr(maker, "__mro__", ())):
            return verifiable.maker(maker, user.path), user
        return maker, user
    registry, name = str(target.get("registry") or ""), str(target.get("id") or "")
    if not registry or not name:
        raise LoadError("The target needs `file` and `class`, or `registry` and `id`.")
    try:
        module = importlib.import_module(registry)
    except ImportError as error:
        raise LoadError(f"{registry} does not load in {sys.executable}: {error}. Install it there with pip.") from error
    if not callable(getattr(module, "make", None)):
        raise LoadError(f"{registry} has no function make(id).")

    def make_registered(**arguments: Any) -> Any:
        return module.make(name, **arguments)

    return make_registered, None


def _knobs(maker: Callable[..., Any], arguments: Mapping[str, Any], *, rows: bool = False) -> type:
    """A dataclass of our knob `turns` and of the arguments with plain values.

    Arguments of a plain type without a default must be set, unless `rows` have them.

    Raises:
        LoadError: Two share a name.
    """
    fields: list[tuple[str, Any, Any]] = [
        ("turns", int, knob(0, ge=0, le=LARGEST_LIMIT, help="most answers; 0: the environment's own limit"))
    ]
    defaults, required = dict(arguments), dict[str, Any]()
    for parameter in parameters_of(maker):
        if parameter.default is not parameter.empty:
            defaults.setdefault(parameter.name, parameter.default)
        elif (
            parameter.annotation in _PLAIN
            and parameter.name not in (*defaults, "turns")
            and not rows
            and parameter.kind not in _MANY
        ):
            required[parameter.name] = parameter.annotation
    for argument, kind in _configurations(maker, arguments).items():
        for field in dataclasses.fields(kind):
            taken = ("turns",) if is_required(field) else ()  # ours leaves a default of theirs as it is
            if field.name in (*defaults, *required, *taken):
                raise LoadError(
                    f"The knob {field.name} would set {argument}.{field.name} and another argument: rename one of them."
                )
            if is_required(field):
                required[field.name] = _PLAIN_NAMES[_type_name(field)]
            else:
                defaults[field.name] = field.default
    for name, kind in required.items():
        fields.append((name, kind, knob(REQUIRED, help="the environment's own setting")))
    for name, value in defaults.items():
        unset = value is None and name in arguments
        if (unset or type(value) in _PLAIN) and name.isidentifier() and name != "turns":
            fields.append((name, Any if unset else type(value), knob(value, help="the environment's own setting")))
    return dataclasses.make_dataclass("Knobs", fields, kw_only=True)


def _type_name(field: dataclasses.Field[Any]) -> str:
    return field.type if isinstance(field.type, str) else str(getattr(field.type, "__name__", ""))


def _configurations(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclasses among the types of required arguments, by the argument's name; their fields have defaults or a
    plain type."""
    configurations: dict[str, Any] = {}
    for name, annotation in _required(maker).items():
        if name not in arguments:
            is_union = get_origin(annotation) in (Union, types.UnionType)
            for kind in get_args(annotation) if is_union else (annotation,):
                if dataclasses.is_dataclass(kind) and all(
                    not is_required(field) or _type_name(field) in _PLAIN_NAMES for field in dataclasses.fields(kind)
                ):
                    configurations.setdefault(name, kind)
    return configurations


def _required(maker: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters without defaults, by name."""
    return {
        parameter.name: parameter.annotation
        for parameter in parameters_of(maker)
        if parameter.default is parameter.empty
    }


def _empty() -> Any:
    """An empty configuration, of the kind that SkyRL-gym's environments are given."""
    try:
        return importlib.import_module("omegaconf").DictConfig({})
    except ImportError:
        return {}


def _key(messages: Messages) -> str:
    return "\n".join(str(message["content"]) for message in messages)
