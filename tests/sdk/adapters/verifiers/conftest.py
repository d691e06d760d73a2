"""A stand-in for verifiers: environments, tasksets and their episodes."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator

from toprope.sdk.adapters import verifiers
from toprope.sdk.adapters._verifiers.harness import HARNESS
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.rollouts import configure


class Config(BaseModel):
    """Settings of a taskset: none."""


class Source(BaseModel):
    """A setting that is an object."""

    path: str


class Asking(BaseModel):
    """Settings of a taskset that cannot do without some."""

    words: list[str] = Field(description="words to copy")
    turns: int
    source: Source
    shuffle: bool = False


class Strict(Asking):
    """Settings that are refused if there are no words."""

    @field_validator("words")
    @classmethod
    def some(cls, words: list[str]) -> list[str]:
        if not words:
            raise ValueError("no words")
        return words


class Task(Thing):
    """A task of verifiers."""

    NEEDS_CONTAINER = False

    served: Sequence[Any] = ()

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return list(cls.served)


class First(Task):
    """An author's task."""


class Taskset(list[Task]):
    """A taskset of verifiers."""

    config: Any = None

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


class Tasks(Taskset):
    """An author's taskset."""


class Spec:
    """An agent's configuration."""

    max_turns = 3
    harness: Any = None

    def model_copy(self, update: dict[str, Any]) -> Any:
        copied = copy.copy(self)
        vars(copied).update(update)
        return copied


class Agents(Spec):
    """A configuration with an agent in each field."""


class Env:
    """An environment of verifiers whose episodes are given."""

    def __init__(self, tasks: Taskset, episodes: list[Any], agents: tuple[str, ...]) -> None:
        self.taskset, self.episodes = tasks, episodes
        self._agent_specs = {name: Spec() for name in agents}
        self.config = Agents().model_copy(self._agent_specs)
        self._shared_tools: dict[str, Any] = {}

    async def setup(self, agents: Any) -> None:
        if hasattr(agents, "referee"):
            agents.referee.trainable = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(self, task: Any, context: Any) -> Any:
        return self.episodes.pop(0)


class InterceptionServer:
    def __init__(self, state_service_secrets: tuple[str, ...]) -> None:
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> InterceptionServer:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stack.aclose()

    def register(self, session: Any) -> tuple[str, str]:
        return "model", "state"


@pytest.fixture
def open_taskset(stand_in: Callable[..., None], unled: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OwnLoop]:
    """A function that makes the environment of a taskset with these rewards, metrics, tools and episodes."""

    def make(
        *,
        rewards: Any = (),
        metrics: Any = (),
        tools: Any = (),
        episodes: Any = (),
        agents: tuple[str, ...] = (),
        settings: type[BaseModel] = Config,
        knobs: dict[str, Any] | None = None,
        task: type[Task] = First,
        taskset: type[Taskset] = Tasks,
    ) -> OwnLoop:
        hooks = {"reward": list(rewards), "metric": list(metrics)}
        data = Thing(system_prompt=None, prompt="Copy: x", answer="x")
        monkeypatch.setattr(Task, "served", tools)
        first = task(hooks=hooks.get, plugged_judges=lambda: [], config=None, data=data)
        config = Thing(taskset=Thing(id="copy"), model_copy=lambda update: config)
        loaders = {
            "taskset_class": lambda name: taskset, "taskset_config_type": lambda taskset: settings,
            "load_environment": lambda config: Env(taskset([first]), list(episodes), agents),
            "resolve_env_config": lambda given: settings(**given["taskset"]) and config,
            "harness_config_type": lambda harness: Thing(model_validate=lambda given: Thing(**given)),
            "harness_class": lambda harness: Thing(NEEDS_CONTAINER=harness == "boxed"),
        }  # fmt: skip
        for name, members in {
            HARNESS: {},
            "verifiers.v1.clients": {"ModelContext": Thing, "EvalClientConfig": Thing},
            "verifiers.v1.clients.eval": {"EvalClient": object},
            "verifiers.v1.configs.agent": {"agent_config_fields": lambda config: {}},
            "verifiers.v1.configs.env": {"default_agent_harness": lambda taskset: Thing(id="bash")},
            "verifiers.v1.dialects.chat": {"message_to_wire": lambda message: message},
            "verifiers.v1.harnesses.utils.mcp": {},
            "verifiers.v1.interception": {"InterceptionServer": InterceptionServer},
            "verifiers.v1.runtimes": {"SubprocessConfig": Thing},
            "verifiers.v1.types": {"SamplingConfig": Thing},
            "verifiers.v1.utils.loaders": loaders,
        }.items():
            stand_in(name, **members)
        monkeypatch.setattr(verifiers, "fork_tool_servers", lambda: None)
        environment = configure(verifiers.make("copy"), knobs=knobs)
        assert isinstance(environment, OwnLoop)
        return environment

    return make


def reward(name: str, weight: float, gives: Any) -> Any:
    def function() -> None:
        """A reward."""

    function.__name__, function._vf_weight = name, weight  # type: ignore[attr-defined]
    function.__annotations__ = {"return": gives} if gives else {}
    return function


_numbers = itertools.count()


def trace(rewards: dict[str, tuple[float, float]], trainable: bool = True) -> Thing:
    given = {name: Thing(score=score, weight=weight, value=score * weight) for name, (score, weight) in rewards.items()}
    rest = {
        "metrics": {"length": 3},
        "messages": [],
        "num_turns": 1,
        "calls": [],
        "is_truncated": False,
        "stop_condition": None,
        "last_error": None,
        "errors": [],
        "id": next(_numbers),
    }
    return Thing(agent=Thing(trainable=trainable, name="agent"), rewards=given, **rest)


def episode(*traces: Thing, error: Thing | None = None) -> Thing:
    return Thing(ok=error is None, traces=list(traces), last_error=error)


def sample(environment: OwnLoop) -> Played | BaseException:
    [task] = environment.tasks()
    assert (task.messages, task.reference) == ([{"role": "user", "content": "Copy: x"}], "x")
    [found] = asyncio.run(environment.group(task, [Session("http://x/v1", "k", "m")]))
    return found
