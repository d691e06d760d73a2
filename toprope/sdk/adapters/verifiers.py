"""Tasksets of verifiers 0.4 with their rewards, metrics and environments.

The target is a module that exports a taskset (an installed package, as for `vf-eval`), or a user's file, with `:Class`
if it has several. verifiers runs the rollouts with the session's key, by default through a harness in this process (see
_verifiers/harness.py), or through one of its own, which the knob `harness` names. Nothing leaves the machine: its
default remote runtime is replaced by the local one, and results are not uploaded.

Judges, and other models that tasks ask, are led to the rollout's grader or judge; see judges.py.

If several agents learn, each rollout is one seat's. Of an agent's runs in an episode the first is recorded, with its
own reward; the others answer with the judge's key. Each reward is a part with its weight, each metric one of 0.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toprope.sdk.adapters._shared.random_state import OwnRandom, load_numpy
from toprope.sdk.adapters._verifiers.harness import FULL, HARNESS, client_config, register_harness, sessions_server
from toprope.sdk.adapters._verifiers.judges import lead_to_judge, rollout_of
from toprope.sdk.adapters._verifiers.listing import OPTIONAL, REQUIREMENTS, declared, installed, more_requirements
from toprope.sdk.adapters._verifiers.load_environment import (
    TURNS,
    LoadedEnvironment,
    bounded,
    bounds,
    is_solved,
    loads_environment,
)
from toprope.sdk.adapters._verifiers.older_tools import adopt_tools
from toprope.sdk.adapters._verifiers.tasksets import OURS, knobs_of, tasks_of
from toprope.sdk.adapters._verifiers.tool_servers import fork_tool_servers
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Part, Task
from toprope.sdk.authoring.knobs import EMPTY, allows_null, may_come_of_empty
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError, MissingKnobs

__all__ = ["OPTIONAL", "PACKAGE", "REQUIREMENTS", "Verifiers", "declared", "installed", "make", "more_requirements"]

PACKAGE = "verifiers"
_OTHER = "other"
_OTHER_LIMIT = 1e6


class Verifiers(OwnLoop):
    """An environment of verifiers."""

    guessed_reference = True
    listed = True
    packages = ("verifiers",)
    tags = ("verifiers", "model-roles")

    def __init__(self, taskset: str, file: str = "") -> None:
        from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

        self._taskset_id = taskset
        cls = taskset_class(taskset)
        self.files = (file,) if file else ()
        self.name = f"verifiers/{cls.__name__ if taskset.startswith('_') else taskset}"
        self.__doc__ = first_line(cls.__doc__) or first_line(sys.modules[cls.__module__].__doc__) or self.name
        config = taskset_config_type(taskset)
        self._fields, self.Knobs = knobs_of(config)
        self._required = [name for name, field in self._fields.items() if config.model_fields[field].is_required()]
        self._nullable = {name for name, field in config.model_fields.items() if allows_null(field.annotation)}
        self._env: Any = None
        self._open: dict[str, Any] = {}
        """State that rollouts share; they run on copies of this environment."""
        self._learning: tuple[str, ...] = ()
        self._seats: tuple[str, ...] = ()
        """Agents that learn, if there are several. Each rollout is one seat's, with that seat's own reward."""
        self._seat = ""
        self._unnamed: set[str] = set()
        """Parts of functions whose rewards have names of their own."""

    def setup(self) -> None:
        from pydantic import ValidationError
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        ours = {name: getattr(self.knobs, name) for name in OURS}
        values = {field: getattr(self.knobs, name) for name, field in self._fields.items()}
        changed = {field: value for field, value in values.items() if value is not None}
        env_config = dict(ours["config"])
        env_config["taskset"] = {**env_config.get("taskset", {}), **changed, "id": self._taskset_id}
        register_harness()
        try:
            config = resolve_env_config(env_config)
            config = self._at_home(config, ours["harness"])
            with OwnRandom("tasks"):
                self._env = load_environment(config)
                first = next(iter(self._env.taskset), None)
        except Exception as error:
            empty = [name for name in self._required if self._is_missing(self._fields[name], env_config["taskset"])]
            if empty and may_come_of_empty(error):
                is_set = any(env_config["taskset"].get(self._fields[name]) is not None for name in empty)
                raise MissingKnobs(
                    f"Empty, it gives {type(error).__name__}: {error}" if is_set else "", *empty
                ) from error
            if isinstance(error, ValidationError | TypeError | ValueError | ModuleNotFoundError):
                raise InvalidRequest(f"verifiers refuses these knobs: {error}") from error
            raise
        self._open = {}
        if first is None:
            raise EnvironmentMistake(f"The taskset {self._taskset_id} has no tasks.")
        if type(first).NEEDS_CONTAINER:
            raise InvalidRequest(
                f"{type(first).__name__} needs a container, but environments run without: choose another taskset."
            )
        adopt_tools(type(first), "Task")
        adopt_tools(type(self._env.taskset), "Taskset")
        self.parts = self._parts(first)
        self._weights = {name: part.weight for name, part in self.parts.items()}
        self._learning = asyncio.run(_learning(self._env))
        self._seats = self._learning if len(self._learning) > 1 else ()
        taskset = self._env.taskset
        tools = [*first.toolsets(first.config), *taskset.toolsets(taskset.config)]
        for server in tools:
            _check_server(server)
        if tools:
            fork_tool_servers()
        agents = self._env._agent_specs
        # Other harnesses than ours may go on after an answer without a call.
        asked_once = all(spec.harness is not None and spec.harness.id == HARNESS for spec in agents.values())
        plain = asked_once and not tools and type(self._env).__name__ == "SingleAgentEnv"
        limits = [agents[name].max_turns or TURNS for name in self._learning]
        self.max_turns = 1 if plain else ours["turns"] or max(limits, default=TURNS)

    def tasks(self) -> Iterator[Task]:
        return tasks_of(self._env.taskset)

    def success(self, parts: dict[str, float], reward: float) -> bool:
        """Return True if a rollout solved its task; see `is_solved`."""
        named_parts = {name: part for name, part in self.parts.items() if name != _OTHER}
        return is_solved(self.knobs, named_parts, parts, reward, self._unnamed)

    async def group(self, task: Task, sessions: Sequence[Session]) -> list[Played | BaseException]:
        """Sample a task once per session; the sessions take turns at the seats."""
        if not self._seats:
            return await super().group(task, sessions)
        groups = []
        for number, session in enumerate(sessions):
            seated = copy.copy(self)
            seated._seat = self._seats[number % len(self._seats)]
            groups.append(OwnLoop.group(seated, task, [session]))
        return [
            played
            if isinstance(played, Played)
            else Played({}, error=played, seat=self._seats[number % len(self._seats)])
            for number, [played] in enumerate(await asyncio.gather(*groups))
        ]

    async def rollout(self, session: Session) -> Played:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.types import SamplingConfig

        await self._start_serving()
        rollout_of.set(session)  # after what all rollouts share was started: that belongs to none
        client, keys = client_config(session.base_url, session.api_key, session.judge_key, self._seat)
        sampling = SamplingConfig(**session.sampling)
        context = ModelContext(model=session.model, client=client, sampling=sampling)
        episode = await self._env.run_episode(self.task.data["task"], context)
        return self._result_of(episode, keys.trace)

    def _is_missing(self, field: str, values: dict[str, Any]) -> bool:
        """Return True if a setting has no value; null is one if its type allows it."""
        if field in values and values[field] is None:
            return field not in self._nullable
        return values.get(field) in EMPTY

    def _at_home(self, config: Any, harness: str) -> Any:
        """Return the configuration with every agent on this machine and the chosen harness."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.configs.env import default_agent_harness
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils.loaders import harness_class, harness_config_type

        default = default_agent_harness(config.taskset.id)
        update = {}
        for name, agent in agent_config_fields(config).items():
            chosen = agent.harness
            if harness != "auto":
                chosen = harness_config_type(harness).model_validate({"id": harness})
            elif (chosen is None and default.id == "bash") or (chosen or default).id == "null":
                # The author named none, and verifiers' default, bash, would let the model run commands here; or null,
                # which is the same loop as a process that fetches packages first.
                kept_settings = {} if chosen is None else {"tool_timeout": chosen.tool_timeout}
                chosen = harness_config_type(HARNESS).model_validate({"id": HARNESS, **kept_settings})
            needed_id = (chosen or default).id
            if harness_class(needed_id).NEEDS_CONTAINER:
                raise InvalidRequest(
                    f"The harness {needed_id} of the agent {name} needs a container, but environments run without: set "
                    f"the knob harness to {HARNESS} (one in this process), if the tasks can do without {needed_id}."
                )
            update[name] = agent.model_copy(update={"harness": chosen, "runtime": SubprocessConfig()})
        return config.model_copy(update=update)

    def _parts(self, task: Any) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        keyed, self._unnamed = "finalize" in _overridden(type(self._env), "Env"), set()
        for function in task.hooks("reward"):
            weight = float(getattr(function, "_vf_weight", 1.0))
            if not _gives_a_number(function):
                keyed = True
                self._unnamed.add(function.__name__)
            parts[function.__name__] = Part(weight, *bounds(self.knobs, weight), first_line(function.__doc__))
        for judge in task.plugged_judges():
            weight = float(judge.config.weight)
            parts[judge.reward_name] = Part(weight, *bounds(self.knobs, weight), "verdict of a judge")
        if keyed or not parts:
            parts[_OTHER] = Part(1.0, -_OTHER_LIMIT, _OTHER_LIMIT, "rewards with undeclared names")
        for function in task.hooks("metric"):
            parts.setdefault(
                function.__name__, Part(0.0, -_OTHER_LIMIT, _OTHER_LIMIT, first_line(function.__doc__) or "a metric")
            )
        return parts

    async def _start_serving(self) -> None:
        """Start the shared state once, on the event loop of the rollouts."""
        if "ready" not in self._open:
            ready = self._open["ready"] = asyncio.get_running_loop().create_future()
            self._open["serving"] = asyncio.create_task(self._serve(self._env, ready))
        await asyncio.shield(self._open["ready"])

    async def _serve(self, env: Any, ready: asyncio.Future[None]) -> None:
        try:
            agents = {}
            for name, spec in env._agent_specs.items():
                most = spec.max_turns or TURNS
                if name in self._learning:
                    most = min(spec.max_turns or self.max_turns, self.max_turns)
                agents[name] = spec.model_copy(update={"max_turns": most})
            env.config = env.config.model_copy(update=agents)  # of which verifiers makes the agents of each episode
            async with env.serving():
                secrets = tuple(
                    tool_server.state_secret for tool_server in env._shared_tools.values() if tool_server.state_secret
                )
                async with sessions_server(secrets) as server:
                    env._interception = server
                    ready.set_result(None)
                    await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def _result_of(self, episode: Any, recorded: Any) -> Played:
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable] or episode.traces
        if self._seat:
            traces = [trace for trace in traces if trace.agent is not None and trace.agent.name == self._seat]
            if not traces and episode.ok:
                return Played({}, error=f"the episode ended before {self._seat} had a turn", seat=self._seat)
        if recorded is not None:
            traces = [trace for trace in traces if trace.id == recorded.id] or traces
        trace = traces[0] if traces else None
        turns = trace.num_turns if trace else 0
        # Harnesses end well after a refused call if the conversation exceeds the context.
        last = trace.calls[-1].error if trace and trace.calls else None
        refused = last if last is not None and last.status_code == 400 else None
        full = refused is not None and FULL in (refused.message or "")
        # A limit of turns cuts no answer off, though verifiers counts it so.
        truncated = full or bool(trace and trace.is_truncated and trace.stop_condition != "max_turns")
        if (refused and not turns) or not episode.ok or trace is None:
            told = (one.last_error for one in (*traces[:1], *episode.traces) if one.last_error)
            failed = episode.last_error or next(told, refused)
            reason = "verifiers reports a failed episode without a reason"
            reason = f"{failed.type}: {failed.message}" if failed else reason
            return Played({}, turns=turns, truncated=truncated, error=reason, seat=self._seat)
        from verifiers.v1.dialects.chat import message_to_wire

        parts = dict.fromkeys(self.parts, 0.0)
        for name, reward in trace.rewards.items():
            if reward is None:
                continue
            if name in parts and name != _OTHER:
                parts[name] = bounded(name, float(reward.score), self.parts[name])
                if _OTHER in parts:  # an environment may have changed the weight after the episode
                    parts[_OTHER] += float(reward.value) - float(reward.score) * self._weights[name]
            elif _OTHER in parts:
                parts[_OTHER] += float(reward.value)
            else:
                raise EnvironmentMistake(
                    f"The rewards gave {name!r}, which no reward function is called. A function that returns "
                    "several by name says so: annotate it with -> dict[str, float]."
                )
        for name, value in trace.metrics.items():
            if value is not None and name in parts:
                parts[name] += float(value)
        messages = list(map(message_to_wire, trace.messages))
        return Played(parts, messages=messages, turns=turns, truncated=truncated, seat=self._seat)


