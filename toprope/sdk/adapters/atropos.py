"""Environments of Atropos (`atroposlib.envs.base.BaseEnv`), called directly in the worker.

The target is a user's file with the class, `/path/environment.py:Class`. Its `collect_trajectories` (or
`collect_trajectory`) is called for each item, with a server object that leads to the policy; the returned scores are
the reward. The alternative is the environment's own `serve` command against the trajectory API, see
docs/trajectory-api.md.

Atropos hands out items in sequence without random access, so the first `items` of them are the tasks.

A rollout has one reward. Of an environment that returns a group of scores for each step, the last one counts, and the
log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toprope.sdk.adapters._servers.atropos import GROUP, Group, Scores, server_class
from toprope.sdk.adapters._servers.atropos_files import declared
from toprope.sdk.adapters._servers.atropos_tokenizer import require_tokenizer, templates_give_lists, tokenizer_here
from toprope.sdk.adapters._shared.bounds import bounds_of, within
from toprope.sdk.adapters._shared.chatml import BYTES_PER_TOKEN
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.user_files import prepare, within_package
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Messages, Part, Task
from toprope.sdk.authoring.event_loop import BackgroundLoop
from toprope.sdk.authoring.knobs import REQUIRED, knob, may_come_of_empty, settable
from toprope.sdk.authoring.loading import find_above, import_root
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError, MissingKnobs
from toprope.sdk.wall.paths import package_of

__all__ = ["PACKAGE", "REQUIREMENTS", "Atropos", "declared", "make"]

REQUIREMENTS = ("torch==2.13.0", "atroposlib==0.4.*", "gymnasium<1.3")
"""Atropos is archived: its environments name games of Gymnasium that later versions refuse."""
PACKAGE = "atroposlib"
_CONFIG = "BaseEnvConfig"
_LONGEST_ITEM = 4000
_VARYING = re.compile(r" at 0x[0-9a-f]+|\b[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b", re.IGNORECASE)
"""Texts that differ in each process: addresses of objects, and identities that an environment draws."""
_EMPTY = re.compile(r"""''|\"\"""")
"""An empty text in the words of an error; alone, that a field is empty tells nothing."""
_UNDECLARED = (-1000.0, 1000.0)


@dataclass
class AtroposKnobs:
    """Knobs of an Atropos environment."""

    tokenizer: str = knob("", help="name or folder of the policy's tokenizer; empty: the environment's, or bytes")
    config: dict[str, Any] = knob({}, help="fields of the environment's own configuration")
    items: int = knob(512, ge=30, le=1_000_000, help="number of tasks: the first items of the environment")
    turns: int = knob(16, ge=1, le=1000, help="most answers in a rollout, as far as known")
    reward_low: float | None = knob(None, help="smallest score; null: not known")
    reward_high: float | None = knob(None, help="largest score; null: not known")
    success_reward: float | None = knob(None, help="score that counts as solved; null: reward_high, or else 1")


