"""Measure workers of other ecosystems, checks, the worker's overhead and mixtures: `make bench-environments`.

    python -P -m benchmarks.environments.environments [--part ecosystems|checks|overhead|mixture ...] [--rollouts N]

    ecosystems   workers of eight ecosystems, each in its own interpreter, over bare imports; verifiers' harnesses
    checks       what check_environment finds among planted defects and in reasoning-gym's tasks
    overhead     what a worker adds to a rollout, over the environment in the same process
    mixture      one run on three kinds of reasoning-gym's tasks

Interpreters of ecosystems are made once, see CONTRIBUTING.md; those that are missing are named, not counted. Estimated
time of all parts: an hour, of which `ecosystems` takes half.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.environments import ecosystems
from benchmarks.learning import mixture
from benchmarks.report import report

__all__ = ["PARTS", "main"]

PARTS = {
    "ecosystems": ("benchmarks.environments.ecosystems", "ecosystems"),
    "checks": ("benchmarks.environments.checks", "checks"),
    "overhead": ("benchmarks.environments.worker_overhead", "overhead"),
    "mixture": ("benchmarks.learning.mixture", "mixture"),
}
"""Module and function of each part; the function prints for people and returns its figures."""


_GOALS = {
    "rollouts_per_second_ratio": ">= 5",
    "workers_failed": "== 0",
    "worker_overhead_ms": "<= 1",
    "worker_start_over_import_s": "<= 0.3",
    "checks_found": "== 1.0",
    "false_alarms": "== 0",
    "mixture_improved": "== 3",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print all figures as one JSON object on the last line."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.environments.environments", description="Environments."
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    parser.add_argument("--rollouts", type=int, default=2000, help="of each harness (default 2000)")
    given = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for part in given.part or PARTS:
        module, function = PARTS[part]
        print(f"== {part}", flush=True)
        chosen = {"rollouts": given.rollouts} if part == "ecosystems" else {}
        figures |= getattr(importlib.import_module(module), function)(**chosen)
    controls, failed = [], []
    for measured, control, verdict in (
        ("rollouts_per_second_ratio", ecosystems.CONTROL, ecosystems.control_failed),
        ("mixture_improved", mixture.CONTROL, mixture.control_failed),
    ):
        if measured in figures:
            controls.append(control)
            failed += [why] if (why := verdict(figures)) else []
    return report(
        "Environments",
        figures,
        goals={name: goal for name, goal in _GOALS.items() if name in figures},
        control=" ".join(controls),
        control_failed="; ".join(failed),
    )


if __name__ == "__main__":
    sys.exit(main())
