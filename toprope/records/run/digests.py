"""Hashes of the code behind a measurement: environment, reward functions and evaluator.

Two runs can be compared only if these are the same, and a run can be trusted only if they stayed the same during it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import toprope
from toprope.records.run.specification import AcceptedFile, EnvironmentSource
from toprope.sdk.wall.paths import code_paths, folders_above, imports_of, package_of, project_of
from toprope.sdk.wall.projects import roots_above
from toprope.shipped import ENVIRONMENTS

_PACKAGE = Path(toprope.__file__).resolve().parent
_SDK = ("sdk", "sdk/authoring", "sdk/worker")
_EVALUATOR = (
    "training/evaluation/evaluator.py",
    "training/rollouts/group_sampler.py",
    "training/rollouts/environment_set.py",
    "training/rollouts/sampled_group.py",
    "training/judges/judging.py",
    "training/judges/questions.py",
    "records/journal/groups.py",
    "records/worker_messages.py",
)
"""Code that samples, judges and counts answers; the code that scores them is in the sdk."""
_SHOWN = 16
_CODE = (".py", ".pyc", ".so", ".pyd")
"""Endings of files that an import executes."""
_UNREADABLE = "unreadable"
_INSTALLED = {"site-packages", "dist-packages"}


def environment_digest(source: EnvironmentSource) -> str:
    """The hash of an environment's code; `missing` if a file is missing.

    The code is its file, or every Python file of its package, or the adapter's module and its target. Imported packages
    are compared by version elsewhere, and data by the hashes of the tasks.
    """
    if source.file is None:
        adapter = _PACKAGE / "sdk" / "adapters" / f"{(source.adapter or '').rsplit('.', 1)[-1]}.py"
        return digest_of([adapter], f"{source.adapter}:{source.target}")
    file = Path(source.file)
    package = file.name == "__init__.py"
    return digest_of(sorted(file.parent.rglob("*.py")) if package else [file], source.attribute or "")


def code_of(sources: Sequence[EnvironmentSource]) -> dict[str, str]:
    """SHA-256 by file of environments and reward functions, of the packages that they lie in, and of the modules and
    packages beside them that they import by `import` statements; installed packages have none."""
    digests: dict[str, str] = {}
    code_in, imports = functools.cache(_code_in), functools.cache(imports_of)
    for file in _named_files(sources):
        roots, package = _roots(file), package_of(file)
        waiting, seen = [file, *([os.path.join(package, "")] if package and roots else ())], set[str]()
        searched: set[tuple[str, str, str]] = set()  # many files import the same
        while waiting:
            if (path := waiting.pop()) in seen:
                continue
            seen.add(path)
            if path.endswith(os.sep):
                waiting += _files_below(path)
                continue
            if path not in digests:
                digests[path] = _hash_of(path)
            for folder, only, name in _search_folders(path, imports(path), roots) if roots else ():
                if (folder, only, name) not in searched:
                    searched.add((folder, only, name))
                    waiting += _imported_files(folder, only, name, code_in)
    return digests


def _hash_of(file: str) -> str:
    try:
        return sha256_of(Path(file))
    except OSError:
        return _UNREADABLE


def _named_files(sources: Sequence[EnvironmentSource]) -> list[str]:
    """The files that environments name."""
    files = [file for source in sources for file in (source.file, *(reward.file for reward in source.rewards)) if file]
    return list(dict.fromkeys([*files, *(path for source in sources for path in code_paths(source.target))]))


def _roots(file: str) -> list[tuple[str, str]]:
    """Folders from which an environment's file imports, as a worker arranges them: `toprope.sdk.authoring.loading`.

    Returns:
        Each with the only name that can be imported from it; empty for all.
    """
    if not _INSTALLED.isdisjoint(Path(file).parts):
        return []
    package = package_of(file)
    alone = [package] if package and not project_of(package) else []
    roots = [(os.path.split(folder)) for folder in (*alone, *folders_above(file))]
    roots += [(project_of(package), "")] if package and not alone else []
    roots += [(root, "") for root in roots_above(file) if Path(root).resolve() != _PACKAGE.parent]  # Toprope's checkout
    return [(os.path.dirname(os.path.abspath(file)), ""), *roots]


def _search_folders(
    file: str, imports: Iterable[tuple[int, str]], roots: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    """The folders that a file's imports search, each with the only name in it, see `_roots`, and the module."""
    for level, name in imports:
        above = Path(file).absolute().parents[level - 1 :][:1] if level else ()
        yield from ((folder, only, name) for folder, only in [(str(parent), "") for parent in above] or roots)


def _imported_files(
    folder: str, only: str, name: str, code_in: Callable[[str], Mapping[str, Sequence[str]]]
) -> Iterator[str]:
    """The files that the import of a module from a folder may execute; its package's folder ends with a slash."""
    place, parts = folder, name.split(".")
    for part in parts if only in ("", parts[0]) else ():
        yield from code_in(place).get(part, ())
        place = os.path.join(place, part)
        if not only and os.path.isfile(os.path.join(place, "__init__.py")):
            yield os.path.join(place, "")
            break
        yield from code_in(place).get("__init__", ())


