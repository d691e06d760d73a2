"""Environments for TRL in users' files, found by parsing: by convention, or as training scripts."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._shared.user_files import data_beside, functions
from toprope.sdk.adapters._trl.script import OWN_SAMPLING, trainer_call
from toprope.sdk.discovery import first_line

__all__ = ["TURNS", "declared"]

TURNS = 10
"""Most answers of a rollout with tools, by default."""


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List a training script; or a file with reward functions over `completions`, or a class with `reset` and
    `get_reward`, and rows."""
    call = trainer_call(tree)  # first: an import of a script would construct its trainer and train
    if call is not None:
        return [_script_listed(file, tree, call)]
    taken = {name: words for name, words in functions(tree).items() if not name.startswith("_")}
    rewards = [name for name, words in taken.items() if {"completions", "environments"} & set(words)]
    scored = any("environments" in words for words in taken.values())  # by a function instead of get_reward()
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [node for node in defined if {"reset", "get_reward"} <= _methods(node)]
    if scored and not classes:
        classes = [node for node in defined if "reset" in _methods(node) and not node.name.startswith("_")]
    rows = data_beside(file, tree)
    if not rewards and not classes:
        return []
    lone = classes[0] if len(classes) == 1 else None
    problem = ""
    if len(classes) > 1:
        problem = f"{file.name} has {len(classes)} environment classes: keep one in a file."
    elif not rows and lone is None:
        problem = f"No rows: add a list `rows`, a function `rows()`, or {file.stem}.jsonl beside {file.name}."
    target = {"file": str(file), "reward_funcs": rewards, "environment": lone.name if lone else "", "rows": rows}
    said = first_line(ast.get_docstring(tree)) or (first_line(ast.get_docstring(lone)) if lone else "")
    return [
        Listed(
            name=file.stem,
            target=json.dumps({key: value for key, value in target.items() if value}),
            description=said or f"Reward functions of {file.name}, as TRL has them",
            turns=TURNS if lone else 1,
            tools=lone is not None,
            tags=("trl",),
            problem=problem,
        )
    ]


def _script_listed(file: Path, tree: ast.Module, call: ast.Call) -> Listed:
    given = {one.arg for one in call.keywords}
    said = first_line(ast.get_docstring(tree))
    return Listed(
        name=re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_"),
        target=json.dumps({"file": str(file), "script": True}),
        description=said if said and not said.startswith("```") else f"The training script {file.name} of TRL",
        turns=None if "environment_factory" in given else TURNS if "tools" in given else 1,
        tools=bool(given & {"tools", "environment_factory"}),
        tags=("trl",),
        problem="Its rollouts are sampled by TRL's own rollout worker, which an environment cannot have."
        if OWN_SAMPLING in given
        else "",
    )


def _methods(node: ast.ClassDef) -> set[str]:
    return {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
