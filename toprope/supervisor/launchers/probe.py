"""A small job that shows what a node offers to a keeper: `python -P -m toprope.supervisor.launchers.probe FOLDER`.

It writes its findings as JSON into the folder, which the front end made on storage that the nodes should share.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import toprope
from toprope.atomic import write_json
from toprope.extras import TRAINING, missing
from toprope.machine import gpu_names, processor_count
from toprope.supervisor.keeper.containment import choose_containment
from toprope.supervisor.lock import RunLock, is_held

FACTS = "facts.json"
HELD = "held"
"""A lock that the front end holds."""


def facts(folder: Path) -> dict[str, Any]:
    """Return what this node offers. `lock_carried`: the lock that the front end holds is seen as held here."""
    own = RunLock.acquire(folder / "probe.lock")
    if own is not None:
        own.release()
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
        "locks": own is not None,
        "clock_ahead_s": time.time() - clock.stat().st_mtime,
        "containment": contained.level,
        "containment_why": contained.why,
        "parent": parent.name() if parent else "",
        "pidfd": hasattr(os, "pidfd_open"),
    }


if __name__ == "__main__":
    write_json(Path(sys.argv[1]) / FACTS, facts(Path(sys.argv[1])))
