"""Loading a task of inspect-ai: with parameters that it has, and without waiting for a Hub that is not reached."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from toprope.sdk.adapters._inspect_ai.packages import broken_entry_point, missing_package, without_markup
from toprope.sdk.adapters._shared.random_state import OwnRandom, load_numpy
from toprope.sdk.adapters._shared.user_files import within_package
from toprope.sdk.authoring.loading import find_above
from toprope.sdk.errors import InvalidRequest, LoadError, MissingKnobs, hub_is_unreached, shortened

__all__ = ["Loaded", "load"]

_RETRYING = ("backoff._sync", "tenacity.nap")
"""Modules whose waits inspect and inspect-evals put between downloads that fail: up to three minutes."""
_MOST_PARAMETERS, _LONGEST_DEFAULT = 1000, 60
"""Characters of all parameters of a task, and of a default."""


class Loaded(NamedTuple):
    """A task, with its samples in order."""

    task: Any
    samples: list[Any]
    parameters: str
    """The names of its parameters, with their defaults; empty if it has none."""


def load(target: str, arguments: Mapping[str, Any]) -> Loaded:
    """Load a task.

    Args:
        target: inspect's name of the task.
        arguments: Of its parameters.

    Raises:
        InvalidRequest: The target names another number of tasks than one, the task has no such parameter, or it refuses
            its value.
        MissingKnobs: It has parameters without a default, and they are not given.
        LoadError: It needs a package that is not installed, or its package does not import.
    """
    from inspect_ai._eval.loader import load_tasks
    from inspect_ai._util.error import PrerequisiteError

    load_numpy()
    if (file := Path(target.partition("@")[0])).is_file():
        find_above(file)  # authors start inspect in the root of their repository
    try:
        with OwnRandom(0), _without_waiting_for_the_hub():  # every worker has to find the same tasks in the same order
            _choices_by_seed()
            _import_relatively()
            tasks = load_tasks([target], dict(arguments))
            samples = [sample for task in tasks for sample in task.dataset]
    except Exception as error:
        if (lacking := missing_package(target, error)) is not None:
            raise lacking from error
        if not isinstance(error, TypeError | ValueError | LookupError | FileNotFoundError | PrerequisiteError):
            raise
        if isinstance(error, TypeError) and str(error).startswith(f"{_name_of(target)}() missing "):
            raise MissingKnobs(str(error), "args") from error
        given = " with these parameters" if arguments else ""
        raise InvalidRequest(f"inspect does not load {target}{given}: {without_markup(error)}") from error
    if not tasks and (broken := broken_entry_point(target)) is not None:  # which inspect only logs
        raise missing_package(target, broken) or LoadError(
            f"The package of {target} does not import: {type(broken).__name__}: {broken}"
        ) from broken
    if len(tasks) != 1:
        names = ", ".join(str(task.name) for task in tasks) or "none"
        raise InvalidRequest(f"{target} names {len(tasks)} tasks ({names}): name one with @.")
    parameters = _parameters_of(tasks[0])
    described = shortened(", ".join(map(_described, parameters.values())), _MOST_PARAMETERS)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not takes_any:  # inspect only logs that it leaves them out
        raise InvalidRequest(f"{target} has no parameter {', '.join(unknown)}. Its parameters: {described or 'none'}.")
    _approve_without_persons(target)
    return Loaded(tasks[0], samples, described)


def _name_of(target: str) -> str:
    """Return the name of a task's function."""
    return target.rpartition("@")[2].rpartition("/")[2]


def _approve_without_persons(target: str) -> None:
    """Approve tool calls about which inspect asks a person: for a task's policies, and for those of its agents."""
    from inspect_ai.approval import Approval
    from inspect_ai.approval._human import approver

    @functools.cache
    def tell() -> None:
        print(
            f"{target} asks a person before tools run. Nobody is there, so that each call is approved.", file=sys.stderr
        )

    def approve(*about: Any, **named: Any) -> Any:
        tell()
        return Approval(decision="approve", explanation="Nobody is there to ask.")

    approver.console_approval = approve


def _parameters_of(task: Any) -> Mapping[str, Parameter]:
    from inspect_ai._util.registry import registry_info, registry_lookup

    try:
        name = registry_info(task).name
    except ValueError:  # a task that a file of the Hub describes
        return {"revision": Parameter("revision", Parameter.KEYWORD_ONLY, default="main")}
    return signature(registry_lookup("task", name)).parameters


def _described(parameter: Parameter) -> str:
    if parameter.default is Parameter.empty:
        return str(parameter.replace(annotation=Parameter.empty))
    try:
        json.dumps(parameter.default)
        return f"{parameter.name}={shortened(repr(parameter.default), _LONGEST_DEFAULT)}"
    except (TypeError, ValueError):  # an object, whose text may differ in each process
        return f"{parameter.name}=..."


@contextmanager
def _without_waiting_for_the_hub() -> Iterator[None]:
    """Retry at once what fails because the Hub is not reached: the waits are longer than a load may take."""
    wait = time.sleep

    def sleep(seconds: Any, /) -> None:
        if sys._getframe(1).f_globals.get("__name__") not in _RETRYING or not hub_is_unreached():
            wait(seconds)

    time.sleep = sleep
    try:
        yield
    finally:
        time.sleep = wait


def _choices_by_seed() -> None:
    """Give shuffled choices a seed if their author gave them none."""
    from inspect_ai.dataset import MemoryDataset

    plain = MemoryDataset.shuffle_choices
    if getattr(plain, "by_seed", False):
        return

    def shuffled(self: Any, seed: int | None = None) -> None:
        plain(self, 0 if seed is None else seed)

    shuffled.by_seed = True  # type: ignore[attr-defined]
    MemoryDataset.shuffle_choices = shuffled


def _import_relatively() -> None:
    """Have files import relatively: inspect runs them in no package, so that only a script of the author's can."""
    from inspect_ai._eval import loader

    plain = loader.load_module
    if getattr(plain, "within_package", False):
        return

    @functools.wraps(plain)
    def loaded(file: Path, *more: Any, **named: Any) -> Any:
        try:
            return plain(file, *more, **named)
        except ImportError as error:
            looked_for = error.name or ""  # the file's path is its name
            if "relative import" not in str(error) and not looked_for.startswith("/"):
                raise
        return within_package(file)

    loaded.within_package = True  # type: ignore[attr-defined]
    loader.load_module = loaded
