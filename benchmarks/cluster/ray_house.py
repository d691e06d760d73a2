"""A Ray of a head and two nodes on this machine, from a virtual environment with `ray[default]`: `make bench-ray`.

The benchmark runs real crews through every fault of the matrix, then the demo over both nodes. Ten minutes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.cluster.house import START_S, Daemons, Net, keeper_of, kill_all, missing, name_of, wait_until, words_of
from toprope.errors import TopropeError
from toprope.records.run.folder import RunFolder
from toprope.settings.clusters import Cluster
from toprope.supervisor.launchers.ray import RayEngine

__all__ = ["RAY", "RayHouse", "why_not"]

RAY = Path(os.environ.get("TOPROPE_RAY") or Path.home() / ".cache" / "toprope" / "ray")
"""Virtual environment with Ray. `make test-engines` installs it."""
_HEAD = "head"
_CPUS, _GPUS = 8, 2
"""Of each node, whatever the machine has. The head takes no runs, because everything ends with it."""


def why_not() -> str:
    """Say what is missing for a Ray here; empty if nothing is."""
    return missing() or ("" if (RAY / "bin" / "ray").exists() else f"{RAY} has no Ray")


class RayHouse:
    """See `House`. `ray stop` is never used: it would end every Ray of the machine."""

    nodes, spent, quota = ("n1", "n2"), "", ""

    def __init__(self, folder: Path, python: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(24))
        self._token.chmod(0o600)
        self.net = Net([_HEAD, *self.nodes])
        self._temporary = f"/tmp/{self.net.space('ray')}"  # short, because sockets lie in it
        self._daemons = Daemons(folder / "logs")
        address = f"http://{self.net.addresses[_HEAD]}:8265"
        self.cluster = Cluster(
            kind="ray", python=python, address=address, token_file=str(self._token), network="trusted"
        )
        self.engine = RayEngine(self.cluster)
        try:
            self.mend()
        except BaseException:
            self.close()
            raise

    def mend(self) -> None:
        """See `House.mend`."""
        names = (_HEAD, *self.nodes)
        lost = [name for name in names if "raylet" not in map(name_of, self.net.processes(name))]
        for name in names if _HEAD in lost else lost:  # nodes do not join another head
            kill_all(self.net.processes(name))
            if name in self._daemons.running:
                self._daemons.kill(name)
            address = self.net.addresses[name]
            before = set() if name == _HEAD else self._alive(address)  # the head lists a killed node for a while
            self._start(name)
            if name == _HEAD:
                wait_until(self._answers, "Ray's dashboard", 2 * START_S)
            # Of two nodes with one /tmp that start at the same moment, one does not come up.
            wait_until(partial(self._joined, address, before), f"Ray's node {name}")

    def _start(self, name: str) -> None:
        cpus, gpus = (0, 0) if name == _HEAD else (_CPUS, _GPUS)
        room = [f"--node-ip-address={self.net.addresses[name]}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        room += ["--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        if name == _HEAD:
            room += ["--head", f"--dashboard-host={self.net.addresses[name]}", f"--temp-dir={self._temporary}"]
        else:
            room += [f"--address={self.net.addresses[_HEAD]}:6379"]
        self._daemons.start(name, [*self.net.enter(name), str(RAY / "bin" / "ray"), "start", *room], self._variables())

    def _variables(self) -> dict[str, str]:
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "PATH": f"{RAY / 'bin'}:{os.environ['PATH']}",
        }

    def free_gpus(self) -> float:
        """Return how many GPUs of both nodes nobody has reserved."""
        address = self.net.addresses[_HEAD]
        code = (
            f"import ray; ray.init('{address}:6379', _node_ip_address='{address}', log_to_driver=False); "
            "print(ray.available_resources().get('GPU', 0))"
        )
        command = [*self.net.enter(_HEAD), str(RAY / "bin" / "python"), "-c", code]
        variables = os.environ | self._variables()
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
        return float(done.stdout.split()[-1])

    def _answers(self) -> bool:
        try:
            self.engine.jobs()
        except TopropeError:
            return False
        return True

    def _joined(self, address: str, before: set[str]) -> bool:
        return not self._alive(address) <= before

    def _alive(self, address: str) -> set[str]:
        """Return the ids of the nodes that the head lists as alive with this address."""
        listed = self.engine._ask("GET", "/nodes?view=summary").json()["data"]["summary"]
        states = [one["raylet"] for one in listed]
        return {
            str(one["nodeId"])
            for one in states
            if one.get("nodeManagerAddress") == address and one.get("state") == "ALIVE"
        }

    def cancel(self, folder: RunFolder) -> None:
        """See `House.cancel`."""
        self.engine._ask("POST", f"/api/jobs/{folder.run_id}.1/stop")

    def kill_engine_process(self, folder: RunFolder) -> None:
        """See `House.kill_engine_process`: the worker that supervises the job."""
        parent = keeper_of(folder).parent()
        assert parent is not None
        parent.kill()

    def kill_daemon(self, folder: RunFolder) -> None:
        """See `House.kill_daemon`: the raylet."""
        node = self.net.node_of(keeper_of(folder).pid)
        kill_all([one for one in self.net.processes(node) if name_of(one) == "raylet"])

    def kill_node(self, folder: RunFolder) -> None:
        """See `House.kill_node`."""
        kill_all(self.net.processes(self.net.node_of(keeper_of(folder).pid)))

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """See `House.unreachable`: the dashboard is stopped and goes on."""
        stopped = [one for one in self.net.processes(_HEAD) if any("dashboard.py" in word for word in words_of(one))]
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    @contextmanager
    def full(self) -> Iterator[Sequence[str]]:
        """See `House.full`: no node has this resource."""
        yield ("nowhere",)

    def close(self) -> None:
        """End everything that the house started."""
        for name in self.net.addresses:
            kill_all([one for one in self.net.processes(name) if one.pid != os.getpid()])
        self._daemons.close()
        self.net.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


if __name__ == "__main__":
    from benchmarks.cluster.bench import measure

    sys.exit(measure("ray", why_not, RayHouse, start_goal_s=30))
