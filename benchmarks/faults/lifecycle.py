"""End runs in every way and look for leftovers: `make bench-lifecycle`.

    python -P -m benchmarks.faults.lifecycle [--rounds N] [--real N] [--seed N]

Measured: the time from the death of a member to the run's new state on disk; the time of a stop if the members ignore
it; the leftovers of runs that were stopped or killed at random moments; the first step of a resumed training, which has
to follow its checkpoint. The printed seed repeats the same choices, not the same timing. Estimated time: five minutes;
needs nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.faults.lives import Leftovers, RealHarness, Round, deaths, harness_at, play, play_real, stubborn
from benchmarks.scratch import scratch

MEMBERS = ("api", "inference", "trainer", "environment")
REAL_ENDS = ("stop", "kill the trainer", "kill the keeper", "stop now")
DEATHS_EACH = 5
STUBBORN_STOPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit with 1 if something was left or a step was missed."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks.faults.lifecycle", description="How runs end.")
    parser.add_argument("--rounds", type=int, default=44, help="runs in all, started and ended (default 44)")
    parser.add_argument("--real", type=int, default=4, help="how many of them have real crews (default 4)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the choices (default: random)")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    console, leftovers, began = Console(), Leftovers(), time.monotonic()
    print(f"seed {seed}")
    with scratch("lifecycle") as folder:
        harness, real = harness_at(folder / "light"), None
        try:
            took = deaths(harness, MEMBERS, DEATHS_EACH)
            stops = stubborn(harness, STUBBORN_STOPS)
            dice = random.Random(seed)
            light = [play(harness, dice, leftovers) for _ in range(given.rounds - given.real)]
            real = RealHarness(harness_at(folder / "real").path)
            heavy = [
                play_real(real, REAL_ENDS[number % len(REAL_ENDS)], dice, leftovers) for number in range(given.real)
            ]
        finally:
            for one in (harness, real):
                if one is not None:
                    one.close()
    errors = [story.step_error for story in heavy if story.step_error is not None]
    figures: dict[str, Any] = {
        "death_to_state_ms_max": round(max(took), 1),
        "death_to_state_ms_median": round(statistics.median(took), 1),
        "deaths": len(took),
        "stubborn_stop_seconds": round(max(stops), 2),
        "rounds": len(light) + len(heavy),
        "real_rounds": len(heavy),
        "leftovers": len(leftovers),
        "leftover_processes": len(leftovers.processes),
        "leftover_ports": len(leftovers.ports),
        "leftover_files": len(leftovers.files),
        "resumes": sum("resumed" in story.end for story in light + heavy),
        "resume_step_error": max(errors) if errors else None,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
    }
    _show(console, light + heavy, leftovers, figures)
    print(json.dumps(figures))
    return 1 if len(leftovers) or any(errors) else 0


def _show(console: Console, stories: list[Round], leftovers: Leftovers, figures: dict[str, Any]) -> None:
    table = Table(title="Rounds")
    for name in ("crew", "end", "states", "s"):
        table.add_column(name, justify="right" if name == "s" else "left")
    for story in stories:
        end = story.end
        if story.step_error is not None:
            end += f" (from step {story.resumed_from}, off by {story.step_error})"
        table.add_row(story.crew, end, " ".join(story.states), f"{story.seconds:.1f}")
    console.print(table)
    for what in (*leftovers.processes, *leftovers.ports, *leftovers.files):
        console.print(f"left over: {what}")
    table = Table(title="Figures")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, str(value))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
