"""Runs a program on another node of a Ray cluster and carries its standard input and output.

    python ray_step.py NODE_ID GPUS PROGRAM ARGUMENT...    below a keeper that is a job of the cluster
    python ray_step.py --nodes COUNT ROOM                  so many nodes as JSON, that of this process first

The second form reserves the room, given as JSON, on each of the other nodes until its input ends. It leaves its parent
at once, because a keeper kills children that it does not know. The program sees the GPUs with these ids and no others;
Ray leaves an actor without GPUs all that its node has.

It needs nothing but Ray, whose interpreter may be another than the keeper's. The program runs below an actor, and Ray
kills it with the actor: when this process, or its node, goes. What must outlive that for a moment, the guard of a
member, leaves the actor's processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

_CHUNK = 1 << 16
_LOST = 1
_APPEAR_S = 60.0


def _connect() -> Any:
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    # Ray would take the address that the node's session folder has cached, which nodes with one /tmp share.
    host, _, port = address.rpartition(":")
    options: dict[str, str] = {}
    if host:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            options = {"_node_ip_address": probe.getsockname()[0]}
    ray.init(address=address, log_to_driver=False, logging_level="error", **options)
    return ray


class _Holder:
    """The actor that holds the GPUs of one node."""

    def gpus(self) -> list[str]:
        """Return their ids on the node."""
        import ray

        return [str(number) for number in ray.get_gpu_ids()]


def reserve_nodes(count: int, room: dict[str, float]) -> int:
    """Print so many nodes as JSON, that of this process first, and hold room on each of the others until this process's
    input ends; print an empty list and return 1 if Ray does not give it within a minute."""
    ray = _connect()
    from ray.util import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    this_node = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    # The first bundle keeps the others off this node, whose room belongs to the job.
    group = placement_group([{f"node:{addresses[this_node]}": 0.001}, *[room] * (count - 1)], strategy="STRICT_SPREAD")
    if not group.wait(_APPEAR_S):
        resources = [{name: node["Resources"].get(name, 0) for name in room} for node in ray.nodes() if node["Alive"]]
        print(f"no {count - 1} further nodes have room for {room} now; the nodes have {resources}", file=sys.stderr)
        print("[]", flush=True)
        return _LOST
    addresses |= {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes, holders = [{"address": addresses[this_node]}], []
    for index, node in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
        if not index:
            continue
        gpus: list[str] = []
        if "GPU" in room:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": 0, "num_gpus": room["GPU"], "scheduling_strategy": strategy}
            holders.append(ray.remote(**options)(_Holder).remote())
            gpus = ray.get(holders[-1].gpus.remote(), timeout=_APPEAR_S)
        nodes.append({"address": addresses[node], "id": node, "gpus": gpus})
    print(json.dumps(nodes), flush=True)
    sys.stdin.read()
    return 0


class _Remote:
    """The actor: one program with pipes."""

    def __init__(self, command: list[str], gpus: str) -> None:
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)

    def write(self, data: bytes) -> None:
        """Write to the program; no data: end its input."""
        assert self._process.stdin is not None
        try:
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()
        except OSError:
            pass  # it has ended, which `read` tells

    def read(self) -> bytes:
        """Return what the program printed since the last call, or wait for it; empty at the end."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _CHUNK)

    def wait(self) -> int:
        """Return the program's exit code."""
        return self._process.wait()


def run_on(node: str, gpus: str, command: list[str]) -> int:
    """Run a program on a node; return its exit code, or 1 if it was lost with its node."""
    ray = _connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    # The room is reserved by `reserve_nodes`, not by the actor. Writes keep their order beside a waiting read.
    groups = {"input": 1, "output": 1}
    actor_class = ray.remote(num_cpus=0, concurrency_groups=groups, scheduling_strategy=strategy)(_Remote)
    remote = actor_class.remote(command, gpus)
    write, read = (
        call.options(concurrency_group=group) for call, group in ((remote.write, "input"), (remote.read, "output"))
    )

    def carry_input() -> None:
        while data := os.read(0, _CHUNK):
            write.remote(data)
        write.remote(b"")

    threading.Thread(target=carry_input, daemon=True).start()
    try:
        while data := ray.get(read.remote()):
            while data:
                data = data[os.write(1, data) :]
        return int(ray.get(remote.wait.remote()))
    except ray.exceptions.RayError as error:
        print(f"the actor on node {node} was lost: {error!r}"[:500], file=sys.stderr)
        return _LOST


def main() -> int:
    """Run the program; return its exit code."""
    first, second, *command = sys.argv[1:]
    if first == "--nodes":
        return 0 if os.fork() else reserve_nodes(int(second), json.loads(command[0]))
    return run_on(first, second, command)


if __name__ == "__main__":
    sys.exit(main())
