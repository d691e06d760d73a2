"""What an OpenEnv server says of an action that it does not accept, over either protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Refused", "details", "missing"]


class Refused(Exception):
    """The environment does not accept an action; the text says why.

    Args:
        why: The reason.
        missing: Names of fields that the action lacks.
    """

    def __init__(self, why: str, missing: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.missing = list(missing)


def missing(errors: Any) -> list[str]:
    """Return the names of fields that a server finds missing."""
    found = [one for one in errors or () if isinstance(one, Mapping)] if isinstance(errors, list) else []
    return [str(one["loc"][-1]) for one in found if one.get("type") == "missing" and one.get("loc")]


def details(errors: Any) -> str:
    """Return the fields that a server finds invalid, and why."""
    found = [one for one in errors or () if isinstance(one, Mapping)] if isinstance(errors, list) else []
    told = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg', '')}" for one in found[:4]]
    return f": {'; '.join(told)}" if told else ""
