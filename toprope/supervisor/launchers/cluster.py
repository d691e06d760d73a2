"""Submits keepers as jobs to an engine, and judges by folder and engine together if a run is alive.

A run is alive if its lock is held, if its keeper gave a sign of life lately, or if the engine says that its job waits
or runs. It is gone only if none of these holds and the engine answered. Not every shared file system carries flock from
node to node, so no single one of them is proof.

Two truths end with one: if the engine has given a job up while its keeper lives on (a node that the engine lost sight
of), the keeper is ordered to end, and the run is settled once it shows no sign of life.

One attempt never has two keepers: the first to create the file of its claim decides. A keeper claims before it starts
anything; a front end claims a job that waits before it cancels it.

Of a run that is mirrored (`mirror`) this machine has a copy, and its lock belongs to the process that writes it.
Silence proves nothing there: once the engine has no job of it, another one brings what the cluster kept, and the end.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from toprope.atomic import write_json
from toprope.errors import ComponentFailed, InvalidValue, TopropeError
from toprope.extras import MIRRORING, require
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch, wanted
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.records.walls import ENV_WALLS, Walls
from toprope.settings.clusters import Cluster, Clusters, Mirror
from toprope.settings.sections.launcher import LauncherSection
from toprope.supervisor.environment_variables import KEEPER as OWNERS_HOME
from toprope.supervisor.environment_variables import OwnerVariables, far_keeper_variables
from toprope.supervisor.heartbeat import BEATING_S, is_beating
from toprope.supervisor.keeper.containment import ENV_CONTAINMENT, ContainmentSetting
from toprope.supervisor.launchers import KeeperState
from toprope.supervisor.launchers.claims import FRONT_END, begun_at, claim, claimed_by_front_end
from toprope.supervisor.launchers.engine import (
    NEVER_PLACED,
    Engine,
    EngineView,
    Job,
    JobRequest,
    QueueFull,
    Refused,
    Unreachable,
)
from toprope.supervisor.launchers.local import KEEPER, LocalLauncher
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.runs.orders import write_end_order, write_stop_order

_SUBMITTED_WITHIN_S = 180.0
"""Longer than a submission takes, also of the first job of a Ray."""
_LISTED_WITHIN_S = 60.0
"""Seconds after which an engine's answer lists a job whose keeper has begun; older ones are not used."""
_DELIVERY_AGAIN_S = 30.0
"""Seconds before the second job that brings what a cluster kept; doubled for each further one, up to two hours."""
FULL = "mirror-full"
"""Name of the file among those of the crew that shows that the copy of a mirrored run has reached its limit."""
_FAR, _RECEIVER = "toprope.supervisor.mirror.far", "toprope.supervisor.mirror.receiver"


