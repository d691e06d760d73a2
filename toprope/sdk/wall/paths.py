"""The files that a worker may use: those of the system, of its interpreter, of its own code and data.

Everything is computed from names and metadata; no user code runs.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from toprope.sdk.wall.kernel import is_within
from toprope.sdk.wall.projects import MANIFEST, MARKS, PROJECT, is_broad, is_marked, project_root

__all__ = [
    *("DEVICES", "SYSTEM", "code_paths", "data_paths", "editable_paths", "folders_above", "imported_by", "imports_of"),
    *(
        "interpreter_paths",
        "package_of",
        "program_paths",
        "project_of",
        "source_paths",
        "without",
    ),
]

_ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "alternatives", "os-release", "debian_version"),
    *("resolv.conf", "hosts", "host.conf", "hostname", "nsswitch.conf", "gai.conf", "services", "protocols"),
    *("ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "pki/tls/certs"),
    *("pki/ca-trust", "crypto-policies", "localtime", "timezone", "locale.alias", "locale.conf", "default/locale"),
    *("passwd", "group", "mime.types", "magic", "fonts", "matplotlibrc", "ImageMagick-6", "python3", "terminfo"),
    *("inputrc", "profile", "bash.bashrc", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "OpenCL"),
)
_SYS = ("devices/system", "devices/virtual/dmi", "fs/cgroup", "class", "bus/pci", "module", "kernel/mm", "dev")

SYSTEM: tuple[str, ...] = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/opt/rocm"),
    *("/opt/intel", "/System", "/Library", "/proc", "/run/systemd/resolve", "/var/cache/fontconfig"),
    *(f"/etc/{name}" for name in _ETC),
    *(f"/sys/{name}" for name in _SYS),
)
"""Readable for every worker. Landlock itself closes the memory and the variables of other processes below /proc."""

DEVICES: tuple[str, ...] = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ACCELERATORS = ("/dev/nvidia*", "/dev/nvidia-caps", "/dev/kfd", "/dev/dri", "/dev/dxg")
_DEEPEST = 6
"""Folders between a root and a closed place below it that are listed one by one."""


def devices() -> list[str]:
    """The devices that a worker may use, accelerators among them."""
    return [*DEVICES, *(path for pattern in _ACCELERATORS for path in glob.glob(pattern))]


def interpreter_paths(python: str) -> list[str]:
    """Everything that an interpreter reads: its environment and the installation below it.

    Args:
        python: Its absolute path.
    """
    return list(_installation(python))


@functools.lru_cache(maxsize=32)
def _installation(python: str) -> tuple[str, ...]:
    paths = [python, os.path.realpath(python)]
    for folder in (os.path.dirname(python), os.path.dirname(os.path.dirname(python))):
        configuration = os.path.join(folder, "pyvenv.cfg")
        if os.path.isfile(configuration):
            paths += _installed_paths(folder)
            paths += _prefix(os.path.join(_home_of(configuration), "python"))
    paths += _prefix(os.path.realpath(python))
    if os.path.abspath(python) == os.path.abspath(sys.executable):
        prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
        paths += [path for prefix in prefixes if not is_broad(prefix) for path in _installed_paths(prefix)]
    return tuple(dict.fromkeys(path for path in paths if path))


def _prefix(python: str) -> list[str]:
    prefix = os.path.dirname(os.path.dirname(python))
    return _installed_paths(prefix) if prefix and not is_broad(prefix) else [os.path.join(prefix, "lib"), python]


def _installed_paths(prefix: str) -> list[str]:
    """An installation; only what was installed if it is the root of a project as well (`python -m venv .`)."""
    is_project = any(os.path.exists(os.path.join(prefix, name)) for name in (*MARKS, ".env"))
    if not (is_project and os.path.isfile(os.path.join(prefix, "pyvenv.cfg"))):
        return [prefix]
    return [os.path.join(prefix, name) for name in ("bin", "lib", "lib64", "include", "share", "etc", "pyvenv.cfg")]


def program_paths(search: str) -> list[str]:
    """The installations of the programs that a shell finds.

    Args:
        search: The folders of PATH.
    """
    return [
        place for folder in search.split(os.pathsep) if folder for place in _prefix(os.path.join(folder, "program"))
    ]


def _home_of(configuration: str) -> str:
    try:
        with open(configuration, encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition("=")
                if name.strip().lower() == "home":
                    return value.strip()
    except OSError:
        pass
    return ""


def editable_paths(python: str) -> tuple[str, ...]:
    """Folders outside an environment that its packages are imported from: editable installs and .pth files.

    Args:
        python: The absolute path of its interpreter.
    """
    prefix = os.path.dirname(os.path.dirname(python))
    return tuple(_folders_outside(prefix)) if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")) else ()


def _folders_outside(prefix: str) -> Iterator[str]:
    for site in glob.glob(os.path.join(prefix, "lib*", "python3*", "site-packages")):
        for file in glob.glob(os.path.join(site, "*.pth")):
            with open(file, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    place = os.path.join(site, line.strip())
                    if line.strip() and not line.startswith(("import ", "import\t", "#")) and os.path.isdir(place):
                        yield place
        for file in glob.glob(os.path.join(site, "*.dist-info", "direct_url.json")):
            try:
                with open(file, encoding="utf-8") as text:
                    direct_url = json.load(text)
                url = str(direct_url["url"])
                editable = bool(direct_url["dir_info"].get("editable"))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if editable and url.startswith("file:///"):
                from urllib.parse import unquote

                yield unquote(url.removeprefix("file://"))


def source_paths(file: str, closed: Iterable[str] = (), added: Iterable[str] = ()) -> list[str]:
    """A file with what it imports from: its folder, or its whole package, or the project that its package is of; of a
    folder as broad as a HOME only the Python files. In a folder that the owner added, also `project_root`.

    Args:
        file: Its path.
        closed: See `folders_above`.
        added: See `project_root`.
    """
    folder = os.path.dirname(os.path.abspath(file))
    if is_broad(folder):
        return [file, *glob.glob(os.path.join(glob.escape(folder), "*.py"))]
    package = package_of(file)
    above = folders_above(file, closed)
    # A worker finds the same folders only if it reads that there is a project.
    project = None if not above or _folders_up_to(file, _is_repository) else _folders_up_to(file, _is_project)
    described = [os.path.join(project[1], PROJECT)] if project else []
    root = os.path.dirname(folder)  # a server of OpenEnv is run from the folder of its manifest
    described += [root] if os.path.isfile(os.path.join(root, MANIFEST)) and not is_broad(root) else []
    described += filter(None, [project_root(file, added, closed)])
    return [file, (project_of(package) or package) if package else folder, *above, *described]


def package_of(file: str) -> str:
    """The folder of the outermost package that a file is in; empty if it is in none.

    Args:
        file: Its path.
    """
    folder, package = os.path.dirname(os.path.abspath(file)), ""
    while os.path.isfile(os.path.join(folder, "__init__.py")) and not is_broad(folder):
        folder, package = os.path.dirname(folder), folder
    return package


def project_of(package: str) -> str:
    """The folder above a package if that is a project's own; empty if it may hold what has nothing to do with it.

    Args:
        package: See `package_of`.
    """
    above = os.path.dirname(package)
    root = os.path.dirname(above) if os.path.basename(above) == "src" else above
    return above if is_marked(root) and not is_broad(root) else ""


def folders_above(file: str, closed: Iterable[str] = ()) -> list[str]:
    """The packages of its repository above a file that it imports, as if run from the repository's root.

    None outside a repository or a project: names in a file must not open folders that have nothing to do with it. A
    folder is a package if it has an `__init__.py` or the imported module.

    Args:
        file: Its path.
        closed: Folders that are no part of a file's repository, though one may lie within it: files that agents saved
            there open nothing.
    """
    closed_paths = [os.path.realpath(place) for place in closed]
    above, root = (
        _folders_up_to(file, _is_repository) or _folders_up_to(file, _is_project) or ([], "")
    )  # a download has no history
    if not above or any(is_broad(folder) or os.path.realpath(folder) in closed_paths for folder in (*above, root)):
        return []
    # An import of the file runs the packages that it lies in too.
    packages = [os.path.join(folder, "__init__.py") for folder in above]
    imported = set[tuple[str, str]]().union(
        *(imported_by(source) for source in (file, *filter(os.path.isfile, packages)))
    )
    return [
        folder
        for folder in above
        if any(_is_package(folder, module) for name, module in imported if name == os.path.basename(folder))
    ]


def _is_repository(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, ".git"))


def _is_project(folder: str) -> bool:
    """True if a pyproject.toml describes a project: one with settings of tools alone may lie above anything."""
    try:
        with open(os.path.join(folder, PROJECT), "rb") as file:
            return "project" in tomllib.load(file)
    except (OSError, ValueError):
        return False


def _folders_up_to(file: str, is_root: Callable[[str], bool]) -> tuple[list[str], str] | None:
    """The folders from a file's own up to a root, which comes apart; None without one."""
    above: list[str] = []
    folder = os.path.dirname(os.path.abspath(file))
    while not is_root(folder):
        above.append(folder)
        folder = os.path.dirname(folder)
        if folder == above[-1]:
            return None
    return above, folder


