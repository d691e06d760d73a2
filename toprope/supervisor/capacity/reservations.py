"""Reserves CPU threads and GPUs of this machine for runs, first come, first served.

Each keeper acts for its own run: it writes an entry into a folder beside the runs and starts the crew when the entry is
granted. There is no central process. All keepers decide under one lock by the same rule, and an entry counts only while
its run's lock is held. So a killed keeper frees its share as soon as its crew is gone, and any number of servers cannot
give the same share twice.

    runs/.reservations/
      lock            held for a moment by the keeper that decides
      .machine.json   the machine's capacity, as the last front end that started a run saw it
      <run_id>.json   one entry per run, until its end

The rule: A run on GPUs has them to itself: one for each process of its trainer, which inference shares, or more if
inference has its own. Memory has no room for a second run. A training run on the CPU takes the threads of its trainer's
processes and its inference, or all threads if it would need more.
Test runs are short, so they do not queue behind training: on the CPU they share the machine with training runs and take
turns only among themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound, TooNew
from toprope.machine import processor_count
from toprope.records.run.folder import RUN_ID, find_record, read_record
from toprope.records.run.specification import Specification
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.programs import torch_members_of

RESERVATION_VERSION = 1
_FOLDER = ".reservations"
_DECIDE_WITHIN_S = 0.2
_ANNOUNCE_WITHIN_S = 2.0
_NAMED = 3
_MACHINE = ".machine.json"
_GPU_NODE = re.compile(r"^nvidia\d+$")

Pool = Literal["training", "tests", "gpu", "light"]


class Machine(BaseModel, frozen=True):
    """The capacity of this machine for runs: CPU threads, and GPUs by their ids in CUDA_VISIBLE_DEVICES."""

    threads: int = Field(ge=1)
    gpus: tuple[str, ...] = ()
    disk_floor: int | None = None
    """Bytes that runs leave free on their disk; None: the owner sets no floor."""
    version: int = RESERVATION_VERSION

    @classmethod
    def detect(
        cls,
        threads: int | None = None,
        gpus: Sequence[str] | None = None,
        visible: str | None = None,
        disk_floor: int | None = None,
    ) -> Machine:
        """Return the capacity of this machine, within the owner's limits.

        Args:
            threads: The owner's limit; None: all CPUs that this process may use.
            gpus: The owner's list of ids; None: those in `visible`, else all that the driver shows.
            visible: The value of CUDA_VISIBLE_DEVICES, if set.
            disk_floor: The owner's floor in bytes.
        """
        if threads is None:
            threads = processor_count()
        if gpus is None and visible is not None:
            gpus = [name for name in (part.strip() for part in visible.split(",")) if name and name != "-1"]
        if gpus is None:
            try:
                nodes = [name for name in os.listdir("/dev") if _GPU_NODE.match(name)]
            except OSError:
                nodes = []
            # CUDA numbers the usable GPUs from 0, independent of the names of the nodes.
            gpus = [str(number) for number in range(len(nodes))]
        return cls(threads=threads, gpus=tuple(dict.fromkeys(gpus)), disk_floor=disk_floor)


class _Entry(BaseModel):
    """The entry of one run. `turn` is its place in the order of arrival."""

    version: int = RESERVATION_VERSION
    turn: int
    pool: Pool
    threads: int
    wanted_gpus: int = 1
    gpus: tuple[str, ...] = ()
    granted: bool = False


@dataclass(frozen=True)
class Granted:
    """The share of a run."""

    threads: int
    gpus: tuple[str, ...] | None
    """Ids of the GPUs that the run may see; empty: none of them; None: the machine has no GPUs."""


@dataclass(frozen=True)
class Waiting:
    """The reason for waiting, for people, and the runs that have to end or start before this run can."""

    reason: str
    behind: tuple[str, ...]


class Reservations:
    """The reservations of one folder of runs. Any number of processes may use them at the same time."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._path = runs / _FOLDER
        self._waited_for: tuple[int, tuple[str, ...]] | None = None

    def announce(self, machine: Machine) -> None:
        """Store the machine's capacity. Waiting runs use it at once."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.machine() == machine:
            return
        lock = RunLock.acquire(self._path / "lock", _ANNOUNCE_WITHIN_S)
        if lock is not None:
            try:
                write_json(self._path / _MACHINE, machine.model_dump(mode="json"))
            finally:
                lock.release()

    def machine(self) -> Machine | None:
        """Return the capacity that was announced last; None if it cannot be read."""
        try:
            return find_record(self._path / _MACHINE, RESERVATION_VERSION, Machine)
        except Corrupt:
            return None

    def claim(self, specification: Specification, *, anew: bool = False) -> Granted | Waiting | None:
        """Claim the share that a run needs. The caller holds the run's lock.

        Args:
            anew: Go to the end of the queue, even if an earlier attempt left an entry.

        Returns:
            The share, or the reason for waiting; None if nothing has changed since the last call, or another keeper is
            deciding at this moment.

        Raises:
            OSError: The entry cannot be written.
        """
        if not anew and self._unchanged():
            return None
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = RunLock.acquire(self._path / "lock", _DECIDE_WITHIN_S)
        if lock is None:
            return None
        try:
            answer = self._decide(specification, anew)
            if isinstance(answer, Waiting):
                self._waited_for = self._path.stat().st_mtime_ns, answer.behind
            return answer
        finally:
            lock.release()

    def release(self, run_id: str) -> None:
        """Give back the share of a run, or take the run out of the queue. Harmless if it has no entry."""
        self._entry(run_id).unlink(missing_ok=True)

    def _unchanged(self) -> bool:
        """True if a run that waits still has to: no entry came or went, and the runs before it are alive."""
        if self._waited_for is None:
            return False
        stamp, behind = self._waited_for
        try:
            current = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        return current == stamp and all(is_held(self._runs / run_id / "keeper.lock") for run_id in behind)

    def _decide(self, specification: Specification, anew: bool) -> Granted | Waiting:
        run_id, machine, entries = specification.run_id, self.machine() or Machine.detect(), self._read_live()
        former = entries.pop(run_id, None)
        if former is None or anew:
            turn = 1 + max((entry.turn for entry in entries.values()), default=0)
            mine = _request(specification, machine, turn)
        else:
            mine = former
        pool_entries = {other_id: entry for other_id, entry in entries.items() if entry.pool == mine.pool}
        if not mine.granted and not any(entry.turn < mine.turn for entry in pool_entries.values() if not entry.granted):
            mine = _grant(mine, machine, [entry for entry in pool_entries.values() if entry.granted])
        if mine != former:
            write_json(self._entry(run_id), mine.model_dump(mode="json"))
        if not mine.granted:
            return _explain_wait(mine, machine, pool_entries)
        return Granted(mine.threads, mine.gpus if machine.gpus else None)

    def _read_live(self) -> dict[str, _Entry]:
        """Return the entries of live runs by run id; remove all others."""
        entries = {}
        for path in self._path.iterdir():
            run_id = path.stem
            if path.name in (_MACHINE, "lock"):
                continue
            try:
                if RUN_ID.fullmatch(run_id) and is_held(self._runs / run_id / "keeper.lock"):
                    entries[run_id] = read_record(path, RESERVATION_VERSION, _Entry)
                    continue
            except (NotFound, PermissionError):  # another user's run
                continue
            except TooNew:
                raise  # the share of a newer version's run is unknown here and must not be given twice
            except Corrupt:
                pass
            # This process holds the lock, so a file with another name was left by a process killed while writing.
            path.unlink(missing_ok=True)
        return entries

    def _entry(self, run_id: str) -> Path:
        return self._path / f"{run_id}.json"


def _request(specification: Specification, machine: Machine, turn: int) -> _Entry:
    launcher, processes = specification.config.launcher, _computing_processes(specification)
    if not processes:
        return _Entry(turn=turn, pool="light", threads=0)
    if gpus := gpus_wanted(specification, machine):
        return _Entry(turn=turn, pool="gpu", threads=0, wanted_gpus=gpus)
    # A run must never be too large for an empty machine.
    threads = min(processes * launcher.threads, machine.threads)
    return _Entry(turn=turn, pool="training" if specification.run_kind.trains else "tests", threads=threads)


def _computing_processes(specification: Specification) -> int:
    members = torch_members_of(specification)
    return len(members) + ("trainer" in members) * (specification.config.launcher.num_processes - 1)


def gpus_wanted(specification: Specification, machine: Machine) -> int:
    """Return the number of GPUs that a run needs; 0 if it computes on the CPU, or not at all."""
    launcher, members = specification.config.launcher, torch_members_of(specification)
    if not members or not machine.gpus or launcher.device == "cpu":
        return 0
    trainer = launcher.num_processes if "trainer" in members else 0
    return max(1, trainer + (launcher.inference_gpus if "inference" in members else 0))


def _grant(mine: _Entry, machine: Machine, others: Sequence[_Entry]) -> _Entry:
    """Grant `mine` its share if the machine has it beside the shares of `others`."""
    if mine.pool == "gpu":
        taken_gpus = {gpu for other in others for gpu in other.gpus}
        free = [gpu for gpu in machine.gpus if gpu not in taken_gpus]
        count = mine.wanted_gpus
        return mine.model_copy(update={"granted": True, "gpus": tuple(free[:count])}) if count <= len(free) else mine
    room = machine.threads - sum(other.threads for other in others)
    # The owner may have lowered the limit while the run waited.
    threads = min(mine.threads, machine.threads)
    return mine.model_copy(update={"granted": True, "threads": threads}) if threads <= room else mine


def _explain_wait(mine: _Entry, machine: Machine, pool_entries: dict[str, _Entry]) -> Waiting:
    holders = sorted(
        (run_id for run_id, entry in pool_entries.items() if entry.granted),
        key=lambda run_id: pool_entries[run_id].turn,
    )
    before = [run_id for run_id, entry in pool_entries.items() if not entry.granted and entry.turn < mine.turn]
    if mine.pool == "gpu":
        resource = f"{mine.wanted_gpus} GPUs" if mine.wanted_gpus > 1 else "a GPU"
        resource += f" (this machine has {len(machine.gpus)} for runs)"
    else:
        resource = f"{mine.threads} CPU thread{'s' if mine.threads > 1 else ''}"
        resource += f" (this machine has {machine.threads} for {mine.pool})"
    names = ", ".join(holders[:_NAMED]) + (f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else "")
    reason = f"Waits for {resource}"
    if names:
        reason += f"; in use by {names}"
    if before:
        reason += f"; {len(before)} waiting before it" if len(before) > 1 else f"; {before[0]} waits before it"
    return Waiting(f"{reason}.", tuple(sorted([*holders, *before])))
