"""Measures of `make bench-slurm` and `make bench-ray`: real crews on a cluster of two nodes, through every fault."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster.house import House, keeper_of, kill_all, wait_until
from benchmarks.cluster.matrix import (
    FAULTS,
    HEAD_KILLED,
    Fault,
    add_keeper,
    keepers_of,
    launcher_for,
    left_of,
    processes_of_run,
    suffer,
)
from benchmarks.faults.lives import RealHarness
from benchmarks.learning.demo import demo
from benchmarks.report import refuse, report, wait_until_quiet
from benchmarks.scratch import scratch
from toprope.errors import ComponentFailed
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_rows
from toprope.records.run.specification import Specification
from toprope.supervisor.runs.manager import RunManager

__all__ = ["measure"]

_READY = frozenset({"ready", "finished"})
_SOON_S = 180.0
_ANSWERS_S = 12.0


class _ClusterHarness(RealHarness):
    """Runs with the real programs on a house."""

    command: Sequence[str] = ()
    """argv of a keeper before its own arguments; the real one when empty."""

    def __init__(self, path: Path, house: House) -> None:
        super().__init__(path)
        self.house = house

    def runs(self, behaviours: Any = None, *, plot: Any = False) -> RunManager:
        return RunManager(self.path / "runs", launcher_for(self.house), lambda: self.machine)

    def specification(self, kind: str = "train", **launcher: Any) -> Specification:
        made = super().specification(kind, **launcher)
        made.config.launcher.kind = self.house.cluster.kind
        made.config.launcher.nodes = len(self.house.nodes)
        return made


def measure(
    name: str,
    why_not: Callable[[], str],
    house_class: Callable[[Path, str], Any],
    *,
    start_goal_s: float,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run the benchmark of one engine and print its figures. It refuses, with words, where the engine cannot run."""
    parser = argparse.ArgumentParser(description=f"Real crews on a {name} of two nodes, through every fault.")
    parser.add_argument("--no-demo", action="store_true", help="leave the demo out")
    parser.add_argument("--only", default="", help="only parts whose names contain one of these: faults, or `demo`")
    given = parser.parse_args(arguments)
    wanted = given.only.split(",")
    if why := why_not():
        return refuse(why)
    console = Console(stderr=True, highlight=False)
    quiet = wait_until_quiet()
    with scratch(name) as path:
        console.rule(f"{name}: two nodes")
        house = house_class(path / "house", sys.executable)
        try:
            tally = _Tally(console)
            (path / "home").mkdir()
            harness = _ClusterHarness(path / "home", house)
            parts: dict[str, Callable[[_ClusterHarness], None]]
            faults = {**FAULTS, **({"head killed": HEAD_KILLED} if house.cluster.kind == "ray" else {})}
            parts = {called: partial(tally.strike, name=called, fault=fault) for called, fault in faults.items()}
            parts |= {
                "other node killed": tally.other_node,
                "unreachable": tally.silence,
                "refused": partial(tally.refusal, name="refused"),
                "quota": partial(tally.refusal, name="quota"),
                "no room": tally.wait_for_ever,
                "planted keeper": tally.plant,
            }
            for called, part in parts.items():
                if any(one in called for one in wanted):
                    tally.play(called, partial(part, harness))
            figures = tally.figures()
            if any(one in "demo" for one in wanted) and not given.no_demo:
                console.rule("the demo, by an agent's tools")
                figures["accuracy_after"] = _demo(path / "demo", house)
        finally:
            house.close()
    goals = {
        "start_seconds": f"<= {start_goal_s:g}",
        "stop_seconds": "<= 4",
        "leftovers": "== 0",
        "wrong_endings": "== 0",
        "double_keepers": "== 0",
    }
    if "accuracy_after" in figures:
        goals["accuracy_after"] = ">= 0.8"
    return report(
        f"A run on {name}",
        figures,
        goals=goals,
        control="every run takes a step before its fault; a second keeper that was planted is counted",
        control_failed=tally.doubts(),
        quiet=quiet,
    )


