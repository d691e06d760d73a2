"""The faults that a run on a cluster must survive in a known state, for stand-in crews and real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import psutil

from benchmarks.cluster.house import House, keeper_of, kill_all, wait_until, words_of
from toprope.records.messages import ENV_FOLDER
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch
from toprope.records.run.specification import Specification
from toprope.settings.clusters import Clusters
from toprope.supervisor.launchers.by_kind import LauncherByKind
from toprope.supervisor.launchers.cluster import ClusterLauncher, request_for
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager

__all__ = [
    "FAULTS", "HEAD_KILLED", "Fault", "Outcome", "add_keeper", "keepers_of", "launcher_for", "left_of",
    "processes_of_run", "suffer",
]  # fmt: skip

_ELSEWHERE = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" keeper.lock && exec "$@"')
"""Before a keeper's command: it sees a lock of its own, as on a node to which flock is not carried."""
_HEADLESS_S = 240.0
"""Ray's daemons look for their head for a minute."""
_PLANTED = """
import json, sys
from pathlib import Path
from toprope.records.run.status import Status
from toprope.supervisor.keeper.program import main
from toprope.supervisor.launchers import claims
read = Status.read
claims.claim = lambda *_, **__: True
Status.read = classmethod(lambda cls, folder: read(folder).model_copy(update={"state": "queued"}))
table = sys.argv.pop(1)
sys.exit(main(programs=json.loads(Path(table).read_text()) if table else None))
"""
"""A keeper that asks nobody if the run has one."""


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to a run that trains, and the states in which it may end."""

    strike: Callable[[House, RunManager, RunFolder], object]
    ends: frozenset[str]
    mends: bool = False
    """The house has to be mended afterwards."""


@dataclass
class Outcome:
    """The end of a run after a fault."""

    state: str
    reason: str
    seconds: float
    left: list[str] = field(default_factory=list)
    """Command lines of processes that were left."""


def launcher_for(house: House, command: tuple[str, ...] | None = None) -> LauncherByKind:
    """Return a launcher whose only cluster is the house.

    Args:
        command: argv of the keeper before its own arguments; the real one when None.
    """
    clusters = Clusters(named={"house": house.cluster})
    cluster = ClusterLauncher(lambda: clusters, lambda _: house.engine, command=command)
    return LauncherByKind(LocalLauncher(), cluster)


FAULTS: Mapping[str, Fault] = {
    "stop order": Fault(lambda house, runs, folder: runs.stop(folder.run_id), frozenset({"stopped"})),
    "engine's stop": Fault(lambda house, runs, folder: house.cancel(folder), frozenset({"stopped"})),
    "keeper killed": Fault(lambda house, runs, folder: keeper_of(folder).kill(), frozenset({"lost"})),
    "engine's process killed": Fault(
        lambda house, runs, folder: house.kill_engine_process(folder), frozenset({"lost"})
    ),
    "daemon killed": Fault(lambda house, runs, folder: house.kill_daemon(folder), frozenset({"lost"}), mends=True),
    "node killed": Fault(lambda house, runs, folder: house.kill_node(folder), frozenset({"lost"}), mends=True),
}


def _lose_head(house: House, runs: RunManager, folder: RunFolder) -> None:
    """Kill the node of the head and wait until Ray's daemons have ended the crew on the others. Nothing is known of the
    run until there is another head."""
    kill_all(house.net.processes("head"))
    wait_until(lambda: not processes_of_run(folder), "the end of the crew", _HEADLESS_S)
    house.mend()


HEAD_KILLED = Fault(_lose_head, frozenset({"lost"}))
"""Ray is lost with its head. Slurm's jobs go on without their controller."""


def processes_of_run(folder: RunFolder) -> list[psutil.Process]:
    """Return keeper, guards and members of a run, on all nodes that share /proc with this process."""
    found, text = [], str(folder.path)
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            words = process.cmdline()
            if any(text in word for word in words) or process.environ().get(ENV_FOLDER) == text:
                found.append(process)
        except psutil.Error:
            continue
    return found


def suffer(house: House, runs: RunManager, folder: RunFolder, fault: Fault, limit_s: float = 90.0) -> Outcome:
    """Strike a run that trains, follow it as a front end does, and return its end."""
    begun = time.monotonic()
    fault.strike(house, runs, folder)
    status = anyio.run(runs.wait_end, folder.run_id, limit_s)
    seconds = time.monotonic() - begun
    left = left_of(folder)
    if fault.mends:
        house.mend()
    return Outcome(status.state if status.ended_at is not None else f"{status.state}?", status.reason, seconds, left)


def left_of(folder: RunFolder) -> list[str]:
    """Return the command lines of processes of a run that are there after ten seconds, and kill them."""
    limit = time.monotonic() + 10
    while (left := processes_of_run(folder)) and time.monotonic() < limit:
        time.sleep(0.05)
    words = [" ".join(words)[:200] for process in left if (words := words_of(process))]
    kill_all(left)
    return words


def keepers_of(folder: RunFolder) -> int:
    """Return the number of the run's keepers that an engine started and that have started something themselves."""
    found = 0
    for process in processes_of_run(folder):
        try:
            words = process.cmdline()
            # A shell that an engine puts above a keeper has its words too, and short-lived children of its own.
            python = bool(words) and Path(words[0]).name.startswith("python")
            below = process.children() if python and "--foreground" in words else []
            # A process that an engine puts above a keeper has the same words, and the keeper below it. One that ends
            # or changes its program has none for a moment.
            started = [one.cmdline() for one in below]
            found += any(started) and not any("--foreground" in one for one in started)
        except psutil.NoSuchProcess:
            continue
    return found


def add_keeper(house: House, folder: RunFolder, command: Sequence[str] = (), *, planted: bool = False) -> int:
    """Have the engine start a second keeper of a run, with a lock of its own; return the number of keepers once the
    second one has left or has started something.

    Args:
        command: argv of the run's keeper before its own arguments; the real one when empty.
        planted: The second keeper does not look for another one.

    Raises:
        TimeoutError: It did neither.
    """
    launch, specification = Launch.read(folder), Specification.read(folder)
    assert launch is not None
    lock = folder.path / "elsewhere.lock"
    lock.touch()
    if planted:
        command = [house.cluster.python, "-P", "-c", _PLANTED, command[-1] if command else ""]
    request = request_for(folder, specification, house.cluster, launch.attempt, command or None)
    name = f"{launch.name}.{'planted' if planted else 'second'}"
    second = replace(request, name=name, command=[*_ELSEWHERE, str(lock), *request.command])
    before, count = _refusals(folder), 1

    def decided() -> bool:
        nonlocal count
        count = keepers_of(folder)
        return count > 1 or _refusals(folder) > before

    house.engine.submit(second)
    wait_until(decided, "the second keeper")
    if count == 1:  # Slurm would keep the nodes of a job whose first node is then killed
        wait_until(lambda: (job := house.engine.jobs().get(name)) is None or job.phase == "ended", "its job's end")
    return count


def _refusals(folder: RunFolder) -> int:
    return folder.log("keeper").read_text(errors="replace").count("was claimed before")