class ClusterLauncher:
    """Starts keepers as jobs on the owner's clusters. See `Launcher`.

    Args:
        clusters: Returns the owner's clusters; asked at every submission and whenever a cluster is met first.
        engines: Makes the engine of a cluster.
        contained: Returns the owner's `containment` setting, which is tried on the node.
        walls: Returns the owner's decisions about the walls around workers.
        command: The keeper's argv before its own arguments, in place of the cluster's interpreter and our module.
    """

    def __init__(
        self,
        clusters: Callable[[], Clusters],
        engines: Callable[[Cluster], Engine],
        contained: Callable[[], ContainmentSetting] = lambda: "auto",
        walls: Callable[[], Walls] = Walls,
        command: Sequence[str] | None = None,
    ) -> None:
        self._command = command
        self._clusters, self._make_engine, self._contained, self._walls = clusters, engines, contained, walls
        self._views: dict[Cluster, EngineView] = {}
        self._receivers = LocalLauncher((*KEEPER[:-1], _RECEIVER), log="mirror")

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """See `Launcher.submit`. The caller holds the run's lock, so nobody else submits this attempt."""
        specification, attempt = Specification.read(folder), Status.read(folder).attempt
        section = specification.config.launcher
        name, cluster = self._clusters().chosen(section)
        former = Launch.read(folder)
        if former is not None and former.attempt == attempt:
            return
        if cluster.mirror is not None:
            require("A run on a cluster that shares no folder", *MIRRORING)
            cluster.mirror.key()  # refuses a key that cannot be used
        now = time.time()
        launch = Launch(
            kind=cluster.kind,
            cluster=name,
            network=cluster.network,
            nodes=section.nodes,
            attempt=attempt,
            name=f"{folder.run_id}.{attempt}",
            submitted_at=now,
            deadline=now + _SUBMITTED_WITHIN_S,
            mirror="" if cluster.mirror is None else f"{cluster.mirror.host}:{free_port(cluster.mirror)}",
        )
        variables_path = folder.path / variables_name(attempt)
        decisions = {ENV_CONTAINMENT: self._contained(), ENV_WALLS: self._walls().encode()}
        if launch.mirror:  # the cluster has no home of the owner
            variables = {component: values for component, values in variables.items() if component != OWNERS_HOME}
        write_json(variables_path, far_keeper_variables(variables) | decisions)
        launch.write(folder)
        view = self._view(cluster)
        try:
            view.engine.submit(request_for(folder, specification, cluster, attempt, self._command, launch))
        except Refused:
            variables_path.unlink(missing_ok=True)
            launch.model_copy(update={"deadline": 0.0}).write(folder)  # a resume need not wait for the job
            raise
        except Unreachable:
            pass  # it may have the job; if not, the run is lost after the deadline
        finally:
            view.forget()
        if launch.mirror:
            try:
                self._receive(folder, lock)
            except (ComponentFailed, OSError):
                self._cancel(launch)  # nobody would answer it
                raise

    def _receive(self, folder: RunFolder, lock: RunLock | None = None) -> None:
        """Start the process that writes the copy of a mirrored run, unless it runs."""
        home = {"TOPROPE_HOME": str(folder.path.parent.parent), "TOPROPE_CONFIG": str(self._clusters().path.parent)}
        self._receivers.submit(folder, {OWNERS_HOME: home}, lock)

    def status(self, folder: RunFolder, *, locked: bool = False) -> KeeperState:
        """See `Launcher.status`."""
        launch = Launch.read(folder)
        mirrored = launch is not None and bool(launch.mirror)
        alive = (not locked and not mirrored and is_held(folder.lock)) or is_beating(folder)
        if launch is None or claimed_by_front_end(folder, launch.attempt):
            if launch is not None and locked:
                self._cancel_waiting(launch)  # the keeper of a sweep claims its members' jobs and asks no engine
            return KeeperState("alive" if alive else "gone", "It was stopped before its job began.")
        if (
            mirrored
            and not locked
            and not is_held(folder.lock)
            and can_listen("", int(launch.mirror.rpartition(":")[2]))
        ):
            with suppress(TopropeError, OSError):  # its log has the reason; the next look tries again
                self._receive(folder)
        try:
            title, job = self._look(launch)
        except Unreachable as error:
            return KeeperState("alive" if alive else "unknown", f"Nothing is known of its job: {error}")
        begun = None if alive or launch.delivery else begun_at(folder, launch.attempt)
        is_over = begun is not None and time.time() - begun > _LISTED_WITHIN_S  # its engine lost it, as Ray's head may
        if job is None and time.time() < launch.deadline and not is_over:
            return KeeperState("alive", f"It is being submitted to {title}.")
        if job is not None and (job.phase in ("waiting", "running") or (job.phase == "ending" and alive)):
            silent = mirrored and not alive and job.phase == "running"
            note = f"Its cluster has not been heard of for {BEATING_S:g} s; what is shown is old." if silent else ""
            if not silent and (folder.crew / FULL).exists():
                note = "The copy here has reached mirror.most_mb; files beyond it stay on the cluster."
            return KeeperState("alive", f"{title}: {job.told}" if job.told else note)
        reason = (
            f"{title} ended its job {job.handle}: {job.told or job.word}." if job else f"{title} knows no job of it."
        )
        if alive and not locked:
            write_end_order(folder, launch.attempt, reason)
        has_failed = job is not None and job.word == "FAILED" and NEVER_PLACED not in job.told
        if has_failed and not alive and not mirrored and begun_at(folder, launch.attempt) is None:
            reason += (
                " Its keeper never began: perhaps the node lacks this home or the interpreter. "
                f"`toprope doctor --cluster {launch.cluster}` tells the owner more."
            )
        if alive or not mirrored:
            return KeeperState("alive" if alive else "gone", reason)
        return self._deliver(folder, launch, reason, locked=locked)

    def _deliver(self, folder: RunFolder, launch: Launch, reason: str, *, locked: bool) -> KeeperState:
        """Have a job bring what the cluster kept of a run whose job is gone, unless everything has arrived."""
        has_ended = Status.read(folder).ended_at is not None
        if (has_ended and not wanted(folder)) or (not has_ended and claim(folder, launch.attempt, by=FRONT_END)):
            return KeeperState("gone", reason)  # a job that never began left nothing
        now, number = time.time(), launch.delivery + 1
        if not locked and (number == 1 or now - launch.submitted_at >= _DELIVERY_AGAIN_S * 2 ** min(number, 8)):
            name, deadline = f"{folder.run_id}.{launch.attempt}.{number}", now + _SUBMITTED_WITHIN_S
            update = {"name": name, "delivery": number, "submitted_at": now, "deadline": deadline}
            launch = launch.model_copy(update=update)
            launch.write(folder)
            try:
                cluster, specification = self._cluster(launch), Specification.read(folder)
                request = request_for(folder, specification, cluster, launch.attempt, self._command, launch)
                self._view(cluster).engine.submit(request)
                self._view(cluster).forget()
            except TopropeError as error:
                return KeeperState("unknown", f"{reason} No job could be started that brings the rest of it: {error}")
        return KeeperState("unknown", f"{reason} Another job brings what the cluster kept of the run.")

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """See `Launcher.stop`. A job that waits is cancelled, so that its run ends at once."""
        write_stop_order(folder, grace_s)
        launch = Launch.read(folder)
        if launch is None or (is_held(folder.lock) and not launch.mirror):
            return
        if not claim(folder, launch.attempt, by=FRONT_END):
            return
        self._cancel(launch)

    def _cancel(self, launch: Launch) -> None:
        with suppress(TopropeError):  # nothing lets the job do anything when it starts
            view = self._view(self._cluster(launch))
            view.engine.cancel(launch.name)
            view.forget()

    def _cancel_waiting(self, launch: Launch) -> None:
        with suppress(Unreachable):
            _, job = self._look(launch)
            if job is None or job.phase == "waiting":
                self._cancel(launch)

    def _look(self, launch: Launch) -> tuple[str, Job | None]:
        try:
            view = self._view(self._cluster(launch))
        except InvalidValue as error:
            raise Unreachable(str(error)) from None
        return view.engine.title, view.job(launch.name)

    def _cluster(self, launch: Launch) -> Cluster:
        clusters = self._clusters()
        if launch.cluster not in clusters.named:
            raise InvalidValue(f"{clusters.path} has no cluster {launch.cluster!r}.")
        return clusters.named[launch.cluster]

    def _view(self, cluster: Cluster) -> EngineView:
        if cluster not in self._views:
            self._views[cluster] = EngineView(self._make_engine(cluster))
        return self._views[cluster]