def _code_in(folder: str) -> dict[str, list[str]]:
    """The files with code in a folder, by the module that each may be; none if it cannot be read."""
    files_by_module: dict[str, list[str]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return files_by_module
    for name in names:
        if name.endswith(_CODE):
            files_by_module.setdefault(name.partition(".")[0], []).append(os.path.join(folder, name))
    return files_by_module


def _files_below(package: str) -> Iterator[str]:
    """The files with code of a package, without installations that lie in it."""
    for folder, folders, names in os.walk(package):
        if "pyvenv.cfg" in names and folder != package:
            folders.clear()
            continue
        apart = {"__pycache__", "node_modules", *_INSTALLED}
        folders[:] = [subfolder for subfolder in folders if not subfolder.startswith(".") and subfolder not in apart]
        yield from (os.path.join(folder, name) for name in names if name.endswith(_CODE))


def accepted_files(sources: Sequence[EnvironmentSource]) -> list[AcceptedFile]:
    """The files of `code_of` as they are now, but those that ship with Toprope."""
    return [
        AcceptedFile(file=file, sha256=digest)
        for file, digest in sorted(code_of(sources).items())
        if not Path(file).is_relative_to(ENVIRONMENTS)
    ]


def changed_files(sources: Sequence[EnvironmentSource], accepted: Sequence[AcceptedFile]) -> list[str]:
    """The files of the code of environments that are other than what was accepted, and accepted ones that are gone."""
    accepted_digests = {accepted_file.file: accepted_file.sha256 for accepted_file in accepted}
    gone = [file for file, digest in accepted_digests.items() if digest != _UNREADABLE and not os.path.exists(file)]
    others = [
        present_file.file
        for present_file in accepted_files(sources)
        if accepted_digests.get(present_file.file) != present_file.sha256
    ]
    return list(dict.fromkeys([*gone, *others]))


def only_accepted(accepted: Sequence[AcceptedFile] | None, agents: Iterable[str]) -> dict[str, Any]:
    """Return the fields by which a worker imports accepted code only: `toprope.sdk.worker.accepted`.

    Args:
        accepted: The accepted code; None if any may run.
        agents: Folders of files that agents wrote.
    """
    if accepted is None:
        return {}
    files = {os.path.realpath(accepted_file.file): accepted_file.sha256 for accepted_file in accepted}
    folders = [
        path for agent_folder in agents for path in (os.path.abspath(agent_folder), os.path.realpath(agent_folder))
    ]
    return {"accepted": {"files": files, "folders": folders}}


def rewards_digest(source: EnvironmentSource) -> str:
    """The hash of the reward functions that a configuration adds to an environment; `missing` if a file is missing."""
    settings = ";".join(
        f"{reward.name} {reward.weight} {reward.low} {reward.high} {reward.attribute}" for reward in source.rewards
    )
    return digest_of([Path(reward.file) for reward in source.rewards], settings)


def evaluator_digest() -> str:
    """The hash of our own code that samples, scores and counts."""
    sdk = [file for folder in _SDK for file in sorted((_PACKAGE / folder).glob("*.py"))]
    return digest_of([*sdk, *(_PACKAGE / name for name in _EVALUATOR)])


def measurement_digests(source: EnvironmentSource) -> dict[str, str]:
    """Digests of the code on disk now: `environment`, `toprope`, and `rewards` if functions are added."""
    digests = {"environment": environment_digest(source), "toprope": evaluator_digest()}
    return digests | ({"rewards": rewards_digest(source)} if source.rewards else {})


def measured_otherwise(sources: Sequence[EnvironmentSource], loaded: Mapping[str, Any]) -> list[str]:
    """Return names of code that differs on disk from that which measured: files of environments and rewards, `Toprope`.

    Args:
        sources: The environments of a run, the selected one first.
        loaded: Its joined measurement digests, as in the file of an evaluation.
    """
    now = join_digests([measurement_digests(source) for source in sources])
    names = {
        "environment": [source.file or f"{source.adapter}: {source.name}" for source in sources],
        "rewards": [reward.file for source in sources for reward in source.rewards],
        "toprope": ["Toprope"],
    }
    return list(dict.fromkeys(name for key in names if now.get(key) != loaded.get(key) for name in names[key]))


def join_digests(measured: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The digests of several environments as one."""
    if len(measured) == 1:
        return dict(measured[0])
    joined = dict(measured[0])
    for name in ("environment", "rewards"):
        digests = [single[name] for single in measured if name in single]
        if digests:
            joined[name] = "missing" if "missing" in digests else digest_of([], " ".join(digests))
    return joined


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(files: Iterable[Path], more: str = "") -> str:
    """SHA-256 over names and contents, 16 hexadecimal digits; `missing` if a file cannot be read."""
    digest = hashlib.sha256(more.encode())
    try:
        for file in files:
            digest.update(f"\0{file.name}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:
        return "missing"
    return digest.hexdigest()[:_SHOWN]