def imported_by(file: str) -> set[tuple[str, str]]:
    """The absolute imports of a file: the top package, and the path of the rest, as in `("games", "chess/rules")`;
    empty if it cannot be read."""
    parts = (name.partition(".") for level, name in imports_of(file) if not level)
    return {(top, module.replace(".", "/")) for top, _, module in parts}


def imports_of(file: str) -> list[tuple[int, str]]:
    """See `imports_in`; empty if the file cannot be read."""
    from pathlib import Path

    from toprope.sdk.discovery import imports_in, parse

    try:
        return imports_in(parse(Path(file)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _is_package(folder: str, module: str) -> bool:
    candidates = ["__init__.py", *((f"{module}.py", f"{module}/__init__.py") if module else ())]
    return any(os.path.isfile(os.path.join(folder, candidate)) for candidate in candidates)


def data_paths(target: str | None, closed: Iterable[str] = (), added: Iterable[str] = ()) -> list[str]:
    """The files that an adapter's target names: absolute paths, alone, with `:attribute` or `@name`, behind a server's
    address and `#`, or in JSON.

    Commands in it are found like a shell finds them.

    Args:
        target: The adapter's target.
        closed: See `folders_above`.
        added: See `project_root`.
    """
    if not target:
        return []
    texts = _texts(_parse_target(target))
    return list(dict.fromkeys(path for text in texts for path in _files_of(text, closed, added)))


def code_paths(target: str | None) -> list[str]:
    """The Python files that an adapter's target names, see `data_paths`, without what is beside them.

    Args:
        target: The adapter's target.
    """
    named_paths = map(_path_in, _texts(_parse_target(target or "")))
    return list(dict.fromkeys(path for path in named_paths if path.endswith(".py") and os.path.isfile(path)))


def _parse_target(target: str) -> Any:
    try:
        return json.loads(target) if target.lstrip().startswith("{") else target
    except ValueError:
        return target


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "command" and item:
                word = item[0] if isinstance(item, list) else item
                yield shutil.which(str(word)) or ""
            yield from _texts(item)
    elif isinstance(value, list):
        for element in value:
            yield from _texts(element)


def _files_of(text: str, closed: Iterable[str], added: Iterable[str]) -> list[str]:
    path = _path_in(text)
    if os.path.isfile(path) and path.endswith(".py"):
        return source_paths(path, closed, added)
    if os.path.isfile(path) and os.access(path, os.X_OK):
        return [path, *_prefix(os.path.realpath(path))]
    return [path] if path else []


def _path_in(text: str) -> str:
    """The path that a text of a target names; empty if nothing is there."""
    if text.startswith(("http://", "https://")):
        text = text.partition("#")[2]
    if not text.startswith("/"):
        return ""
    paths = (text.rpartition(mark)[0] if mark else text for mark in ("", ":", "@"))
    return next((path for path in paths if path and os.path.exists(path)), "")


def without(places: Iterable[str], closed: Iterable[str]) -> list[str]:
    """The places with everything in them except what is closed.

    Args:
        places: Files and folders that may be used.
        closed: Files and folders that may not, except where a place lies within one: it was asked for by name.

    A folder that holds a closed one is replaced by its other entries, as they are now, without links: what these lead
    to may lie elsewhere, and one that leads above a closed folder would open all that is there.
    """
    closed_paths = [os.path.realpath(path) for path in closed]
    remaining: list[str] = []

    def add(path: str, depth: int) -> None:
        if depth and os.path.islink(path):
            return
        real = os.path.realpath(path)
        if not any(is_within(closed_path, real) for closed_path in closed_paths):
            remaining.append(path)
        elif real not in closed_paths and depth < _DEEPEST:
            try:
                names = os.listdir(path)
            except OSError:
                return
            for name in names:
                add(os.path.join(path, name), depth + 1)

    for place in places:
        add(place, 0)
    return remaining
