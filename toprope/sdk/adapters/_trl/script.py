"""Training scripts of TRL, run up to the trainer that they construct.

A script defines its rewards, environment and data set wherever it likes, often inside `main()`. Its trainer sees all of
them, so the script is run as `__main__` with a trainer that records its arguments and ends the script. What only
training needs (configurations, LoRA, loggers, vLLM) is replaced by placeholders, and need not be installed.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.user_files import prepare
from toprope.sdk.adapters._trl.arguments import ArgumentsError
from toprope.sdk.adapters._trl.placeholders import Constructed, placeholders
from toprope.sdk.authoring.loading import search_from
from toprope.sdk.discovery import script_requirements
from toprope.sdk.errors import EnvironmentMistake, Failure, LoadError
from toprope.sdk.wall.paths import package_of

__all__ = ["OWN_SAMPLING", "ROLLOUT", "TRAINERS", "Recorded", "recorded_of", "samples_itself", "trainer_call"]

TRAINERS = ("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
OWN_SAMPLING = "rollout_worker"
"""Argument of a trainer whose rollouts are sampled by an agent program with TRL's own server."""
ROLLOUT = "rollout_func"
"""Argument of a trainer whose rollouts are sampled by a function of the script."""
_FINISHED = "The script ended without constructing a trainer"
_LONGEST = 200
"""Characters of a printed line that a message quotes."""


@dataclass(frozen=True)
class Recorded:
    """The arguments that a script passes to its trainer."""

    module: ModuleType
    reward_funcs: list[Any]
    weights: list[float] | None
    environment: Any
    """The `environment_factory`: None, a callable, or a dict of callables."""
    tools: list[Any]
    rows: Any
    max_turns: int | None
    rollout_func: Any
    """The function that samples its rollouts, or None."""
    settings: Any
    """The trainer's `args`."""
    processing_class: Any


def recorded_of(path: Path, arguments: Sequence[str]) -> Recorded:
    """Run a script up to its trainer: with tokenizers of bytes if it samples its rollouts, else with its own.

    Its source tells which; a script that decides otherwise while it runs is run again.

    Args:
        path: The script.
        arguments: Its arguments on the command line.

    Raises:
        LoadError: It fails, constructs no trainer, or its trainer gets something that an environment cannot have.
    """
    if not samples_itself(path):
        recorded = _run_script(path, arguments, of_bytes=False)
        return recorded if recorded.rollout_func is None else _run_script(path, arguments, of_bytes=True)
    failure: LoadError | None = None
    try:
        recorded = _run_script(path, arguments, of_bytes=True)
        if recorded.rollout_func is not None:
            return recorded
    except LoadError as error:
        failure = error
    try:
        recorded = _run_script(path, arguments, of_bytes=False)
    except LoadError as error:
        raise failure or error from None
    if recorded.rollout_func is not None and failure is not None:
        raise failure
    return recorded


