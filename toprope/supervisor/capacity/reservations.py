"""Who has which CPU threads and GPUs of this machine, and who waits for them, first come first served.

Each keeper looks after its own run: it puts an entry into a folder beside the runs and goes on when the entry is
granted. Nobody keeps the books. All of them decide under one lock by the same rule, and an entry counts only while its
run's lock is held, so whatever kills a keeper frees what it had as soon as its crew is gone, and any number of servers
cannot give the same thing twice.

    runs/.reservations/
      lock            held by whoever decides, for a moment
      .machine.json   what there is to give, as the last front end that started a run saw it
      <run_id>.json   one entry a run, until its end

The rule. A run on a GPU has one to itself: trainer and inference share it, and memory has no room for a second run's. A
training run on the CPU takes the threads of its trainer and its inference, or all there are if it would need more. Test
runs are short, so they do not queue behind training: on the CPU they share the machine with it, and take turns among
themselves only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound, TooNew
from toprope.records.run.folder import RUN_ID, read_json
from toprope.records.run.specification import Specification
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.programs import members_of

__all__ = ["Granted", "Machine", "Reservations", "Waiting"]

RESERVATION_VERSION = 1
_FOLDER = ".reservations"
_DECIDE_WITHIN_S = 0.2
_ANNOUNCE_WITHIN_S = 2.0
_NAMED = 3
_MACHINE = ".machine.json"
_TORCH = frozenset({"trainer", "inference"})
"""The members that compute; the others wait for them most of the time."""
_GPU_NODE = re.compile(r"^nvidia\d+$")

Pool = Literal["training", "tests", "gpu", "light"]


class Machine(BaseModel):
    """What this machine has to give to runs: CPU threads, and GPUs by the ids of CUDA_VISIBLE_DEVICES."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    threads: int = Field(ge=1)
    gpus: tuple[str, ...] = ()
    disk_floor: int | None = None
    """Bytes that runs leave free on their disk; None: the owner has not said."""
    version: int = RESERVATION_VERSION

    @classmethod
    def detect(
        cls,
        threads: int | None = None,
        gpus: Sequence[str] | None = None,
        visible: str | None = None,
        disk_floor: int | None = None,
    ) -> Machine:
        """The machine as it is, or as the owner limits it.

        Args:
            threads: The owner's limit; None: the CPUs that this process may use.
            gpus: The owner's list of ids; None: those in `visible`, else every one that the driver shows.
            visible: CUDA_VISIBLE_DEVICES where it is set.
            disk_floor: The owner's, in bytes.
        """
        if threads is None:
            usable = getattr(os, "sched_getaffinity", None)
            threads = len(usable(0)) if usable else os.cpu_count() or 1
        if gpus is None and visible is not None:
            gpus = [name for name in (part.strip() for part in visible.split(",")) if name and name != "-1"]
        if gpus is None:
            try:
                nodes = [name for name in os.listdir("/dev") if _GPU_NODE.match(name)]
            except OSError:
                nodes = []
            # CUDA counts what it may use from 0, whatever the numbers of the nodes.
            gpus = [str(number) for number in range(len(nodes))]
        return cls(threads=threads, gpus=tuple(dict.fromkeys(gpus)), disk_floor=disk_floor)


class _Entry(BaseModel):
    """A run's entry. `turn` is its place in the order of arrival."""

    model_config = ConfigDict(extra="ignore")

    version: int = RESERVATION_VERSION
    turn: int
    pool: Pool
    threads: int
    gpus: tuple[str, ...] = ()
    granted: bool = False


@dataclass(frozen=True)
class Granted:
    """What a run has. `gpus`: the ids that it may see; none: it is to see no GPU; None: there is nothing to choose."""

    threads: int
    gpus: tuple[str, ...] | None


@dataclass(frozen=True)
class Waiting:
    """Why a run has to wait, for people, and the runs that have to end or go on before it can."""

    reason: str
    behind: tuple[str, ...]


