"""What a rule says when it sees something."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Finding", "Level", "cut"]

Level = Literal["note", "warning", "critical"]
_SHOWN = 160


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with an environment, or worth knowing."""

    rule: str
    level: Level
    what: str
    """One sentence: what is the case."""
    threshold: str
    """What was held against, in words."""
    next: str
    """What to do about it."""
    observed: dict[str, float | int | str] = field(default_factory=dict)
    refuses: bool = False
    """Whether a training run is refused for it: nothing can be learned."""


def cut(text: str | None) -> str:
    """A text of the environment's in one line that is not long."""
    text = " ".join((text or "").split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
