"""Measure check_environment: defects planted in known-good tasks, and reasoning-gym's tasks unchanged.

    python -P -m benchmarks.environments.checks [--planted] [names of tasks ...]

A planted defect counts as found if a rule that may name it reports a warning or worse. Of reasoning-gym's tasks, those
with previously known defects have to be found; every other flag needs a reason that was confirmed by reading the task's
code, or it counts as unexplained. Needs reasoning-gym; estimated time: some minutes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environments.checks_known import EXPLAINED, NAMED
from benchmarks.environments.checks_planted import GOOD, PLANTED, Planted, source_of
from benchmarks.scratch import scratch
from toprope.errors import TopropeError
from toprope.records.run.specification import EnvironmentSource
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.catalog.check import CheckReport, check
from toprope.workbench.catalog.describe import WorkerOptions
from toprope.workbench.entries import Entry

__all__ = ["CONTROL", "checks", "control_failed", "planted", "swept"]

CONTROL = "the file of the planted defects, with none in it, must not be flagged."

_SECONDS = 90.0
"""Limit for one task; the machine may be busy."""
_RG = "reasoning_gym/"
_MADE_OF_OTHERS = ("composite",)


def checks() -> dict[str, Any]:
    """Run both parts, print their tables, and return the figures."""
    return {**planted(), **swept()}


def control_failed(figures: dict[str, Any]) -> str:
    """Say why the planted defects prove nothing; empty if they do."""
    flags = figures["unplanted_flags"]
    return f"a file without a planted defect was flagged: {', '.join(flags)}" if flags else ""


def planted() -> dict[str, Any]:
    """Return the defects that were found, by name, and the good tasks, in which none should be found."""
    missed, said = [], []
    with scratch("planted") as folder:
        bare = folder / "bare.py"
        bare.write_text(source_of(Planted("nothing", "gcd", "", ())))
        unplanted = _flags(_checked(_entry("nothing", bare)))
        for number, defect in enumerate(PLANTED):
            file = folder / f"planted_{number}.py"
            file.write_text(source_of(defect))
            found = _flags(_checked(_entry(defect.name, file), full=defect.full))
            hit = [rule for rule in defect.rules if rule in found]
            missed += [] if hit else [defect.name]
            said.append((defect.name, ", ".join(hit) or "MISSED", ", ".join(set(found) - set(hit))))
    catalog = Catalog()
    wrong = {}
    for name in GOOD:
        if flags := _flags(_checked(catalog.find(_RG + name))):
            wrong[name] = flags
    print(f"{'planted in a good task':44} {'found by':22} also said")
    for name, hit, also in said:
        print(f"{name:44} {hit:22} {also}")
    print(f"good tasks that were flagged: {wrong or 'none'} of {len(GOOD)}\n", flush=True)
    return {
        "planted_defects": len(PLANTED),
        "planted_defects_missed": len(missed),
        "good_tasks_flagged": len(wrong),
        "unplanted_flags": sorted(unplanted),
    }


def swept(names: list[str] | None = None) -> dict[str, Any]:
    """Check every task of reasoning-gym, or those named; return the flags and the known reasons."""
    catalog = Catalog()
    all_names = [entry.name for entry in catalog.entries() if entry.name.startswith(_RG)]
    all_names = [name for name in all_names if name.removeprefix(_RG) not in _MADE_OF_OTHERS]
    names = [_RG + name for name in names] if names else all_names
    began, unexplained, lost = time.monotonic(), {}, []
    print(f"{'task':30} {'seconds':>7} {'flag':18} why")
    for full_name in names:
        name = full_name.removeprefix(_RG)
        at = time.monotonic()
        try:
            report = _checked(catalog.find(full_name))
            found = _flags(report)
        except TopropeError as error:
            found = {"does_not_load": str(error)[:200]}
        seconds = time.monotonic() - at
        known = NAMED.get(name, {})
        lost += [f"{name}: {defect}" for defect, rules in known.items() if not set(rules) & set(found)]
        for rule, what in found.items():
            named = next((defect for defect, rules in known.items() if rule in rules), None)
            reason = f"named: {named}" if named else EXPLAINED.get((name, rule)) or EXPLAINED.get(("*", rule))
            if reason is None:
                unexplained.setdefault(name, []).append(rule)
                reason = f"UNEXPLAINED: {what}"
            print(f"{name:30} {seconds:7.1f} {rule:18} {reason}", flush=True)
    for one in lost:
        print(f"NOT FOUND: {one}")
    others = len([name for name in names if name.removeprefix(_RG) not in NAMED])
    share = 100 * len(unexplained) / max(1, others)
    print(f"{len(names)} tasks in {time.monotonic() - began:.0f} s\n", flush=True)
    return {
        "tasks_checked": len(names),
        "named_defects": sum(len(defects) for task, defects in NAMED.items() if _RG + task in names),
        "named_defects_missed": len(lost),
        "unexplained_flags": sum(map(len, unexplained.values())),
        "unexplained_flags_percent": round(share, 2),
    }


def _entry(name: str, file: Path) -> Entry:
    source = EnvironmentSource(name=file.stem, file=str(file), attribute="planted")
    return Entry(file.stem, name, "folder", "ready", "", 1, source)


def _checked(entry: Entry, *, full: bool = False) -> CheckReport:
    return asyncio.run(check(entry, WorkerOptions(load_timeout_s=60, call_timeout_s=30), full=full, seconds=_SECONDS))


def _flags(report: CheckReport) -> dict[str, str]:
    return {finding.rule: finding.what for finding in report.findings if finding.level != "note"}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--planted"]:
        figures = planted()
    elif arguments:
        figures = swept(arguments)
    else:
        figures = checks()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
