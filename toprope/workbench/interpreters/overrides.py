"""Places from which projects have uv take packages, and what they require in place of what dependencies require."""

from __future__ import annotations

import configparser
import contextlib
import posixpath
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from toprope.errors import EnvironmentFailed
from toprope.sdk.discovery import address_of
from toprope.sdk.worker.client import KEY_IN_URL
from toprope.workbench.adapters import adapters
from toprope.workbench.interpreters.left_out import local_path
from toprope.workbench.interpreters.processes import require_no_secret

__all__ = ["at_sources", "overrides", "package_of", "project_name", "pyproject_of", "require_kept", "sourced"]

_USUAL = ("https://download.pytorch.org/", "https://pypi.org/simple")
"""Indexes of torch, whose build Toprope chooses itself, and that of all packages."""


def overrides(requirements: Iterable[str]) -> Iterator[str]:
    """Yield what projects in folders declare (`[tool.uv]`), the project that one lies in, and versions of packages.

    The project if it is required by the address of a git repository alone: a clone has it, and needs no network. A
    version if it is asked for beside a project that takes the package by an address, which admits no version, or pins
    the package of an ecosystem to another; that of its adapter if a project takes such a package from a folder.
    """
    texts = list(requirements)
    declared: list[str] = []
    addressed: set[str] = set()
    folders: set[str] = set()
    pins: list[tuple[str, str]] = []
    for text in texts:
        folder = Path(text)
        if not folder.is_absolute():  # the name of a package, also if a folder here has it
            continue
        project = pyproject_of(folder)
        declared += [*_declared(project, folder)[0], *_projects_above(folder, project)]
        pins += _pins_of(project)
        known = _sources(_places(folder))
        addressed |= {canonicalize_name(one.name) for one in _dependencies(project) if one.url} | known.keys()
        folders |= {name for name, source in known.items() if any("path" in one for one in source.tables)}
    taken = set(map(package_of, declared))
    chosen: list[str] = []
    for text in filter(package_of, texts):
        allowed, name = Requirement(text).specifier, package_of(text)
        others = {package for package, pin in pins if not allowed.contains(pin, prereleases=True)}
        if allowed and name in (addressed | others) - taken:
            chosen.append(text)  # uv combines several for one package
    yield from [*declared, *chosen]
    taken |= set(map(package_of, chosen))
    for adapter in adapters() if folders - taken else ():
        for line in adapter.requirements:
            if (name := package_of(line)) in folders - taken:
                taken.add(name)
                yield line


class Sourced(NamedTuple):
    """Packages that projects have uv take from places of their own: by their names alone, an index would give what
    anyone may own."""

    by_uv: list[str]
    """Those that uv alone finds, because pip does not read these places, and those by an address, whose own projects
    are not read here."""
    unpinnable: set[str]
    """Those of which a pin, a name and a version, does not say the place; see `require_kept`."""


def sourced(requirements: Iterable[str], indexes: Collection[str] = ()) -> Sourced:
    """Return the packages that the projects of requirements, and the local projects that these require, give places.

    Args:
        requirements: Requirements, and paths of folders.
        indexes: URLs of indexes that are asked for all packages.

    Raises:
        InvalidValue: A place holds a password.
    """
    return _Walk(requirements, indexes).sourced()


