"""The answer of a tool: a few short lines for the model that reads them, and a typed structure for programs.

Every token of an answer costs the reader context, so answers have a budget, and text that was cut says how to get the
rest. A client may show its model both, so a structure is sent without defaults and without what its text says already
(`IN_TEXT`). Callers in the same process have all of it. These modules import nothing of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel

TOKEN_BUDGET = 10_000
"""Most tokens of an answer, counted as bytes / 4 of its text and its structure together."""
IN_TEXT = "in text"
"""Marks a field of a structure that is not sent, because the text says it."""
_DIGITS = 6
"""Significant digits of a number that is sent; numbers from 100,000 on, such as times, keep one decimal."""


class Structure(BaseModel, extra="forbid"):
    """Base of the structures of all answers."""

    @classmethod
    def of(cls, source: object, **own: Any) -> Self:
        """Return a structure with the values `own`, and those of the attributes of `source` that have its names."""
        attributes = {
            name: getattr(source, name) for name in cls.model_fields if name not in own and hasattr(source, name)
        }
        return cls(**attributes, **own)


@dataclass(frozen=True)
class Answer:
    """The answer of a tool."""

    text: str
    """For the model."""
    data: BaseModel
    """The typed structure."""
    picture: bytes | None = None
    """A PNG."""


def sent_fields(structure: type[BaseModel]) -> list[str]:
    """Return the names of the fields that may be sent."""
    return [name for name, field in structure.model_fields.items() if IN_TEXT not in field.metadata]


def sent(value: Any) -> Any:
    """Return a structure, or a value in one, as it is sent: plain JSON values, rounded, without what a reader has."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        sent_values = {name: getattr(value, name) for name in sent_fields(type(value))}
        return {
            name: sent(item)
            for name, item in sent_values.items()
            if fields[name].is_required() or item != fields[name].get_default(call_default_factory=True)
        }
    if isinstance(value, Mapping):
        return {str(name): sent(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [sent(item) for item in value]
    if isinstance(value, float):
        return round(value, 1) if abs(value) >= 1e5 else float(f"{value:.{_DIGITS}g}")
    return value


def tokens(answer: Answer) -> int:
    """Return an answer's size in tokens, as bytes / 4."""
    structure = json.dumps(sent(answer.data), ensure_ascii=False, separators=(",", ":"))
    return (len(answer.text.encode()) + len(structure.encode())) // 4


def fitting(make: Callable[[int], Answer]) -> Answer:
    """Return the answer with the longest values that fit the budget; `make` is given their most characters."""
    for limit in (4000, 800, 200, 60):
        answer = make(limit)
        if tokens(answer) <= TOKEN_BUDGET:
            break
    return answer
