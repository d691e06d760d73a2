"""Environments of GEM by their ids: games, and tasks of its data sets. See `toprope.sdk.adapters.gymnasium`.

The target is an id, such as `game:GuessTheNumber-v0-easy`. `installed` reads the ids from the package's files. Data
sets come from the Hugging Face Hub; tasks of reasoning-gym have an adapter of their own.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters.gymnasium import Gymnasium
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.discovery import literal, parse
from toprope.sdk.errors import LoadError

__all__ = ["PACKAGE", "REQUIREMENTS", "installed", "make"]

PACKAGE = "gem"
REQUIREMENTS = ("gem-llm==0.1.*", "datasets", "pandas", "pywikiapi", "beautifulsoup4")
_OF_HUB = ("math", "code", "qa", "eval", "logic")
_BROWSED = "WikiGame"


def make(target: str) -> Gymnasium:
    """Make the environment of an id.

    Raises:
        LoadError: GEM is not installed, or does not know the id.
    """
    try:
        with OwnRandom(0):
            importlib.import_module("gem.envs")
            registered = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    except ImportError as error:
        raise LoadError(f"GEM does not load ({error}). Install it: {sys.executable} -m pip install gem-llm") from error
    if target not in registered:
        raise LoadError(f"GEM has no environment {target!r}. {nearest(target, registered, 'Environments')[:2000]}")
    arguments = dict(registered[target].kwargs)
    name = f"{PACKAGE}/{target}"
    environment = Gymnasium({"registry": PACKAGE, "id": target, "name": name, "arguments": arguments})
    environment.packages = ("gem-llm",)
    environment.copied = target.startswith("game:") and _BROWSED not in target  # a game holds all of its state
    return environment


def installed(site_packages: Path) -> list[Listed]:
    """List the registered ids, with what they are known to need."""
    try:
        tree = parse(site_packages / PACKAGE / "envs" / "__init__.py")
    except (OSError, SyntaxError, ValueError):
        return []
    environments = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "register":
            continue
        name = literal(node.args[0]) if node.args else None
        if not isinstance(name, str):
            continue  # a name made in a loop: tasks of reasoning-gym
        family, _, task_name = name.partition(":")
        problem = needs = ""
        if family in _OF_HUB:
            problem, needs = "its tasks are a data set of the Hugging Face Hub", "download"
        if _BROWSED in name:
            problem, needs = "it reads Wikipedia", "network"
        environments.append(
            Listed(
                name,
                name,
                f"{task_name} of GEM",
                tags=Gymnasium.tags,
                problem=problem,
                needs=needs,
            )
        )
    return environments
