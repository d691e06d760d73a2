"""A hostile environment. The files of its attacks are copied beside it and run in a worker; standard library only.

An attack gets the places and processes of its victims, and returns something true if it succeeded; an exception or
something false means that it was held. Text that it returns is searched for canaries.
"""

from __future__ import annotations

from typing import Any

from benchmarks.hostile import attack_registry, file_attacks, process_attacks
from benchmarks.hostile.attack_registry import ATTACKS, NEEDS, Victim

__all__ = ["ATTACKS", "FILES", "NEEDS", "Hostile"]

FILES = [str(one.__file__) for one in (attack_registry, file_attacks, process_attacks)]
"""The modules that a worker needs beside this file, as `benchmarks.hostile`."""


class Hostile:
    """The object that a worker makes of this file."""

    def attempt(self, name: str, victim: Victim) -> list[Any]:
        """Return True if an attack succeeded, and the text that it got."""
        try:
            found = ATTACKS[name](victim)
        except BaseException as error:
            return [False, f"{type(error).__name__}: {error}"[:300]]
        return [bool(found), str(found)[:2000]]