class Atropos(OwnLoop):
    """An Atropos environment."""

    guessed_reference = True
    listed = True
    packages = ("atroposlib",)
    tags = ("atropos",)
    Knobs: type = AtroposKnobs

    def __init__(self, cls: Any, file: str) -> None:
        self.files = (file,)
        own_name = getattr(cls, "name", None)
        self.name = f"atropos/{own_name if own_name and isinstance(own_name, str) else cls.__name__.lower()}"
        self.__doc__ = first_line(cls.__doc__) or f"The Atropos environment {cls.__name__}"
        self._cls = cls
        self._default_config, self._fields, self.Knobs = _knobs(cls)
        self._loop = BackgroundLoop()  # its objects are bound to one loop
        self._env: Any = None
        self._has_told = False

    def setup(self) -> None:
        knobs = self.knobs
        self._bounds = low, high = bounds_of(self.knobs, *_UNDECLARED)
        self.parts = {
            "score": Part(1.0, low, high, "the environment's score"),
            "dropped": Part(0.0, 0.0, 1.0, "1: the environment left the rollout out, so its score is its group's mean"),
        }
        self.max_turns = knobs.turns
        try:
            self._env = self._loop.run(self._make_env())
        except Exception as error:
            empty = [name for name in self._fields if knobs.config.get(name, getattr(knobs, name)) == ""]
            if empty and _EMPTY.search(str(error)) and may_come_of_empty(error):
                raise MissingKnobs(f"Empty, it gives {type(error).__name__}: {error}", *empty) from error
            raise

    def tasks(self) -> Iterator[Task]:
        empty, seen = True, dict[str, dict[str, int]]()
        for _ in range(self.knobs.items):
            item, kept = self._loop.run(self._next_item())
            if item is None:
                continue
            empty = False
            text = repr(item)
            plain = _VARYING.sub("", text)
            numbers = seen.setdefault(plain, {})
            number = numbers.setdefault(text, len(numbers))
            key = f"{plain} {number}" if number else plain
            yield Task(_prompt_of(item), reference=_reference(item), data={"item": item, "kept": kept}, key=key)
        if empty:
            raise EnvironmentMistake(
                f"get_next_item returned None {self.knobs.items} times, as environments do whose data are missing: "
                "what its file says about data must be done first"
            )

    def success(self, parts: dict[str, float], reward: float) -> bool:
        thresholds = (self.knobs.success_reward, self.knobs.reward_high, 1.0)
        return bool(parts["score"] >= next(threshold for threshold in thresholds if threshold is not None) - 1e-9)

    def _unscored(self, scores: Collection[float]) -> float:
        """Return the score of a rollout that the environment dropped from a group with these scores."""
        if scores:
            return sum(scores) / len(scores)
        low, high = self._bounds
        return low if self.knobs.reward_low is not None else min(max(0.0, low), high)

    async def group(self, task: Task, sessions: Sequence[Session]) -> list[Played | BaseException]:
        playing = self._loop.start(self._collect(task.data, sessions))
        limit = sessions[0].timeout_s
        try:
            return await asyncio.wait_for(asyncio.wrap_future(playing), limit)
        except TimeoutError:
            return [TimeoutError(f"the group took longer than {limit:g} s")] * len(sessions)
        except Exception as error:
            return [error] * len(sessions)

    async def _next_item(self) -> tuple[Any, dict[str, Any]]:
        """Return the next item and the attributes that the environment replaced meanwhile: some score by them."""
        before = dict(vars(self._env))
        self._cls.server_cls.refused = False
        with self._random.with_ids():  # every worker has to find the same items
            item = await self._env.get_next_item()
        if self._cls.server_cls.refused:
            raise EnvironmentMistake("It asks the policy in get_next_item, which only collect_trajectories can.")
        return item, {name: value for name, value in vars(self._env).items() if value is not before.get(name, self)}

    async def _make_env(self) -> Any:
        from atroposlib.envs.base import APIServerConfig
        from pydantic import ValidationError

        knobs = self.knobs
        config = self._default_config
        set_knobs = {name: value for name in self._fields if (value := getattr(knobs, name)) is not None}
        changed = {
            **set_knobs, **knobs.config, "use_wandb": False, "data_path_to_save_groups": None, "include_messages": True
        }  # fmt: skip
        name = changed.get("tokenizer_name", config.tokenizer_name)
        changed["tokenizer_name"] = tokenizer = knobs.tokenizer or tokenizer_here(name)
        if tokenizer != name and not knobs.tokenizer and "max_token_length" not in knobs.config:
            limit = getattr(config, "max_token_length", 0)  # Texts have several times as many bytes as tokens.
            changed |= {"max_token_length": BYTES_PER_TOKEN * limit} if limit else {}
        unknown = [name for name in changed if name not in type(config).model_fields]
        if unknown:
            fields = ", ".join(type(config).model_fields)
            raise InvalidRequest(f"The environment's configuration has no {unknown[0]!r}. Fields: {fields}.")
        try:
            config = type(config).model_validate({**config.model_dump(), **changed})
        except ValidationError as error:
            raise InvalidRequest(f"The environment refuses this configuration: {error}") from error
        place = APIServerConfig(
            model_name="policy", base_url="http://127.0.0.1:9/v1", api_key="x", server_type="vllm", health_check=False,
            tokenizer_name=config.tokenizer_name,
        )  # fmt: skip
        envs: list[Any] = []
        servers = server_class(lambda: envs[0].tokenizer)
        self._cls.server_cls = servers  # some keep the first server that they are given
        self._random = OwnRandom("tasks")
        if knobs.tokenizer:  # alone, because errors of the environment are about something else
            require_tokenizer(knobs.tokenizer)
        with self._random:
            env = self._cls(config, [place], slurm=False, testing=False)
        Scores.install(sys.modules[self._cls.__module__])
        envs.append(env)
        if not env.server.servers or not all(isinstance(server, servers) for server in env.server.servers):
            env.server.servers = [servers(place)]
        with self._random.with_ids():
            await env.setup()
        if servers.refused:
            print(f"{self.name} asks the policy in setup, where it gets no answer.", file=sys.stderr)
        return env

    async def _collect(self, data: Mapping[str, Any], sessions: Sequence[Session]) -> list[Played | BaseException]:
        group = Group(sessions)
        GROUP.set(group)
        # A copy, because groups of other sizes run concurrently.
        env = _copy_of(self._env)
        vars(env).update(_copies(data["kept"], {id(self._env): env}))
        env.config = env.config.model_copy(update={"group_size": len(sessions)})
        env.collect_trajectory = group.told_apart(env.collect_trajectory)
        scored, _ = await env.collect_trajectories(data["item"])
        scored = await env.postprocess_histories(scored)
        if isinstance(scored, list) and scored and not any(isinstance(entry, Mapping) for entry in scored):
            score = getattr(env, "score", None)  # Some leave the call of it to who runs them.
            scored = await score(scored) if score is not None else scored
        if isinstance(scored, list):
            groups = [entry for entry in scored if entry is not None]
            if len(groups) > 1 and not self._has_told:
                self._has_told = True
                print(
                    f"{self.name} returns {len(groups)} groups of scores for an item, as for the steps of a game. The "
                    "last one is the reward; the others are left out.",
                    file=sys.stderr,
                )
            scored = groups[-1] if groups else None
        scored = scored or group.scores
        if scored is not None and not (isinstance(scored, Mapping) and {"tokens", "scores"} <= scored.keys()):
            raise EnvironmentMistake(
                f"collect_trajectories returned {type(scored).__name__} without tokens and scores: written for another "
                "version of atroposlib"
            )
        if scored is None:
            why = "the environment dropped the group (Atropos does so if all scores are equal, among other reasons)"
            return [
                Played({}, messages=rollout.messages, turns=len(rollout.said), error=why) for rollout in group.rollouts
            ]
        return self._results_of(env, group, scored)

    def _results_of(self, env: Any, group: Group, scored: Mapping[str, Any]) -> list[Played | BaseException]:
        texts = [env.tokenizer.decode(tokens) for tokens in scored["tokens"]]
        rewards: dict[int, float] = {}
        talks: dict[int, Messages] = {}
        for owner, text, score in zip(group.whose(texts, scored["tokens"]), texts, scored["scores"], strict=True):
            if owner is not None:
                rewards[owner], talks[owner] = float(score), group.rollouts[owner].talk_in(text)
        low, high = self._bounds
        inside = {place: score for place in rewards if (score := within(rewards[place], low, high)) is not None}
        results: list[Played | BaseException] = []
        for place, rollout in enumerate(group.rollouts):
            conversation: dict[str, Any] = {"messages": talks.get(place, rollout.messages), "turns": len(rollout.said)}
            if place in inside:
                results.append(Played({"score": inside[place], "dropped": 0.0}, **conversation))
            elif place in rewards:
                why = (
                    f"score {rewards[place]:g} is outside {low:g} to {high:g}: set the knobs reward_low and reward_high"
                )
                results.append(Played({}, error=why, **conversation))
            elif not rollout.said:
                results.append(Played({}, error="the environment asked for no answer of this rollout", **conversation))
            elif not inside and not all(other.cut for other in group.rollouts):
                # A scorer or judge that fails leaves all out too, and its author catches that.
                results.append(
                    Played({}, error="the environment dropped the whole group without a score", **conversation)
                )
            else:
                # Atropos does not train on it: at the mean of its group it has no advantage.
                parts = {"score": self._unscored(inside.values()), "dropped": 1.0}
                results.append(Played(parts, success=False, **conversation))
        return results


