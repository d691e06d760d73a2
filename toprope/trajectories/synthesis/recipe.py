"""How a data set is made, as a person or an agent writes it down: a recipe, checked before anything is made.

target_size: 500
min_score: 0.5
dedup_threshold: 0.85
split: {train: 0.9, validation: 0.1}
steps:
  - templates: ["What is {a} + {b}?"]
    variables: {a: [1, 2, 3], b: [4, 5, 6]}
  - teacher: my-model           # a model that the owner named; answers what has no answer
  - score: scorers.py:Right     # the owner's file, run in a worker
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toprope.errors import InvalidValue, shown

__all__ = ["STEPS", "Recipe", "StepPlan", "parse_recipe"]


class _Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StepPlan(_Plan):
    """One step; exactly one of those in STEPS says which."""

    templates: list[str | dict[str, str]] | None = None
    variables: dict[str, list[Any]] = {}
    """Of templates: values by slot."""
    teacher: str | None = None
    """A model that the owner named."""
    write: str = "answers"
    """Of a teacher: answers (to what has none), or questions (after three of the seeds)."""
    system: str = ""
    """Of a teacher that answers: a message of the system before each question."""
    prompt: str | None = None
    """Of a teacher that writes questions: what it is asked, with {examples} in it."""
    again: bool = False
    """Of a teacher that answers: also what has an answer."""
    temperature: float = Field(0.7, ge=0, le=5, strict=False)
    max_new_tokens: int = Field(1024, ge=1, le=131_072)
    environment: str | None = None
    """An environment's training tasks, by its name."""
    knobs: dict[str, Any] = {}
    """Of an environment."""
    solve: bool = True
    """Of an environment: whether its own solver answers."""
    noise: float | None = Field(None, ge=0, le=1, strict=False)
    """New items from seeds with mistyped questions: share of the letters."""
    swap_io: bool | None = None
    """New items from seeds, with question and answer swapped."""
    generate: str | None = None
    """A user's generator: file.py:Attribute."""
    score: str | None = None
    """A user's scorer, likewise, or `environment`: the one whose tasks are answered."""
    filter: str | None = None
    """A user's filter, likewise."""
    arguments: dict[str, Any] = {}
    """What a user's class is made with."""

    @property
    def kind(self) -> str:
        """Which of STEPS it is."""
        return next(name for name in STEPS if getattr(self, name) is not None)


STEPS = ("templates", "teacher", "environment", "noise", "swap_io", "generate", "score", "filter")
_OF = {
    "variables": "templates",
    "write": "teacher",
    "system": "teacher",
    "prompt": "teacher",
    "again": "teacher",
    "temperature": "teacher",
    "max_new_tokens": "teacher",
    "knobs": "environment",
    "solve": "environment",
}


class Recipe(_Plan):
    """The whole; what is left out is not done."""

    description: str = Field("", max_length=2000)
    strategy: str | None = None
    """A user's strategy for what is read: file.py:Attribute."""
    strategy_arguments: dict[str, Any] = {}
    steps: list[StepPlan] = []
    target_size: int | None = Field(None, ge=1, le=10_000_000)
    """Needed by steps that generate."""
    min_score: float | None = Field(None, strict=False)
    dedup_threshold: float | None = Field(None, gt=0, le=1, strict=False)
    split: dict[str, float] = {}
    """Ratios by name of the split; near duplicates never go to two."""
    seed: int = 0
    concurrency: int = Field(8, ge=1, le=64)
    retries: int = Field(2, ge=0, le=10)

    @property
    def in_memory(self) -> bool:
        """Whether items are held all at once: to compare them, or to grow them."""
        return bool(self.steps or self.split or self.dedup_threshold or self.min_score is not None)

    @property
    def generates(self) -> bool:
        """Whether a step makes items."""
        made = {"templates", "environment", "noise", "swap_io", "generate"}
        return any(step.kind in made or (step.kind == "teacher" and step.write == "questions") for step in self.steps)

    @property
    def digest(self) -> str:
        """SHA-256 over what it says."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def parse_recipe(given: Mapping[str, Any] | None) -> Recipe:
    """The recipe of a JSON or YAML object.

    Raises:
        InvalidValue: Something in it is unknown, of the wrong type, or does not fit together.
    """
    given = dict(given or {})
    _known(given, Recipe, "The recipe")
    steps = given.get("steps") or []
    if isinstance(steps, list):
        for number, step in enumerate(steps, 1):
            if isinstance(step, Mapping):
                _known(step, StepPlan, f"Step {number}")
                _one_kind(step, number)
    try:
        recipe = Recipe.model_validate(given)
    except ValidationError as error:
        places = [
            f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}"
            for entry in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        raise InvalidValue(f"The recipe cannot be read: {'; '.join(places[:4])}.", hint=_EXAMPLE) from None
    for number, step in enumerate(recipe.steps, 1):
        if step.write not in ("answers", "questions"):
            raise InvalidValue(f"Step {number}: write is answers or questions, not {shown(step.write)}.")
        if step.swap_io is False:
            raise InvalidValue(f"Step {number}: swap_io is true, or is left out.")
    if recipe.generates and recipe.target_size is None:
        raise InvalidValue("A recipe whose steps generate items needs a target_size.", hint=_EXAMPLE)
    for name, ratio in recipe.split.items():
        if not name.isidentifier() or name == "heldout" or not 0 < ratio < float("inf"):
            raise InvalidValue(
                f"split: {shown(name)}: {ratio} is no name and ratio of a split.",
                hint="For example {train: 0.9, validation: 0.1}; heldout is the name of what is sealed.",
            )
    return recipe


_EXAMPLE = (
    'For example {"target_size": 100, "steps": [{"templates": ["What is {a} + 1?"], "variables": {"a": ["1", "2"]}}, '
    '{"teacher": "a-model"}], "dedup_threshold": 0.85, "split": {"train": 0.9, "validation": 0.1}}.'
)


def _known(given: Mapping[str, Any], model: type[BaseModel], where: str) -> None:
    for name in given:
        if name not in model.model_fields:
            near = difflib.get_close_matches(str(name), model.model_fields, n=1)
            said = f"Did you mean {near[0]}? " if near else ""
            raise InvalidValue(f"{where} has no {shown(name)}.", hint=f"{said}Known: {', '.join(model.model_fields)}.")


def _one_kind(step: Mapping[str, Any], number: int) -> None:
    kinds = [name for name in STEPS if step.get(name) is not None]
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else "says nothing of what it does"
        raise InvalidValue(f"Step {number} {found}.", hint=f"Each step has exactly one of {', '.join(STEPS)}.")
    for name in step:
        if name in _OF and _OF[name] != kinds[0]:
            raise InvalidValue(f"Step {number}: {name} is of a step with {_OF[name]}.", hint="Leave it out.")
