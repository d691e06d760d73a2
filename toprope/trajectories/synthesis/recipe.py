"""Recipes: how to make a data set, written by a person or an agent and validated before anything is made.

target_size: 500
min_score: 0.5
dedup_threshold: 0.85
split: {train: 0.9, validation: 0.1}
steps:
  - templates: ["What is {a} + {b}?"]
    variables: {a: [1, 2, 3], b: [4, 5, 6]}
  - teacher: my-model           # a model that the owner named; answers questions without an answer
  - score: scorers.py:Right     # the owner's file, run in a worker
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from toprope.errors import InvalidValue, shown
from toprope.settings.yamlfiles import check_keys
from toprope.trajectories.synthesis.near_duplicates import named_ratios


class _Plan(BaseModel, extra="forbid", strict=True):
    """Refuses unknown fields."""


class StepPlan(_Plan):
    """One step; exactly one of the fields in STEPS is set."""

    templates: list[str | dict[str, str]] | None = None
    variables: dict[str, list[Any]] = {}
    """For templates: values by slot."""
    teacher: str | None = None
    """A model that the owner named."""
    write: str = "answers"
    """For a teacher: write `answers` (to questions without one) or `questions` (from three seeds)."""
    system: str = ""
    """For a teacher that answers: system message before each question."""
    prompt: str | None = None
    """For a teacher that writes questions: the prompt, which contains {examples}."""
    again: bool = False
    """For a teacher that answers: also replace existing answers."""
    temperature: float = Field(0.7, ge=0, le=5, strict=False)
    max_new_tokens: int = Field(1024, ge=1, le=131_072)
    environment: str | None = None
    """Training tasks of the environment of this name."""
    knobs: dict[str, Any] = {}
    """For an environment: its knobs."""
    solve: bool = True
    """For an environment: its own solver answers."""
    noise: float | None = Field(None, ge=0, le=1, strict=False)
    """Add copies with mistyped questions: share of the characters."""
    swap_io: bool | None = None
    """Add copies with question and answer swapped."""
    generate: str | None = None
    """A user's generator: file.py:Attribute."""
    score: str | None = None
    """A user's scorer (file.py:Attribute), or `environment`: that of the tasks."""
    filter: str | None = None
    """A user's filter: file.py:Attribute."""
    arguments: dict[str, Any] = {}
    """Arguments of the user's class."""

    @property
    def kind(self) -> str:
        """The field in STEPS that is set."""
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
    """A recipe; omitted parts are not applied."""

    description: str = Field("", max_length=2000)
    strategy: str | None = None
    """A user's strategy for the items read: file.py:Attribute."""
    strategy_arguments: dict[str, Any] = {}
    steps: list[StepPlan] = []
    target_size: int | None = Field(None, ge=1, le=10_000_000)
    """Items at most. Required by steps that generate, which add items up to it."""
    min_score: float | None = Field(None, strict=False)
    dedup_threshold: float | None = Field(None, gt=0, le=1, strict=False)
    split: Annotated[dict[str, float], BeforeValidator(named_ratios)] = {}
    """Ratio by split, or a list in the order of SPLITS; near duplicates stay in one split."""
    seed: int = 0
    concurrency: int = Field(8, ge=1, le=64)
    retries: int = Field(2, ge=0, le=10)

    @property
    def in_memory(self) -> bool:
        """True if all items must be in memory, to compare or to generate them."""
        chooses = self.target_size or self.dedup_threshold or self.min_score is not None
        return bool(self.steps or self.split or chooses)

    @property
    def generates(self) -> bool:
        """True if a step generates items."""
        generating = {"templates", "environment", "noise", "swap_io", "generate"}
        return any(
            step.kind in generating or (step.kind == "teacher" and step.write == "questions") for step in self.steps
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def parse_recipe(data: Mapping[str, Any] | None) -> Recipe:
    """Parse a recipe from a JSON or YAML object.

    Raises:
        InvalidValue: A field is unknown, has the wrong type, or contradicts another.
    """
    data = dict(data or {})
    check_keys(data, Recipe.model_fields, "The recipe")
    steps = data.get("steps") or []
    if isinstance(steps, list):
        for number, step in enumerate(steps, 1):
            if isinstance(step, dict):
                check_keys(step, StepPlan.model_fields, f"Step {number}")
                _require_one_kind(step, number)
    try:
        recipe = Recipe.model_validate(data)
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
        _require_used(step, number)
    if recipe.strategy_arguments and recipe.strategy is None:
        raise InvalidValue("The recipe has strategy_arguments without a strategy.", hint="Add it, or leave them out.")
    if recipe.generates and recipe.target_size is None:
        raise InvalidValue("A recipe whose steps generate items needs a target_size.", hint=_EXAMPLE)
    for name, ratio in recipe.split.items():
        if not name.isidentifier() or name == "heldout" or not 0 < ratio < float("inf"):
            raise InvalidValue(
                f"split: {shown(name)}: {ratio} is not a name and a ratio of a split.",
                hint="For example {train: 0.9, validation: 0.1}; heldout is reserved for sealed tasks.",
            )
    return recipe


_EXAMPLE = (
    'For example {"target_size": 100, "steps": [{"templates": ["What is {a} + 1?"], "variables": {"a": ["1", "2"]}}, '
    '{"teacher": "a-model"}], "dedup_threshold": 0.85, "split": {"train": 0.9, "validation": 0.1}}.'
)


def _require_one_kind(step: Mapping[str, Any], number: int) -> None:
    kinds = [name for name in STEPS if step.get(name) is not None]
    if len(kinds) != 1:
        problem = f"has {' and '.join(kinds)}" if kinds else "has none of the step fields"
        raise InvalidValue(f"Step {number} {problem}.", hint=f"Each step has exactly one of {', '.join(STEPS)}.")
    for name in step:
        if name in _OF and _OF[name] != kinds[0]:
            raise InvalidValue(f"Step {number}: {name} belongs to a step with {_OF[name]}.", hint="Leave it out.")


def _require_used(step: StepPlan, number: int) -> None:
    """Refuse fields that a step of this kind would ignore."""
    unused = {}
    if step.kind == "teacher" and step.write == "answers":
        unused["prompt"] = "a teacher with write: questions"
    elif step.kind == "teacher":
        unused = dict.fromkeys(("system", "again"), "a teacher with write: answers")
    if step.kind not in ("generate", "score", "filter") or step.score == "environment":
        unused["arguments"] = "a step with the user's own code"
    for name, owner in unused.items():
        if getattr(step, name):
            raise InvalidValue(f"Step {number}: {name} belongs to {owner}.", hint="Leave it out.")