class Reservations:
    """The reservations of one folder of runs. Any number of processes may have one of these."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._path = runs / _FOLDER
        self._seen: tuple[int, tuple[str, ...]] | None = None

    def announce(self, machine: Machine) -> None:
        """Notes what there is to give. Runs that wait take it into account at once."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._machine() == machine:
            return
        lock = RunLock.acquire(self._path / "lock", _ANNOUNCE_WITHIN_S)
        if lock is not None:
            try:
                write_json(self._path / _MACHINE, machine.model_dump(mode="json"))
            finally:
                lock.release()

    def machine(self) -> Machine | None:
        """What was announced last; None: nothing that can be read."""
        return self._machine()

    def claim(self, specification: Specification, *, anew: bool = False) -> Granted | Waiting | None:
        """Asks for what a run needs; the caller holds the run's lock.

        Args:
            specification: The run's.
            anew: Line up at the end, whatever an earlier attempt left.

        Returns:
            What it has from now on, or why it has to wait; None when nothing has changed since the last call, or others
            are deciding right now.

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
                self._seen = self._path.stat().st_mtime_ns, answer.behind
            return answer
        finally:
            lock.release()

    def leave(self, run_id: str) -> None:
        """Gives back what a run has, or takes it out of the queue. Harmless where there is nothing."""
        self._entry(run_id).unlink(missing_ok=True)

    def _unchanged(self) -> bool:
        """Whether a run that waited still does: entries come and go by name, and those before it live."""
        if self._seen is None:
            return False
        stamp, behind = self._seen
        try:
            now = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        return now == stamp and all(is_held(self._runs / run_id / "keeper.lock") for run_id in behind)

    def _decide(self, specification: Specification, anew: bool) -> Granted | Waiting:
        run_id, machine, entries = specification.run_id, self._machine() or Machine.detect(), self._live()
        former = entries.pop(run_id, None)
        if former is None or anew:
            turn = 1 + max((entry.turn for entry in entries.values()), default=0)
            mine = _needs(specification, machine, turn)
        else:
            mine = former
        beside = {other: entry for other, entry in entries.items() if entry.pool == mine.pool}
        if not mine.granted and not any(entry.turn < mine.turn for entry in beside.values() if not entry.granted):
            mine = _given(mine, machine, [entry for entry in beside.values() if entry.granted])
        if mine != former:
            write_json(self._entry(run_id), mine.model_dump(mode="json"))
        if not mine.granted:
            return _waits(mine, machine, beside)
        return Granted(mine.threads, mine.gpus if machine.gpus else None)

    def _live(self) -> dict[str, _Entry]:
        """The entries that count, by run. Those of runs that nobody keeps any more are removed."""
        found = {}
        for path in self._path.iterdir():
            run_id = path.stem
            if path.name in (_MACHINE, "lock"):
                continue
            try:
                if RUN_ID.fullmatch(run_id) and is_held(self._runs / run_id / "keeper.lock"):
                    found[run_id] = _Entry.model_validate(read_json(path, RESERVATION_VERSION))
                    continue
            except NotFound:
                continue
            except TooNew:
                raise  # what a newer version's run has is not known here, and is not to be given twice
            except (Corrupt, ValidationError):
                pass
            # We hold the lock, so a file with another name is what somebody left who was killed while writing.
            path.unlink(missing_ok=True)
        return found

    def _machine(self) -> Machine | None:
        try:
            return Machine.model_validate(read_json(self._path / _MACHINE, RESERVATION_VERSION))
        except (NotFound, Corrupt, ValidationError):
            return None

    def _entry(self, run_id: str) -> Path:
        return self._path / f"{run_id}.json"


def _needs(specification: Specification, machine: Machine, turn: int) -> _Entry:
    launcher, computing = specification.config.launcher, len(_TORCH & set(members_of(specification)))
    if not computing:
        return _Entry(turn=turn, pool="light", threads=0)
    if machine.gpus and launcher.device != "cpu":
        return _Entry(turn=turn, pool="gpu", threads=0)
    # A run alone is never too large for the machine.
    threads = min(computing * launcher.threads, machine.threads)
    return _Entry(turn=turn, pool="training" if specification.run_kind.trains else "tests", threads=threads)


def _given(mine: _Entry, machine: Machine, others: Sequence[_Entry]) -> _Entry:
    """`mine` with what it needs, if that is there beside what others have."""
    if mine.pool == "gpu":
        taken = {gpu for other in others for gpu in other.gpus}
        free = [gpu for gpu in machine.gpus if gpu not in taken]
        return mine.model_copy(update={"granted": True, "gpus": (free[0],)}) if free else mine
    room = machine.threads - sum(other.threads for other in others)
    # The owner may have lowered the limit while it waited.
    wanted = min(mine.threads, machine.threads)
    return mine.model_copy(update={"granted": True, "threads": wanted}) if wanted <= room else mine


def _waits(mine: _Entry, machine: Machine, beside: dict[str, _Entry]) -> Waiting:
    holders = sorted((run_id for run_id, entry in beside.items() if entry.granted), key=lambda one: beside[one].turn)
    before = [run_id for run_id, entry in beside.items() if not entry.granted and entry.turn < mine.turn]
    if mine.pool == "gpu":
        what = f"a GPU (this machine has {len(machine.gpus)} for runs)"
    else:
        what = f"{mine.threads} CPU thread{'s' if mine.threads > 1 else ''}"
        what += f" (this machine has {machine.threads} for {mine.pool})"
    names = ", ".join(holders[:_NAMED]) + (f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else "")
    reason = f"Waits for {what}"
    if names:
        reason += f"; in use by {names}"
    if before:
        reason += f"; {len(before)} waiting before it" if len(before) > 1 else f"; {before[0]} waits before it"
    return Waiting(f"{reason}.", tuple(sorted([*holders, *before])))
