"""The answer of a tool: a few short lines for the model that reads them, and the same as a typed structure.

Every token of an answer costs the reader context, so answers have a budget, and text that was cut says how to get the
rest. The server reads the structures at its start to publish them with the tools; these modules import nothing of the
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

TOKEN_BUDGET = 10_000
"""Most tokens of an answer, counted as bytes / 4 of its text and its structure together."""


class Structure(BaseModel):
    """Base of the structures of all answers."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Answer:
    """The answer of a tool."""

    text: str
    """For the model."""
    data: BaseModel
    """The typed structure."""
    brief: bool = False
    """Leave fields at their default out of the structure."""
    picture: bytes | None = None
    """A PNG."""


def tokens(answer: Answer) -> int:
    """Return an answer's size in tokens, as bytes / 4."""
    return (len(answer.text.encode()) + len(answer.data.model_dump_json().encode())) // 4


def fitting(make: Callable[[int], Answer]) -> Answer:
    """Return the answer with the longest values that fit the budget; `make` is given their most characters."""
    for limit in (4000, 800, 200, 60):
        answer = make(limit)
        if tokens(answer) <= TOKEN_BUDGET:
            break
    return answer
