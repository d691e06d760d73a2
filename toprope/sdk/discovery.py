"""Find the environments in a user's files by parsing them, never by running them.

An agent lists environments first and often. Listing must be quick, and a file that prints, sleeps or raises on import
must not disturb it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import threading
import tomllib
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    *("DeclaredKnob", "EARLIER", "Found", "NAME", "TRAINING_PACKAGES", "address_of", "assignments", "discover_file"),
    *("environment_files", "first_line", "imports_in", "literal", "name_of", "script_metadata", "script_python"),
    *("script_requirements", "searched", "subfolders"),
]

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""Valid names of environments."""

TRAINING_PACKAGES = (
    *("peft", "vllm", "deepspeed", "bitsandbytes", "liger_kernel", "kernels", "flash_attn", "unsloth"),
    *("trackio", "wandb", "swanlab", "tensorboard"),
)
"""Packages of training scripts that their environments and rewards do not use."""
_TRAINING_EXTRAS = (*TRAINING_PACKAGES, "liger", "quantization", "quality", "test", "dev")
"""Extras of TRL that only training or its authors use; others belong to environments, such as `openreward`."""
_METADATA = re.compile(r"^# /// script$(?P<block>(?:\n#(?: .*)?)*?)\n# ///$", re.MULTILINE)
_OF_SOURCE = {"git", "rev", "tag", "branch", "url", "path", "subdirectory", "editable", "lfs"}
"""Keys of a source of uv that a requirement can say in full, or that do not change the package."""
_NEEDS_TRL = re.compile(
    r"^(?:from|import)[ \t]+(?:trl\.|(?:torch|transformers|accelerate)\b)|\brollout_func\b", re.MULTILINE
)
"""Imports of TRL's rewards and of what comes with it, which a rollout function needs, too; indented ones are those of a
main function that trains."""
_BASES: dict[str, int | None] = {"Environment": 1, "OwnLoop": 1, "ToolEnvironment": 10}
"""Base classes that this package offers, each with its `max_turns`."""
_LARGEST = 4 << 20
"""Largest file in bytes: nobody writes more by hand, and its syntax tree takes a hundred times as much memory."""
EARLIER = "earlier"
"""Folder with earlier versions of saved files, in the folder with those."""
_NOT_SEARCHED = ("build", "dist", "node_modules", "site-packages", "test", "tests", "venv")
_MOST_FILES = _MOST_FOLDERS = 1000
_PARSING = threading.Lock()


@dataclass(frozen=True)
class DeclaredKnob:
    """A knob as written in the file; `default` is None if it is not a literal."""

    name: str
    type: str
    default: Any = None
    description: str = ""


@dataclass(frozen=True)
class Found:
    """An environment in a file, or a file that cannot be read: then `problem` says why and `attribute` is empty."""

    name: str
    file: Path
    attribute: str = ""
    line: int = 1
    description: str = ""
    max_turns: int | None = 1
    """None if it is computed."""
    decides_turns: bool = False
    """True if it may change them when it is opened."""
    tags: tuple[str, ...] = ()
    knobs: tuple[DeclaredKnob, ...] = field(default=())
    problem: str = ""
    is_named_by_file: bool = False
    """True if its class sets no `name`, or the file cannot be read."""
    names_sdk: bool = True
    """False if the file cannot be parsed and its text does not contain the name of this package."""


def environment_files(folder: Path, *, deep: bool = False) -> list[Path]:
    """Python files in a folder, sorted by name, without helpers, whose names begin with `_`.

    Args:
        deep: Look into its folders as well, without tests, hidden folders and installed packages.
    """
    if not deep:
        return sorted(file for file in folder.glob("*.py") if not file.name.startswith("_") and os.path.isfile(file))
    return [file for _, files in searched(folder) for file in files]


