"""A small job that shows what a node offers to a keeper.

    python -P -m toprope.supervisor.launchers.probe FOLDER
    python -P -m toprope.supervisor.launchers.probe HOME JOB HOST:PORT KEY_FILE [trusted]

It writes its findings as JSON into the folder, which the front end made on storage that the nodes should share; from a
cluster that is mirrored it sends them, as its runs send theirs (see `toprope.supervisor.mirror.far`).
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import toprope
from toprope.atomic import write_json
from toprope.extras import TRAINING, missing
from toprope.machine import gpu_names, has_pidfd, processor_count
from toprope.settings.clusters import cluster_key
from toprope.supervisor.keeper.containment import choose_containment
from toprope.supervisor.lock import RunLock, is_held

FACTS = "facts.json"
HELD = "held"
"""A lock that the front end holds."""


def facts(folder: Path) -> dict[str, Any]:
    """Return what this node offers. `lock_carried`: the lock that the front end holds is seen as held here."""
    lock = RunLock.acquire(folder / "probe.lock")
    if lock is not None:
        lock.release()
    clock = folder / ".clock"
    clock.touch()
    parent = psutil.Process().parent()
    contained = choose_containment("auto")
    return {
        "node": platform.node(),
        "version": toprope.__version__,
        "python": platform.python_version(),
        "missing": missing(TRAINING),
        "processors": processor_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_names(),
        "lock_carried": is_held(folder / HELD),
        "locks": lock is not None,
        "clock_ahead_s": time.time() - clock.stat().st_mtime,
        "containment": contained.level,
        "containment_why": contained.why,
        "parent": parent.name() if parent else "",
        "pidfd": has_pidfd(),
    }


def _send(home: str, job: str, server: str, key_file: str, *network: str) -> None:
    from toprope.supervisor.mirror.wire import Wire, run_key

    wire = Wire(server, run_key(cluster_key(Path(key_file)), job, 0), trusted=network == ("trusted",))
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=home) as folder:
        wire.ask("POST", "/facts", json=facts(Path(folder)))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _send(*sys.argv[1:])
    else:
        write_json(Path(sys.argv[1]) / FACTS, facts(Path(sys.argv[1])))