def make(target: str) -> OwnLoop:
    """Make the environment of a taskset, or of a module with `load_environment`. See the module.

    Raises:
        LoadError: verifiers is not installed or too old, or the taskset is unknown.
    """
    try:
        import verifiers
    except ModuleNotFoundError as error:
        raise LoadError(
            f"verifiers is not installed for {sys.executable} ({error}). Make it an interpreter of its own with "
            f"{', '.join(REQUIREMENTS)}."
        ) from error
    lead_to_judge()  # before authors' modules are imported: they may make clients then
    load_numpy()
    with OwnRandom("tasks"):  # every worker has to find the same tasks
        if hasattr(verifiers, "SingleTurnEnv") and (environment := _before(target)):
            return environment
        _check_version(target, str(getattr(verifiers, "__version__", "?")))
        return Verifiers(*_taskset(target))


def _before(target: str) -> OwnLoop | None:
    """Make the environment of a module with `load_environment`; None if it has none."""
    module = target
    if ".py" in target:
        path = Path(target.partition(".py")[0] + ".py")
        if str(path.parent) not in sys.path[:1]:
            sys.path.insert(0, str(path.parent))
        module = path.stem
    if loads_environment(module):
        return LoadedEnvironment(module)
    return None


def _check_version(target: str, version: str) -> None:
    """Raise LoadError if this verifiers is too old for tasksets."""
    try:
        importlib.import_module("verifiers.v1.harnesses.utils.mcp")  # since 0.4
    except ImportError:
        raise LoadError(
            f"{target} has no load_environment, and tasksets are played by {REQUIREMENTS[0]}, not {version}. Add it "
            f"again with -r '{REQUIREMENTS[0]}'; if its own requirements exclude that, change them in a copy."
        ) from None