class _Walk:
    """A walk through local projects, from what is required to what that requires; see `sourced`."""

    def __init__(self, requirements: Iterable[str], indexes: Collection[str]) -> None:
        # A project comes before the names that ask for it.
        self._asked = sorted(requirements, key=lambda text: not _address_in(text))
        self._indexes = _indexes(indexes)
        ours = [Requirement(line) for line in overrides(self._asked)]
        self._versioned = {canonicalize_name(one.name) for one in ours if not one.url}
        """Packages whose version the owner or a project chooses, from the usual index."""
        self._by_uv: list[str] = [canonicalize_name(one.name) for one in ours if one.url]
        self._unpinnable: set[str] = set()
        self._folders: dict[str | None, Path] = {}
        """Local projects by name."""

    def sourced(self) -> Sourced:
        read = set[tuple[Path, frozenset[str]]]()
        for text in self._asked:  # grows
            folder = self._folder_of(text)
            if folder is None:
                continue
            extras = frozenset(Requirement(text).extras if package_of(text) else ())
            if (folder, extras) not in read:
                read.add((folder, extras))
                self._read(folder, extras)
        return Sourced(list(dict.fromkeys(self._by_uv)), self._unpinnable)

    def _folder_of(self, text: str) -> Path | None:
        """Return the folder of a local project; None for another requirement, of which uv may know more than pip."""
        address = _address_in(text)
        # A name may come again with other extras, and an extra may name others.
        place = local_path(address) if address else self._folders.get(package_of(text))
        if place is not None and place.is_dir() and "#" not in address:  # behind it is a part of the folder
            return place
        if address and not urlsplit(address).path.endswith(".whl"):  # a wheel has no sources
            self._by_uv.append(package_of(text) or text)
        return None

    def _read(self, folder: Path, extras: Collection[str]) -> None:
        project, known = pyproject_of(folder), _sources(_places(folder))
        self._folders.setdefault(project_name(project), folder)
        for name in sorted(set(_declared(project, folder)[1]) - self._versioned):
            self._by_uv.append(name)
            if not known[name].indexes or known[name].indexes - self._indexes:
                self._unpinnable.add(name)
        for line in _strings(_table(project, "build-system").get("requires")):
            name, source = _source_of(line, known)
            if source is None:
                self._asked.append(line)
            else:
                self._by_uv.append(name)  # installed while the project is built, so no pin has it
        for line in _required(project, known, extras):
            name, source = _source_of(line, known)
            if source is None:
                self._asked.append(line)
            elif name not in self._versioned:
                self._by_uv.append(name)
                if source.indexes - self._indexes:
                    self._unpinnable.add(name)
                there = source.address() or _address_of_member(name, source)
                if there.startswith("file:"):
                    self._asked.append(_at(Requirement(line), there))


def require_kept(lost: Iterable[str]) -> None:
    """Refuse packages whose pins, a name and a version, would not say the place that a project gives uv.

    Raises:
        EnvironmentFailed: There are some.
    """
    if names := ", ".join(dict.fromkeys(lost)):
        raise EnvironmentFailed(
            f"Pins cannot say the places that projects give uv for {names} (tool.uv.sources). The usual index, which "
            "is asked for pins, may have packages of strangers. Nothing was installed.",
            hint="--extra-index-url gives an index that a pyproject.toml names (tool.uv.index); --requirement "
            "'NAME==VERSION' takes a package from the usual one.",
        )


