"""Measure which changes of `make bench-findings` are harmful alone, and write `harm.json`.

    python -P -m benchmarks.findings.measure [--seconds 45] [--environment NAME] [--at-once 2] [--log FILE]

Each environment gets two runs of the preset with different seeds, one run for each harmful candidate of `changes.py`
alone, and one for each bundle of harmless ones. A change is harmful if its 95 % interval ends below the preset's;
a bundle is harmless if its accuracy is not below the preset's interval, which spans those of the preset's runs.
Candidates that are neither are not drawn. Measurements in `harm.json` and the log are kept, so an interrupted program
continues, and new candidates need no old runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.findings.changes import ENVIRONMENTS, HARM_FILE, HARMFUL, HARMLESS
from benchmarks.findings.runs import HELDOUT_TASKS, STEPS, Done, Runner
from benchmarks.scratch import scratch

_BASE: tuple[dict[str, Any], ...] = ({"algorithm.seed": 0}, {"algorithm.seed": 1})


def main() -> int:
    """Measure what the log lacks, then write `harm.json`."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks.findings.measure", description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="training time of a run")
    parser.add_argument("--environment", nargs="*", default=list(ENVIRONMENTS), choices=ENVIRONMENTS)
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--log", type=Path, default=Path("harm.jsonl"), help="measurements so far, one per line")
    parser.add_argument("--most", type=int, help="most runs before it ends; all by default")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which is kept")
    options = parser.parse_args()
    known = _read(options.log)
    candidates = [_BASE[0], *({field: value} for field, value in HARMFUL[:5]), *HARMLESS, _BASE[1]]
    candidates += [{field: value} for field, value in HARMFUL[5:]]
    have = [(row["environment"], row["changes"]) for row in known]
    wanted = [(name, changes) for changes in candidates for name in options.environment if (name, changes) not in have]
    wanted = wanted[: options.most]
    lock = threading.Lock()
    with scratch("findings-harm", options.keep) as home:
        runner = Runner(home, options.seconds)

        def one(task: tuple[str, dict[str, Any]]) -> None:
            environment, changes = task
            row = _row(environment, changes, runner.train(environment, changes, "harm"), options.seconds)
            with lock, options.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
                print(json.dumps(row), file=sys.stderr, flush=True)

        if wanted and not known:
            one(wanted.pop(0))  # the first run makes the embedded policy
        runner.each(one, wanted, options.at_once)
    if rows := _read(options.log):
        HARM_FILE.write_text(json.dumps(classify(rows), indent=1) + "\n")
    return 0


def classify(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of `harm.json` from measurements."""
    found: dict[str, Any] = {
        "provenance": {
            "by": "python -P -m benchmarks.findings.measure",
            "preset": f"cpu-embedded with {STEPS} steps in at most {max(row['seconds'] for row in rows):g} s and "
            f"{HELDOUT_TASKS} held-out tasks, sampled answers",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load of 1 minute by row",
            "date": time.strftime("%Y-%m-%d"),
            "rule": "harmful: the upper end of the 95 % interval is below the preset's lower end; harmless: the "
            "accuracy is not below the preset's lower end; else not drawn",
        },
        "environments": {},
    }
    for environment in ENVIRONMENTS:
        own = [row for row in rows if row["environment"] == environment and row["accuracy"] is not None]
        base = [row for row in own if row["changes"] in _BASE]
        if not base:
            continue
        low, high = min(row["low"] for row in base), max(row["high"] for row in base)
        alone = [row for row in own if any(row["changes"] == {field: value} for field, value in HARMFUL)]
        bundles = [row for row in own if row["changes"] in HARMLESS]
        harmful = [row for row in alone if row["high"] < low]
        harmless = [row for row in bundles if row["accuracy"] >= low]
        found["environments"][environment] = {
            "preset": {"low": low, "high": high, "runs": base},
            "harmful": harmful,
            "harmless": harmless,
            "neither": [row for row in (*alone, *bundles) if row not in harmful and row not in harmless],
        }
    return found


def _row(environment: str, changes: dict[str, Any], done: Done, seconds: float) -> dict[str, Any]:
    return {
        "environment": environment,
        "changes": changes,
        "state": done.state,
        "before": done.before,
        "accuracy": done.accuracy,
        "low": done.low,
        "high": done.high,
        "steps": done.answer.get("steps"),
        "seconds": seconds,
        "took_s": round(done.seconds),
        "load": round(os.getloadavg()[0], 1),
    }


def _read(log: Path) -> list[dict[str, Any]]:
    """Return the measurements in `harm.json` and those that the log adds."""
    rows = []
    if HARM_FILE.exists():
        for entry in json.loads(HARM_FILE.read_text())["environments"].values():
            rows += [*entry["preset"]["runs"], *entry["harmful"], *entry["harmless"], *entry["neither"]]
    new = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return rows + [row for row in new if row not in rows]


if __name__ == "__main__":
    sys.exit(main())