def request_for(
    folder: RunFolder,
    specification: Specification,
    cluster: Cluster,
    attempt: int = 1,
    command: Sequence[str] | None = None,
    launch: Launch | None = None,
) -> JobRequest:
    """Return the job of a run: its keeper, by the cluster's interpreter or by `command`. No secret is in it.

    Args:
        launch: Tells the way between a mirrored run and the server; None for a preview.
    """
    python = cluster.python or sys.executable
    name = f"{folder.run_id}.{attempt}" if launch is None else launch.name
    section = specification.config.launcher
    if cluster.mirror is None:
        keeper = command or [python, *KEEPER[1:]]
        command = [*keeper, str(folder.path), "--foreground", "--variables", variables_name(attempt)]
        return JobRequest(name, command, folder.path, folder.log("keeper"), section)
    if launch is not None and launch.delivery:  # a copy needs little room
        keys = ("kind", "partition", "account", "features")
        section = LauncherSection.model_validate({key: getattr(section, key) for key in keys})
    home = Path(cluster.mirror.home)
    options = [str(home), name, "" if launch is None else launch.mirror, cluster.mirror.key_file]
    network = ["trusted"] if cluster.network == "trusted" else []
    command = [*(command or [python, *KEEPER[1:-1], _FAR]), *options, *network]
    return JobRequest(name, command, home, home / "jobs.log", section)


def variables_name(attempt: int) -> str:
    """Return the name of the file with an attempt's variables. A hidden file is removed at the end of the attempt, also
    if its job never starts."""
    return f".variables-{attempt}.json"


def free_port(mirror: Mirror) -> int:
    """Return a free port of those that the nodes of a cluster can reach, by chance: the first one may be another run's
    whose receiver was lost, or of a run that is submitted at the same time.

    Raises:
        QueueFull: All are taken.
    """
    ports = mirror.port_range()
    for port in random.sample(ports, len(ports)):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("", port))
            return int(trial.getsockname()[1])
    raise QueueFull(f"All ports of the cluster's mirror ({mirror.ports}) are taken.", hint="Give it more ports.")


def can_listen(host: str, port: int) -> bool:
    """True if a process of this machine can listen there; the host may be empty."""
    with socket.socket() as trial, suppress(OSError):
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not count
        trial.bind((host, port))
        return True
    return False
