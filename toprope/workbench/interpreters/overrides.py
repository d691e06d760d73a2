"""Requirements that take the place of what dependencies of a project in a folder require."""

from __future__ import annotations

import configparser
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from toprope.workbench.adapters import adapters
from toprope.workbench.interpreters.naming import pyproject_of, require_no_secret

__all__ = ["overrides"]


def overrides(requirements: Iterable[str]) -> Iterator[str]:
    """Yield what projects in folders declare (`[tool.uv]`), the project that one lies in, and versions of packages.

    The project if it is required by the address of a git repository alone: a clone has it, and needs no network. A
    version if it is asked for beside a project that takes the package by an address, which admits no version; that
    of its adapter if a project takes the package of an ecosystem from a folder.
    """
    texts = list(requirements)
    declared: list[str] = []
    addressed: set[str] = set()
    folders: set[str] = set()
    for text in texts:
        if not Path(text).is_absolute():  # the name of a package, also if a folder here has it
            continue
        project = pyproject_of(Path(text))
        declared += [*_uv_overrides(project), *_projects_above(Path(text), project)]
        addressed |= _names_by_address(project)
        folders |= _names_by_address(project, "path")
    yield from declared
    taken: set[str] = {canonicalize_name(Requirement(line).name) for line in declared}
    chosen: set[str] = set()
    for text in texts:
        with contextlib.suppress(InvalidRequirement):
            version = Requirement(text)
            if version.specifier and (name := canonicalize_name(version.name)) in addressed - taken:
                chosen.add(name)
                yield text  # uv combines several for one package
    taken |= chosen
    for adapter in adapters() if folders - taken else ():
        for line in adapter.requirements:
            if (name := canonicalize_name(Requirement(line).name)) in folders - taken:
                taken.add(name)
                yield line


def _uv_overrides(project: dict[str, Any]) -> Iterator[str]:
    try:
        lines = project["tool"]["uv"]["override-dependencies"]
    except (LookupError, TypeError):
        return
    for line in lines if isinstance(lines, list) else ():
        with contextlib.suppress(InvalidRequirement, TypeError):
            Requirement(line)
            require_no_secret(line)
            if line.isprintable():  # a URL may hold a line break, and what follows be an option
                yield line


def _names_by_address(project: dict[str, Any], key: str = "") -> set[str]:
    """Names of the packages that a project takes by an address, itself or by the sources that it gives uv.

    Args:
        key: Only sources with this key.
    """
    names: set[str] = set()
    with contextlib.suppress(InvalidRequirement, LookupError, TypeError):
        names |= {
            requirement.name
            for line in project["project"]["dependencies"]
            if not key and (requirement := Requirement(line)).url
        }
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        names |= {name for name, source in project["tool"]["uv"]["sources"].items() if _is_address(source, key)}
    return {str(canonicalize_name(name)) for name in names}


def _is_address(source: Any, key: str) -> bool:
    return isinstance(source, dict) and (key in source if key else "index" not in source)


def _projects_above(folder: Path, project: dict[str, Any]) -> Iterator[str]:
    try:
        requirements = [Requirement(line) for line in project["project"]["dependencies"]]
    except (InvalidRequirement, LookupError, TypeError):
        return
    for requirement in requirements:
        if requirement.url is None or not requirement.url.startswith("git+"):
            continue
        address = requirement.url.removeprefix("git+")
        if "@" in urlsplit(address).path or "#" in address:
            continue  # another commit than that of the clone, or a part of it, may be meant
        for place in folder.resolve().parents:
            if _is_clone(place, address) and _is_of_one_owner(folder, place):
                about = pyproject_of(place).get("project")
                project_name = str(about.get("name")) if isinstance(about, dict) else ""
                if canonicalize_name(project_name) == canonicalize_name(requirement.name):
                    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
                    yield f"{requirement.name}{extras} @ {place.as_uri()}" + (
                        f" ; {requirement.marker}" if requirement.marker else ""
                    )
                break


def _is_clone(place: Path, address: str) -> bool:
    """True if a folder is a clone of the repository at an address: what a project names opens no other."""
    config = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        config.read_string((place / ".git" / "config").read_text(encoding="utf-8"))
        origin = config['remote "origin"']["url"]
    except (OSError, ValueError, LookupError, configparser.Error):
        return False
    return origin.removesuffix("/").removesuffix(".git") == address.removesuffix("/").removesuffix(".git")


def _is_of_one_owner(folder: Path, place: Path) -> bool:
    """False if others than the owner of a folder may have written what lies at a place above it, as in /tmp."""
    try:
        owner, above, file = folder.stat().st_uid, place.stat(), (place / "pyproject.toml").stat()
    except OSError:
        return False
    return not (above.st_mode | file.st_mode) & 0o022 and owner == above.st_uid == file.st_uid