def at_sources(
    lines: Iterable[str],
    folder: Path,
    but: Collection[str] = (),
    script: dict[str, Any] | None = None,
    indexes: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Return requirements of a project with the addresses that it gives uv, and the packages whose addresses a
    requirement cannot say: members of a workspace, one of several sources, those of an index.

    Args:
        folder: Folder of the project, or of the script.
        but: Packages that stay as they are.
        script: Metadata of a script, whose sources hold instead of the folder's.
        indexes: URLs of indexes that are asked for all packages: those of these alone stay as they are.

    Raises:
        InvalidValue: An address holds a password.
    """
    known = _sources(_places(folder) if script is None else [(script, folder)])
    found: list[str] = []
    unclear: list[str] = []
    for line in lines:
        name, source = _source_of(line, known)
        if source is None or name in but or source.is_of(_indexes(indexes)):
            found.append(line)
        elif address := source.address():
            found.append(_at(Requirement(line), address))
        else:
            unclear.append(name)
    return found, unclear


@dataclass(frozen=True)
class _Source:
    """The place from which a project has uv take a package."""

    given: Any
    folder: Path
    """Folder where its paths begin."""
    indexes: frozenset[str]
    """URLs of the indexes in it that Toprope does not ask anyway."""

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The places in it: several may be for different machines."""
        return _tables(self.given)

    def address(self) -> str | None:
        """Return its address for a requirement; None if it has none."""
        address = (address_of(self.given, self.folder) or "").replace("https://git@", "https://")
        return None if not address or KEY_IN_URL.search(address) else address

    def is_of(self, indexes: Collection[str]) -> bool:
        """Return True if it is of these indexes alone."""
        return bool(self.tables) and all("index" in one for one in self.tables) and self.indexes <= set(indexes)


def _places(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """Return the projects whose sources hold in a folder, with their folders: its own, and that of its workspace."""
    found = [(pyproject_of(folder), folder)]
    if "workspace" in _table(found[0][0], "tool", "uv"):
        return found
    above = next((place for place in folder.parents if (place / "pyproject.toml").is_file()), None)
    if above is not None:  # uv looks no further
        root = pyproject_of(above)
        workspace, inside = _table(root, "tool", "uv", "workspace"), folder.relative_to(above).as_posix()
        if _fits(inside, workspace.get("members")) and not _fits(inside, workspace.get("exclude")):
            found.append((root, above))
    return found


def _address_of_member(name: str, source: _Source) -> str:
    """Return the address of the member of a workspace that a source means; empty if there is none."""
    if not any(one.get("workspace") for one in source.tables):
        return ""
    project, root = _places(source.folder)[-1]
    patterns = map(posixpath.normpath, _strings(_table(project, "tool", "uv", "workspace").get("members")))
    inside = [pattern for pattern in patterns if not pattern.startswith((".", "/"))]
    with contextlib.suppress(ValueError):  # of a pattern
        for place in (root, *(found for pattern in inside for found in sorted(root.glob(pattern)))):
            if project_name(pyproject_of(place)) == name:
                return place.as_uri()
    return ""


def _fits(inside: str, patterns: Any) -> bool:
    """Return True if a path fits one of a workspace's patterns, in which `*` matches `/` too, as uv reads them."""
    plain = [posixpath.normpath(pattern) for pattern in _strings(patterns)]
    return any(fnmatchcase(inside, form) for pattern in plain for form in (pattern, pattern.replace("**/", "")))


def _sources(places: Sequence[tuple[dict[str, Any], Path]]) -> dict[str, _Source]:
    """Return the sources of packages; those of a project precede those of its workspace."""
    found: dict[str, _Source | None] = {}
    tables = [(_table(project, "tool", "uv"), folder) for project, folder in places]
    named = {
        str(index.get("name")): str(index.get("url")).rstrip("/")
        for uv, _ in reversed(tables)
        for index in _tables(uv.get("index"))
    }
    for uv, folder in tables:
        trusted = folder == places[0][1] or _is_of_one_owner(places[0][1], folder)
        for key, given in _table(uv, "sources").items():
            urls = {named.get(str(one["index"]), "") for one in _tables(given) if "index" in one}
            others = frozenset(url for url in urls if not url.startswith(_USUAL))
            is_usual = not others and all("index" in one for one in _tables(given))  # also what is no source
            source = None if is_usual else _Source(given if trusted else None, folder, others)
            found.setdefault(canonicalize_name(key), source)
    return {name: source for name, source in found.items() if source is not None}


def _indexes(urls: Iterable[str]) -> set[str]:
    return {url.rstrip("/") for url in urls}


def _source_of(line: str, known: dict[str, _Source]) -> tuple[str, _Source | None]:
    """Return a requirement's package and the source with its address; None without one."""
    with contextlib.suppress(InvalidRequirement):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if not requirement.url and name in known:
            require_no_secret(str(known[name].given).replace("://git@", "://"))  # a user, as some write it
            return name, known[name]
    return "", None


def _required(project: dict[str, Any], known: Iterable[str], extras: Collection[str]) -> list[str]:
    """Return what a project requires with these extras; where its build tells that, all packages with sources."""
    about = _table(project, "project")
    lines = _strings(about.get("dependencies"))
    optional = {canonicalize_name(name): more for name, more in _table(about, "optional-dependencies").items()}
    for extra in extras:
        lines += _strings(optional.get(canonicalize_name(extra)))
    told = {"dependencies", *(["optional-dependencies"] if extras else [])}
    return lines if about and told.isdisjoint(_strings(about.get("dynamic"))) else [*lines, *known]


def _address_in(text: str) -> str:
    """Return the URL of a requirement, and of a path; empty for the name of a package."""
    with contextlib.suppress(ValueError):  # of an invalid URL, too
        if Path(text).is_absolute():
            return Path(text).as_uri()
        url = text if "://" in text and package_of(text) is None else Requirement(text).url or ""
        return url if urlsplit(url).scheme else ""
    return ""


def _at(requirement: Requirement, address: str) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras} @ {address}" + (f" ; {requirement.marker}" if requirement.marker else "")


def _table(value: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _tables(value: Any) -> list[dict[str, Any]]:
    """Return a table, or those of a list."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def _strings(value: Any) -> list[str]:
    return [line for line in value if isinstance(line, str)] if isinstance(value, list) else []


def package_of(line: str) -> str | None:
    """Return the name of a requirement's package; None for a path or a bare URL."""
    with contextlib.suppress(InvalidRequirement):
        return canonicalize_name(Requirement(line).name)
    return None


def pyproject_of(folder: Path) -> dict[str, Any]:
    """Parse a folder's pyproject.toml; empty if the file is missing or broken."""
    try:
        return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _pins_of(project: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the packages of ecosystems that a project pins, and the versions."""
    packages = _of_ecosystems()
    for requirement in _dependencies(project):
        name = canonicalize_name(requirement.name)
        for clause in requirement.specifier if name in packages else ():
            if clause.operator == "==" and not clause.version.endswith("*"):
                yield name, clause.version


def project_name(project: dict[str, Any]) -> str:
    """Return the name of a project as indexes write it; `none` if it has none."""
    return canonicalize_name(str(_table(project, "project").get("name")))


def _of_ecosystems() -> set[str]:
    return {adapter.distribution for adapter in adapters() if adapter.distribution}


def _declared(project: dict[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Return what a project tells uv, in pyproject.toml or in the file that `uv pip` is given, and the packages in it
    whose addresses a requirement cannot say."""
    lines = _strings(_table(project, "tool", "uv").get("override-dependencies"))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (folder / "overrides.txt").read_text("utf-8")
        lines += [line.partition(" #")[0].strip() for line in text.splitlines()]
    told, unclear = at_sources(lines, folder, _of_ecosystems())
    found: list[str] = []
    for line in told:
        with contextlib.suppress(InvalidRequirement):
            Requirement(line)
            require_no_secret(line)
            if line.isprintable():  # a URL may hold a line break, and what follows be an option
                found.append(line)
    return found, unclear


def _dependencies(project: dict[str, Any]) -> list[Requirement]:
    """Return what a project requires, without lines that are no requirements."""
    return [Requirement(line) for line in _strings(_table(project, "project").get("dependencies")) if package_of(line)]


def _projects_above(folder: Path, project: dict[str, Any]) -> Iterator[str]:
    for requirement in _dependencies(project):
        kind, _, address = (requirement.url or "").partition("+")
        if kind != "git" or "@" in urlsplit(address).path or "#" in address:
            continue  # another commit than that of the clone, or a part of it, may be meant
        for place in folder.resolve().parents:
            if _is_clone(place, address) and _is_of_one_owner(folder, place):
                if project_name(pyproject_of(place)) == canonicalize_name(requirement.name):
                    yield _at(requirement, place.as_uri())
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
