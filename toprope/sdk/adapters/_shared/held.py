"""What an object holds, as values that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LARGE", "held"]

LARGE = 1000
"""Containers with more elements are word lists; games do not change them, so copies share them."""


def held(value: Any, depth: int = 8) -> Any:
    """Return a JSON form of a value that is equal in every process, without word lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):  # arrays
        return value.tolist()
    if depth == 0 or (isinstance(value, list | tuple | set | frozenset | dict) and len(value) > LARGE):
        return type(value).__name__
    if isinstance(value, Mapping):
        return [[str(key), held(item, depth - 1)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [held(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return held(vars(value), depth - 1) if hasattr(value, "__dict__") and not callable(value) else type(value).__name__
