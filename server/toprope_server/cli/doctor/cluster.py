"""`toprope doctor --cluster NAME`: ask a cluster's engine, and prove by a small job what a run needs there."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import toprope
from toprope.errors import TopropeError, visible
from toprope.extras import MIRRORING, require
from toprope.records.run.folder import read_json
from toprope.settings.clusters import Cluster
from toprope.settings.owner import Home
from toprope.settings.sections.launcher import LauncherSection
from toprope.supervisor.launchers.by_kind import engine_of
from toprope.supervisor.launchers.engine import Engine, JobRequest
from toprope.supervisor.launchers.probe import FACTS, HELD
from toprope.supervisor.lock import RunLock
from toprope.supervisor.mirror.wire import run_key
from toprope_server.cli.doctor.checks import Finding

LIMIT_S = 300.0
_SKEW_S = 5.0
_FILE_S = 5.0
"""The longest that a file takes through a shared file system after the end of its job."""
_LOOK_EVERY_S = 0.5


def check_cluster(
    home: Home,
    name: str,
    *,
    engine: Callable[[Cluster], Engine] = engine_of,
    limit_s: float = LIMIT_S,
    show: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """Prove each requirement of a cluster.

    Args:
        name: As clusters.yaml names it.
        engine: Makes the engine.
        limit_s: The longest that the job may wait and run.
        show: Called with what is being waited for.
    """
    try:
        clusters = home.clusters()
        kind = clusters.named[name].kind if name in clusters.named else "slurm"
        _, cluster = clusters.chosen(LauncherSection(kind=kind, cluster=name))
        cluster_engine = engine(cluster)
        count = len(cluster_engine.jobs())
    except TopropeError as error:
        yield Finding(name, "broken", error.message, error.hint or "Fix clusters.yaml, or the way to the cluster.")
        return
    yield Finding(name, "ok", f"{cluster_engine.title} answers; it knows {count} jobs of yours")
    home.ensure().runs.mkdir(mode=0o700, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=home.runs))
    lock = RunLock.acquire(folder / HELD)
    try:
        yield from _prove(cluster_engine, cluster, name, folder, limit_s, show)
    except TopropeError as error:
        yield Finding(name, "broken", error.message, error.hint)
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _prove(
    engine: Engine, cluster: Cluster, name: str, folder: Path, limit_s: float, show: Callable[[str], None]
) -> Iterator[Finding]:
    """Take the findings of the job by the way that a run's files would take."""
    mirror, job, log = cluster.mirror, f"toprope-doctor-{folder.name.rpartition('-')[2]}", folder / "job.log"
    command = [cluster.python or sys.executable, "-P", "-m", "toprope.supervisor.launchers.probe"]
    section = LauncherSection(kind=cluster.kind)
    if mirror is None:
        request = JobRequest(job, [*command, str(folder)], folder, log, section)
        remedy = f"The node needs {command[0]} with Toprope, and {folder.parent} under the same path."
        yield from _probe(engine, request, name, folder, limit_s, show, remedy)
        return
    require("A check of a cluster that shares no folder", *MIRRORING)
    from toprope.supervisor.mirror.receiver import taking_facts

    trusted, home = cluster.network == "trusted", Path(mirror.home)
    with taking_facts(mirror, run_key(mirror.key(), job, 0), folder / FACTS, trusted=trusted) as server:
        arguments = [str(home), job, server, mirror.key_file, *(["trusted"] if trusted else [])]
        request = JobRequest(job, [*command, *arguments], home, home / "jobs.log", section)
        remedy = (
            f"The node needs {command[0]} with Toprope, the folder {home}, the key file {mirror.key_file} as it is "
            f"here, and a way to {server}; {request.log} there says which of them it lacks."
        )
        yield from _probe(engine, request, name, folder, limit_s, show, remedy, server)


def _probe(
    engine: Engine,
    request: JobRequest,
    name: str,
    folder: Path,
    limit_s: float,
    show: Callable[[str], None],
    remedy: str,
    server: str = "",
) -> Iterator[Finding]:
    log, job_name = request.log, request.name
    engine.submit(request)
    limit, ended_at = time.monotonic() + limit_s, None
    while not (folder / FACTS).exists():
        job = engine.jobs().get(job_name)
        job_state = job.told or job.word if job else "unknown to the engine"
        show(f"The job waits: {job_state} ...")
        if job is not None and job.phase == "ended":
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > _FILE_S:
                said = _last_line(log)
                reason = f"the job ended without an answer ({job_state})"
                yield Finding(name, "broken", f"{reason}: {said}" if said else reason, remedy)
                return
        if time.monotonic() > limit:
            engine.cancel(job_name)
            yield Finding(name, "broken", f"the job did not run within {limit_s:g} s: {job_state}", "Ask again later.")
            return
        time.sleep(_LOOK_EVERY_S)
    if said := _last_line(log):
        text = f"besides its answer the job wrote: {said}"
        yield Finding(name, "warning", text, "If a line of `setup` failed, mend it. No profile is read before it.")
    yield from _judge(name, read_json(folder / FACTS), server)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return visible(lines[-1], 200) if lines else ""


def _judge(name: str, facts: dict[str, Any], server: str) -> Iterator[Finding]:
    node = f"{name}, node {facts['node']}"
    resources = f"{facts['processors']} processors, {facts['memory_bytes'] / 1e9:.0f} GB, {len(facts['gpus'])} GPUs"
    reach = f"reaches {server} with the key" if server else "sees the home under its path"
    yield Finding(node, "ok", f"runs jobs, and {reach}; {resources}")
    if facts["version"] != toprope.__version__:
        yield Finding(
            node,
            "broken",
            f"its Toprope is {facts['version']}, here is {toprope.__version__}",
            "Install the same version, or set the cluster's `python`.",
        )
    if facts["missing"]:
        missing_packages = ", ".join(facts["missing"])
        yield Finding(node, "broken", f"its interpreter lacks {missing_packages}", "Install toprope[train] there.")
    if not facts["lock_carried"] and not server:
        yield Finding(
            node,
            "note",
            "locks do not reach it from here; runs are told apart by claims and signs of life, which takes 10 s longer",
        )
    if abs(facts["clock_ahead_s"]) > _SKEW_S:
        yield Finding(
            node,
            "warning",
            f"its clock differs by {facts['clock_ahead_s']:+.0f} s from that of the shared storage",
            "Synchronise the clocks; times of events are the node's.",
        )
    if not facts["pidfd"]:
        yield Finding(
            node,
            "broken",
            "it refuses pidfd_open(2), without which a keeper would not notice the end of its engine",
            "Use Linux 5.3 or newer, and containers whose seccomp profile allows that call.",
        )
    if facts["containment"] != "bubblewrap":
        yield Finding(node, "note", f"guard without pid namespaces: {facts['containment_why']}")
    if facts["parent"] in ("sh", "bash", "dash"):
        yield Finding(
            node,
            "broken",
            f"a shell ({facts['parent']}) stays above the keeper, so the loss of its engine would go unnoticed",
            "Remove what keeps `exec` from replacing it, such as a trap in `setup`.",
        )
