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
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toprope.errors import ComponentFailed
from toprope.records.run.launch import Launch
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


@dataclass(frozen=True)
class Node:
    """A machine that members can run on."""

    name: str
    address: str
    """An IP address or host name at which the other nodes reach it."""
    gpus: int = 0
    command: tuple[str, ...] = ()
    """Starts the program whose arguments follow on this node and carries its standard input and output; empty on the
    keeper's own node."""

    @property
    def is_far(self) -> bool:
        """Its processes are not descendants of the keeper."""
        return bool(self.command)


class Spread:
    """The nodes of one run. The keeper's is the first.

    Args:
        nodes: At least one node.
        network: See `Network`.
        inference_gpus: GPUs of its own that inference gets on the trainer's node.
    """

    def __init__(self, nodes: Sequence[Node], network: Network = "tls", inference_gpus: int = 0) -> None:
        self.nodes, self.network, self._inference_gpus = list(nodes), network, inference_gpus
        self._lost: dict[str, float] = {}

    def lose(self, node: Node) -> None:
        """Give a node no more members for a while, because the connection to it broke."""
        if node is not self.nodes[0]:
            self._lost[node.name] = time.monotonic()

    def place(self, member: str) -> Node | None:
        """Return the node for a member that starts now; None for members that stay with the keeper.

        Trainer and inference go to nodes with GPUs, two different ones if there are two, else to the first node.
        Drivers take turns on the other nodes. A lost node's members go to the next one.
        """
        role, number = role_of(member), int(member.partition("-")[2] or 1)
        if role not in _SPREAD:
            return None
        alive = [node for node in self.nodes if time.monotonic() - self._lost.get(node.name, -_AVOID_S) >= _AVOID_S]
        if role == "environment":
            others = alive[1:] or alive
            return others[(number - 1) % len(others)]
        with_gpus = [node for node in alive if node.gpus] or alive[:1]
        if role == "api":
            return alive[0]
        return with_gpus[0] if role == "trainer" else with_gpus[:2][-1]

    def inference_gpus(self) -> int | None:
        """Return the GPUs of its own that inference gets on the trainer's node; None if it has another node."""
        return self._inference_gpus if self.place("trainer") is self.place("inference") else None


def share_of_gpus(member: str, gpus: Sequence[str], own: int) -> Sequence[str]:
    """Return the GPUs of its node that a member sees: inference the trainer's first, or its own, which are the last."""
    if member not in ("trainer", "inference") or own >= len(gpus):
        return gpus
    if member == "trainer":
        return gpus[: len(gpus) - own]
    return gpus[-own:] if own else gpus[:1]


def find_nodes(launch: Launch | None, surroundings: Mapping[str, str], inference_gpus: int = 0) -> Spread | None:
    """Return the nodes of a run; None if all members run beside the keeper.

    Args:
        launch: The submission of the run's keeper to an engine, if there was one.
        surroundings: The keeper's variables, with those that the engine gave it.
        inference_gpus: See `Spread`.

    Raises:
        ComponentFailed: The engine does not tell its nodes.
    """
    if text := surroundings.get(ENV_NODES):
        told = json.loads(text)
        nodes = [Node(**{**node, "command": tuple(node["command"])}) for node in told["nodes"]]
        return Spread(nodes, told["network"], inference_gpus)
    if launch is None or launch.nodes < 2:
        return None
    nodes = _nodes_of_slurm(surroundings) if launch.kind == "slurm" else _nodes_of_ray(launch.nodes)
    return Spread(nodes, launch.network, inference_gpus)


def _nodes_of_ray(count: int) -> list[Node]:
    """Return so many nodes of the Ray cluster that has the keeper as a job, the keeper's first."""
    python, ray = sys.executable, shutil.which("ray")
    if importlib.util.find_spec("ray") is None:
        if ray is None:
            raise ComponentFailed("The nodes of the run cannot be listed: neither this interpreter nor PATH has Ray.")
        python = str(Path(ray).parent / "python")
    command = (python, "-P", str(Path(__file__).with_name("ray_step.py")))
    return [
        Node(
            name=one["address"],
            address=one["address"],
            gpus=one["gpus"],
            command=(*command, one["id"]) if number else (),
        )
        for number, one in enumerate(json.loads(_ask([*command, "--nodes", str(count)])))
    ]


def _nodes_of_slurm(surroundings: Mapping[str, str]) -> list[Node]:
    """Return the nodes of this Slurm job, the keeper's first.

    A step with --overlap shares the resources of the job, which all steps of the crew need at once.
    """
    names = _ask(["scontrol", "show", "hostnames", surroundings.get("SLURM_JOB_NODELIST", "")]).split()
    here = surroundings.get("SLURMD_NODENAME", socket.gethostname())
    names.sort(key=lambda name: name != here)
    gpus = surroundings.get("SLURM_GPUS_ON_NODE", "0")
    found = []
    for number, name in enumerate(names):
        shown = _ask(["scontrol", "-o", "show", "node", name])
        address = re.search(r"NodeAddr=(\S+)", shown)
        step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--export=ALL", "--unbuffered")
        found.append(
            Node(
                name=name,
                address=address[1] if address else name,
                gpus=int(gpus) if gpus.isdecimal() else 0,
                command=(*step, f"--nodelist={name}") if number else (),
            )
        )
    return found


def _ask(command: Sequence[str]) -> str:
    try:
        variables = engine_variables(os.environ)
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ComponentFailed(f"The nodes of the run cannot be listed: {error}.") from error
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ComponentFailed(f"The nodes of the run cannot be listed: {command[0]}: {last[:300]}.")
    return asked.stdout
