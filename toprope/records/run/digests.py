"""Hashes of the code behind a measurement: environment, reward functions and evaluator.

Two runs can be compared only if these are the same, and a run can be trusted only if they stayed the same during it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import toprope
from toprope.records.run.specification import AcceptedFile, EnvironmentSource
from toprope.sdk.wall.paths import data_paths, imported_by
from toprope.shipped import ENVIRONMENTS

_PACKAGE = Path(toprope.__file__).resolve().parent
_SDK = ("sdk", "sdk/authoring", "sdk/worker")
_EVALUATOR = ("training/evaluation/evaluator.py", "training/rollouts/group_sampler.py")
"""Code that samples and counts answers; the code that scores them is in the sdk."""
_SHOWN = 16


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
    """SHA-256 by file of environments and reward functions, and of the modules beside them that they import; packages
    have none."""
    waiting = [file for source in sources for file in (source.file, *(one.file for one in source.rewards)) if file]
    waiting += [path for source in sources for path in data_paths(source.target) if path.endswith(".py")]
    found: dict[str, str] = {}
    while waiting:
        file = Path(waiting.pop())
        if str(file) in found:
            continue
        try:
            found[str(file)] = sha256_of(file)
        except OSError:
            found[str(file)] = "unreadable"
            continue
        beside = [file.with_name(f"{module}.py") for module, _ in imported_by(str(file))]
        waiting += [str(one) for one in beside if one.is_file()]
    return found


def accepted_files(sources: Sequence[EnvironmentSource]) -> list[AcceptedFile]:
    """The files of `code_of` as they are now, but those that ship with Toprope."""
    return [
        AcceptedFile(file=file, sha256=digest)
        for file, digest in sorted(code_of(sources).items())
        if not Path(file).is_relative_to(ENVIRONMENTS)
    ]


def changed_files(source: EnvironmentSource, accepted: Sequence[AcceptedFile]) -> list[str]:
    """The files of an environment's code that are other than what was accepted."""
    return [one.file for one in accepted_files([source]) if one not in accepted]


def rewards_digest(source: EnvironmentSource) -> str:
    """The hash of the reward functions that a configuration adds to an environment; `missing` if a file is missing."""
    said = ";".join(f"{one.name} {one.weight} {one.low} {one.high} {one.attribute}" for one in source.rewards)
    return digest_of([Path(one.file) for one in source.rewards], said)


def evaluator_digest() -> str:
    """The hash of our own code that samples, scores and counts."""
    sdk = [file for folder in _SDK for file in sorted((_PACKAGE / folder).glob("*.py"))]
    return digest_of([*sdk, *(_PACKAGE / name for name in _EVALUATOR)])


def measurement_digests(source: EnvironmentSource) -> dict[str, str]:
    """Digests of the code on disk now: `environment`, `toprope`, and `rewards` if functions are added."""
    found = {"environment": environment_digest(source), "toprope": evaluator_digest()}
    return found | ({"rewards": rewards_digest(source)} if source.rewards else {})


def join_digests(measured: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The digests of several environments as one."""
    if len(measured) == 1:
        return dict(measured[0])
    found = dict(measured[0])
    for name in ("environment", "rewards"):
        own = [one[name] for one in measured if name in one]
        if own:
            found[name] = "missing" if "missing" in own else digest_of([], " ".join(own))
    return found


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(files: Iterable[Path], more: str = "") -> str:
    """SHA-256 over names and contents, 16 hexadecimal digits; `missing` if a file cannot be read."""
    found = hashlib.sha256(more.encode())
    try:
        for file in files:
            found.update(f"\0{file.name}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:
        return "missing"
    return found.hexdigest()[:_SHOWN]