def _taskset(target: str) -> tuple[str, str]:
    """Return the id by which verifiers finds the taskset, and the user's file if it was made importable."""
    file, _, attribute = target.partition(".py")
    if not target.startswith("/") and ".py" not in target:
        return target, ""
    path = Path(file + ".py")
    if not path.is_file():
        raise LoadError(f"The file {path} does not exist.")
    folder = str(path.parent)
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    places = os.environ.get("PYTHONPATH", "")
    if folder not in places.split(os.pathsep):  # verifiers starts tool servers as processes that import the module
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, places]))
    module = importlib.import_module(path.stem)
    if Path(getattr(module, "__file__", "") or "").resolve() != path.resolve():
        raise LoadError(f"The name {path.stem!r} is taken by {module.__file__}: rename {path.name}.")
    from verifiers.v1.env import Env
    from verifiers.v1.harness import Harness
    from verifiers.v1.taskset import Taskset

    chosen, tasksets = attribute.lstrip(":"), _defined(module, Taskset)
    if chosen and chosen not in tasksets:
        raise LoadError(f"{path.name} has no taskset {chosen!r}. Tasksets: {', '.join(tasksets) or 'none'}.")
    if not chosen and len(tasksets) != 1:
        raise LoadError(f"{path.name} has {len(tasksets)} tasksets ({', '.join(tasksets)}): name one as {path}:Class.")
    # Without exports, verifiers would play a taskset without the environment of its file; it refuses two of a kind.
    own = {getattr(module, name): name for name in _defined(module, Env, Harness)}
    last = [name for kind, name in own.items() if sum(issubclass(other, kind) for other in own) == 1]
    others = [name for name in getattr(module, "__all__", None) or last if name not in tasksets]
    module.__all__ = [*others, chosen or tasksets[0]]  # type: ignore[attr-defined]
    return path.stem, str(path)


