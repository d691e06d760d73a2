"""Packages that tasks of inspect-ai need and an interpreter lacks."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from toprope.sdk.errors import LoadError

__all__ = ["broken_entry_point", "missing_package", "more_requirements", "without_markup"]

_EXTRA = re.compile(r"--extra[ =]([A-Za-z][\w.-]*)")
_PIP = re.compile(r"\bpip install\b")
_CLIENT = "openai"
"""Its client, by which the policy is asked; inspect does not require it."""


def more_requirements(place: Path) -> tuple[str, ...]:
    """Return what an interpreter's packages lack: projects require inspect alone, or with their own providers."""
    return (_CLIENT,) if (place / "inspect_ai").is_dir() and not (place / _CLIENT).is_dir() else ()


def missing_package(target: str, error: BaseException) -> LoadError | None:
    """Return the error that names what to add for a task that does not load; None if it does not lack a package.

    Args:
        target: inspect's name of the task.
        error: Raised by its package or by inspect.
    """
    package = target.partition("/")[0].replace("_", "-")
    if package and (extra := _EXTRA.search(str(error))):
        why, needed = without_markup(error), f"'{package}[{extra[1]}]' -r inspect_ai"
    elif isinstance(error, ModuleNotFoundError):
        why, needed = f"it imports {error.name}", _needed(target, package, str(error.name))
    elif type(error).__name__ == "PrerequisiteError" and _PIP.search(str(error)):
        return LoadError(f"Could not import what {target} needs: {without_markup(error)}")
    else:
        return None
    what = f"{target} needs what is not installed: {why.rstrip('.')}"
    return LoadError(f"{what}. The owner adds it: toprope env add {needed}")


def broken_entry_point(target: str) -> Exception | None:
    """Return the error of importing what a task's package registers with inspect; None without an error or package."""
    for entry_point in metadata.entry_points(group="inspect_ai", name=target.partition("/")[0]):
        try:
            entry_point.load()
        except Exception as error:
            return error
    return None


def without_markup(error: BaseException) -> str:
    """Return an error's text without the markup of inspect's terminal, in one line."""
    return " ".join(re.sub(r"\[/?[a-z ]+\]", "", str(error)).split())


def _needed(target: str, package: str, module: str) -> str:
    """Return what to add for a missing module: the extra of the task's package that has it, or the module itself."""
    word = module.partition(".")[0].replace("_", "-").lower()
    if not package:
        return f"{target.partition('@')[0]} -r inspect_ai -r PACKAGE, with the package that has {module}."
    try:
        required = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        required = []
    for line in required:
        name, _, condition = line.partition(";")
        extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", condition)
        if extra and re.split(r"[\s\[<>=!~@]", name.strip(), maxsplit=1)[0].replace("_", "-").lower() == word:
            return f"'{package}[{extra[1]}]' -r inspect_ai"
    return f"{package if required else 'inspect_ai'} -r {word}"
