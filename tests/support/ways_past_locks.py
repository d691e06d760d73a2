"""Calls that set a field of the configuration without editing it: each is an attack on a lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toprope_tools.data import build_dataset
from toprope_tools.hermes import Selection, rl_edit_config, rl_select_environment, rl_test_inference
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environment_check import check_environment
from toprope_tools.planning.environments import describe_environment, select_environment
from toprope_tools.runs.ask import ask_checkpoint
from toprope_tools.runs.inference import test_inference
from toprope_tools.runs.sweeps import start_sweep
from toprope_tools.runs.training import start_training
from toprope_tools.workshop import Workshop

from tests.support.tools_house import do

DRAFT = object()
"""Stands for the id of the draft at hand."""
MODEL = "mine"
"""A model that the owner must have named."""


@dataclass(frozen=True)
class Way:
    """A call with a value beyond a lock.

    Attributes:
        parameter: The parameter that has the value.
        field: The locked field.
        bound: The lock: `value`, `min` or `max`.
    """

    tool: Callable[..., Any]
    parameter: str
    field: str
    bound: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.tool.__name__} {self.parameter} {self.field}"

    def attack(self, shop: Workshop, draft_id: str) -> Any:
        """Make the call; the draft is also the one that a client selected under Hermes' names."""
        shop.selections[""] = Selection(draft_id)
        given = {name: draft_id if one is DRAFT else one for name, one in self.arguments.items()}
        return do(self.tool, shop, **given)


def recipe(*steps: dict[str, Any]) -> dict[str, Any]:
    """A recipe of a data set with an environment's tasks and further steps."""
    return {"target_size": 1, "steps": [{"environment": "number_guess"}, *steps]}


def _test(parameter: str, field: str, most: int, value: int, **more: Any) -> Way:
    return Way(test_inference, parameter, field, {"max": most}, {"draft_id": DRAFT, parameter: value, **more})


def _ask(parameter: str, field: str, most: float, value: float, **more: Any) -> Way:
    given = {"draft_id": DRAFT, "prompts": ["x"], parameter: value, **more}
    return Way(ask_checkpoint, parameter, field, {"max": most}, given)


def _build(field: str, bound: dict[str, Any], *steps: dict[str, Any]) -> Way:
    return Way(build_dataset, "recipe", field, bound, {"name": "x", "recipe": {"target_size": 1, "steps": [*steps]}})


def _rl_test(parameter: str, field: str) -> Way:
    return Way(rl_test_inference, parameter, field, {"max": 64}, {"who": "", parameter: 999, "models": [MODEL]})


_GUESS = {"environment": "number_guess"}
_TAUGHT = ({"templates": ["{a}"], "variables": {"a": ["1"]}}, {"teacher": MODEL, "temperature": 4.0})
_RATE = "optimizer.learning_rate"

_WIDER = {"name": "number_guess", "knobs": {"spare": 5}}

WAYS = (
    Way(select_environment, "knobs", "environment.knobs.spare", {"max": 3}, _WIDER),
    Way(check_environment, "knobs", "environment.knobs.spare", {"max": 3}, _WIDER),
    Way(
        rl_select_environment,
        "name",
        "environment.name",
        {"value": "sort_letters"},
        {"who": "", "name": "number_guess"},
    ),
    Way(rl_edit_config, "value", _RATE, {"max": 1e-3}, {"who": "", "field": "learning_rate", "value": 0.5}),
    _rl_test("num_steps", "evaluation.validation_tasks"),
    _rl_test("group_size", "rollout.group_size"),
    _test("group_size", "rollout.group_size", 4, 64),
    _test("tasks", "evaluation.validation_tasks", 64, 9999),
    _test("max_new_tokens", "rollout.max_new_tokens", 64, 9999, models=[MODEL]),
    _ask("temperature", "rollout.temperature", 1.0, 5.0),
    _ask("max_new_tokens", "rollout.max_new_tokens", 20, 40),
    _ask("count", "rollout.group_size", 4, 8, temperature=1.0),
    Way(
        describe_environment,
        "knobs",
        "environment.knobs.spare",
        {"max": 3},
        _WIDER,
    ),
    Way(select_environment, "name", "environment.name", {"value": "sort_letters"}, {"name": "number_guess"}),
    _build("sft.teacher", {"value": "solver"}, *_TAUGHT),
    _build("sft.temperature", {"max": 1.0}, *_TAUGHT),
    _build("sft.max_new_tokens", {"max": 64}, *_TAUGHT),
    _build("environment.name", {"value": "sort_letters"}, _GUESS),
    _build("environment.knobs.spare", {"max": 3}, {**_GUESS, "knobs": {"spare": 5}}),
    Way(start_training, "seeds", "algorithm.seed", {"max": 1}, {"draft_id": DRAFT, "seeds": 8}),
    Way(start_sweep, "space", _RATE, {"max": 0.001}, {"draft_id": DRAFT, "space": {_RATE: {"min": 1e-5, "max": 0.5}}}),
    Way(
        start_sweep,
        "options",
        "budget.steps",
        {"max": 1000},
        {
            "draft_id": DRAFT,
            "space": {"rollout.groups_per_step": {"choices": [2, 4]}},
            "options": {"steps": 5000},
        },
    ),
    Way(edit_config, "changes", _RATE, {"max": 0.001}, {"draft_id": DRAFT, "changes": {_RATE: 0.5}}),
    Way(
        edit_config,
        "changes",
        "environment.mixture",
        {"value": []},
        {"draft_id": DRAFT, "changes": {"environment.mixture": [{"name": "sort_letters"}]}},
    ),
    Way(
        edit_config,
        "changes",
        "environment.curriculum",
        {"value": {}},
        {"draft_id": DRAFT, "changes": {"environment.curriculum": {"knob": "length", "levels": [1, 2]}}},
    ),
)