def _defined(module: types.ModuleType, *kinds: type) -> list[str]:
    """Names of the classes of these kinds that a module defines itself."""
    classes = ((name, value) for name, value in vars(module).items() if isinstance(value, type))
    return [name for name, value in classes if issubclass(value, kinds) and value.__module__ == module.__name__]


def _overridden(cls: type, base: str) -> set[str]:
    """Names that a class's own bases below `base` define."""
    names: set[str] = set()
    for ancestor in cls.__mro__:
        if ancestor.__name__ == base:
            break
        names |= set(vars(ancestor))
    return names


def _gives_a_number(function: Any) -> bool:
    try:
        return typing.get_type_hints(function).get("return") in (float, int, bool)
    except Exception:  # an annotation may name what exists for type checkers only
        return False


async def _learning(env: Any) -> tuple[str, ...]:
    """Return the names of the agents that an environment does not declare untrainable."""
    seats = {name: types.SimpleNamespace(trainable=True) for name in env._agent_specs}
    try:
        await env.setup(types.SimpleNamespace(**seats))
    except Exception:  # It needs real agents there; all of them count.
        pass
    return tuple(name for name, seat in seats.items() if seat.trainable)


def _check_server(server: Any) -> None:
    """A tool server is a program, `python -m module`; one that ends at once would be waited for for three minutes.

    Raises:
        InvalidRequest: The module does nothing as a program, or its tools would be left out.
    """
    try:
        type(server)._config_cls()
    except TypeError as error:
        raise InvalidRequest(f"verifiers cannot start a tool server: {error}") from error
    kind, name = type(server), type(server).__name__
    own = [vars(ancestor) for ancestor in kind.__mro__ if not ancestor.__module__.startswith(f"{PACKAGE}.")]
    older = next((members["_register"] for members in own if "_register" in members), None)
    is_marked = any(getattr(member, "tool", None) is True for members in own for member in members.values())  # @vf.tool
    has_register = not str(getattr(getattr(kind, "register", None), "__module__", "")).startswith(f"{PACKAGE}.")
    if older is not None and not has_register and (not is_marked or _adds_tools(older)):
        raise InvalidRequest(
            f"{name} adds tools in `_register`, which verifiers calls `register` since 0.3: tools added there would be "
            f"left out. Rename that method in {type(server).__module__}."
        )
    module = sys.modules.get(type(server).__module__)
    file = Path(getattr(module, "__file__", None) or "/")
    if server.config.url or file.name == "__init__.py" or not file.is_file():
        return
    if "__main__" not in file.read_text(errors="replace"):
        raise InvalidRequest(
            f"verifiers starts {name} as a program, but {file.name} runs nothing: end it with "
            f'if __name__ == "__main__": {name}.run()'
        )


def _adds_tools(register: Any) -> bool:
    """Return True if a method takes verifiers' server, there called `mcp`, or adds tools to one of another name."""
    code = getattr(inspect.unwrap(register), "__code__", None)
    return code is not None and ("mcp" in code.co_varnames or not {"add_tool", "tool"}.isdisjoint(code.co_names))
