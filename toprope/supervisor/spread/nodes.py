"""The nodes of a run, and the member that each of them gets.

An engine chooses the nodes of a job when it starts the keeper, so the keeper asks the engine for them. The keeper's own
node is the first. Members reach each other through gates (see `gate`), so the address of a node must be one that the
others can connect to.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from toprope.errors import ComponentFailed
from toprope.records.run.launch import Launch
from toprope.settings.sections.launcher import LauncherSection
from toprope.supervisor.environment_variables import engine_variables
from toprope.supervisor.programs import role_of

ENV_NODES = "TOPROPE_NODES"
"""Names the nodes to a keeper that no engine started: `network`, and `nodes` with the fields of `Node`. No component
gets it."""

Network = Literal["tls", "trusted"]
"""Members reach each other between nodes by TLS with a certificate made for the run, which both sides must show,
or in clear on a network that the owner trusts."""

_SPREAD = frozenset({"api", "inference", "trainer", "environment"})
"""Members that serve others or sample. All others stay with the keeper."""
_AVOID_S = 300.0
"""A node whose connection broke gets no member for so long, if there is another one."""
_ASK_S = 120.0
_ASK_ONCE_S = 5.0
"""A job that ends has half a minute by Slurm's defaults, and needs it for its checkpoint."""


@dataclass(frozen=True)
class Node:
    """A machine that members can run on."""

    name: str
    address: str
    """An IP address or host name at which the other nodes reach it."""
    gpus: int | None = 0
    """GPUs that the engine gave to the run; None: it counts none there, so members see those that the node has."""
    command: tuple[str, ...] = ()
    """Starts the program whose arguments follow on this node and carries its standard input and output; empty on the
    keeper's own node."""

    @property
    def is_far(self) -> bool:
        """Its processes are not descendants of the keeper."""
        return bool(self.command)


@dataclass(frozen=True)
class Share:
    """A member's part of a node."""

    node: Node
    gpus: Sequence[int] | None
    """Its GPUs by their places among those of the run on this node; None: the engine does not count them."""


