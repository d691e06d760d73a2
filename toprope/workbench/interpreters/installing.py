"""Fill a virtual environment: resolve requirements to pins, then install exactly these pins.

uv, which is faster, is used if it is installed, or fetched for the installation; pip is used if it cannot be had. A GPU
build of torch takes gigabytes, so by default torch is pinned to the version that Toprope runs, and a GPU build is
refused if Toprope's own is a CPU build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from toprope.errors import EnvironmentFailed
from toprope.records.run.manifest import packages_in, site_packages_of
from toprope.workbench.interpreters.left_out import content_of, copy_left_out, local_path
from toprope.workbench.interpreters.overrides import (
    overrides,
    package_of,
    project_name,
    pyproject_of,
    require_kept,
    sourced,
)
from toprope.workbench.interpreters.processes import Commands
from toprope.workbench.interpreters.pythons import fitting_python, looked_at, pythons_in_log, specifiers_of
from toprope.workbench.interpreters.uv_for_pip import fetched_uv
from toprope.workbench.interpreters.words import (
    NO_NETWORK,
    OtherPythonNeeded,
    excerpt,
    failure,
    missing_python,
    with_builds_output,
)

_NO_SUCH_VERSION = ("No matching distribution found", "No solution found")
"""Words of pip and uv."""
_TORCH_INDEX = "https://download.pytorch.org/whl/"


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
    """The owner's Python that creates the environment."""
    chosen: str | None = None
    """Python that creates it without `base`, unless packages require another; Toprope's own if None."""
    script_python: str = ""
    """`requires-python` of the script."""
    left_out: frozenset[str] = frozenset()
    """Packages that are resolved and not installed."""
    folders: tuple[str, ...] = ()
    """Further folders, besides required ones, whose overrides count."""
    prepare: Callable[[Path], None] | None = None
    """Called with the folder of the packages after their installation."""


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
        self._pip_alone = False
        """True if uv cannot be fetched, or failed."""

    @property
    def python(self) -> str:
        """Path of the environment's interpreter."""
        return str(self._venv / "bin" / "python")

    def make(self, base: str | None) -> None:
        """Create the empty environment.

        Raises:
            EnvironmentFailed: The Python cannot create one.
        """
        self._pip_alone = False
        needs_pip = not _has_pip() and not shutil.which("uv")  # a fetched uv may fail
        command = [base or sys.executable, "-I", "-m", "venv", *([] if needs_pip else ["--without-pip"])]
        code, lines = self._commands.run([*command, str(self._venv)], self._venv.parent)
        if code:
            raise EnvironmentFailed(
                f"{command[0]} cannot make a virtual environment; nothing was kept. It printed:\n{excerpt(lines)}",
                hint="Give --base with the path of another Python.",
            )

    def made_and_resolved(self, name: str, wanted: Wanted, progress: Callable[[str], None]) -> list[Pin]:
        """Make the environment and resolve its pins, with another Python of this machine if the packages require one.

        Raises:
            EnvironmentFailed: See `make` and `resolve`.
        """
        python, tried = wanted.base or wanted.chosen, list[tuple[int, ...]]()
        groups: list[Sequence[SpecifierSet]] = [[specifiers_of(wanted.script_python)]]
        while True:
            self.make(python)
            try:
                return self.resolve(name, wanted)
            except OtherPythonNeeded as failed:
                if wanted.base is not None:
                    raise
                tried.append(looked_at(python or sys.executable).version)
                groups.append(failed.required)
                python = fitting_python(groups, tried)
                if python is None:
                    raise EnvironmentFailed(failed.message, hint=missing_python(groups)) from None
                progress(f"it requires {python}")
                shutil.rmtree(self._venv)

    def resolve(self, name: str, wanted: Wanted) -> list[Pin]:
        """Resolve the requirements to pins.

        Raises:
            EnvironmentFailed: They cannot be resolved, or need a GPU build of torch that was not requested.
        """
        version = own_torch()
        public, _, flavour = version.partition("+")
        pinned = {"own": public, "any": ""}.get(wanted.torch, wanted.torch)
        pins = self._resolve(name, wanted, f"torch=={pinned}" if pinned else "")
        own = (str(package.metadata["Name"]) for package in metadata.distributions() if package.metadata is not None)
        if wanted.torch != "own" or not _for_gpus(pin.name for pin in pins) or _for_gpus(own):
            return pins
        if flavour and not wanted.offline:
            index = f"{_TORCH_INDEX}{flavour}"
            wanted = replace(wanted, extra_indexes=(*wanted.extra_indexes, index))
            self._require_torch(name, wanted, f"torch=={version}", index)
            return self._resolve(name, wanted, f"torch=={version}")
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
            # Its cache knows a project by its settings, and a file by its version: code may be newer.
            command += [f"--reinstall-package={package_of(pin.line)}" for pin in pins if pin.content]
        else:
            command = [*self._pip(), "install", "--no-warn-script-location", "--progress-bar", "off", *options]
        code, lines = self._commands.run(command, self._venv.parent)
        if code:
            raise failure(name, lines, offline=wanted.offline)
        for pin in pins:
            place = _place_of(pin)
            if place is not None and place.is_dir():
                copy_left_out(place, site_packages_of(self.python))

    def _require_torch(self, name: str, wanted: Wanted, build: str, index: str) -> None:
        """Check that there is this build: pip would ask a host that it cannot reach again for each package."""
        if self._uv:
            command = [self._uv, "pip", "install", "--dry-run", "--python", self.python]
        else:
            command = [*self._pip(), "install", "--dry-run", "--ignore-installed", "--retries=1", "--progress-bar=off"]
        code, lines = self._commands.run([*command, "--no-deps", build, *self._sources(wanted)], self._venv.parent)
        if code:
            said, version = "\n".join(lines), ".".join(map(str, looked_at(self.python).version[:2]))
            unreachable = NO_NETWORK.search(said)
            if not unreachable and not any(sign in said for sign in _NO_SUCH_VERSION):
                raise failure(name, lines, offline=False)
            missing = "could not be reached" if unreachable else "does not have it"
            raise EnvironmentFailed(
                f"{name} requires torch: {build} for Python {version}, and {index} {missing}. Nothing was installed.",
                hint="Check the network; --extra-index-url names another index, --torch any accepts a GPU build "
                "(gigabytes).",
            )

    def _resolve(self, name: str, wanted: Wanted, constraint: str) -> list[Pin]:
        if not (self._uv or self._pip_alone or wanted.offline):
            self._fetch_uv()
        unpinnable = self._unpinnable(name, wanted)
        requirements_file = self._file("requirements.txt", map(_as_line, wanted.requirements))
        constraints_file = self._file("constraints.txt", [constraint] if constraint else [])
        out, log = self._venv.parent / "resolved", self._venv.parent / "pip.log"
        out.unlink(missing_ok=True)
        log.unlink(missing_ok=True)  # of an earlier attempt
        options = ["-c", str(constraints_file), *self._sources(wanted)]
        if self._uv:
            command = [self._uv, "pip", "compile", str(requirements_file), "--python", self.python, "-o", str(out)]
            command += ["--no-header", "--no-annotate", *options]
            asked = [*wanted.requirements, *wanted.folders]
            told = self._file("overrides.txt", overrides(asked))
            command += ["--override", str(told)]
            if not (wanted.offline or os.environ.get("UV_OFFLINE")):  # uv refuses both
                local = [project_name(pyproject_of(Path(text))) for text in asked if Path(text).is_absolute()]
                local += [package for package, _ in _files_in(wanted.find_links)]
                command += [f"--refresh-package={package}" for package in dict.fromkeys(local)]
        else:
            command = [*self._pip(), "install", "--dry-run", "--ignore-installed", "--report", str(out)]
            command += ["--progress-bar", "off", "--log", str(log), "-r", str(requirements_file), *options]
        code, lines = self._commands.run(command, self._venv.parent)
        if code and self._leaves_to_pip(wanted, lines):
            return self._resolve(name, wanted, constraint)
        if code:
            logged = log.read_text("utf-8", "replace") if log.is_file() else ""
            required = pythons_in_log(lines, logged)
            lines = with_builds_output(lines, logged)
            raise failure(name, lines, offline=wanted.offline, constraint=constraint, required=required)
        pins = _pins_of_uv(out, wanted.find_links) if self._uv else _pins_of_pip(out)
        if not self._uv:
            self._unpinnable(
                name, wanted, [pin.line for pin in pins if " @ " in pin.line]
            )  # a build may have told some
        by_name = (pin.name for pin in pins if " @ " not in pin.line)
        require_kept(package for package in by_name if canonicalize_name(package) in unpinnable)
        return [pin for pin in pins if pin.name.lower() not in wanted.left_out]

    def _leaves_to_pip(self, wanted: Wanted, lines: Sequence[str]) -> bool:
        """Go on with pip if a fetched uv failed; False if pip would fail too, or not read where packages come from.

        uv takes pre-releases of dependencies only if it is told to, and does not ask a keyring for credentials.
        """
        required, said = [*wanted.requirements, *wanted.folders], "\n".join(lines)
        unsolved = "No solution found" in said and not any(word in said for word in ("pre-release", "credentials"))
        needs_uv = list(overrides(required)) or sourced(required, wanted.extra_indexes).by_uv
        if not self._of_pip or unsolved or needs_uv:
            return False
        self._uv, self._of_pip, self._pip_alone = None, [], True
        return True

    def _unpinnable(self, name: str, wanted: Wanted, more: Sequence[str] = ()) -> set[str]:
        """Return packages that no pin may name: a project says where they come from, and strangers may have others.

        Raises:
            EnvironmentFailed: uv alone takes packages from there, and cannot be had; see `sourced`.
        """
        required = (*wanted.requirements, *wanted.folders, *more)
        by_uv, unpinnable = sourced(() if wanted.offline else required, wanted.extra_indexes)
        if by_uv and not self._uv:
            raise EnvironmentFailed(
                f"{name} needs uv, which could not be had or run: {', '.join(by_uv)}, or what they require, may come "
                "from places that pip does not read (tool.uv.sources). An index may have packages of strangers.",
                hint="Install uv, and add it again.",
            )
        return unpinnable

    def _fetch_uv(self) -> None:
        command = fetched_uv(self._pip(), self._venv.parent / "uv", self._commands)
        self._pip_alone = command is None
        if command is not None:
            self._uv, *self._of_pip = command

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


