"""Environments for TRL in users' files, found by parsing: by convention, or as training scripts."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._shared.user_files import data_beside, functions
from toprope.sdk.adapters._trl.script import OWN_SAMPLING, ROLLOUT, trainer_call
from toprope.sdk.discovery import first_line

__all__ = ["TURNS", "declared"]

TURNS = 10
"""Most answers of a rollout with tools, by default."""

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List a training script; or a file with reward functions over `completions`, or a class with `reset` and
    `get_reward`, and rows."""
    parameters = {name: words for name, words in functions(tree).items() if not name.startswith("_")}
    scoring = [name for name, words in parameters.items() if {"completions", "environments"} & set(words)]
    # TRL passes every column, the trainer's state and loggers: what does not take them all is a helper of others.
    taking = {node.name for node in tree.body if isinstance(node, _FUNCTIONS) and node.args.kwarg}
    rewards = [name for name in scoring if name in taking]
    scored = any("environments" in words for words in parameters.values())  # by a function instead of get_reward()
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [node for node in defined if {"reset", "get_reward"} <= _methods(node)]
    if scored and not classes:
        classes = [node for node in defined if "reset" in _methods(node) and not node.name.startswith("_")]
    rows, call = data_beside(file, tree), trainer_call(tree)
    # An import of a script would train; what only its main part does is no harm to a file that has rows and rewards.
    if call is not None and (_trains_at_import(tree) or not rows or not (rewards or classes)):
        return [_script_listed(file, tree, call)]
    if not scoring and not classes:
        return []
    lone = classes[0] if len(classes) == 1 else None
    problem = ""
    if not rewards and not classes:
        problem = f"{scoring[0]} is no reward function of TRL: it must take **kwargs, the columns of the rows."
    elif len(classes) > 1:
        problem = f"{file.name} has {len(classes)} environment classes: keep one in a file."
    elif not rows and lone is None:
        problem = f"No rows: add a list `rows`, a function `rows()`, or {file.stem}.jsonl beside {file.name}."
    target = {"file": str(file), "reward_funcs": rewards, "environment": lone.name if lone else "", "rows": rows}
    description = first_line(ast.get_docstring(tree)) or (first_line(ast.get_docstring(lone)) if lone else "")
    return [
        Listed(
            name=file.stem,
            target=json.dumps({key: value for key, value in target.items() if value}),
            description=description or f"Reward functions of {file.name}, as TRL has them",
            turns=TURNS if lone else 1,
            tools=lone is not None,
            tags=("trl",),
            problem=problem,
        )
    ]


def _trains_at_import(tree: ast.Module) -> bool:
    """True if the trainer is made not only where the file is run itself."""
    mains = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in _names(node.test)]
    return trainer_call(ast.Module([node for node in tree.body if node not in mains], [])) is not None


def _names(node: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _script_listed(file: Path, tree: ast.Module, call: ast.Call) -> Listed:
    passed = {keyword.arg for keyword in call.keywords}
    has_tools = bool(passed & {"tools", "environment_factory"})
    description = first_line(ast.get_docstring(tree))
    return Listed(
        name=file.stem,
        target=json.dumps({"file": str(file), "script": True}),
        description=description
        if description and not description.startswith("```")
        else f"The training script {file.name} of TRL",
        turns=None if has_tools or passed & {None, ROLLOUT} else 1,  # `**settings` may have an environment
        tools=has_tools,
        tags=("trl",),
        problem="Its rollouts are sampled by TRL's own rollout worker, which an environment cannot have."
        if OWN_SAMPLING in passed
        else "",
    )


def _methods(node: ast.ClassDef) -> set[str]:
    return {method.name for method in node.body if isinstance(method, _FUNCTIONS)}
