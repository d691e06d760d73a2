"""Registry of the attacks of a hostile environment; standard library only, as it runs in a worker."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from typing import Any

Victim = dict[str, Any]
ATTACKS: dict[str, Callable[[Victim], Any]] = {}
NEEDS: dict[str, tuple[str, int]] = {}
"""Network and memory in MB of the worker that an attack runs in."""
_ARM = platform.machine() == "aarch64"


def attack(network: str = "allow", memory_mb: int = 0) -> Callable[[Callable[[Victim], Any]], Callable[[Victim], Any]]:
    """Register an attack under its name, in a worker with this network and memory."""

    def register(function: Callable[[Victim], Any]) -> Callable[[Victim], Any]:
        ATTACKS[function.__name__] = function
        NEEDS[function.__name__] = (network, memory_mb)
        return function

    return register


def call(x86: int, arm: int, *arguments: Any) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    done = int(library.syscall(arm if _ARM else x86, *arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
