"""Runs a program on another node of a Ray cluster and carries its standard input and output.

    python ray_step.py NODE_ID PROGRAM ARGUMENT...    below a keeper that is a job of the cluster
    python ray_step.py --nodes COUNT                  so many nodes as JSON, that of this process first

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
import time
from typing import Any

_CHUNK = 1 << 16
_LOST = 1
_APPEAR_S = 60.0


def _connect() -> Any:
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    # Ray would take the address that the node's session folder has cached, which nodes with one /tmp share.
    host, _, port = address.rpartition(":")
    here: dict[str, str] = {}
    if host:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            here = {"_node_ip_address": probe.getsockname()[0]}
    ray.init(address=address, log_to_driver=False, logging_level="error", **here)
    return ray


def list_nodes(count: int) -> list[dict[str, Any]]:
    """Return so many live nodes, that of this process first, or fewer if no more appear within a minute; `gpus` counts
    those that Ray manages."""
    ray = _connect()
    here, limit = ray.get_runtime_context().get_node_id(), time.monotonic() + _APPEAR_S
    while sum(node["Alive"] for node in ray.nodes()) < count and time.monotonic() < limit:
        time.sleep(0.5)
    found = [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "gpus": int(node["Resources"].get("GPU", 0)),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node["id"] != here, -node["gpus"], node["address"]))[:count]


class _Remote:
    """The actor: one program with pipes."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

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


def run_on(node: str, command: list[str]) -> int:
    """Run a program on a node; return its exit code, or 1 if it was lost with its node."""
    ray = _connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    # The job's place has the room; the actor itself reserves nothing. Writes keep their order beside a waiting read.
    groups = {"input": 1, "output": 1}
    remote = ray.remote(num_cpus=0, concurrency_groups=groups, scheduling_strategy=where)(_Remote).remote(command)
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
    first, *command = sys.argv[1:]
    if first == "--nodes":
        print(json.dumps(list_nodes(int(command[0]))))
        return 0
    return run_on(first, command)


if __name__ == "__main__":
    sys.exit(main())
