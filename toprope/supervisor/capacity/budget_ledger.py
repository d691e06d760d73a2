"""The books of one folder of runs: what every run used and may still use, added up from the folders whenever one is to
start, under a lock, so that two front ends cannot give the same budget twice.

A run that lives counts with what it reserved; one whose keeper is gone counts with what it used. Nobody has to settle
anything: the moment a run's lock is free, its reservation is. Between the decision and the keeper a run is pencilled
in, so that the books are held for milliseconds and not while processes start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from toprope.analysis.budget import Account
from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound, NotPossibleNow
from toprope.records.run.folder import RUN_ID, RunFolder, read_json
from toprope.records.run.specification import Specification
from toprope.records.run.usage import Usage, day_of
from toprope.settings.limits import FrozenLimits
from toprope.supervisor.lock import RunLock, is_held

__all__ = ["read_accounts", "folder_bytes", "gpu_names", "reserved", "processor_count", "ledger_lock"]

_FOLDER = ".budget"
_PENCIL = ".pencilled"
_PENCILLED_S = 120.0
"""So long a run may take to appear; what is older was left by somebody who was killed."""
LOCK_WITHIN_S = 20.0


@contextmanager
def ledger_lock(runs: Path) -> Iterator[None]:
    """Holds the books of a folder of runs: whoever starts a run looks and reserves within it.

    Raises:
        NotPossibleNow: Somebody else has held them for 20 s.
    """
    path = runs / _FOLDER
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = RunLock.acquire(path / "lock", LOCK_WITHIN_S)
    if lock is None:
        raise NotPossibleNow(
            f"Another front end has been starting a run for {LOCK_WITHIN_S:.0f} s; nothing was started.",
            hint="Try again.",
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def reserved(runs: Path, specifications: Sequence[Specification]) -> Iterator[None]:
    """Counts runs as live until their keepers do: from now, while the caller holds the books, to the end of the block,
    which they need not be held for."""
    paths = [runs / _FOLDER / f"{one.run_id}{_PENCIL}" for one in specifications]
    try:
        for path, one in zip(paths, specifications, strict=True):
            write_json(path, one.limits.reserved if one.limits else {})
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def read_accounts(runs: Path, now: float | None = None, *, leave_out: Sequence[str] = ()) -> list[Account]:
    """Every run's account.

    Args:
        runs: The folder of runs.
        now: Seconds since the epoch; the clock where it is None.
        leave_out: Ids of runs that are not to be counted.
    """
    today = day_of(time.time() if now is None else now)
    found = []
    try:
        entries = [entry for entry in os.scandir(runs) if RUN_ID.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
    for entry in entries:
        if entry.name in leave_out:
            continue
        try:
            found.append(_account(RunFolder(Path(entry.path)), today))
        except FileNotFoundError:
            continue  # it is being removed
    known = {account.run_id for account in found if account.live} | set(leave_out)
    return found + [account for account in _pencilled(runs, today) if account.run_id not in known]


def _pencilled(runs: Path, today: str) -> list[Account]:
    found = []
    for path in (runs / _FOLDER).glob(f"*{_PENCIL}"):
        try:
            age = time.time() - path.stat().st_mtime
            if not -1.0 <= age < _PENCILLED_S:
                path.unlink(missing_ok=True)
                continue
            reserved = {str(name): float(value) for name, value in read_json(path).items()}
        except (NotFound, Corrupt, OSError, AttributeError, TypeError, ValueError):
            continue
        found.append(Account(path.name.removesuffix(_PENCIL), True, True, Usage(), {}, reserved))
    return found


def _account(folder: RunFolder, today: str) -> Account:
    live = is_held(folder.lock)
    try:
        usage = Usage.read(folder)
    except Corrupt:
        usage = None
    if usage is None:
        usage = Usage(disk_bytes=0 if live else folder_bytes(folder.path))
    spent = usage.days.get(today)
    used = {} if spent is None else {"cpu_hours": spent.cpu_s / 3600, "gpu_hours": spent.gpu_s / 3600}
    if spent is not None and spent.usd is not None:
        used["cost_usd"] = spent.usd
    try:
        # The specification is written once, when the run is started.
        started = day_of(folder.spec.stat().st_mtime)
    except FileNotFoundError:
        started = ""
    reserved = _reserved(folder) if live else {}
    return Account(folder.run_id, live, started == today, usage, used, reserved)


def _reserved(folder: RunFolder) -> dict[str, float]:
    try:
        return FrozenLimits.model_validate(read_json(folder.spec)["limits"]).reserved
    except (NotFound, Corrupt, KeyError, TypeError, ValidationError):
        return {}  # one that an earlier version started


def folder_bytes(path: Path) -> int:
    """Bytes of all files below a folder; what vanishes meanwhile counts for nothing."""
    total, places = 0, [os.fspath(path)]
    while places:
        try:
            with os.scandir(places.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        places.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total


def processor_count() -> int:
    """How many this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def gpu_names(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """The names of NVIDIA's GPUs of this machine, as the driver tells them, in the order of their addresses."""
    names = []
    for path in sorted(root.glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names
