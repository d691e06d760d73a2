"""Fill a virtual environment: resolve requirements to pins, then install exactly these pins.

uv is used if it is installed, otherwise pip. A GPU build of torch takes gigabytes, so by default torch is pinned to the
version that Toprope runs, and a GPU build is refused if Toprope's own is a CPU build.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.metadata import PackagePath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from toprope.errors import EnvironmentFailed
from toprope.records.run.manifest import packages_in, site_packages_of
from toprope.sdk.discovery import parse
from toprope.sdk.wall.paths import imported_by
from toprope.workbench.adapters import Adapter
from toprope.workbench.interpreters.overrides import overrides
from toprope.workbench.interpreters.processes import Commands
from toprope.workbench.interpreters.pythons import better_python, newer_python
from toprope.workbench.interpreters.uv_for_pip import fetched_uv
from toprope.workbench.interpreters.words import excerpt, failure

_TORCH_INDEX = "https://download.pytorch.org/whl/"
_SKIPPED = {".git", "__pycache__", "build", "dist", ".venv", "node_modules"}
_HOOKS = ("sitecustomize.py", "usercustomize.py")
_MOST_COPIED = 200_000_000
"""Bytes of a project that its wheel leaves out."""


@dataclass(frozen=True)
class Wanted:
    """Requirements of an interpreter, and sources of its packages."""

    requirements: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    """Folders with wheels, besides the index."""
    extra_indexes: tuple[str, ...] = ()
    offline: bool = False
    """Use no index: only `find_links` and the installer's cache."""
    wheels_only: bool = False
    """Install no source distributions: building one runs its author's code."""
    torch: str = "own"
    """`own` (the version that Toprope runs), `any`, or a version."""
    base: str | None = None
    """Python that creates the environment; Toprope's own if None."""
    left_out: frozenset[str] = frozenset()
    """Packages that are resolved and not installed."""
    prepare: Callable[[Path], None] | None = None
    """Called with the folder of the packages after their installation."""

    def of(self, requirements: Sequence[str], adapter: Adapter | None) -> Wanted:
        """Return these options for requirements, with the Python that their ecosystem is better run by."""
        return replace(self, requirements=tuple(requirements), base=self.base or better_python(adapter))


@dataclass(frozen=True)
class Pin:
    """An exact distribution."""

    name: str
    line: str
    """Requirement for pip: `name==1.0`, `name @ url`."""
    content: str = ""
    """Hash of a local file or project, which its version does not identify."""


