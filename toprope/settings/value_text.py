"""How a value of the configuration is said in a message."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["say", "short"]


def say(value: Any) -> str:
    """The value as one would type it: texts without quotes, whole numbers without a point."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False, default=str)


def short(value: Any, limit: int = 80) -> str:
    """The value as JSON, cut."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