class Spread:
    """The nodes of one run. The keeper's is the first.

    Args:
        nodes: At least one node.
        network: See `Network`.
        section: The GPUs that trainer and inference need.
        held: Reserves the nodes until it is closed.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        network: Network = "tls",
        section: LauncherSection | None = None,
        held: IO[str] | None = None,
    ) -> None:
        section = section or LauncherSection()
        self.nodes, self.network, self._held = list(nodes), network, held
        trainer = max(section.num_processes, section.resources_of("trainer").gpus)
        inference = max(section.inference_gpus, section.resources_of("inference").gpus)
        self._needs = {"trainer": trainer, "inference": inference}
        self._shares: dict[str, Share] = {}
        self._lost: dict[str, float] = {}

    def close(self) -> None:
        """Give the nodes back, as the end of this process does."""
        if self._held is not None:
            self._held.close()

    def lose(self, node: Node) -> None:
        """Give a node no more members for a while, because the connection to it broke."""
        if node is not self.nodes[0]:
            self._lost[node.name] = time.monotonic()

    def place(self, member: str) -> Share | None:
        """Return the part of a node for a member that starts now; None for members that stay with the keeper.

        Trainer and inference go to nodes with GPUs, two different ones if there are two, else to the first node, and
        stay where they are until their node is lost. Drivers take turns on the other nodes. A lost node's members go
        to the next one.
        """
        role, number = role_of(member), int(member.partition("-")[2] or 1)
        if role not in _SPREAD:
            return None
        alive = [node for node in self.nodes if time.monotonic() - self._lost.get(node.name, -_AVOID_S) >= _AVOID_S]
        if role in ("api", "environment"):
            candidates = (alive[1:] or alive) if role == "environment" else alive[:1]
            node = candidates[(number - 1) % len(candidates)]
            return Share(node, None if node.gpus is None else range(node.gpus))
        if role == "inference" and "trainer" not in self._shares:
            self.place("trainer")
        if role not in self._shares or self._shares[role].node not in alive:
            self._shares[role] = self._share(role, [node for node in alive if node.gpus] or alive[:1])
        return self._shares[role]

    def _share(self, role: str, nodes: Sequence[Node]) -> Share:
        """Return the node on which most of the GPUs that trainer or inference needs are free, and as many of these;
        GPUs of the other one only if none is free, or if inference needs none of its own."""
        other = self._shares.get("inference" if role == "trainer" else "trainer")
        needed = max(1, self._needs[role])

        def taken_on(node: Node) -> Sequence[int]:
            return (other.gpus or ()) if other is not None and other.node is node else ()

        def free(node: Node) -> Sequence[int]:
            return [place for place in range(node.gpus or 0) if place not in taken_on(node)]

        node = max(nodes, key=lambda node: (min(needed, len(free(node))), not taken_on(node)))
        if node.gpus is None:
            return Share(node, None)
        if not self._needs["inference"] and taken_on(node):
            return Share(node, range(node.gpus)[:needed] if role == "trainer" else taken_on(node)[:1])
        gpus = free(node) or range(node.gpus)
        return Share(node, gpus[:needed] if role == "trainer" else gpus[-needed:])


def find_nodes(
    launch: Launch | None, surroundings: Mapping[str, str], section: LauncherSection | None = None
) -> Spread | None:
    """Return the nodes of a run; None if all members run beside the keeper.

    Args:
        launch: The submission of the run's keeper to an engine, if there was one.
        surroundings: The keeper's variables, with those that the engine gave it.
        section: The room that the run needs on each node.

    Raises:
        ComponentFailed: The engine does not tell its nodes, or has no room on them.
    """
    if text := surroundings.get(ENV_NODES):
        listing = json.loads(text)
        nodes = [Node(**{**node, "command": tuple(node["command"])}) for node in listing["nodes"]]
        return Spread(nodes, listing["network"], section)
    if launch is None or launch.nodes < 2:
        return None
    if launch.kind == "slurm":
        return Spread(_nodes_of_slurm(surroundings), launch.network, section)
    nodes, held = _nodes_of_ray(launch.nodes, section or LauncherSection())
    return Spread(nodes, launch.network, section, held)


def _nodes_of_ray(count: int, section: LauncherSection) -> tuple[list[Node], IO[str]]:
    """Return so many nodes of the Ray cluster that has the keeper as a job, the keeper's first, and the input of
    the process that reserves room on the others until it is closed."""
    python, ray = sys.executable, shutil.which("ray")
    if importlib.util.find_spec("ray") is None:
        if ray is None:
            raise ComponentFailed("The nodes of the run cannot be listed: neither this interpreter nor PATH has Ray.")
        python = str(Path(ray).parent / "python")
    command = (python, "-P", str(Path(__file__).with_name("ray_step.py")))
    room = section.room()
    bundle: dict[str, float] = {"CPU": room.cpus, "GPU": room.gpus, "memory": room.memory_mb * 1_000_000}
    bundle |= dict.fromkeys(section.features, 0.001)
    holder = subprocess.Popen(
        [*command, "--nodes", str(count), json.dumps({name: amount for name, amount in bundle.items() if amount})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=engine_variables(os.environ),
        start_new_session=True,
    )
    holder.wait()
    assert holder.stdin is not None and holder.stdout is not None
    with holder.stdout as answer:
        line = answer.readline() if select.select([answer], [], [], _ASK_S)[0] else ""
    listed = json.loads(line or "[]")
    if not listed:
        holder.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        if not line:
            raise ComponentFailed(
                f"Ray could not be asked for {count - 1} further nodes: its interpreter gave no answer.",
                hint="keeper.log has the reason, if Ray printed one. Start the run again once `ray status` answers.",
            )
        featured = "".join(f", {name}" for name in section.features)
        raise ComponentFailed(
            f"Ray gave no room on {count - 1} further nodes for {room.cpus} CPUs, {room.gpus} GPUs and "
            f"{room.memory_mb} MB{featured} on each.",
            hint="Start it again once Ray has room, or lower launcher.nodes or launcher.resources (see keeper.log).",
        )
    first, *further = listed
    nodes = [Node(name=first["address"], address=first["address"], gpus=room.gpus)]
    for node in further:
        started = (*command, node["id"], ",".join(node["gpus"]))
        nodes.append(Node(name=node["address"], address=node["address"], gpus=len(node["gpus"]), command=started))
    return nodes, holder.stdin


def _nodes_of_slurm(surroundings: Mapping[str, str]) -> list[Node]:
    """Return the nodes of this Slurm job, the keeper's first.

    A step with --overlap shares the resources of the job, which all steps of the crew need at once.
    """
    names = _ask(["scontrol", "show", "hostnames", surroundings.get("SLURM_JOB_NODELIST", "")]).split()
    this_node = surroundings.get("SLURMD_NODENAME", socket.gethostname())
    names.sort(key=lambda name: name != this_node)
    gpus = surroundings.get("SLURM_GPUS_ON_NODE", "")
    nodes = []
    for number, name in enumerate(names):
        description = _ask(["scontrol", "-o", "show", "node", name])
        address, counted = re.search(r"NodeAddr=(\S+)", description), re.search(r"Gres=\S*\bgpu\b", description)
        step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--export=ALL", "--unbuffered")
        nodes.append(
            Node(
                name=name,
                address=address[1] if address else name,
                gpus=int(gpus) if gpus.isdecimal() else 0 if counted else None,
                command=(*step, f"--nodelist={name}") if number else (),
            )
        )
    return nodes


def is_taken_back(surroundings: Mapping[str, str]) -> bool:
    """True if Slurm says that it takes the nodes of this job back; False if somebody cancelled it, or none is known.

    A job that is preempted gets the SIGTERM that scancel sends, and no other signal unless the site has set
    preempt_send_user_signal. While its processes end, its state is COMPLETING in both cases, so the time counts.
    """
    job = surroundings.get("SLURM_JOB_ID")
    try:
        description = _ask(["scontrol", "-o", "show", "job", job], _ASK_ONCE_S) if job else ""
    except ComponentFailed:
        return False
    return re.search(r"\bPreemptTime=\d|\bJobState=(?:PREEMPTED|NODE_FAIL|TIMEOUT|DEADLINE)\b", description) is not None


def _ask(command: Sequence[str], within_s: float = _ASK_S) -> str:
    try:
        variables = engine_variables(os.environ)
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ComponentFailed(f"The nodes of the run cannot be listed: {error}.") from error
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ComponentFailed(f"The nodes of the run cannot be listed: {command[0]}: {last_line[:300]}.")
    return done.stdout
