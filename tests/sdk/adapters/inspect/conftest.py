"""Shared by the tests of inspect-ai: a stand-in for the package, with its samples and evaluations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from toprope.sdk.adapters import inspect_ai
from toprope.sdk.authoring.env_managed import OwnLoop, Session
from toprope.sdk.rollouts import configure


def session(**other: Any) -> Session:
    return Session(**{"base_url": "http://x/v1", "api_key": "k", "model": "m"} | other)


def results(environment: OwnLoop, **other: Any) -> list[Any]:
    """The rollout of each task, or its failure."""
    return [asyncio.run(environment.group(task, [session(**other)]))[0] for task in environment.tasks()]


class PrerequisiteError(Exception):
    pass


class Sample(Thing):
    """A sample of inspect; its log has the same members, and its epoch."""


class Samples(list[Any]):
    """A data set whose choices an author may shuffle."""

    def shuffle_choices(self, seed: int | None = None) -> None:
        self[:] = [seed]


def sample(text: Any, **fields: Any) -> Sample:
    answer = Thing(role="assistant", text="", tool_calls=None)
    rest = {"id": None, "choices": None, "target": "x", "limit": None, "error": None, "sandbox": None}
    rest["output"] = Thing(choices=[Thing(stop_reason="stop")])
    log = {"messages": [answer], "scores": {"exact": Thing(value="C")}}
    return Sample(input=text, **rest | log | fields)


class Model:
    """A model of inspect, by its API."""

    def __init__(self, api: Any, config: Any = None) -> None:
        self.api, self.config = api, config

    async def generate(self, messages: list[Any], tools: Any = ()) -> Any:
        return (await self.api.generate(messages, tools, None, None))[0].choices[0].message


places: list[dict[str, str]] = []
"""Addresses of the roles of each evaluation."""
given_limits: list[tuple[int, int]] = []
"""Most turns and seconds of each evaluation."""


@pytest.fixture
def inspect(stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., OwnLoop]:
    """A function that makes the environment of a task; its evaluations call `evaluate(its samples, rollouts)`."""
    monkeypatch.setenv("OPENAI_API_KEY", "of the owner")

    def make(
        samples: list[Sample],
        evaluate: Any = None,
        scorers: tuple[str, ...] = ("exact",),
        failure: BaseException | None = None,
        target: str = "package/sums",
        metrics: Any = ("accuracy",),
        limits: tuple[int | None, int | None] = (None, None),
        maker: Callable[..., Any] = lambda **parameters: None,
    ) -> OwnLoop:
        task = Thing(dataset=samples, sandbox=None, scorer=list(scorers), model_roles={"critic": "other/model"})
        task.early_stopping, task.model = "some", "mockllm/model"
        task.turn_limit, task.time_limit = limits

        async def eval_async(asked: list[Sample], model: dict[str, Any], **settings: Any) -> list[Thing]:
            assert settings["model_roles"].keys() == {"grader", "critic"} and model["plays"] == ""
            assert all(one["plays"] == role for role, one in settings["model_roles"].items())
            named = {model["name"], *(one["name"] for one in settings["model_roles"].values())}
            assert len(named) == 3, "solvers that ask for a role's model by its name get no other's"
            given_limits.append((settings["turn_limit"], settings["time_limit"]))
            places.append({role: one["base_url"] for role, one in settings["model_roles"].items()})
            if evaluate is not None:
                await evaluate(asked, model["rollouts"])
            played = [one for one in asked if one.input != "left out"]
            return [Thing(samples=played, error=None, status="success")]

        def load_tasks(targets: list[str], arguments: dict[str, Any]) -> list[Thing]:
            if failure is not None:
                raise failure
            for one in task.dataset:
                if one.input == "drawn":
                    one.input = str(random.random())
            return [task]

        def task_with(task: Thing, dataset: list[Sample], epochs: int) -> list[Sample]:
            assert task.early_stopping is None, "rollouts are no repetitions of an evaluation"
            assert task.model is None, "the policy answers"
            ids = [str(one.id) for one in dataset]
            assert len(ids) == len({*ids}), "The dataset contains duplicate sample ids"
            return [Sample(**vars(one) | {"epoch": 1 + epoch}) for epoch in range(epochs) for one in dataset]

        values = {"C": 1.0, "I": 0.0}
        for name, members in {
            "openai": {},
            "inspect_ai": {"eval_async": eval_async, "task_with": task_with},
            "inspect_ai._eval.loader": {"load_tasks": load_tasks, "load_module": None},
            "inspect_ai._util.error": {"PrerequisiteError": PrerequisiteError},
            "inspect_ai._util.registry": {
                "registry_info": lambda one: Thing(
                    name=one if "/" in str(one) else f"package/{one}", metadata={"metrics": metrics}
                ),
                "registry_params": lambda one: {
                    "metric": {"name": "accuracy" if one == "grouped" else "mean"},
                    "grade_pattern": one if "(" in one else None,
                },
                "registry_lookup": lambda kind, name: maker,
            },
            "inspect_ai.approval": {"Approval": Thing},
            "inspect_ai.approval._human.approver": {"console_approval": None},
            "inspect_ai.dataset": {"MemoryDataset": type("MemoryDataset", (Samples,), {})},
            "inspect_ai.log._samples": {"sample_active": None},
            "inspect_ai.model": {
                "get_model": lambda name, role=None, **settings: settings | {"name": name},
                "modelapi": lambda name: lambda made: made,
                "ModelAPI": object, "model_roles": dict, "Model": type("Model", (Model,), {}),
            },
            "inspect_ai.util": {"suspend_turn_limit": None},
            "inspect_ai.model._model": {"active_model": lambda: None, "cache_fetch": None, "cache_store": None},
            "inspect_ai.model._generate_config": {"active_generate_config": None},
            "inspect_ai.model._providers.openai_compatible": {"OpenAICompatibleAPI": object},
            "inspect_ai.scorer": {"value_to_float": lambda: lambda value: values.get(value, value)},
            "inspect_ai.util._display": {"init_display_type": lambda kind: None},
        }.items():  # fmt: skip
            stand_in(name, **members)
        environment = configure(inspect_ai.make(target))
        assert isinstance(environment, OwnLoop)
        return environment

    return make
