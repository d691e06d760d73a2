"""Runs whose crews are stand-ins, and checks that none of their processes is left."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import psutil

from tests.support import records, supervisor_stand_ins
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification, TestPlan
from toprope.records.run.status import Status
from toprope.settings.schema import Config
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.keeper.containment import ContainmentSetting
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.lock import is_held
from toprope.supervisor.runs.manager import RunManager
from toprope.supervisor.spread.nodes import Node

LIMIT_S = 60.0


def eventually(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Return the value of `condition` as soon as it is true; fail after `limit_s` seconds."""
    limit = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < limit, f"not true within {limit_s:g} s"
        time.sleep(0.002)
    return found


class RunHarness:
    """Runs below `path`. `close` kills the processes that a failed test left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = f"token-{uuid.uuid4().hex}"
        self.started: list[RunFolder] = []
        self.programs: dict[str, list[str]] = {}
        self.machine = Machine(threads=64)
        """Has room for every run that a test starts, unless the test is about capacity."""
        self.contained: ContainmentSetting = "auto"

    def runs(
        self, behaviours: dict[str, dict[str, Any]] | None = None, *, plot: bool | list[str] = False
    ) -> RunManager:
        """Return a front end whose launcher starts stand-ins. `plot`: the real program, none, or this one."""
        self.programs = supervisor_stand_ins.programs(behaviours or {}, self.token)
        if plot is not True:
            self.programs["plot"] = plot or [sys.executable, "-I", "-S", "-c", "pass"]
        table = self.path / f"programs-{uuid.uuid4().hex}.json"
        table.write_text(json.dumps(self.programs))
        command = [sys.executable, "-P", str(supervisor_stand_ins.PATH), "keeper", str(table)]
        return RunManager(
            self.path / "runs", LocalLauncher(command, contained=lambda: self.contained), lambda: self.machine
        )

    def specification(self, kind: str = "train", **launcher: Any) -> Specification:
        config = Config()
        usual = {"stop_grace_s": 1.0, "start_timeout_s": 60.0, "restarts": 0, "restart_backoff_s": 0.05}
        usual |= {"restart_window_s": 600.0, "hang_timeout_s": 120.0, "trainer_hang_timeout_s": 120.0}
        for name, value in (usual | launcher).items():
            setattr(config.launcher, name, value)
        return records.specification(
            f"run-{uuid.uuid4().hex[:8]}",
            kind=kind,
            created_at=time.time(),
            config=config,
            test=TestPlan(tasks=100, group_size=4) if kind == "test" else None,
            policy_cache=str(self.path / "policies"),
        )

    def start(
        self,
        behaviours: dict[str, dict[str, Any]] | None = None,
        kind: str = "train",
        plot: bool = False,
        **launcher: Any,
    ) -> tuple[RunManager, RunFolder]:
        runs = self.runs(behaviours, plot=plot)
        folder = runs.start(self.specification(kind, **launcher))
        self.started.append(folder)
        return runs, folder

    def processes(self, folder: RunFolder) -> list[psutil.Process]:
        """Return all processes of a run: keeper, guards, components and their descendants."""
        found = []
        for process in psutil.process_iter(["cmdline", "ppid"]):
            words = " ".join(process.info["cmdline"] or ())
            if self.token in words or str(folder.path) in words:
                found.append(process)
        return found

    def count_keepers(self, folder: RunFolder) -> int:
        """Count keepers. A child between fork and exec carries its keeper's command line, so it is not counted."""
        keepers = {p.pid: p for p in self.processes(folder) if "keeper" in p.info["cmdline"]}
        return sum(p.info["ppid"] not in keepers for p in keepers.values())

    def keeper(self, folder: RunFolder) -> psutil.Process:
        return psutil.Process(json.loads(folder.lock.read_text())["pid"])

    def check_nothing_left(self, folder: RunFolder) -> None:
        """Fail unless all processes, the crew folder and the temporary files of the run are gone soon."""
        eventually(lambda: not self.processes(folder))
        assert not folder.crew.exists()
        assert not [path for path in folder.path.rglob(".*")]
        assert not (folder.path.parent / ".reservations" / f"{folder.run_id}.json").exists()

    def close(self) -> None:
        for folder in self.started:
            for process in self.processes(folder):
                try:
                    process.kill()
                except psutil.Error:
                    continue


def until(runs: RunManager, folder: RunFolder, *states: str, limit_s: float = LIMIT_S) -> Status:
    """Return the status as soon as the run is in one of `states`."""
    limit = time.monotonic() + limit_s
    while (status := runs.status(folder.run_id)).state not in states and time.monotonic() < limit:
        time.sleep(0.005)
    assert status.state in states, (status.state, status.reason, status.failure)
    if not status.ended and status.state != "queued":  # the keeper writes the status first, then its event
        eventually(lambda: any(event.data.get("to") == status.state for event in runs.events(folder.run_id)))
    return status


def ended(runs: RunManager, folder: RunFolder, limit_s: float = LIMIT_S) -> Status:
    """Return the final status, after the crew is gone."""
    status = anyio.run(runs.wait_end, folder.run_id, limit_s)
    assert status.ended_at is not None, (status.state, status.reason)
    eventually(lambda: not is_held(folder.lock))  # its last events are written by then
    return status


def describe_nodes(nodes: Sequence[Node], network: str) -> str:
    """Return the value of ENV_NODES for these nodes, the keeper's first."""
    return json.dumps({"network": network, "nodes": [asdict(node) for node in nodes]})


def wait_for_heartbeats(folder: RunFolder, count: int) -> None:
    """Wait until the run's keeper has sent `count` more heartbeats, about one a second."""
    for _ in range(count):
        last = folder.lock.stat().st_mtime_ns
        eventually(lambda last=last: folder.lock.stat().st_mtime_ns > last)
