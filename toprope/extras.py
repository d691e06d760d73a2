"""Optional packages: `pip install toprope` brings the server and its tools; the extra `train` brings what runs need."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from toprope.errors import NotPossibleNow

TRAINING = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "aiohttp")
"""Modules without which no run works that computes here."""
HOSTED = ("tinker", "transformers", "aiohttp")
"""Modules without which no run at a service works."""

MIRRORING = ("aiohttp", "cryptography")
"""Modules without which no run works on a cluster that shares no folder with this machine."""


def missing(modules: Iterable[str]) -> list[str]:
    """Return those of the modules that are not installed. Imports none of them."""
    return [module for module in modules if find_spec(module) is None]


def install_command(extra: str = "train") -> str:
    """Return the command that adds an extra to this installation."""
    return f"{sys.executable} -m pip install 'toprope[{extra}]'"


def require(what: str, *modules: str, extra: str = "train") -> None:
    """Require modules of an extra.

    Args:
        what: What needs them, as the subject of a sentence.
        modules: Names to import.
        extra: Its name.

    Raises:
        NotPossibleNow: Some are not installed.
    """
    if lacking := missing(modules):
        raise NotPossibleNow(
            f"{what} needs packages that this installation lacks ({', '.join(lacking)}): it has the server and its "
            "tools only. Nothing was started or changed.",
            hint=f"The owner installs them: {install_command(extra)}",
        )


@contextmanager
def without_collector() -> Iterator[None]:
    """Import big packages within the block, with the garbage collector off.

    The collector would visit all that is loaded again and again, which takes a quarter of the time of importing torch
    and transformers. What is loaded stays, so the collector does not visit it afterwards either (`gc.freeze`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
