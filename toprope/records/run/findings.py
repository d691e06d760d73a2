"""A diagnosis of a run, as it is told, kept and read: one finding says what rule saw which values, and what to do next.

Findings are events of kind `finding` in the run's events;
one of level `over` says that a rule no longer holds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Finding", "Level"]

Level = Literal["note", "warning", "critical", "over"]


class Finding(BaseModel):
    """One diagnosis. Its event's data is its `model_dump(mode="json")`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rule: str
    """The rule's id, such as `collapse`; stable, so that agents and tests can name it."""
    level: Level
    what: str
    """One sentence: what is the case."""
    observed: dict[str, Any] = {}
    """The values that it rests on, by name."""
    threshold: str = ""
    """What they were held against, in words."""
    source: str = ""
    """Where the threshold comes from."""
    confidence: Literal["low", "medium", "high"] = "medium"
    next: str = ""
    """What to do about it: a call, or a change with its field."""
    step: int | None = None