class Installer:
    """pip or uv for one virtual environment.

    Args:
        venv: Folder of the environment, which does not exist yet; its parent does.
    """

    def __init__(self, venv: Path, commands: Commands) -> None:
        self._venv, self._commands = venv, commands
        self._uv = shutil.which("uv")
        self._of_pip: list[str] = []
        """Options of a fetched uv for what pip is set to."""
        self._constraint = ""

    @property
    def name(self) -> str:
        """`uv` or `pip`."""
        return "uv" if self._uv else "pip"

    @property
    def python(self) -> str:
        """Path of the environment's interpreter."""
        return str(self._venv / "bin" / "python")

    def make(self, base: str | None) -> None:
        """Create the empty environment.

        Raises:
            EnvironmentFailed: The Python cannot create one.
        """
        needs_pip = not self._uv and not _has_pip()
        command = [base or sys.executable, "-I", "-m", "venv", *([] if needs_pip else ["--without-pip"])]
        code, lines = self._commands.run([*command, str(self._venv)], self._venv.parent)
        if code:
            raise EnvironmentFailed(
                f"{command[0]} cannot make a virtual environment; nothing was kept. It printed:\n{excerpt(lines)}",
                hint="Give --base with the path of another Python.",
            )

    def made_and_resolved(self, name: str, wanted: Wanted, progress: Callable[[str], None]) -> list[Pin]:
        """Make the environment and resolve its pins, with a newer Python of this machine if the packages require one.

        Raises:
            EnvironmentFailed: See `make` and `resolve`.
        """
        self.make(wanted.base)
        try:
            return self.resolve(name, wanted)
        except EnvironmentFailed as failed:
            newer = newer_python(failed.message) if wanted.base is None else None
            if newer is None:
                raise
            progress(f"it requires {newer}")
            shutil.rmtree(self._venv)
            self.make(newer)
            return self.resolve(name, wanted)

    def resolve(self, name: str, wanted: Wanted) -> list[Pin]:
        """Resolve the requirements to pins.

        Raises:
            EnvironmentFailed: They cannot be resolved, or need a GPU build of torch that was not requested.
        """
        version = own_torch()
        public = version.partition("+")[0]
        constraint = "" if wanted.torch == "any" or (wanted.torch == "own" and not version) else f"torch=={public}"
        if wanted.torch not in ("own", "any"):
            constraint = f"torch=={wanted.torch}"
        pins = [pin for pin in self._resolve(name, wanted, constraint) if pin.name.lower() not in wanted.left_out]
        if wanted.torch != "own" or not _for_gpus(pins) or _for_gpus(_own_pins()):
            return pins
        flavour = version.partition("+")[2]
        if flavour and not wanted.offline:
            index = f"{_TORCH_INDEX}{flavour}"
            return self._resolve(
                name, replace(wanted, extra_indexes=(*wanted.extra_indexes, index)), f"torch=={version}"
            )
        raise EnvironmentFailed(
            f"{name} requires a GPU build of torch, which takes gigabytes; nothing was installed.",
            hint="--torch any accepts it; --extra-index-url names an index with another build.",
        )

    def install(self, name: str, pins: Sequence[Pin], wanted: Wanted) -> None:
        """Install exactly these pins, which include all dependencies.

        Raises:
            EnvironmentFailed: A pin cannot be downloaded or built.
        """
        lock = self._file("pins.txt", (pin.line for pin in pins))
        options = ["--no-deps", "-r", str(lock), *self._sources(wanted)]
        if self._uv:
            command = [self._uv, "pip", "install", "--compile-bytecode", "--python", self.python, *options]
        else:
            command = [*self._pip(), "install", "--no-warn-script-location", "--progress-bar", "off", *options]
        code, lines = self._commands.run(command, self._venv.parent)
        if code:
            raise failure(name, lines, offline=wanted.offline)
        for pin in pins:
            place = _place_of(pin)
            if place is not None and place.is_dir():
                _complete(place, site_packages_of(self.python))

    def _resolve(self, name: str, wanted: Wanted, constraint: str) -> list[Pin]:
        self._constraint = constraint
        requirements_file = self._file("requirements.txt", wanted.requirements)
        constraints_file = self._file("constraints.txt", [constraint] if constraint else [])
        out = self._venv.parent / "resolved"
        out.unlink(missing_ok=True)
        options = ["-c", str(constraints_file), *self._sources(wanted)]
        if self._uv:
            command = [self._uv, "pip", "compile", str(requirements_file), "--python", self.python, "-o", str(out)]
            command += ["--no-header", "--no-annotate", *options]
            command += ["--override", str(self._file("overrides.txt", overrides(wanted.requirements)))]
        else:
            command = [*self._pip(), "install", "--dry-run", "--ignore-installed", "--report", str(out)]
            command += ["--progress-bar", "off", "-r", str(requirements_file), *options]
        code, lines = self._commands.run(command, self._venv.parent)
        if code and not self._uv and self._switch_to_uv(wanted):
            return self._resolve(name, wanted, constraint)
        if code:
            raise failure(name, lines, offline=wanted.offline, constraint=constraint)
        return _pins_of_uv(out) if self._uv else _pins_of_pip(out)

    def _switch_to_uv(self, wanted: Wanted) -> bool:
        """Go on with uv if a project has overrides, which pip does not take; False if it cannot be had."""
        if wanted.offline or not list(overrides(wanted.requirements)):
            return False
        uv_command = fetched_uv(self._pip(), self._venv.parent / "uv", self._commands)
        if uv_command is not None:
            self._uv, *self._of_pip = uv_command
        return uv_command is not None

    def _pip(self) -> list[str]:
        if _has_pip():
            return [sys.executable, "-m", "pip", "--python", self.python]
        return [self.python, "-m", "pip"]

    def _sources(self, wanted: Wanted) -> list[str]:
        # With an equals sign, a value may begin with a dash.
        options = [*self._of_pip, *(f"--find-links={place}" for place in wanted.find_links)]
        options += [f"--extra-index-url={url}" for url in wanted.extra_indexes]
        if wanted.wheels_only:
            options += ["--only-binary=:all:"]
        if wanted.offline:
            options += ["--offline"] if self._uv and not wanted.find_links else ["--no-index"]
        elif self._uv and wanted.extra_indexes:
            options += ["--index-strategy=unsafe-best-match"]  # like pip
        return options

    def _file(self, name: str, lines: Iterable[str]) -> Path:
        path = self._venv.parent / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path


