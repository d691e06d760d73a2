"""Measure the demo: `make bench-demo`.

The demo runs twice as the process that `make demo` starts: once in an empty home (the embedded policy has to be made)
and once with the policy cached. Control: the same with rewards shuffled within each group, which must not learn.
Seconds are of the whole process, from its start to its exit. Estimated time: six minutes on two quiet cores; needs
nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scratch import scratch

CONTROL = {"algorithm.shuffle_rewards": True}


def demo(home: Path, changes: dict[str, Any] | None = None) -> tuple[dict[str, Any], float]:
    """Run the demo in a process of its own; return its report and its seconds.

    Raises:
        SystemExit: It failed; its output has been shown.
    """
    report = home / "report.json"
    variables = os.environ | {"TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(home / "config")}
    command = [sys.executable, "-P", "-m", "toprope_server.cli.demo", str(report), json.dumps(changes or {})]
    began = time.monotonic()
    status = subprocess.run(command, env=variables, stdout=sys.stderr).returncode
    seconds = time.monotonic() - began
    if status not in (0, 1):  # 1: accuracy did not rise, as expected of the control
        raise SystemExit(f"the demo ended with {status}")
    return json.loads(report.read_text()), seconds


def main() -> int:
    """Print the table and the figures."""
    console = Console(stderr=True, highlight=False)
    with scratch("demo") as home:
        console.rule("cold: the policy is made first")
        cold, cold_seconds = demo(home)
        console.rule("warm: the policy is there")
        warm, warm_seconds = demo(home)
        console.rule("control: rewards shuffled within each group")
        control, _ = demo(home, CONTROL)
    figures = _figures(cold["results"], warm["results"], control["results"])
    figures |= {
        "start_answer_seconds": warm["start_answer_seconds"],
        "demo_warm_seconds": warm_seconds,
        "demo_cold_seconds": cold_seconds,
    }
    table = Table(title="The demo")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    print(json.dumps(figures))
    return 0


def _figures(cold: dict[str, Any], warm: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
    before, after = (warm["evaluations"][label] for label in ("before", "after"))
    held_back = control["evaluations"]
    return {
        "accuracy_before": before["sampled"]["accuracy"],
        "accuracy_before_high": before["sampled"]["high"],
        "accuracy_after": after["sampled"]["accuracy"],
        "accuracy_after_low": after["sampled"]["low"],
        "greedy_before": before["greedy"]["accuracy"],
        "greedy_after": after["greedy"]["accuracy"],
        "heldout_tasks": after["sampled"]["tasks"],
        "cold_accuracy_after": cold["evaluations"]["after"]["sampled"]["accuracy"],
        "control_accuracy_before": held_back["before"]["sampled"]["accuracy"],
        "control_accuracy_before_high": held_back["before"]["sampled"]["high"],
        "control_accuracy_after": held_back["after"]["sampled"]["accuracy"],
        "control_rose": control["rose"],
        "training_seconds": warm["seconds"]["training"],
        "steps": warm["steps"],
        "rollouts": warm["rollouts"],
        # From the request, which is sent shortly before the answer.
        "first_step_seconds": warm["seconds"]["to_first_step"],
    }


if __name__ == "__main__":
    sys.exit(main())