def samples_itself(path: Path) -> bool:
    """Return True if a script's source passes a rollout function, by keyword or in a dictionary."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        named = isinstance(node, ast.keyword) and node.arg == ROLLOUT and not _is_none(node.value)
        if named or isinstance(node, ast.Dict) and any(_says(key, ROLLOUT) for key in node.keys):
            return True
    return False


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _says(node: ast.expr | None, word: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == word


def _run_script(path: Path, arguments: Sequence[str], of_bytes: bool) -> Recorded:
    """Run a script up to its trainer.

    Args:
        path: The script.
        arguments: Its arguments on the command line.
        of_bytes: True to give it tokenizers of bytes.

    Raises:
        LoadError: It fails, constructs no trainer, or its trainer gets something that an environment cannot have.
    """
    module = ModuleType("__main__")
    module.__file__ = str(path)
    if package := package_of(str(path)):  # it may import its neighbours as `python -m` lets it
        module.__package__ = ".".join(path.parent.relative_to(Path(package).parent).parts)
    folder, heard = str(path.parent), _Heard(sys.stderr)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        prepare(path)
        search_from(path)  # for good, as are the script's own places: rewards and environments import later, too
        with placeholders(module, arguments, of_bytes), OwnRandom(0), heard.listening():
            exec(code, module.__dict__)
    except Constructed as constructed:
        if constructed.own:
            raise LoadError(
                f"{path.name} trains with a class that replaces {constructed.own} of TRL's trainer: what that samples "
                "or scores cannot be had here. Reward functions, environments with reset() and tools, and rollout "
                "functions run here."
            ) from None
        return _recorded(module, path, constructed.arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may raise anything, SystemExit of argparse too
        failure = Failure.of(error, folder)
        message = f"{path.name} fails before its trainer: {failure.type}: {failure.message}"
        if not message.endswith("could not be reached"):  # what helps then is added where the HOME is known
            message = ". ".join(filter(None, (message.rstrip("."), _cure(error, path, heard.said))))
        raise LoadError(message, failure.where) from error
    raise LoadError(
        f"{_FINISHED} of {', '.join(TRAINERS)}.{heard.said or f' {path.name} is no training script of TRL.'}"
    )


class _Heard:
    """Writes what a script prints to the log, and keeps the last line of it."""

    def __init__(self, log: Any) -> None:
        self.log, self.last, self._begun = log, "", ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self), contextlib.redirect_stderr(self):
            yield

    @property
    def said(self) -> str:
        return f" The last that it printed: «{self.last}»." if self.last else ""

    def write(self, text: str) -> int:
        lines = (self._begun + text).splitlines(keepends=True)  # print() writes a line in parts
        self.last = next((line.strip()[:_LONGEST] for line in reversed(lines) if line.strip()), self.last)
        self._begun = "" if not lines or lines[-1].endswith(("\n", "\r")) else lines[-1][:_LONGEST]
        return int(self.log.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


def trainer_call(tree: ast.Module) -> ast.Call | None:
    """The call that constructs a trainer with rewards or an environment, at any depth of a file that gets there."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl")]
    imported = {alias.name for node in imports for alias in node.names} & set(TRAINERS)  # else `**all` says nothing
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    trainers = {*TRAINERS, *(node.name for node in classes if set(map(_name_of, node.bases)) & set(TRAINERS))}
    for node in _run_by(tree):
        if isinstance(node, ast.Call):
            passed = {keyword.arg for keyword in node.keywords}
            told = passed & {"reward_funcs", "environment_factory", OWN_SAMPLING} or None in passed and imported
            if told and _name_of(node.func) in trainers:
                return node
    return None


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _run_by(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what running a file may run: all but functions and classes that only importers of the file call."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    definitions = {node.name: node for node in tree.body if isinstance(node, kinds) and not node.decorator_list}
    running: list[ast.stmt] = [node for node in tree.body if definitions.get(getattr(node, "name", "")) is not node]
    for part in running:  # grows
        for node in ast.walk(part):
            yield node
            if isinstance(node, ast.Name) and node.id in definitions:
                running.append(definitions.pop(node.id))


def _cure(error: BaseException, path: Path, said: str) -> str:
    if isinstance(error, ImportError):
        requirements = script_requirements(path.read_text("utf-8", "replace"))
        install = f"toprope env add {path}" if requirements else f"{sys.executable} -m pip install ..."
        says = f" (it names {', '.join(requirements)})" if requirements else ""
        return f"Install what it imports{says}: {install}"
    if isinstance(error, SystemExit):
        return (
            f"The knob `arguments` sets the arguments of its command line.{said or ' Its own message is in the log.'}"
        )
    if isinstance(error, EnvironmentMistake):
        return "If an argument of its command line leaves that out, the knob `arguments` can give it."
    if re.search("Hub|HF_HUB", str(error)):
        return "It needs that data set in the cache of the Hugging Face Hub, or environment.network: allow."
    if isinstance(error, ArgumentsError | OSError):
        return "The knob `arguments` sets the arguments of its command line, such as the address of a server."
    return ""


def _recorded(module: ModuleType, path: Path, arguments: dict[str, Any]) -> Recorded:
    args = arguments["args"]
    rewards = arguments["reward_funcs"]
    rewards = [] if rewards is None else list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    if arguments.get(OWN_SAMPLING) is not None:
        raise LoadError(
            f"{path.name} gives its trainer a rollout worker, which samples with TRL's own server. Environments with "
            "reset() and tools, reward functions, and rollout functions run here."
        )
    turns = getattr(args, "max_tool_calling_iterations", None)
    weights = getattr(args, "reward_weights", None) or arguments.get("reward_weights")
    weights = [weights] if isinstance(weights, int | float | str) else weights
    return Recorded(
        module=module,
        reward_funcs=rewards,
        weights=None if weights is None else [float(weight) for weight in weights],
        environment=arguments.get("environment_factory"),
        tools=list(arguments.get("tools") or ()),
        rows=arguments["train_dataset"],
        max_turns=None if turns is None else int(turns) + 1,  # each round of tools comes before an answer
        rollout_func=arguments.get(ROLLOUT),
        settings=args,
        processing_class=arguments.get("processing_class"),
    )
