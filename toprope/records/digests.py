"""What a figure was measured by, as hashes: two runs can be compared only where environment and evaluator are the same,
and a run can be trusted only where they stayed the same while it went on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import toprope
from toprope.records.specification import EnvironmentSource

__all__ = ["digest_of", "environment_digest", "evaluator_digest", "joined", "measuring"]

_PACKAGE = Path(toprope.__file__).resolve().parent
_EVALUATOR = ("training/evaluation.py", "training/rollouts.py")
"""What decides how an answer is asked for and counted; how it is scored stands in the sdk."""
_SHOWN = 16


def environment_digest(source: EnvironmentSource) -> str:
    """The hash of the code of an environment: its file, or every Python file of the package that it is the head of, or
    the adapter's module and what it is asked for. `missing` where a file is gone.

    Packages that an environment imports are told by their versions, and data by the hashes of the tasks.
    """
    if source.file is None:
        adapter = _PACKAGE / "sdk" / "adapters" / f"{(source.adapter or '').rsplit('.', 1)[-1]}.py"
        return digest_of([adapter], f"{source.adapter}:{source.target}")
    file = Path(source.file)
    package = file.name == "__init__.py"
    return digest_of(sorted(file.parent.rglob("*.py")) if package else [file], source.attribute or "")


def _with_rewards(own: str, source: EnvironmentSource) -> str:
    """The digest with the reward functions that a configuration adds."""
    if not source.rewards:
        return own
    said = ";".join(f"{one.name} {one.weight} {one.low} {one.high} {one.attribute}" for one in source.rewards)
    added = digest_of([Path(one.file) for one in source.rewards], said)
    return "missing" if "missing" in (own, added) else digest_of([], f"{own} {added}")


def evaluator_digest() -> str:
    """The hash of our own code that asks, scores and counts."""
    return digest_of([*sorted((_PACKAGE / "sdk").glob("*.py")), *(_PACKAGE / name for name in _EVALUATOR)])


def measuring(source: EnvironmentSource) -> dict[str, str]:
    """Both, as they lie on the disk now: `environment` and `toprope`."""
    return {"environment": _with_rewards(environment_digest(source), source), "toprope": evaluator_digest()}


def joined(measured: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What `measuring` gave of several environments as one."""
    first, *others = measured
    if not others:
        return dict(first)
    own = [one["environment"] for one in measured]
    return {**first, "environment": "missing" if "missing" in own else digest_of([], " ".join(own))}


def digest_of(files: Iterable[Path], more: str = "") -> str:
    """SHA-256 over names and contents, 16 hexadecimal digits; `missing` where a file cannot be read."""
    found = hashlib.sha256(more.encode())
    try:
        for file in files:
            found.update(f"\0{file.name}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:
        return "missing"
    return found.hexdigest()[:_SHOWN]
