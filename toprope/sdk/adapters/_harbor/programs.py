"""Programs that stand in for those by which a task installs packages: a process has those of this machine alone.

For the policy and a task's own solution, installers succeed if the packages are there. Tests usually fetch uv, let it
make a virtual environment with pytest and its report in CTRF, and start pytest there: installers do nothing then, and
pytest is that of the worker's Python, isolated from the working folder and HOME, which are the policy's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["stand_ins"]

_NOTHING = "#!/bin/sh\nexit 0\n"
_INSTALLERS = ("apt-get", "apt", "pip", "pip3")
_INSTALL = '#!/bin/sh\nexec "{python}" -sP "{bin}/install.py" "$@"\n'
_INSTALL_PY = """\
import importlib.metadata, pathlib, re, shutil, sys

VALUES = ("-r", "-c", "-t", "-i", "-f", "-e", "-p", "--index-url", "--extra-index-url", "--find-links", "--python")


def is_here(name):
    try:
        return bool(importlib.metadata.distribution(name))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return bool(shutil.which(name)) or (pathlib.Path("/usr/share/doc") / name).is_dir()


words, absent, asks = iter(sys.argv[1:]), [], False
for word in words:
    if word in VALUES:
        next(words, None)
    elif word in ("install", "add"):
        asks = True
    elif asks and not word.startswith("-") and "/" not in word and word != ".":
        name = re.split(r"[=<>~!\\[;@ ]", word)[0]
        if name and not is_here(name):
            absent.append(name)
if absent:
    sys.exit(f"not installed: {', '.join(absent)}. This machine installs no packages.")
print("All that was asked for is installed already." if asks else "")
"""
_PYTHON = '#!/bin/sh\nexec "{python}" "$@"\n'
"""A link would be a Python without the packages of a virtual environment."""
_SUDO = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in -u | -g) shift 2 ;; -* | *=*) shift ;; *) break ;; esac
done
exec "$@"
"""
_PYTEST = '#!/bin/sh\nexec "{python}" -sP "{bin}/pytest.py" "$@"\n'
_PYTEST_PY = """\
import importlib.util, sys
import pytest

PLUGINS = {"--ctrf": "pytest_json_ctrf", "--html": "pytest_html", "--json-report-file": "pytest_jsonreport"}
given, kept = iter(sys.argv[1:]), []
for word in given:  # reports of plugins that are not here; pytest would refuse the option
    option, has_value, _ = word.partition("=")
    if option in PLUGINS and importlib.util.find_spec(PLUGINS[option]) is None:
        has_value or next(given, None)
    else:
        kept.append(word)
sys.argv[1:] = kept
sys.exit(pytest.console_main())
"""
_UV = """\
#!/bin/sh
run=
case "${0##*/} $1 $2" in
    uvx*) run=1 ;;
    "uv run "*) run=1; shift ;;
    "uv pip "* | "uv add "*) exec pip "$@" ;;
    "uv tool run") run=1; shift 2 ;;
    "uv venv "*) shift; folder=.venv
        while [ $# -gt 0 ]; do
            case "$1" in -p | --python | --prompt) shift ;; -*) ;; *) folder=$1 ;; esac
            shift
        done
        mkdir -p "$folder/bin" && : > "$folder/bin/activate" ;;
esac
[ -n "$run" ] || exit 0
while [ $# -gt 0 ]; do
    case "$1" in
        --) shift; break ;;
        -m | --module) shift; set -- python -m "$@"; break ;;
        -p | -w | --python | --with | --from | --with-requirements | --with-editable | --project | --directory | \\
        --index | --index-url | --default-index | --extra-index-url | --find-links | --extra | --group | --env-file) \\
            shift 2 || exit 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
case "$1 $2 $3" in
    python*" -m pytest") shift 2 ;;
esac
case "$1" in
    pytest@*) shift; set -- pytest "$@" ;;
    *.py) set -- python "$@" ;;
esac
exec "$@"
"""
_FETCH = """\
#!/bin/sh
case "$*" in *//astral.sh/*) exit 0 ;; esac
exec "{program}" "$@"
"""
"""The installer of uv fetches nothing; other addresses are the tests' own."""


def stand_ins(python: str, folder: Path, *, tests: bool) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the programs.

    Args:
        python: The worker's Python.
        folder: The folder that they are put into.
        tests: They are for the tests, whose packages have been looked for.
    """
    places = {"python": python, "bin": folder}
    for name in ("apt-get", "apt", "pip", "pip3"):
        yield name, _NOTHING if tests else _INSTALL.format(**places)
    for name in ("python", "python3"):
        yield name, _PYTHON.format(**places)
    for name in ("uv", "uvx"):
        yield name, _UV
    for name in ("curl", "wget"):
        if program := shutil.which(name):
            yield name, _FETCH.format(program=program)
    yield "sudo", _SUDO
    yield "install.py", _INSTALL_PY
    yield "pytest.py", _PYTEST_PY
    yield "pytest", _PYTEST.format(**places)
