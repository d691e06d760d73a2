"""Measure other ecosystems, checks, the worker's overhead and mixtures: `make bench-environments`.

    python -P -m benchmarks.environments.environments [--part ecosystems|checks|overhead|mixture ...]

    ecosystems   environments of eight ecosystems, unmodified, each in its own interpreter; verifiers' harnesses
    checks       what check_environment finds among planted defects and in reasoning-gym's tasks
    overhead     what a worker adds to a rollout, over the environment in the same process
    mixture      one run on environments of three ecosystems

Interpreters of ecosystems are made once, see CONTRIBUTING.md; those that are missing are named, not counted. Estimated
time of all parts: half an hour.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["PARTS", "main"]

PARTS = {
    "ecosystems": ("benchmarks.environments.ecosystems", "ecosystems"),
    "checks": ("benchmarks.environments.checks", "checks"),
    "overhead": ("benchmarks.environments.worker_overhead", "overhead"),
    "mixture": ("benchmarks.learning.mixture", "mixture"),
}
"""Module and function of each part; the function prints for people and returns its figures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print all figures as one JSON object on the last line."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.environments.environments", description="Environments."
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    given = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    for part in given.part or PARTS:
        module, function = PARTS[part]
        print(f"== {part}", flush=True)
        figures |= getattr(importlib.import_module(module), function)()
    print(json.dumps(figures))
    return 1 if figures.get("ecosystems_failed") else 0


if __name__ == "__main__":
    sys.exit(main())
