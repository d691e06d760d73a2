"""What a worker says of an environment that it loaded, as values."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

__all__ = ["Card", "KnobCard", "PartCard", "SplitSize"]


class KnobCard(BaseModel):
    """One of an environment's own settings."""

    name: str
    type: str
    default: Any = None
    description: str = ""
    ge: int | float | None = None
    le: int | float | None = None
    choices: list[Any] | None = None
    value: Any = None


class PartCard(BaseModel):
    """One named part of a reward, with the weight in force and the range of its value."""

    weight: float
    low: float
    high: float
    description: str = ""


class Card(BaseModel):
    """What a worker says of an environment that it loaded."""

    name: str
    description: str
    max_turns: int
    knobs: list[KnobCard]
    parts: dict[str, PartCard]
    max_reward: float
    tags: list[str] = []
    guessed_reference: bool = False
    """Whether which answers are right was guessed from names of columns."""
    own_loop: bool = False
    """Whether it plays its rollouts itself, against an OpenAI endpoint."""
    versions: dict[str, str]


class SplitSize(BaseModel):
    """Distinct tasks of a split: all of them, or those found in a second."""

    known: int
    exhausted: bool