def searched(*folders: Path, left_out: Collection[Path] = ()) -> Iterator[tuple[Path, list[Path]]]:
    """Yield folders and all folders in them that are searched, with their Python files: by depth, then by name.

    The search ends after a thousand folders or files.

    Args:
        left_out: Folders that are left out, with those in them.
    """
    waiting, folders_left, files_left = deque(folders), _MOST_FOLDERS, _MOST_FILES
    while waiting and folders_left and files_left:
        place = waiting.popleft()
        if place in left_out:
            continue
        files = environment_files(place)[:files_left]
        yield place, files
        folders_left, files_left = folders_left - 1, files_left - len(files)
        if len(waiting) < folders_left:
            waiting += subfolders(place)


def subfolders(folder: Path) -> list[Path]:
    """Folders in a folder, sorted by name, without tests, hidden folders, virtual environments, installed packages and
    links; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    searchable = [folder / name for name in names if not name.startswith((".", "_")) and name not in _NOT_SEARCHED]
    return [subfolder for subfolder in searchable if not os.path.exists(subfolder / "pyvenv.cfg")]


def name_of(text: str) -> str:
    """Return a valid name for an environment that its author called otherwise; a long one ends with a hash of it."""
    name = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_") or "environment"
    return name if len(name) <= 64 else f"{name[:55]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def discover_file(file: Path) -> list[Found]:
    """The environments in one file.

    A class is an environment if one of its bases is `Environment`, `OwnLoop` or `ToolEnvironment` of this package,
    under any imported name, or another environment of the file or of a file that it imports from beside it. Classes
    whose names begin with `_` are base classes and not listed. A file that imports this package and has none, but a
    class that defines `tasks`, is listed with that problem.
    """
    try:
        tree = parse(file)
    except SyntaxError as error:
        location = f"{file}:{error.lineno or 1}"
        problem = f"{error.msg} ({location})"
        return [_describe_unreadable(file, problem, error.lineno or 1)]
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        problem = f"{type(error).__name__}: {error} ({file})"
        return [_describe_unreadable(file, problem)]
    classes = _environments(tree, file, {file: {}})
    listed = [(node, turns) for node, turns in classes if not node.name.startswith("_")]
    if not classes and (node := _underived(tree)) is not None:
        problem = (
            f"{node.name} defines tasks(), but none of its bases is known to be an environment: derive it from "
            "Environment, OwnLoop or ToolEnvironment of toprope.sdk, or from a class of a file beside it "
            f"({file}:{node.lineno})."
        )
        return [Found(file.stem, file, line=node.lineno, problem=problem, is_named_by_file=True)]
    return [_describe_class(node, turns, file, alone=len(listed) == 1) for node, turns in listed]


def _describe_unreadable(file: Path, problem: str, line: int = 1) -> Found:
    try:
        with file.open("rb") as source:
            names_sdk = b"toprope" in source.read(_LARGEST)
    except OSError:
        names_sdk = False
    return Found(file.stem, file, line=line, problem=problem, is_named_by_file=True, names_sdk=names_sdk)


def parse(file: Path) -> ast.Module:
    """The syntax tree of a file; warnings of the parser are dropped.

    Threads take turns: neither Python 3.11's parser (python/cpython#106905) nor its warning filters are thread-safe.

    Raises:
        OSError, SyntaxError, RecursionError, MemoryError: It cannot be read or parsed.
        ValueError: It is larger than 4 MB.
    """
    with file.open("rb") as source:
        content = source.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it is larger than {_LARGEST >> 20} MB")
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(content, str(file))


def first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().partition("\n")[0].strip()


def literal(node: ast.expr | None) -> Any:
    """The value of a literal; None for any other expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the plain names to which a statement assigns, each with its value."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        yield statement.target.id, statement.value
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value


def imports_in(tree: ast.Module) -> list[tuple[int, str]]:
    """The modules that the `import` statements of a file may name, each with its level: 0 if absolute, 1 from its
    package."""
    imports: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            imports += [
                (node.level, module)
                for module in (prefix[:-1], *(prefix + alias.name for alias in node.names))
                if module
            ]
    return imports