class _Tally:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._starts: list[float] = []
        self._stops: list[float] = []
        self._left: list[str] = []
        self._wrong: list[str] = []
        self._double = 0
        self._begun = self._trained = 0
        self._planted: int | None = None

    def doubts(self) -> str:
        """Say why the figures prove nothing; empty if they do."""
        if self._trained < self._begun:
            return f"{self._begun - self._trained} of {self._begun} runs took no step"
        if self._planted is None:
            return "the control was not run"
        return "a second keeper was planted and not counted" if self._planted == 1 else ""

    def figures(self) -> dict[str, Any]:
        timed = {"start_seconds": statistics.median(self._starts)} if self._starts else {}
        timed |= {"stop_seconds": max(self._stops)} if self._stops else {}
        return {
            **{name: round(seconds, 2) for name, seconds in timed.items()},
            "leftovers": len(self._left),
            "wrong_endings": len(self._wrong),
            "double_keepers": self._double,
        }

    def _start(self, harness: _ClusterHarness) -> tuple[RunManager, RunFolder]:
        """Start a run, wait until it has trained, and have its engine start a second keeper of it."""
        self._begun += 1
        begun = time.monotonic()
        runs, folder = harness.start()
        wait_until(lambda: _all_ready(runs, folder), "all members", _SOON_S)
        self._starts.append(time.monotonic() - begun)
        wait_until(lambda: read_rows(folder.metrics), "a first step", _SOON_S)
        self._trained += 1
        self._count_second(add_keeper(harness.house, folder, harness.command))
        return runs, folder

    def _count_second(self, keepers: int) -> None:
        self._double += max(0, keepers - 1)  # a run without a keeper makes up for no second one

    def play(self, name: str, part: Callable[[], None]) -> None:
        """Play one part; one that breaks off is a wrong ending, and the others are played all the same."""
        try:
            part()
        except Exception as error:
            self._console.print_exception()
            self._note(name, type(error).__name__, frozenset(), [], str(error), 0.0)

    def strike(self, harness: _ClusterHarness, name: str, fault: Fault) -> None:
        """One run, one fault."""
        runs, folder = self._start(harness)
        outcome = suffer(harness.house, runs, folder, fault)
        if name == "stop order":
            self._stops.append(outcome.seconds)
        self._note(name, outcome.state, fault.ends, outcome.left, outcome.reason, outcome.seconds)
        if name == "daemon killed":  # the engine gave up a job whose keeper lived on
            self._resume(runs, folder)

    def _resume(self, runs: RunManager, folder: RunFolder) -> None:
        """Resume a lost run as a new job, and stop it once it has taken a step."""
        begun, rows = time.monotonic(), len(read_rows(folder.metrics))
        runs.resume(folder.run_id)
        wait_until(lambda: len(read_rows(folder.metrics)) > rows, "a step after the resume", _SOON_S)
        self._count_second(keepers_of(folder))
        seconds = time.monotonic() - begun
        runs.stop(folder.run_id)
        wait_until(lambda: runs.status(folder.run_id).ended_at is not None, "the end", _SOON_S)
        self._note("resumed", runs.status(folder.run_id).state, frozenset({"stopped"}), left_of(folder), "", seconds)

    def plant(self, harness: _ClusterHarness) -> None:
        """The control: a second keeper that looks for no other one is counted."""
        self._planted = 1
        _, folder = self._start(harness)
        try:
            self._planted = add_keeper(harness.house, folder, harness.command, planted=True)
        finally:
            kill_all(processes_of_run(folder))

    def other_node(self, harness: _ClusterHarness) -> None:
        """The node of the drivers is lost; they go on beside the keeper, and so does the run."""
        runs, folder = self._start(harness)
        net, begun = harness.house.net, time.monotonic()
        near = net.node_of(keeper_of(folder).pid)
        kill_all(net.processes(next(name for name in harness.house.nodes if name != near)))
        try:
            wait_until(lambda: _drivers_moved(runs, folder), "drivers beside the keeper", _SOON_S)
            posted = runs.status(folder.run_id).making["posted"]
            wait_until(lambda: runs.status(folder.run_id).making["posted"] > posted, "more groups", _SOON_S)
            seconds = time.monotonic() - begun
            runs.stop(folder.run_id)
            wait_until(lambda: runs.status(folder.run_id).ended_at is not None, "the end", _SOON_S)
            state = runs.status(folder.run_id).state
            self._note("other node killed", state, frozenset({"stopped"}), left_of(folder), "", seconds)
        finally:
            kill_all(processes_of_run(folder))
            harness.house.mend()

    def silence(self, harness: _ClusterHarness) -> None:
        """The engine does not answer for a while; the run goes on."""
        runs, folder = self._start(harness)
        with harness.house.unreachable():
            limit, states = time.monotonic() + _ANSWERS_S, set()
            while time.monotonic() < limit:
                states.add(harness.runs().status(folder.run_id).state)
                states.add(runs.status(folder.run_id).state)
                time.sleep(0.5)
        runs.stop(folder.run_id)
        wait_until(lambda: runs.status(folder.run_id).ended_at is not None, "the end", _SOON_S)
        seen = "+".join(sorted(states))
        self._note("unreachable", seen, frozenset({"training"}), left_of(folder), "", 0.0)

    def refusal(self, harness: _ClusterHarness, name: str) -> None:
        """The engine refuses the job, and the run fails with its words."""
        house, specification = harness.house, harness.specification()
        if not house.spent:
            return  # Ray accepts everything and lets it wait
        launcher = specification.config.launcher
        launcher.partition, launcher.account = ("", house.spent) if name == "quota" else ("nowhere", "")
        runs, state, told = harness.runs(), "started", ""
        try:
            runs.start(specification)
        except ComponentFailed:
            status = runs.status(specification.run_id)
            state, told = status.state, status.failure.reason if status.failure else ""
        if (house.quota if name == "quota" else "invalid partition") not in told:
            state += ", not in the engine's words"
        folder = runs.folder(specification.run_id)
        left = [*left_of(folder), *(str(path) for path in folder.path.glob(".variables-*"))]
        left += [job for job in house.engine.jobs() if job.startswith(folder.run_id)]
        self._note(name, state, frozenset({"failed"}), left, told, 0.0)

    def wait_for_ever(self, harness: _ClusterHarness) -> None:
        """The engine has no room; the run says why, and a stop ends it."""
        runs, specification = harness.runs(), harness.specification()
        with harness.house.full() as features:
            specification.config.launcher.features = list(features)
            folder = runs.start(specification)
            harness.started.append(folder)
            wait_until(lambda: harness.house.engine.title in runs.status(folder.run_id).reason, "a reason", _SOON_S)
            told, begun = runs.status(folder.run_id).reason, time.monotonic()
            runs.stop(folder.run_id)
            wait_until(lambda: runs.status(folder.run_id).ended_at is not None, "the end", _SOON_S)
        state, seconds = runs.status(folder.run_id).state, time.monotonic() - begun
        self._note("no room", state, frozenset({"stopped"}), left_of(folder), told, seconds)

    def _note(
        self, name: str, state: str, ends: frozenset[str], left: Sequence[str], reason: str, seconds: float
    ) -> None:
        self._left += left
        if state not in ends:
            self._wrong.append(f"{name}: {state}")
        mark = "" if state in ends and not left else "[bold red]wrong[/] "
        self._console.print(f"{mark}{name}: {state} after {seconds:.1f} s, {len(left)} left. {reason}", soft_wrap=True)
        for words in left:
            self._console.print(f"   left: {words}", soft_wrap=True, markup=False)


