"""The virtual environments of a home by the digest of their packages; equal environments are shared.

Each is made in a temporary folder and renamed when complete. Leftovers of crashes are recognised by name and deleted at
the next collection.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.errors import Corrupt, TopropeError
from toprope.records.run.folder import RunFolder, find_record
from toprope.records.run.status import Status
from toprope.settings.owner import Home
from toprope.supervisor.lock import RunLock, is_held
from toprope.trajectories.jobs.jobs import Job

MADE_VERSION = 1
_MAKING, _GONE = ".making-", ".gone-"
_FACTS = "interpreter.json"
_DIGEST = re.compile(r"[0-9a-f]{20}")
_LARGEST_SCRIPT = 1 << 20
_YOUNG_S = 60.0


class Made(BaseModel):
    """interpreter.json: record of an environment in the store."""

    version: int = MADE_VERSION
    python: str
    """Python implementation, version and platform."""
    requirements: list[str]
    pins: list[str]
    made_at: float
    seconds: float
    bytes: int


class Store:
    """The folder `interpreters` of a home.

    Args:
        path: The folder; may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def python(self, digest: str) -> str:
        """Return the path of the interpreter of the environment with this digest, made or not."""
        return str(self.path / digest / "bin" / "python")

    def made(self, digest: str) -> Made | None:
        """Return its record; None if it is missing or incomplete."""
        try:
            return find_record(self.path / digest / _FACTS, MADE_VERSION, Made)
        except TopropeError:
            return None

    def digests(self) -> list[str]:
        """Return the digests of complete environments."""
        if not self.path.is_dir():
            return []
        return sorted(path.name for path in self.path.iterdir() if path.is_dir() and not path.name.startswith("."))

    def lock(self, digest: str, timeout_s: float) -> FileLock:
        """Return the lock for making the environment with this digest."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return FileLock(self.path / f".{digest}.lock", timeout=timeout_s, mode=0o600)

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """Yield a temporary folder for a new environment; it is removed unless `keep` moved it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = self.path / f"{_MAKING}{secrets.token_hex(6)}"
        folder.mkdir(mode=0o700)
        lock = RunLock.acquire(folder / "lock")
        try:
            yield folder
        finally:
            if lock is not None:
                lock.release()
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, aside: Path, digest: str, facts: Made) -> None:
        """Move the environment `venv` of a temporary folder into place. Call it under `lock(digest)`."""
        venv, place = aside / "venv", self.path / digest
        write_json(venv / _FACTS, facts.model_dump(mode="json"))
        (venv / "lock.txt").write_text("".join(f"{pin}\n" for pin in facts.pins), encoding="utf-8")
        _move_within(venv, place)
        if place.exists():  # An incomplete leftover of an older version; a complete one was found before.
            shutil.rmtree(self.set_aside(digest), ignore_errors=True)
        os.replace(venv, place)

    def set_aside(self, digest: str) -> Path:
        """Rename an environment that is to be deleted, so that nobody sees an incomplete one, and return its path.

        Its lock file stays: another process may be waiting for it.
        """
        aside = self.path / f"{_GONE}{secrets.token_hex(6)}"
        with suppress(FileNotFoundError):
            os.replace(self.path / digest, aside)
        return aside

    def unused(self, used: set[str], pythons: Sequence[Path] = ()) -> list[Path]:
        """Return unreferenced environments and leftovers of crashes, and nothing that somebody else put there.

        Args:
            used: Referenced digests.
            pythons: Interpreters of entries; what holds one of them is left out.
        """
        if not self.path.is_dir():
            return []
        removable = []
        for path in sorted(self.path.iterdir()):
            if path.name.startswith(_GONE) or (path.name.startswith(_MAKING) and _is_abandoned(path)):
                removable.append(path)
            elif _DIGEST.fullmatch(path.name) and path.name not in used and (path / _FACTS).is_file():
                removable.append(path)
        return [path for path in removable if not any(python.is_relative_to(path) for python in pythons)]


def digests_in_use(home: Home, digests: list[str], *, resumable: bool = False) -> set[str]:
    """Return the digests that live runs and live data jobs refer to.

    Args:
        home: The owner's.
        digests: Digests to look for.
        resumable: Count stopped runs, which somebody may resume, and lost ones that will resume by themselves.
    """
    in_use: set[str] = set()
    if not digests:
        return in_use
    for place in (home.exports, home.datasets):
        for path in place.glob(".jobs/*/order.json"):
            with suppress(OSError):
                text = path.read_text(encoding="utf-8")
                mentioned = {digest for digest in digests if digest in text}
                if mentioned - in_use and Job(path.parent).alive():
                    in_use |= mentioned
    for path in home.runs.iterdir() if home.runs.is_dir() else ():
        folder = RunFolder(path)
        try:
            text = folder.spec.read_text(encoding="utf-8")
        except OSError:
            continue
        mentioned = {digest for digest in digests if digest in text}
        if mentioned - in_use and (is_held(folder.lock) or not _has_ended(folder, resumable)):
            in_use |= mentioned
    return in_use


def bytes_of(folder: Path) -> int:
    """Return the disk usage of a folder in bytes; links are not followed."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                stat = os.lstat(os.path.join(place, name))
                total += stat.st_blocks * 512
    return total


def _is_abandoned(aside: Path) -> bool:
    """Return True if a temporary folder is abandoned; its lock is taken shortly after its creation."""
    try:
        return not is_held(aside / "lock") and time.time() - aside.stat().st_mtime > _YOUNG_S
    except OSError:
        return False


def _has_ended(folder: RunFolder, resumable: bool) -> bool:
    try:
        status = Status.read(folder)
    except Corrupt:
        return False  # Unknown: keep everything that it may use.
    except TopropeError:
        return True
    may_go_on = status.state == "stopped" or status.goes_on
    return status.is_over and not (resumable and may_go_on)


def _move_within(venv: Path, place: Path) -> None:
    """Rewrite paths in scripts and settings of an environment to its final place."""
    old, new = os.fsencode(venv), os.fsencode(place)
    for path in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_SCRIPT:
            continue
        text = path.read_bytes()
        if old in text:
            path.write_bytes(text.replace(old, new))