def _environments(
    tree: ast.Module, file: Path, read: dict[Path, dict[str, int | None]]
) -> list[tuple[ast.ClassDef, int | None]]:
    """The environments of a file, each with the `max_turns` that it inherits.

    Args:
        read: The result of `_beside` for files that were read already, since files may import each other.
    """
    ours = dict(_BASES)
    theirs: set[str] = set()
    for node in ast.walk(tree):  # authors import in `try`, too
        if not isinstance(node, ast.ImportFrom):
            continue
        from_us = (node.module or "").split(".")[0] == "toprope"
        known = _BASES if from_us else _beside(file, node, read)
        for alias in node.names:
            if alias.name in known:
                ours[alias.asname or alias.name] = known[alias.name]
            elif alias.name in _BASES:
                theirs.add(alias.asname or alias.name)
    ours = {name: turns for name, turns in ours.items() if name not in theirs}
    found = []
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            inherited = [turns for base in statement.bases for turns in _turns_of(base, ours)]
            if inherited:
                found.append((statement, inherited[0]))
                ours[statement.name] = _own_turns(statement, inherited[0])
    return found


def _beside(file: Path, node: ast.ImportFrom, read: dict[Path, dict[str, int | None]]) -> dict[str, int | None]:
    """The environments of the file from which a statement imports, by class name, each with its `max_turns`; empty if
    that is not a file in the folder of `file` or below it."""
    if node.level > 1 or not node.module:
        return {}
    beside = file.parent.joinpath(*node.module.split(".")).with_suffix(".py")
    if not os.path.isfile(beside):
        return {}
    if beside not in read:
        read[beside] = {}
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            classes = _environments(parse(beside), beside, read)
            read[beside] = {found.name: _own_turns(found, inherited) for found, inherited in classes}
    return read[beside]


def _turns_of(base: ast.expr, names: dict[str, int | None]) -> list[int | None]:
    """The `max_turns` of a base class; empty if it is not an environment."""
    if isinstance(base, ast.Name):
        return [names[base.id]] if base.id in names else []
    return [_BASES[base.attr]] if isinstance(base, ast.Attribute) and base.attr in _BASES else []


def _own_turns(node: ast.ClassDef, inherited: int | None) -> int | None:
    """The `max_turns` of a class; None if it is computed."""
    assigned = {name: value for statement in node.body for name, value in assignments(statement)}
    if "max_turns" not in assigned:
        return inherited
    turns = literal(assigned["max_turns"])
    return turns if isinstance(turns, int) else None


def _underived(tree: ast.Module) -> ast.ClassDef | None:
    """The first class with tasks in a file that imports this package."""
    if not any(name.split(".")[0] == "toprope" for level, name in imports_in(tree) if not level):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
            if "tasks" in names and (node.bases or "score" in names):
                return node
    return None


def _describe_class(node: ast.ClassDef, inherited: int | None, file: Path, alone: bool) -> Found:
    assigned = {name: value for statement in node.body for name, value in assignments(statement)}
    name = literal(assigned.get("name"))
    is_named_by_file = not isinstance(name, str) or not name
    if is_named_by_file:
        name = file.stem if alone else f"{file.stem}_{node.name.lower()}"
    is_plain = all(ast.unparse(base).rpartition(".")[2] == "Environment" for base in node.bases)
    stored_attributes = (
        child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
    )
    methods = (child.name for child in node.body if isinstance(child, ast.FunctionDef))
    decides_turns = not is_plain or "max_turns" in (*stored_attributes, *methods)
    tags = literal(assigned.get("tags"))
    problem = ""
    if NAME.fullmatch(name) is None:
        problem = (
            f"{name!r} is not a valid name: use up to 64 lower-case letters, digits, '_' and '-', beginning with a "
            f"letter or digit. Set `name` in {node.name} ({file}:{node.lineno})."
        )
    return Found(
        name=name,
        file=file,
        attribute=node.name,
        line=node.lineno,
        description=first_line(ast.get_docstring(node)),
        max_turns=_own_turns(node, inherited),
        decides_turns=decides_turns,
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list | tuple) else (),
        knobs=_knobs(node),
        problem=problem,
        is_named_by_file=is_named_by_file,
    )


