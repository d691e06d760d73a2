"""Measure diagnosis on labelled runs: `make bench-findings`.

Some fifty short real CPU runs with the embedded policy, healthy and faulty ones, each with a label that it got before
it was ever run (`cases.py`). Half of each label's runs were kept out while the rules were tuned; the figures are
theirs. A faulty run counts as named if, before half of its steps, the finding that an agent would act on (the gravest
open finding, or the gravest reported one if none is open) is a rule that names its label. Every run has a real keeper
and crew; findings are read from its events, as an agent sees them. Estimated time: twenty minutes on two quiet cores;
needs nothing else.

    python -P -m benchmarks.findings.findings [--half heldout|tuning] [--only NAME ...] [--keep FOLDER] [--at-once 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.findings.cases import CASES, RIGHT, STEPS, Case, heldout
from benchmarks.findings.runs import Played, play
from benchmarks.scratch import scratch
from toprope.analysis.findings import diagnose, headline
from toprope.records.run.metrics import read_rows
from toprope.records.run.specification import Specification
from toprope.records.run.status import Finding

__all__ = ["Verdict", "judge", "main"]


@dataclass(frozen=True)
class Verdict:
    """The diagnosis of a run: the rule `named` by its half (None: no finding), at which step, and all criticals and
    warnings of the whole run.
    """

    named: str | None
    step: int | None
    right: bool
    criticals: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def judge(case: Case, told: Sequence[Finding], half: float = STEPS / 2) -> Verdict:
    """Compare the findings of a run with its label.

    Args:
        case: The run.
        told: Its findings, oldest first.
        half: The step at which half of the run is over.
    """
    early = [finding for finding in told if (finding.step or 0) <= half]
    found = headline(early) or headline([finding for finding in early if finding.level != "over"])
    criticals, warnings = (
        tuple(dict.fromkeys(finding.rule for finding in told if finding.level == level))
        for level in ("critical", "warning")
    )
    if case.label == "healthy":
        right = not criticals
    else:
        right = found is not None and found.rule in RIGHT[case.label]
    return Verdict(found.rule if found else None, found.step if found else None, right, criticals, warnings)


def main() -> int:
    """Print the table and the figures."""
    options = _options()
    apart = heldout()
    cases = [
        case
        for case in CASES
        if (not options.only or case.name in options.only)
        and (options.half is None or (case.name in apart) == (options.half == "heldout"))
    ]
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    with scratch("findings", options.keep and Path(options.keep)) as home:
        results: list[tuple[Case, Played, Verdict]] = []

        def one(case: Case) -> None:
            played = play(case, home)
            verdict = judge(case, played.told)
            results.append((case, played, verdict))
            mark = "ok " if verdict.right else "BAD"
            said = f"{verdict.named} at step {verdict.step}, {played.status.state}, {played.seconds:.0f} s"
            console.print(f"{mark} {len(results)}/{len(cases)} {case.label}: {case.name}, {said}", soft_wrap=True)

        # The first run makes the embedded policy; a second at the same time would only wait for it.
        one(cases[0])
        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(one, cases[1:]))
        cost = _milliseconds_a_row([played for _, played, _ in results])
    results.sort(key=lambda result: CASES.index(result[0]))
    Console(width=150).print(_table(results, apart))
    figures = _figures(results, apart) | {
        "diagnosis_ms_a_step": round(cost, 4),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    return 0


def _figures(results: list[tuple[Case, Played, Verdict]], apart: frozenset[str]) -> dict[str, Any]:
    def of(kept_out: bool) -> dict[str, Any]:
        own = [(case, verdict) for case, _, verdict in results if (case.name in apart) == kept_out]
        sick = [verdict for case, verdict in own if case.label != "healthy"]
        right = [verdict for verdict in sick if verdict.right]
        return {
            "runs": len(own),
            "sick_runs": len(sick),
            "healthy_called_critical": sum(bool(v.criticals) for case, v in own if case.label == "healthy"),
            "healthy_warned": sum(bool(v.warnings) for case, v in own if case.label == "healthy"),
            "sick_named_right_share": round(len(right) / len(sick), 4) if sick else None,
            "median_step_named": statistics.median(verdict.step or 0 for verdict in right) if right else None,
        }

    kept_out, tuned = of(True), of(False)
    return {
        "runs": len(results),
        "heldout_runs": kept_out.pop("runs"),
        **{f"heldout_{name}" if name == "sick_runs" else name: value for name, value in kept_out.items()},
        **{f"tuning_{name}": value for name, value in tuned.items()},
        "steps_a_run": STEPS,
    }


def _milliseconds_a_row(played: Sequence[Played]) -> float:
    """Return the time that the rules take over the stored rows of all runs."""
    rows = spent = 0.0
    for one in played:
        stored, config = read_rows(one.folder.metrics), Specification.read(one.folder).config
        began = time.perf_counter()
        diagnose(stored, config)
        spent, rows = spent + time.perf_counter() - began, rows + len(stored)
    return 1000 * spent / max(rows, 1.0)


def _table(results: list[tuple[Case, Played, Verdict]], apart: frozenset[str]) -> Table:
    table = Table(title="Runs and their findings before half of their steps")
    for name in ("label", "run", "half", "named", "step", "criticals", "ended", "s", ""):
        table.add_column(name, justify="right" if name in ("step", "s") else "left")
    for case, played, verdict in results:
        table.add_row(
            case.label,
            case.name,
            "kept out" if case.name in apart else "tuning",
            verdict.named or "-",
            "-" if verdict.step is None else str(verdict.step),
            ", ".join(verdict.criticals) or "-",
            played.status.state,
            f"{played.seconds:.0f}",
            "right" if verdict.right else "WRONG",
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.findings.findings", description="Measure diagnosis on labelled runs."
    )
    parser.add_argument("--half", choices=["heldout", "tuning"], help="only the runs of this half")
    parser.add_argument("--only", nargs="*", default=[], help="names of runs")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which is kept")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
