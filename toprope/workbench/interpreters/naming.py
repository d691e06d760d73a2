"""Parse the argument of `toprope env add` into kind and name."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from toprope.errors import EnvironmentFailed, InvalidValue, NotFound, shown
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import (
    NAME,
    discover_file,
    environment_files,
    name_of,
    parse,
    script_metadata,
    script_python,
    script_requirements,
)
from toprope.settings.yamlfiles import YAML_ENDINGS, nearest, read_yaml
from toprope.workbench.adapters import Adapter
from toprope.workbench.interpreters.left_out import modules_from
from toprope.workbench.interpreters.overrides import at_sources, package_of, project_name, pyproject_of
from toprope.workbench.interpreters.processes import require_no_secret
from toprope.workbench.interpreters.words import CHECK_NETWORK

_GIT = re.compile(
    r"^(git\+|git@|ssh://|file://.*\.git)|\.git(@[^/@]+)?$|"
    r"^https://(github\.com|gitlab\.com|huggingface\.co/spaces)(/[\w.-]+){2}(@[^/@]+)?/?$"
)
"""URLs of repositories; at hosts of repositories alone, without `.git`."""
_EDITABLE = re.compile(r"(?:-e|--editable)[ =]+(?:[\w.-]+(?:\[[^\]]*\])? *@ *)?(?P<place>\.[^\s;]*)")
_UNBUILT = re.compile(r"(?i)failed to build|(metadata|build).generation.failed|getting requirements to build wheel")
_UNRESOLVED = re.compile(r"No solution found|ResolutionImpossible")
_UNFIT = re.compile(r"conflicting dependencies|No matching distribution|requires (a GPU build of )?torch")
_USUAL = ("app", "main", "server", "task")
"""Names that the file of every environment of an ecosystem has: its folder's name tells them apart."""
_HUB = re.compile(r"hf:[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Target:
    """The environment to add."""

    kind: str
    """`packages`, `folder`, `git`, `server` or `dataset`."""
    given: str
    name: str
    requirements: tuple[str, ...] = ()
    adapter: Adapter | None = None
    path: Path | None = None
    ref: str = ""
    """Branch or tag of a checkout."""
    python: str = ""
    """`requires-python` of a script."""
    unbuilt: bool = False
    """True if its project cannot be built: its files are run, with what the project requires."""


def target_of(
    given: str,
    adapters: Sequence[Adapter],
    speaks: str | None = None,
    *,
    plain_only: bool = False,
    indexes: Sequence[str] = (),
) -> Target:
    """Parse an argument.

    Args:
        given: An ecosystem, a requirement, a path, a git URL, a server's URL, or `hf:` and a data set's id.
        adapters: Known ecosystems.
        speaks: Ecosystem of a server.
        plain_only: Read it as an ecosystem or a requirement only, never as a local path.
        indexes: URLs of further indexes that the installation asks.

    Raises:
        NotFound: The argument is none of these.
        InvalidValue: It cannot be added in this form.
    """
    by_name = {ecosystem.name: ecosystem for ecosystem in adapters}
    plain = given.strip()
    require_no_secret(plain)
    if plain.replace("-", "_").lower() in by_name:
        adapter = by_name[plain.replace("-", "_").lower()]
        if not adapter.requirements:
            raise InvalidValue(
                f"{adapter.name} needs no separate interpreter: it is available already.", hint="toprope env list"
            )
        return Target("packages", given, adapter.name, adapter.requirements, adapter)
    if not plain_only and (place := _parse_place(given, plain, by_name, speaks, indexes)) is not None:
        return place
    try:
        requirement = Requirement(plain)
    except InvalidRequirement:
        raise NotFound(
            f"{shown(given)} is not an ecosystem, requirement, path or URL.",
            hint=nearest(plain, [adapter.name for adapter in adapters if adapter.requirements]),
        ) from None
    return Target("packages", given, name_of(requirement.name), _with_extras(requirement, plain, adapters))


def _with_extras(requirement: Requirement, plain: str, adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """Return a requirement with the extras and the ecosystem that a known package of environments needs."""
    for adapter in adapters:
        for known, extras in adapter.extras.items():
            if package_of(known) == package_of(plain) and not requirement.extras and not requirement.url:
                wanted = requirement.specifier or Requirement(known).specifier
                return (f"{requirement.name}[{','.join(extras)}]{wanted}", *adapter.requirements)
    return (plain,)


def names_any(line: str, lines: Sequence[str]) -> bool:
    """Return True if a requirement is of a package that one of the others names, as pins that have risen since."""
    name = package_of(line)
    return name is not None and name in map(package_of, lines)


def with_extras_of(wanted: str, former: str) -> str | None:
    """Return the requirement `wanted` with the extras of `former`, too; None if they are not of one package."""
    if package_of(wanted) is None or package_of(wanted) != package_of(former):
        return None
    new, old = Requirement(wanted), Requirement(former)
    if new.url or old.url:
        return None
    if old.extras <= new.extras:
        return wanted
    return f"{new.name}[{','.join(sorted(new.extras | old.extras))}]{new.specifier}"


def module_name(name: str) -> str:
    """Return the name of the Python file of an environment, without its ending.

    Raises:
        InvalidValue: Not a valid name, or the name of a Python module.
    """
    module = checked_name(name).replace("-", "_")
    is_module = module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None
    if module[0].isdigit() or module[0] == "_" or keyword.iskeyword(module) or is_module:
        raise InvalidValue(
            f"{shown(name)} cannot be the name of a Python file"
            + (": the file would hide a module of that name." if is_module else "."),
            hint="Use a name that begins with a letter and is not a module's.",
        )
    return module


def checked_name(name: str) -> str:
    """Validate a name.

    Raises:
        InvalidValue: Not a valid name.
    """
    if NAME.fullmatch(name) is None:
        raise InvalidValue(
            f"{shown(name)} is not a valid name.",
            hint="Use up to 64 lower-case letters, digits, '_' and '-', beginning with a letter or digit.",
        )
    return name


def _parse_place(
    given: str, plain: str, by_name: dict[str, Adapter], speaks: str | None, indexes: Sequence[str]
) -> Target | None:
    """Parse a place: on the Hub, in a repository, at a URL, or an existing path; None for another text."""
    if _HUB.fullmatch(plain):
        return Target("dataset", plain, name_of(plain.removeprefix("hf:").rpartition("/")[2]))
    if _GIT.search(plain):
        return _parse_git(plain)
    if re.match(r"(https?|wss?)://", plain):
        return _parse_server(plain, by_name, speaks)
    if (path := Path(plain).expanduser()).exists():
        return _parse_path(given, path.absolute(), list(by_name.values()), indexes)
    if plain.endswith(".py") or ("/" in plain and "@" not in plain):  # else an index is asked for a file's name
        hint = "" if path.is_absolute() else f"The path begins at {Path.cwd()}."
        hint += f" A data set of the Hub is hf:{plain}." if re.fullmatch(r"\w[\w.-]*/[\w.-]+", plain) else ""
        raise NotFound(f"There is no file or folder {shown(given)}.", hint=hint)
    return None


def _parse_git(plain: str) -> Target:
    url, _, ref = plain.removeprefix("git+").rpartition("@")
    if not url or "/" in ref or ":" in ref:  # the @ belongs to a user name
        url, ref = plain.removeprefix("git+"), ""
    if ref.startswith("-") or url.startswith("-"):
        raise InvalidValue(f"{shown(plain)} is not a repository URL.")
    return Target("git", url, name_of(url.rstrip("/").rpartition("/")[2].removesuffix(".git")), ref=ref)


def _parse_server(plain: str, by_name: dict[str, Adapter], speaks: str | None) -> Target:
    parts = urlsplit(plain)
    if not parts.hostname:
        raise InvalidValue(f"{shown(plain)} names no host.")
    adapter = by_name.get(speaks or "")
    if adapter is None:
        raise InvalidValue(
            f"Name the ecosystem of the server at {plain}: --as ECOSYSTEM.",
            hint=nearest(speaks, by_name) if speaks else f"There are {', '.join(by_name)}.",
        )
    name = name_of(f"{parts.hostname}-{parts.port}" if parts.port else parts.hostname)
    return Target("server", plain.rstrip("/"), name, adapter=adapter)


def _parse_path(given: str, path: Path, adapters: Sequence[Adapter], indexes: Sequence[str]) -> Target:
    if path.is_file() and path.suffix in YAML_ENDINGS:
        return _parse_yaml(path, adapters, indexes)
    if path.is_file() and path.suffix not in (".py", ".whl"):
        raise InvalidValue(
            f"{path} is neither a folder nor a Python file, a wheel or a YAML file.",
            hint="Add data by a YAML file: adapter: dataset, path: FILE, and what docs/datasets.md says.",
        )
    stem = f"{path.parent.name}-{path.stem}" if path.stem in _USUAL else path.stem
    name = name_of(stem if path.is_file() else path.name)
    if path.suffix == ".whl" or (path.is_dir() and is_project(path)):
        adapter, others = _ecosystem_of(path, adapters)
        name = name if path.is_dir() else name_of(name.split("-")[0])  # a wheel's goes on with its version
        return Target("packages", str(path), name, (str(path), *others), adapter, path)
    source = path.read_text("utf-8", "replace") if path.is_file() else ""
    requirements = _of_script(source, path, indexes)
    listed = (path.parent if path.is_file() else path) / "requirements.txt"
    if not requirements and listed.is_file():
        requirements = tuple(_lines(listed, adapters))
    return Target("folder", str(path), name, requirements, path=path, python=script_python(source))


def _parse_yaml(path: Path, adapters: Sequence[Adapter], indexes: Sequence[str]) -> Target:
    """Parse a YAML file that defines an environment: what its adapter and its Python file need."""
    fields, by_name = read_yaml(path), {ecosystem.name: ecosystem for ecosystem in adapters}
    adapter_name = fields.get("adapter")
    if not isinstance(adapter_name, str) or adapter_name not in by_name:
        wrong = "names no adapter" if adapter_name is None else f"names {shown(str(adapter_name))}, which is no adapter"
        raise InvalidValue(f"{path} {wrong}.", hint=nearest(str(adapter_name or ""), sorted(by_name)))
    adapter, file = by_name[adapter_name], path.parent / Path(str(fields.get("file") or "")).expanduser()
    source = file.read_text("utf-8", "replace") if file.suffix == ".py" and file.is_file() else ""
    needed = () if fields.get("interpreter") or (adapter.urls_alone and fields.get("url")) else adapter.requirements
    return Target(
        "folder",
        str(path),
        name_of(path.stem),
        (*_of_script(source, file, indexes), *needed),
        adapter if needed else None,
        path,
        python=script_python(source),
    )


def _of_script(source: str, file: Path, indexes: Sequence[str]) -> tuple[str, ...]:
    """Return what a script names in its metadata, with the addresses that it gives uv there.

    Raises:
        InvalidValue: A requirement cannot say one.
    """
    told = script_metadata(source)
    lines, unclear = at_sources(script_requirements(source), file.parent, script=told, indexes=indexes)
    if unclear:
        raise InvalidValue(
            f"{file} takes {', '.join(unclear)} from places (tool.uv.sources) that a requirement cannot say. An index, "
            "by their names alone, may have packages of strangers.",
            hint="--extra-index-url gives an index that it names; else write their addresses among the dependencies "
            "in a copy: 'NAME @ URL'.",
        )
    return tuple(lines)


def ecosystem_requirements(target: Target, adapters: Sequence[Adapter], site: Path | None = None) -> tuple[str, ...]:
    """Return what the ecosystems of a folder's files need, which their authors often leave out of its requirements.

    Args:
        site: Packages that are installed: ecosystems that these have are left out, in whatever version.
    """
    if target.kind == "packages" or target.path is None:
        return ()
    lines = (
        adapter.for_standalone if standalone else adapter.requirements
        for adapter, standalone in _adapters_declaring(target.path, adapters)
        if site is None or not adapter.is_in(site)
    )
    return tuple(dict.fromkeys(line for requirements in lines for line in requirements))


def run_from_folder(target: Target, site_packages: str | None, adapters: Sequence[Adapter]) -> Target | None:
    """Return the target of a project whose environments are in its files alone; None if its packages bring some.

    Args:
        site_packages: Where the project was installed.
    """
    if target.path is None or not target.path.is_dir() or site_packages is None:
        return None
    if target.unbuilt and (theirs := ecosystem_requirements(target, adapters, Path(site_packages))):
        return replace(target, requirements=(*target.requirements, *theirs))
    if target.kind != "packages":
        return None
    site = Path(site_packages)
    modules = {module.parts[0].removesuffix(".py") for module in modules_from(target.path, site)}
    brought = (listed for adapter in adapters if adapter.lists_packages for listed in adapter.installed(site))
    if any(not modules or _is_in(listed, modules, site) for listed in brought):
        return None
    folder = replace(target, kind="folder")
    ours = any(
        environment.attribute
        for file in environment_files(target.path, deep=True)
        for environment in discover_file(file)
    )
    if not ours and not _adapters_declaring(target.path, adapters):
        return None
    theirs = ecosystem_requirements(folder, adapters, site)
    return replace(folder, requirements=tuple(dict.fromkeys((*target.requirements, *theirs))))


def without_build(target: Target, output: str) -> Target | None:
    """Return the target of a project that runs from its files because it cannot be built, or because its requirements
    contradict each other and it lists others in `requirements.txt`; None if it says no more.

    Args:
        output: What the installer printed.
    """
    unresolved = _UNRESOLVED.search(output) is not None
    if target.path is None or not target.path.is_dir():
        return None
    project, listed = pyproject_of(target.path).get("project"), target.path / "requirements.txt"
    place = str(target.path.resolve())
    is_unbuilt = _UNBUILT.search(output) is not None and place in unquote(output)
    if project is None or not (unresolved or is_unbuilt) or "dependencies" in (project.get("dynamic") or ()):
        return None
    needed = [line for line in project.get("dependencies") or () if isinstance(line, str)]
    if unresolved or not needed:
        needed = []
        with suppress(InvalidValue):  # its options are not requirements
            needed = list(_lines(listed, ())) if listed.is_file() else []
        if unresolved and not needed:
            return None
    needed = [line for line in (*needed, *target.requirements) if line not in (str(target.path), place)]
    kind = "git" if target.kind == "git" else "folder"
    return replace(target, kind=kind, requirements=tuple(dict.fromkeys(needed)), unbuilt=True)


def may_fit_otherwise(failed: EnvironmentFailed) -> bool:
    """Return True if an installation may succeed with other versions, or without some packages."""
    is_unfit = any(pattern.search(failed.message) for pattern in (_UNRESOLVED, _UNBUILT, _UNFIT))
    return is_unfit and CHECK_NETWORK not in failed.hint


def _is_in(listed: Listed, modules: set[str], site: Path) -> bool:
    """Return True if an installed environment is in one of these modules: an ecosystem may bring others."""
    places = [Path(text).resolve() for text in _texts(listed.target) if text.startswith("/")]
    if not places:
        return not modules.isdisjoint(re.findall(r"\w+", listed.target))
    inside = (place.relative_to(site.resolve()).parts for place in places if place.is_relative_to(site.resolve()))
    return any(re.split(r"\W", parts[0])[0] in modules for parts in inside if parts)


def _texts(target: str) -> list[str]:
    """Return the texts of a target, which may be JSON."""
    try:
        values: list[Any] = [json.loads(target)]
    except ValueError:
        return [target]
    for item in values:  # what it holds is added meanwhile
        values += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [item for item in values if isinstance(item, str)]


def _adapters_declaring(path: Path, adapters: Sequence[Adapter]) -> list[tuple[Adapter, bool]]:
    """Return the adapters that find environments in a file, or in a folder's files, each with whether all of these do
    without its package."""
    candidates = [adapter for adapter in adapters if adapter.reads_files]
    declaring: dict[str, tuple[Adapter, bool]] = {}
    for file in [path] if path.is_file() else environment_files(path, deep=True):
        try:
            tree = parse(file)
            for adapter in candidates:
                if listed := adapter.declared(file, tree):
                    before = declaring.get(adapter.name, (adapter, True))[1]
                    declaring[adapter.name] = adapter, before and all(environment.standalone for environment in listed)
        except Exception:  # Listing reports files that cannot be read.
            continue
    return list(declaring.values())


def is_project(folder: Path) -> bool:
    """Return True if a folder is an installable project."""
    return any((folder / name).is_file() for name in ("pyproject.toml", "setup.py"))


def _lines(file: Path, adapters: Sequence[Adapter]) -> list[str]:
    """Return the requirements of a file; for the project of an ecosystem itself, those of its adapter."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} cannot be read as UTF-8: {error}.", hint="Save it as UTF-8.") from None
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    wanted: list[str] = []
    for line in lines:
        if editable := _EDITABLE.match(line):
            place = file.parent / editable["place"]
            adapter, _ = _ecosystem_of(place, adapters)
            wanted += adapter.requirements if adapter is not None else [str(place.resolve())]
        elif line.startswith("-"):
            raise InvalidValue(
                f"{file} has the line {shown(line)}, which is a pip option, not a requirement.",
                hint="Remove it from the file and use --requirement, --extra-index-url or --find-links.",
            )
        elif line and not line.startswith("#"):
            wanted.append(line)
    return wanted


def _ecosystem_of(place: Path, adapters: Sequence[Adapter]) -> tuple[Adapter | None, tuple[str, ...]]:
    """Return the adapter of the ecosystem whose own project a folder is, and its further requirements."""
    name = project_name(pyproject_of(place))
    for adapter in adapters:
        others = tuple(line for line in adapter.requirements if package_of(line) != name)
        if others != adapter.requirements:
            return adapter, others
    return None, ()
