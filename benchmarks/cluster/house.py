"""Two nodes on one machine: two network namespaces on a bridge, and the daemons of an engine within them.

Such nodes share files, flock and /proc, so what breaks without them does not show here. Needs Linux and root. Daemons
are ended by their process ids, never by name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from toprope.records.run.folder import RunFolder, read_json
from toprope.settings.clusters import Cluster
from toprope.supervisor.launchers.engine import Engine

START_S = 120.0
_IP = "/usr/sbin/ip"


class House(Protocol):
    """A running cluster of a head and two nodes for runs, and the ways to break it."""

    cluster: Cluster
    engine: Engine
    net: Net
    nodes: tuple[str, str]
    spent: str
    """An account that the engine refuses with the words `quota`; empty where engines refuse no job."""
    quota: str

    def cancel(self, folder: RunFolder) -> None:
        """End the run's job by the engine's own means."""

    def kill_engine_process(self, folder: RunFolder) -> None:
        """SIGKILL the engine's process above the run's keeper."""

    def kill_daemon(self, folder: RunFolder) -> None:
        """SIGKILL the engine's daemon on the node of the run's keeper."""

    def kill_node(self, folder: RunFolder) -> None:
        """SIGKILL everything on the node of the run's keeper at once."""

    def mend(self) -> None:
        """Start daemons that were killed, and wait until both nodes take jobs."""

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Nobody answers for the engine within the block."""

    @contextmanager
    def full(self) -> Iterator[Sequence[str]]:
        """No job that asks for the features that are yielded starts within the block."""


def missing(*programs: str) -> str:
    """Say what is missing here for nodes in namespaces and for these programs; empty if all is there."""
    if os.geteuid() != 0:
        return "root is needed for network namespaces"
    wanted = [_IP, "/usr/bin/nsenter", "/usr/bin/unshare", *programs]
    absent = [one for one in wanted if not (Path(one).exists() if "/" in one else shutil.which(one))]
    if absent:
        return f"{', '.join(Path(one).name for one in absent)} is missing"
    probe = subprocess.run([_IP, "link", "add", "toprope-probe", "type", "bridge"], capture_output=True, check=False)
    subprocess.run([_IP, "link", "del", "toprope-probe"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "no bridge can be made here"


class Net:
    """A bridge with the named namespaces on it. Addresses are 10.N.0.1 for this machine, then 10.N.0.11 and so on."""

    def __init__(self, names: Sequence[str]) -> None:
        number = 64 + os.getpid() % 128
        while Path(f"/sys/class/net/t{number}br").exists():
            number += 1
        self._tag = f"t{number}"
        self.host = f"10.{number}.0.1"
        self.addresses = {name: f"10.{number}.0.{11 + index}" for index, name in enumerate(names)}
        self._ip("link", "add", f"{self._tag}br", "type", "bridge")
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self._ip("addr", "add", f"{self.host}/24", "dev", f"{self._tag}br")
        self._ip("link", "set", f"{self._tag}br", "up")
        for index, (name, address) in enumerate(self.addresses.items()):
            space, link = self.space(name), f"{self._tag}v{index}"
            self._ip("netns", "add", space)
            self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", link, "master", f"{self._tag}br", "up")
            self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")

    def space(self, name: str) -> str:
        """Return the namespace of a node."""
        return f"{self._tag}{name}"

    def enter(self, name: str) -> list[str]:
        """Return the words before a command that runs on a node. `ip netns exec` would mount a /sys without cgroups."""
        return ["nsenter", f"--net=/run/netns/{self.space(name)}"]

    def close(self) -> None:
        """Remove namespaces and bridge."""
        for name in self.addresses:
            subprocess.run([_IP, "netns", "del", self.space(name)], capture_output=True, check=False)
        subprocess.run([_IP, "link", "del", f"{self._tag}br"], capture_output=True, check=False)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes on a node."""
        space, found = os.stat(f"/run/netns/{self.space(name)}").st_ino, []
        for pid in psutil.pids():
            try:
                if os.stat(f"/proc/{pid}/ns/net").st_ino == space:
                    found.append(psutil.Process(pid))
            except (OSError, psutil.Error):
                continue
        return found

    def node_of(self, pid: int) -> str:
        """Return the node on which a process runs."""
        space = os.stat(f"/proc/{pid}/ns/net").st_ino
        return next(name for name in self.addresses if os.stat(f"/run/netns/{self.space(name)}").st_ino == space)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run([_IP, *words], check=True, capture_output=True, text=True)


class Daemons:
    """Processes in the foreground, by name."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start one, with its output in a file of its name."""
        with (self._logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send one a signal that ends it, and wait for its end."""
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait()

    def close(self) -> None:
        """End all, the last started first."""
        for process in reversed(self.running.values()):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self.running.values()):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def keeper_of(folder: RunFolder) -> psutil.Process:
    """Return the keeper of a run that is kept."""
    return psutil.Process(read_json(folder.lock)["pid"])


def name_of(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL processes as if at one moment: none acts on the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            try:
                process.send_signal(number)
            except psutil.Error:
                continue
    psutil.wait_procs(processes, timeout=5)


def wait_until(condition: Callable[[], object], what: str, limit_s: float = START_S) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: It did not come true in time.
    """
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)
