"""A cluster that shares no folder with the server: its home is another folder, and crews are stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support import supervisor_stand_ins
from tests.support.run_harness import RunHarness
from toprope.errors import NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.settings.clusters import Clusters
from toprope.supervisor.launchers.by_kind import LauncherByKind
from toprope.supervisor.launchers.cluster import ClusterLauncher
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager

KEY = "canary-0123456789abcdef0123456789abcdef"


class FarCluster:
    """Front ends of one home, whose only cluster has a home of its own.

    Args:
        engine: Runs its jobs.
        home: Its home.
        entry: Further fields of its entry in clusters.yaml; `host`: this machine, as the cluster reaches it.
    """

    def __init__(
        self, harness: RunHarness, engine: Any, home: Path | None = None, host: str = "127.0.0.1", **entry: Any
    ) -> None:
        self.harness, self.engine, self.home = harness, engine, home or harness.path / "cluster"
        self.home.mkdir()
        self.key = self.home / "key"
        self.key.write_text(KEY)
        self.key.chmod(0o600)
        mirror = {"host": host, "home": str(self.home), "key_file": str(self.key)}
        self.path = harness.path / "config" / "clusters.yaml"
        self.path.parent.mkdir()
        lab = {"kind": "slurm", "python": sys.executable, "mirror": mirror, **entry}
        self.path.write_text(yaml.safe_dump({"lab": lab}))

    def runs(
        self, behaviours: Mapping[str, Any] | None = None, variables: Any = None, *, real: bool = False
    ) -> RunManager:
        """Return a front end; its crews are stand-ins unless `real`."""
        harness = self.harness
        harness.runs(dict(behaviours or {"trainer": {"endless": True, "patient": True}}))
        table = harness.path / "programs.json"
        table.write_text(json.dumps(harness.programs))
        command = None if real else (sys.executable, "-P", str(supervisor_stand_ins.PATH), "far", str(table))
        launcher = ClusterLauncher(lambda: Clusters.read(self.path), lambda _: self.engine, command=command)
        return RunManager(
            harness.path / "runs", LauncherByKind(LocalLauncher(), launcher), lambda: harness.machine, variables
        )

    def start(
        self, runs: RunManager, variables: Any = None, specification: Specification | None = None, **launcher: Any
    ) -> RunFolder:
        """Start a run on the cluster."""
        specification = specification or self.harness.specification(**launcher)
        specification.config.launcher.kind = "slurm"
        folder = runs.start(specification, variables or {})
        self.harness.started += [folder, self.there(folder)]
        return folder

    def there(self, folder: RunFolder) -> RunFolder:
        """Return the run's folder on the cluster."""
        return RunFolder(self.home / "runs" / folder.run_id)

    def receiver(self, folder: RunFolder) -> psutil.Process:
        """Return the process that writes the copy."""
        return psutil.Process(json.loads(folder.lock.read_text())["pid"])


def shown(folder: RunFolder) -> dict[str, bytes]:
    """Return the content of what both sides have."""
    names = ("status.json", "events.jsonl", "metrics.jsonl", "results.json")
    paths = [*(folder.path / name for name in names), *folder.evaluations.glob("*")]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def leave(path: Path) -> list[str]:
    """Return the names of what a run must not leave."""
    return [one.name for one in path.rglob(".*") if one.name != ".clock"] + [one.name for one in path.glob("crew")]


def resume(runs: RunManager, folder: RunFolder) -> int | None:
    """Return the new attempt; None while the engine still has the former one's job."""
    with suppress(NotPossibleNow):
        return runs.resume(folder.run_id).attempt
    return None
