"""Attack Toprope as a hostile agent, a local user and an environment's author would: `make bench-hostile`.

    python -P -m benchmarks.hostile.hostile [--seed N] [--quick] [--part NAME]

Each part is a module beside this file whose `measure(seed, quick)` returns its figures. Every part also attacks a copy
with the wall taken away; a control in which the attack fails says that the attack proves nothing, and the benchmark
ends with status 1. The same seed makes the same attacks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import report

__all__ = ["CONTROLS", "PARTS", "main"]

PARTS = tuple(
    name
    for name in ("connections", "canaries", "inputs", "authority", "environments")
    if importlib.util.find_spec(f"{__package__ or 'benchmarks.hostile'}.{name}") is not None
)
"""Modules of this package with a function `measure`."""
CONTROLS = "control_"
"""Begins the name of a figure that must not be 0: an attack that succeeds without its wall."""
GOALS = dict.fromkeys(
    (
        "crashes",
        "masked",
        "effects",
        "leaks",
        "escapes",
        "spent_over_limit",
        "sealed_seen",
        "door_down_seconds",
        "canaries_found",
    ),
    "== 0",
)
"""Figures that count successful attacks."""


def main() -> int:
    """Run the parts, print the table and the figures; 1 if a control failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the attacks that are chosen at random")
    parser.add_argument("--quick", action="store_true", help="a sample of each part, for development")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; repeatable")
    given = parser.parse_args()
    figures: dict[str, Any] = {"seed": given.seed, "quick": given.quick}
    for name in given.part or PARTS:
        began = time.monotonic()
        module = importlib.import_module(f"benchmarks.hostile.{name}")
        for figure, value in module.measure(given.seed, given.quick).items():
            counted = figure in figures and isinstance(value, int | float)
            figures[figure] = figures[figure] + value if counted else value  # canaries are looked for by several
        figures[f"{name}_seconds"] = round(time.monotonic() - began, 1)
    harmless = [name for name, value in figures.items() if name.startswith(CONTROLS) and not value]
    return report(
        "Attacks",
        figures,
        goals={name: goal for name, goal in GOALS.items() if name in figures},
        control="each part attacks a copy with its wall taken away; those attacks must succeed.",
        control_failed=f"{', '.join(harmless)} is 0 without the wall" if harmless else "",
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