def _copy_of(env: Any) -> Any:
    """Return a copy whose end leaves alone what it shares: some delete files or end servers in `__del__`."""
    copied = copy.copy(env)
    kind: Any = type(env)
    if hasattr(kind, "__del__"):
        copied.__class__ = _without_end(kind)
    return copied


def _copies(kept: Mapping[str, Any], known: dict[int, Any]) -> dict[str, Any]:
    """Return copies of attributes, because groups of one task change theirs concurrently.

    Args:
        kept: The attributes.
        known: By their id, what their values have of others, such as the environment, with what stands for it.
    """
    copies = dict(kept)
    for name, value in kept.items():
        seen = dict(known)
        with contextlib.suppress(Exception):  # locks and connections stay as they are
            copies[name] = copy.deepcopy(value, seen)
            known = seen
    return copies


@functools.cache
def _without_end(kind: Any) -> Any:
    """Return a class whose objects do nothing at their end: one for all groups, so that its author meets no others."""
    members = {"__del__": lambda self: None, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


def _knobs(cls: Any) -> tuple[Any, list[str], type]:
    """Return an environment's own configuration, its fields that are knobs, and the class of all knobs.

    The fields of Atropos itself concern its server and trainer; they are set by the knob `config`.
    """
    annotated = _named_config(cls)
    config = cls.config_init()[0] if annotated is None else annotated.model_construct()
    theirs = set(_base_fields(type(config)))
    ours = {field.name for field in dataclasses.fields(AtroposKnobs)}
    fields: list[str] = []
    definitions: list[tuple[str, Any, Any]] = []
    for name, field in type(config).model_fields.items():
        if name in theirs or name in ours or not settable(field.annotation):
            continue
        fields.append(name)
        value = REQUIRED if annotated is not None and field.is_required() else getattr(config, name)
        definitions.append((name, field.annotation, knob(value, help=field.description or "")))
    return config, fields, dataclasses.make_dataclass("Knobs", definitions, bases=(AtroposKnobs,), kw_only=True)


def _named_config(cls: Any) -> Any:
    """Return the configuration's class that only the type of the constructor's parameter names; None otherwise."""
    from atroposlib.envs.base import BaseEnv

    if any(
        "config_init" in vars(base) or "env_config_cls" in vars(base)
        for base in cls.__mro__
        if base not in BaseEnv.__mro__
    ):
        return None
    try:
        annotation = inspect.signature(cls.__init__, eval_str=True).parameters["config"].annotation
    except (NameError, KeyError, TypeError, ValueError):
        return None
    return (
        annotation
        if hasattr(annotation, "model_construct") and _base_fields(annotation) and annotation.__name__ != _CONFIG
        else None
    )


def _base_fields(kind: type) -> Sequence[str]:
    """Return the fields that a configuration has from Atropos."""
    bases = [base for base in kind.__mro__ if base.__name__ == _CONFIG and base.__module__.startswith(PACKAGE)]
    return list(bases[0].model_fields) if bases else []  # type: ignore[attr-defined]


def make(target: str) -> Atropos:
    """Make the environment of a class. See the module.

    Raises:
        LoadError: atroposlib is not installed, or the class does not exist.
    """
    os.environ.setdefault("WANDB_MODE", "disabled")
    try:
        from atroposlib.envs import base
    except ModuleNotFoundError as error:
        raise LoadError(
            f"atroposlib is not complete for {sys.executable} ({error}). Make it an interpreter of its own with "
            f"{', '.join(REQUIREMENTS)}."
        ) from error
    templates_give_lists()
    if not hasattr(base, "OpenaiConfig"):
        base.OpenaiConfig = base.APIServerConfig  # its name in older files
    file, _, name = target.rpartition(":")
    path = Path(file or target)
    if path.suffix != ".py" or not path.is_file():
        raise LoadError(f"{target!r} is not a file with an Atropos environment: give /path/environment.py:Class.")
    # A file in a package is imported by its full name, so that relative imports work.
    path = Path(os.path.abspath(path))
    root, folder = import_root(path), str(path.parent)
    module_name = ".".join(path.with_suffix("").relative_to(Path(package_of(str(path)) or path).parent).parts)
    sys.path[:] = [root, *(entry for entry in sys.path if entry not in (root, folder)), folder]
    find_above(path)
    prepare(path)
    with OwnRandom("tasks"):
        module = _imported(module_name, path)
    if Path(getattr(module, "__file__", "") or "").resolve() != path.resolve():
        raise LoadError(f"The name {path.stem!r} is taken by {module.__file__}: rename {path.name}.")
    environments = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base.BaseEnv) and value.__module__ == module.__name__
    }
    if name not in environments:
        raise LoadError(
            f"{path.name} has no Atropos environment {name!r}. Environments: {', '.join(environments) or 'none'}."
        )
    kind: Any = environments[name]
    kind.__abstractmethods__ = frozenset(getattr(kind, "__abstractmethods__", ())) - {"evaluate"}  # it is never called
    return Atropos(kind, str(path))


def _imported(name: str, file: Path) -> ModuleType:
    """Import a file by its name; if it imports relatively without a package, as part of its folder."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if "no known parent package" not in str(error):
            raise
    return within_package(file)


def _prompt_of(item: Any) -> str | Messages:
    """Return the prompt of an item: its messages if it has some, otherwise its text."""
    for candidate in item if isinstance(item, list | tuple) else (item,):
        if isinstance(candidate, list | tuple) and candidate:
            messages = [dict(part) if isinstance(part, frozenset | dict) else None for part in candidate]
            if all(message and isinstance(message.get("content"), str) and "role" in message for message in messages):
                return [message for message in messages if message]
    if isinstance(item, Mapping):
        for name in ("prompt", "question", "problem", "input"):
            if isinstance(item.get(name), str):
                return str(item[name])
    return str(item)[:_LONGEST_ITEM] or "(an empty item)"


def _reference(item: Any) -> Any:
    if isinstance(item, Mapping):
        found = next((item[name] for name in ("answer", "solution", "target") if isinstance(item.get(name), str)), None)
        return found
    last = item[-1] if isinstance(item, tuple) and len(item) > 1 else None
    return last if isinstance(last, str) else None
