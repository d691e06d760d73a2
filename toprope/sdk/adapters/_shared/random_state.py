"""Separate states of the global random generators for rollouts that share a process.

Environments of other ecosystems use `random` and `numpy.random` as if they were alone. Each rollout has its own states,
which are set before each call into its code and restored afterwards. Calls are sequential; threads that outlive a call
are not covered.
"""

from __future__ import annotations

import random
import sys
from typing import Any

__all__ = ["OwnRandom"]


class OwnRandom:
    """The generator states of a rollout, as a reentrant context manager.

    Args:
        seed: Initial seed.
    """

    def __init__(self, seed: Any) -> None:
        self._own: tuple[Any, Any] | None = None
        self._before: tuple[Any, Any] = (None, None)
        self._depth = 0
        self._seed = seed

    def __enter__(self) -> OwnRandom:
        self._depth += 1
        if self._depth == 1:
            numbers = _numpy()
            self._before = random.getstate(), None if numbers is None else numbers.get_state()
            if self._own is None:
                self._sow(numbers)
            else:
                random.setstate(self._own[0])
                if numbers is not None:
                    if self._own[1] is None:
                        numbers.seed(random.Random(str(self._seed)).getrandbits(32))
                    else:
                        numbers.set_state(self._own[1])
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            numbers = _numpy()
            self._own = random.getstate(), None if numbers is None else numbers.get_state()
            random.setstate(self._before[0])
            if numbers is not None and self._before[1] is not None:
                numbers.set_state(self._before[1])

    def _sow(self, numbers: Any) -> None:
        seed = self._seed if isinstance(self._seed, int | float | str) else str(self._seed)
        random.seed(seed)
        if numbers is not None:
            numbers.seed(random.Random(str(seed)).getrandbits(32))


def _numpy() -> Any:
    """Return numpy.random if it is loaded already; importing it would cost a tenth of a second."""
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)