def digest_of(pins: Sequence[Pin], python: str) -> str:
    """Return the digest of an environment; environments with equal digests are shared.

    Args:
        pins: Installed pins.
        python: Python implementation, version and platform.
    """
    lines = sorted(
        f"{canonicalize_name(pin.name)} {pin.line.partition('==')[2] or pin.line} {pin.content}" for pin in pins
    )
    return hashlib.sha256("\n".join([python, *lines]).encode()).hexdigest()[:20]


def own_torch() -> str:
    """Return the version of torch that Toprope runs; empty if it is not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def satisfied(requirements: Sequence[str], site: Path, inside: frozenset[str] = frozenset()) -> bool:
    """Return True if installed packages satisfy the requirements, with their extras; those with URLs never count.

    Args:
        requirements: Requirements in pip's syntax.
        site: Folder of the packages; it may be missing.
        inside: Requirements with extras that these belong to, since an extra may name itself.
    """
    here = {canonicalize_name(name): version for name, version in packages_in(site).items()}
    for text in requirements:
        try:
            requirement = Requirement(text)
            of_extras = [] if text in inside else _requirements_of_extras(requirement, site)
        except InvalidRequirement:  # also of a package from before the syntax of today
            return False
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = here.get(canonicalize_name(requirement.name))
        if version is None or requirement.url or not requirement.specifier.contains(version, prereleases=True):
            return False
        if of_extras and not satisfied(of_extras, site, inside | {text}):
            return False
    return bool(requirements)


def _requirements_of_extras(requirement: Requirement, site: Path) -> list[str]:
    """Return what the extras of a requirement add to its installed package, without markers."""
    lines = []
    for installed in metadata.distributions(name=requirement.name, path=[str(site)]) if requirement.extras else ():
        for added in map(Requirement, installed.requires or ()):
            if added.marker is not None and not added.marker.evaluate({"extra": ""}):
                if any(added.marker.evaluate({"extra": extra}) for extra in requirement.extras):
                    added.marker = None
                    lines.append(str(added))
    return lines


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _for_gpus(pins: Iterable[Pin]) -> bool:
    return any(pin.name.lower().startswith("nvidia-cu") for pin in pins)


def _own_pins() -> list[Pin]:
    return [
        Pin(str(package.metadata["Name"]), "") for package in metadata.distributions() if package.metadata is not None
    ]


def _pins_of_pip(report: Path) -> list[Pin]:
    pins = []
    for entry in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name, version, source = entry["metadata"]["name"], entry["metadata"]["version"], entry["download_info"]
        url = str(source["url"])
        hashes = source.get("archive_info", {}).get("hashes", {})
        local = _local(url)
        content = hashes.get("sha256", "") if local is not None else ""
        if "vcs_info" in source:
            vcs = source["vcs_info"]
            pins.append(Pin(name, f"{name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"))
        elif entry.get("is_direct"):
            pins.append(Pin(name, f"{name} @ {url}", content or _content(local)))
        else:
            pins.append(Pin(name, f"{name}=={version}", content))
    return pins


def _pins_of_uv(lock: Path) -> list[Pin]:
    pins = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        text = line.partition(" ;")[0].strip()
        if not text or text.startswith(("#", "-")):
            continue
        name = re.split(r"==| @ ", text)[0].strip()
        if "==" in text and " @ " not in text:
            pins.append(Pin(name, text))
            continue
        pin = Pin(name, text)
        pins.append(replace(pin, content=_content(_place_of(pin))))
    return pins


def _place_of(pin: Pin) -> Path | None:
    """Return the file or folder of a local pin."""
    place = pin.line.partition(" @ ")[2] or pin.line
    local = _local(place) or Path(place)
    return local if local.exists() else None


def _complete(project: Path, site: Path | None) -> None:
    """Copy the files of a project that its wheel left out to their place beside its modules.

    Authors often leave out data and helpers, because they run their own project from its folder.
    """
    modules: list[PackagePath] = []
    for distribution in metadata.distributions(path=[str(site)]):
        source = distribution.read_text("direct_url.json")
        if source and _local(json.loads(source)["url"]) == project:
            modules = [file for file in distribution.files or () if file.suffix == ".py" and ".." not in file.parts]
    roots: Counter[tuple[Path, Path]] = Counter()
    for module in modules:
        for skipped in range(len(module.parts)):
            tail = Path(*module.parts[skipped:])
            sources = [root for root in (project, project / "src") if (root / tail).is_file()]
            if sources:
                roots[sources[0], Path(*module.parts[:skipped])] += 1
                break
    if site is None or not roots:
        return
    [((root, inside), _)] = roots.most_common(1)
    packages = {Path(module.parent) for module in modules} - {Path()}
    visible = {name for name in os.listdir(root) if not name.startswith(".")} - _SKIPPED
    siblings, reached = {name for name in visible if not (root / name).is_symlink()}, set[str]()
    unread = [site / module for module in modules if len(module.parts) == 1]
    while unread:  # modules that are alone, and helpers that they name
        new = (_names_reached_by(unread.pop()) & siblings) - reached
        reached |= new
        files = (file for name in new for file in (root / name, *_files_of(root / name)))
        unread += [file for file in files if file.suffix == ".py"]
    copies: dict[Path, Path] = {}
    copies_by_sibling: dict[str, dict[Path, Path]] = {}
    for file in () if root.is_symlink() else _files_of(root):  # a project's `src`
        place = inside / file.relative_to(root)
        target = site / place
        taken = target.exists() or any(parent.is_file() for parent in target.parents)
        if taken or _is_kept_back(file, root):
            continue
        if packages.intersection(place.parents):
            copies[target] = file
        elif place.parts[0] in reached:
            copies_by_sibling.setdefault(place.parts[0], {})[target] = file
    if (total := _size(copies)) > _MOST_COPIED:
        raise EnvironmentFailed(
            f"The wheel of {project} leaves out {total / 1e6:.0f} MB of files in its packages; at most "
            f"{_MOST_COPIED / 1e6:.0f} MB are copied. Nothing was kept.",
            hint="Move large data out of the packages, or have the wheel include it.",
        )
    # Any text may name a folder, so a large one is left out.
    for group in sorted(copies_by_sibling.values(), key=_size):
        if (total := total + _size(group)) <= _MOST_COPIED:
            copies |= group
    for target, file in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target, follow_symlinks=False)


def _size(copies: dict[Path, Path]) -> int:
    return sum(file.stat().st_size for file in copies.values())


def _names_reached_by(module: Path) -> set[str]:
    """Return the names by which a module reaches what lies beside it: its imports, and parts of paths in its texts."""
    try:
        texts = [node.value for node in ast.walk(parse(module)) if isinstance(node, ast.Constant)]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    imported = {name for name, _ in imported_by(str(module))}
    return {part for text in texts for part in str(text).split("/")} | imported | {f"{name}.py" for name in imported}


def _is_kept_back(file: Path, root: Path) -> bool:
    """Return True for what must not reach an interpreter: links, hidden files, start hooks, .pth files."""
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return hidden or file.is_symlink() or file.name in _HOOKS or file.suffix == ".pth"


def _files_of(root: Path) -> Iterator[Path]:
    """Yield a project's own files, without environments and what builds leave behind."""
    for place, folders, names in os.walk(root):
        if "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = sorted(folder for folder in folders if folder not in _SKIPPED and not folder.endswith(".egg-info"))
        yield from (file for name in sorted(names) if (file := Path(place, name)).is_file())


def _local(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _content(place: Path | None) -> str:
    """Return the hash of a file, or of all files of a project."""
    if place is None:
        return ""
    whole = hashlib.sha256()
    for file in [place] if place.is_file() else sorted(_files_of(place)):
        inside = file.relative_to(place).parts
        whole.update(f"{'/'.join(inside)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
