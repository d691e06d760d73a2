"""Run a benchmark by its name: `python -P -m benchmarks NAME [ARGUMENTS]`, or list the names with `--list`."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import tempfile
from pathlib import Path

TARGETS = {
    "agent": "agent.agent",
    "all": "compare_figures",
    "conformance": "server.conformance",
    "containment": "faults.containment",
    "data": "server.data",
    "decode": "performance.decode",
    "demo": "learning.demo",
    "disk": "faults.disk",
    "ecosystems": "foreign.foreign",
    "engines": "models.engines",
    "environments": "environments.environments",
    "evolution": "learning.evolution",
    "faults": "faults.faults",
    "findings": "findings.findings",
    "fit": "models.fit",
    "gpu": "models.gpu",
    "growth": "performance.growth",
    "hostile": "hostile.hostile",
    "house": "house.house",
    "install": "house.install",
    "lifecycle": "faults.lifecycle",
    "load": "server.load",
    "many_runs": "server.many_runs",
    "memory": "performance.memory",
    "models": "models.models",
    "orchestrator": "orchestrator.orchestrator",
    "page": "page.page",
    "ppo": "learning.ppo",
    "precision": "models.precision",
    "ranks": "models.ranks",
    "ray": "cluster.ray_house",
    "reproduce": "learning.reproduce",
    "rollouts": "learning.rollouts",
    "scale": "performance.scale",
    "server": "server.server",
    "sft_then_grpo": "learning.sft_then_grpo",
    "slurm": "cluster.slurm_house",
    "tinker": "hosted.tinker",
    "train": "performance.train",
    "trajectory_api": "trajectory_api.trajectory_api",
    "wrong_inputs": "wrong_inputs.wrong_inputs",
}
"""Name of the make target, with underscores -> module below `benchmarks`."""


def main() -> int:
    """Run the benchmark that the first argument names; exit with 2 if there is no such benchmark."""
    if sys.argv[1:] == ["--list"]:
        print(" ".join(name.replace("_", "-") for name in TARGETS))
        return 0
    name = sys.argv[1] if sys.argv[1:] else ""
    if name not in TARGETS:
        print(f"No benchmark {name!r}. There are: {', '.join(TARGETS)}.", file=sys.stderr)
        return 2
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    del sys.argv[1]
    if {"-h", "--help"} & set(sys.argv[1:]):
        module = importlib.import_module(f"benchmarks.{TARGETS[name]}")
        print(module.__doc__)
        return module.main() if hasattr(module, "argparse") else 0
    from benchmarks.scratch import scratch

    # Everything temporary lies in one folder, by which also its processes are found: nothing is left, however it ends.
    with scratch(name.replace("_", "-")) as place:
        os.environ["TOPROPE_BENCH_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = str(place)
        runpy.run_module(f"benchmarks.{TARGETS[name]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