def _knobs(node: ast.ClassDef) -> tuple[DeclaredKnob, ...]:
    nested = [child for child in node.body if isinstance(child, ast.ClassDef) and child.name == "Knobs"]
    knobs = []
    for statement in nested[0].body if nested else []:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        value, description = statement.value, ""
        if isinstance(value, ast.Call):
            words = {keyword.arg: keyword.value for keyword in value.keywords}
            description = literal(words.get("help")) or ""
            value = value.args[0] if value.args else words.get("default")
        knobs.append(
            DeclaredKnob(statement.target.id, ast.unparse(statement.annotation), literal(value), str(description))
        )
    return tuple(knobs)


def script_requirements(source: str) -> list[str]:
    """Requirements that a script names in its metadata (PEP 723), for what is not training; empty without metadata.

    Args:
        source: The script. TRL itself is replaced by `datasets`, unless the script imports a submodule of it or a
            package that TRL brings, such as torch; then TRL is kept with the extras that are not for training.
    """
    dependencies = script_metadata(source).get("dependencies")
    requirements: list[str] = []
    for requirement in dependencies if isinstance(dependencies, list) else []:
        root = re.split(r"[^A-Za-z0-9_.-]", str(requirement).strip(), maxsplit=1)[0].replace("-", "_").lower()
        if root == "trl":
            trl_itself = [] if _NEEDS_TRL.search(source) is None else [_without_training(str(requirement).strip())]
            requirements += [*trl_itself, "datasets"]
        elif root and root not in TRAINING_PACKAGES:
            requirements.append(str(requirement).strip())
    return list(dict.fromkeys(requirements))


def script_python(source: str) -> str:
    """`requires-python` of a script's metadata (PEP 723); empty without one."""
    required = script_metadata(source).get("requires-python")
    return required if isinstance(required, str) else ""


def script_metadata(source: str) -> dict[str, Any]:
    """Return a script's metadata; empty without any, or if it has errors."""
    metadata = _METADATA.search(source)
    if metadata is None:
        return {}
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in metadata["block"].splitlines())
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return {}


def address_of(source: Any, folder: Path) -> str | None:
    """Return the address of a source in `[tool.uv.sources]` for a requirement; None if it has none, or holds for some
    machines only.

    Args:
        source: As the file has it.
        folder: Folder where its paths begin.
    """
    if not isinstance(source, dict) or not source.keys() <= _OF_SOURCE:
        return None
    if path := source.get("path"):
        address = Path(os.path.abspath(folder / str(path))).as_uri()
    else:
        commit = next((f"@{source[key]}" for key in ("rev", "tag", "branch") if key in source), "")
        address = f"git+{source['git']}{commit}" if "git" in source else str(source.get("url"))
    address += f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
    # pip fills in variables, and reads no address as `git@host:path`.
    is_plain = "://" in address and address.isprintable() and not set(address) & set("$ ")
    return address if is_plain else None


def _without_training(requirement: str) -> str:
    """Return a requirement of TRL without its extras for training."""
    brackets = re.search(r"\[(.*?)\]", requirement)
    extras = [extra.strip() for extra in brackets[1].split(",")] if brackets else []
    kept_extras = ",".join(extra for extra in extras if extra.replace("-", "_").lower() not in _TRAINING_EXTRAS)
    return re.sub(r"\[.*?\]", f"[{kept_extras}]" if kept_extras else "", requirement, count=1)