def _all_ready(runs: RunManager, folder: RunFolder) -> bool:
    status = runs.status(folder.run_id)
    if status.ended:
        raise TimeoutError(f"{folder.run_id} is {status.state}: {status.reason} {status.failure}")
    return len(status.crew) > 1 and all(member.state in _READY for member in status.crew.values())


def _drivers_moved(runs: RunManager, folder: RunFolder) -> bool:
    crew = runs.status(folder.run_id).crew
    drivers = [member for name, member in crew.items() if name.startswith("environment")]
    return all(one.restarts and one.state == "ready" and one.node == crew["api"].node for one in drivers)


def _demo(home: Path, house: House) -> float:
    """Return the accuracy after the demo, whose runs an agent starts on the cluster."""
    (home / "config").mkdir(parents=True)
    entry = {"house": house.cluster.model_dump(mode="json", exclude_defaults=True)}
    (home / "config" / "clusters.yaml").write_text(json.dumps(entry))
    # The demo tries a locked field.
    lock = {"field": "optimizer.learning_rate", "max": 0.01, "reason": "A higher rate risks a collapse."}
    (home / "config" / "locks.yaml").write_text(json.dumps({"locks": [lock]}))
    changes = {"launcher.kind": house.cluster.kind, "launcher.nodes": len(house.nodes)}
    told, _ = demo(home, changes)
    return float(told["results"]["evaluations"]["after"]["sampled"]["accuracy"])