def _as_line(requirement: str) -> str:
    """A requirement as a line of a file, in which " -", " #" and "$" of a path would have a meaning."""
    path = Path(requirement)
    return path.as_uri() if path.is_absolute() and path.exists() else requirement


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


def _for_gpus(packages: Iterable[str]) -> bool:
    return any(name.lower().startswith("nvidia-cu") for name in packages)


def _pins_of_pip(report: Path) -> list[Pin]:
    pins = []
    for entry in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name, version, source = entry["metadata"]["name"], entry["metadata"]["version"], entry["download_info"]
        url = str(source["url"])
        hashes = source.get("archive_info", {}).get("hashes", {})
        local = local_path(url)
        content = hashes.get("sha256", "") if local is not None else ""
        part = f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
        if "vcs_info" in source:
            vcs = source["vcs_info"]
            pins.append(Pin(name, f"{name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}{part}"))
        elif entry.get("is_direct"):
            pins.append(Pin(name, f"{name} @ {url}{part}", content or content_of(local)))
        else:
            pins.append(Pin(name, f"{name}=={version}", content))
    return pins


def _pins_of_uv(lock: Path, folders: Sequence[str]) -> list[Pin]:
    pins, wheels = [], [*_files_in(folders)]
    for line in lock.read_text(encoding="utf-8").splitlines():
        text = line.partition(" ;")[0].strip()
        if not text or text.startswith(("#", "-")):
            continue
        pin = Pin(re.split(r"==| @ ", text)[0].strip(), text)
        is_version = "==" in text and " @ " not in text
        # It does not tell from where it takes a version.
        files = [file for package, file in wheels if package == canonicalize_name(pin.name)]
        pins.append(replace(pin, content="".join(map(content_of, files if is_version else [_place_of(pin)]))))
    return pins


def _files_in(folders: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield the packages and files of folders with wheels."""
    for file in (file for folder in folders for file in sorted(Path(folder).glob("*-*"))):
        with contextlib.suppress(InvalidWheelFilename, InvalidSdistFilename):
            name = parse_wheel_filename(file.name)[0] if file.suffix == ".whl" else parse_sdist_filename(file.name)[0]
            yield name, file


def _place_of(pin: Pin) -> Path | None:
    """Return the file or folder of a local pin."""
    place = pin.line.partition(" @ ")[2] or pin.line
    local = local_path(place) or Path(place)
    return local if local.exists() else None
