"""Run the same specification twice and compare all numbers: `make bench-reproduce`.

    python -P -m benchmarks.learning.reproduce [--steps N] [--runs N]

Deterministic runs of one specification are started one after the other, each with a real crew of its own: keeper,
trajectory API, inference, trainer, rollout driver, worker. Every column of metrics.jsonl is compared at every step,
except times, which are printed; and so is every evaluation. Control: two runs without the deterministic mode. Estimated
time: five minutes; needs nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.faults.lives import RealHarness, harness_at
from benchmarks.report import report
from benchmarks.scratch import scratch
from toprope.analysis.reproduction import compare_runs_of_one, is_timing
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.metrics import read_rows
from toprope.records.run.status import Status

LIMIT_S = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit with 1 if a metric differs."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.learning.reproduce", description="Same run, same numbers."
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default 20)")
    parser.add_argument("--runs", type=int, default=2, help="deterministic runs (default 2)")
    given = parser.parse_args(arguments)
    console = Console()
    with scratch("reproduce") as path:
        harness = RealHarness(harness_at(path).path)
        try:
            same = [_run(harness, given.steps, deterministic=True) for _ in range(given.runs)]
            loose = [_run(harness, given.steps, deterministic=False) for _ in range(2)]
            found = [_difference(same[0][0], other[0], True) for other in same[1:]]
            control = _difference(loose[0][0], loose[1][0], False)
            figures: dict[str, Any] = {
                "differing_metrics": len({name for one in found for name in one["differing"]}),
                "differing_evaluations": sum(one["evaluations"] for one in found),
                "steps": min(one["steps"] for one in found),
                "compared_metrics": min(one["compared"] for one in found),
                "runs": given.runs,
                "differing_without_the_mode": len(control["differing"]),
                "seconds_deterministic": round(min(seconds for _, seconds in same), 1),
                "seconds_without": round(min(seconds for _, seconds in loose), 1),
            }
            excluded = sorted({name for row in read_rows(same[0][0].metrics) for name in row if is_timing(name)})
        finally:
            harness.close()
    for one in found:
        for name in one["differing"]:
            console.print(f"differs: {name}")
    console.print(f"Left out because they are times: {', '.join(excluded)}.")
    goals = {"differing_metrics": "== 0", "differing_evaluations": "== 0", "steps": f">= {given.steps}"}
    return report(
        "The same run twice",
        figures,
        goals=goals,
        control="runs without the deterministic mode must differ.",
        control_failed="" if control["differing"] else "runs without the mode did not differ",
    )


def _run(harness: RealHarness, steps: int, *, deterministic: bool) -> tuple[RunFolder, float]:
    """Run once from start to end; return the folder and the seconds of training."""
    specification = harness.specification(steps=steps)
    config = specification.config
    config.algorithm.deterministic, config.algorithm.drop_zero_signal = deterministic, True
    config.optimizer.learning_rate = 1e-3
    config.evaluation.every_steps, config.evaluation.validation_tasks = max(1, steps // 2), 8
    config.environment.knobs = {"shortest": 3, "longest": 4, "alphabet": "abcdefghij"}
    runs = harness.runs()
    folder = runs.start(specification)
    harness.started.append(folder)
    limit = time.monotonic() + LIMIT_S
    while not (status := runs.status(folder.run_id)).ended_at:
        if time.monotonic() > limit:
            raise TimeoutError(f"{folder.run_id} is still {status.state} after {LIMIT_S:g} s")
        time.sleep(0.05)
    if status.state != "completed":
        raise RuntimeError(f"{folder.run_id} {status.state}: {status.failure}")
    return folder, _trained(folder, status)


def _trained(folder: RunFolder, status: Status) -> float:
    return float(read_rows(folder.metrics)[-1]["train_seconds"])


def _difference(first: RunFolder, second: RunFolder, deterministic: bool) -> dict[str, Any]:
    found = compare_runs_of_one(
        first.run_id, read_rows(first.metrics), read_rows(second.metrics), deterministic=deterministic
    )
    return {
        "differing": found.differing,
        "steps": found.steps,
        "compared": found.compared,
        "evaluations": sum(_measured(first, label) != _measured(second, label) for label in _labels(first, second)),
    }


def _labels(*folders: RunFolder) -> list[str]:
    return sorted({path.stem for folder in folders for path in folder.evaluations.glob("*.json")})


def _measured(folder: RunFolder, label: str) -> Any:
    """Return an evaluation without its times; None if it was not made."""
    if not folder.evaluation(label).exists():
        return None
    content = read_json(folder.evaluation(label))
    return {key: value for key, value in content.items() if key not in ("at", "seconds")}


if __name__ == "__main__":
    sys.exit(main())
