"""Pythons: others of this machine, for packages that Toprope's own is too old for, and what one is and can import."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from toprope.errors import EnvironmentFailed, InvalidValue
from toprope.sdk.worker.client import worker_environment
from toprope.workbench.adapters import Adapter
from toprope.workbench.interpreters.processes import Commands
from toprope.workbench.interpreters.words import excerpt

_REQUIRED = re.compile(r"(?:satisfy Python|Requires-Python|not in ')\s*(?P<what>[<>=!~][^\s'\"]*)")
_NEWEST_MINOR = 20
_LOOK_S, _EACH_S = 60.0, 20.0
_IMPORT_S = 180.0
_LOOK = (
    "import json, platform, sys, sysconfig; print(json.dumps({'version': list(sys.version_info[:3]), "
    "'site': sysconfig.get_path('purelib'), "
    "'what': f'{platform.python_implementation()} {platform.python_version()} {sys.platform} {platform.machine()}'}))"
)


def better_python(adapter: Adapter | None) -> str | None:
    """Return the Python of this machine that an ecosystem is better run by; None if Toprope's own will do."""
    if adapter is None or not adapter.python or _text(sys.version_info[:3]) in SpecifierSet(adapter.python):
        return None
    return newer_python(f"satisfy Python{adapter.python}")


def newer_python(complaint: str) -> str | None:
    """Return the oldest Python of this machine that an installer's complaint asks for; None if there is no such one.

    Looks in PATH and where pyenv and uv keep theirs.

    Args:
        complaint: What pip or uv printed about the version of Python.
    """
    wanted = []
    for match in _REQUIRED.finditer(complaint):  # pip lists every version of a package with the Pythons that it takes
        with contextlib.suppress(InvalidSpecifier):
            wanted.append(SpecifierSet(match["what"].rstrip(",.;")))
    if not wanted:
        return None
    versions = []
    for python in _pythons():
        with contextlib.suppress(InvalidValue):  # it does not run, as pyenv's stand-ins do not
            versions.append((looked_at(python, _EACH_S).version, python))
    fitting = [candidate for candidate in versions if any(_text(candidate[0]) in specifiers for specifiers in wanted)]
    return min(fitting)[1] if fitting else None


def _text(version: tuple[int, ...]) -> str:
    """Return a version with dots."""
    return ".".join(map(str, version))


def _pythons() -> Iterator[str]:
    for minor in range(sys.version_info[1] + 1, _NEWEST_MINOR):
        if python := shutil.which(f"python3.{minor}"):
            yield python
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local" / "share" / "uv" / "python")
    for folder in (pyenv, uv):
        yield from map(str, sorted(folder.glob("*/bin/python3")))


@dataclass(frozen=True)
class Interpreter:
    """Properties of an interpreter."""

    version: tuple[int, ...]
    site: str
    """Its site-packages folder."""
    what: str
    """Python implementation, version and platform."""


def looked_at(python: str, within_s: float = _LOOK_S) -> Interpreter:
    """Start an interpreter and return its properties.

    Raises:
        InvalidValue: Not a Python interpreter, or it does not answer.
    """
    path = Path(python).expanduser().absolute()
    try:
        done = subprocess.run(
            [str(path), "-I", "-c", _LOOK],
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        facts = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise InvalidValue(
            f"{python} is not a working Python: {error}.", hint="Give the path of a Python interpreter."
        ) from None
    if not isinstance(facts, dict):
        raise InvalidValue(
            f"{python} is not a working Python; it printed: {excerpt(done.stderr.splitlines())}",
            hint="Give the path of a Python interpreter.",
        )
    return Interpreter(tuple(facts["version"]), str(facts["site"]), str(facts["what"]))


def require_import(python: str, adapter: Adapter, aside: Path) -> None:
    """Check that the ecosystem's package can be imported; some install but fail to import."""
    command = [python, "-I", "-c", f"import {adapter.package}"]
    # The import runs user code, so it gets no keys of package indexes.
    code, lines = Commands(aside / "log", timeout_s=_IMPORT_S, surroundings=worker_environment).run(command, aside)
    if code:
        raise EnvironmentFailed(
            f"{adapter.package} was installed but cannot be imported; nothing was kept. It printed:\n"
            + "\n".join(lines[-6:]),
            hint="Add missing packages with --requirement, or pin another version: --requirement 'name==version'.",
        )
