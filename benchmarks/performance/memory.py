"""Measure the memory of a server and a run of the demo's kind: `make bench-memory`. Linux and root only.

    python -P -m benchmarks memory [--seconds N]

The policy is made before, as in every run but the first. While the run trains, every process of it and the server are
measured twice a second: RSS (all resident pages), USS (pages of this process alone) and PSS (shared pages divided among
their users), from `smaps_rollup`. `run_pss_mb` is the highest sum of PSS; the table shows the processes at that moment.
Control: a process that holds 64 MB more than an idle one has to show as 64 MB more, and the server and every component
have to be among the processes; otherwise the benchmark exits with 2. Takes two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from toprope_server.cli.demo import ENVIRONMENT, PRESET

from benchmarks.performance.train import read_status
from benchmarks.report import refuse, report
from benchmarks.scratch import scratch
from benchmarks.training_agent import training_agent

CONTROL_MB = 64
_COMPONENTS = ("toprope_server.cli", "keeper", "api", "inference", "trainer", "driver", "worker")
"""Words of the names of processes that every sample has."""
_STARTED_WITHIN_S = 300.0
_MAKE = """
import pathlib, sys
from toprope.settings.schema import PolicySection
from toprope.training.policy.loading import place
place(PolicySection(), pathlib.Path(sys.argv[1]), lambda progress: None)
"""
_HOLD = "import sys; held = bytearray(int(sys.argv[1]) << 20); print(flush=True); sys.stdin.read()"


@dataclass(frozen=True)
class Memory:
    """One process, in MB."""

    name: str
    rss: float
    uss: float
    pss: float


def memory_of(process: psutil.Process) -> Memory:
    """Measure a process.

    Raises:
        OSError: It is gone.
        PermissionError: It hides its memory from its own user, as a keeper does.
    """
    found: dict[str, float] = {}
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        found[name] = float(value.split()[0]) / 1024
    uss = found["Private_Clean"] + found["Private_Dirty"]
    return Memory(_name(process), found["Rss"], uss, found["Pss"])


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "?"
    if any(word.endswith("guard.py") for word in words):
        return f"guard of {words[words.index('-m') + 1].rpartition('.')[2] if '-m' in words else '?'}"
    if any(word.endswith("sdk/worker/program.py") for word in words):
        return "worker"
    if "-m" in words:
        return " ".join(words[words.index("-m") + 1 :][:2]).replace("toprope.training.", "")[:40]
    return " ".join(words)[:40]


def _sample(home: Path) -> list[Memory]:
    """Measure the server, keepers and everything below them.

    Raises:
        PermissionError: One of them hides its memory; the sum would lack it.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = "toprope.supervisor.keeper" in words and any(word.startswith(str(home)) for word in words)
            if ours or (process.ppid() == os.getpid() and "toprope_server.cli" in words):
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
        except psutil.Error:
            continue
    measured = []
    for process in found.values():
        try:
            measured.append(memory_of(process))
        except PermissionError:
            raise PermissionError(f"the memory of {_name(process)} can be read by root only") from None
        except (OSError, KeyError, psutil.Error):
            continue
    return measured


def missing(sample: Sequence[Memory]) -> list[str]:
    """The components that a sample lacks."""
    return [word for word in _COMPONENTS if not any(word in one.name.split("guard of ")[0] for one in sample)]


async def _measure(home: Path, seconds: float) -> list[list[Memory]]:
    """Samples of the time in which a run trains.

    Raises:
        PermissionError: See `_sample`.
    """
    samples: list[list[Memory]] = []
    hidden: PermissionError | None = None
    async with training_agent(home, Console(stderr=True)) as agent:
        changes = {"budget.max_train_seconds": seconds, "evaluation.heldout_tasks": 100}
        run_id = await agent.start(ENVIRONMENT, PRESET, changes)
        folder, limit = home / "runs" / run_id, time.monotonic() + _STARTED_WITHIN_S + seconds
        while (state := read_status(folder).get("state")) not in ("completed", "failed", "stopped", "lost"):
            if time.monotonic() > limit:
                raise SystemExit(f"{run_id} is still {state}")
            if state == "training" and (folder / "metrics.jsonl").exists():
                try:
                    samples.append(await asyncio.to_thread(_sample, home))
                except PermissionError as error:
                    hidden = error
                    break
            await asyncio.sleep(0.5)
    if hidden is not None:  # raised here: the client's task group would wrap it
        raise hidden
    if state != "completed":
        raise SystemExit(f"{run_id} is {state}")
    return samples


def control_mb() -> float:
    """The difference that the measurement shows between a process that holds CONTROL_MB and an idle one."""
    found = []
    for held in (0, CONTROL_MB):
        command = [sys.executable, "-I", "-S", "-c", _HOLD, str(held)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found.append(memory_of(psutil.Process(process.pid)).pss)
            process.communicate()
    return found[1] - found[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the figures; exit with 2 if the control fails."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks memory", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of training (default 20)")
    given = parser.parse_args(arguments)
    if not sys.platform.startswith("linux"):
        return refuse("smaps_rollup exists on Linux only")
    difference = control_mb()
    with scratch("memory") as home:
        (home / "config").mkdir()
        # In a process of its own: this one must not share the pages of PyTorch.
        subprocess.run([sys.executable, "-P", "-c", _MAKE, str(home / "policies")], check=True)
        try:
            samples = asyncio.run(_measure(home, given.seconds))
        except PermissionError as error:
            return refuse(str(error))
    highest = max(samples, key=lambda sample: sum(one.pss for one in sample))
    lost = missing(highest)
    table = Table("process", "RSS", "USS", "PSS", title="MB at the highest sum of PSS")
    for one in sorted(highest, key=lambda one: -one.pss):
        table.add_row(one.name, f"{one.rss:.0f}", f"{one.uss:.0f}", f"{one.pss:.0f}")
    Console().print(table)
    figures: dict[str, float] = {
        f"run_{kind}_mb": round(sum(getattr(one, kind) for one in highest), 1) for kind in ("pss", "rss", "uss")
    }
    figures |= {"processes": len(highest), "samples": len(samples), "control_mb": round(difference, 1)}
    return report(
        "Memory of a run and its server",
        figures,
        goals={"run_pss_mb": "<= 700"},
        control=f"a process that holds {CONTROL_MB} MB more must show as that, and no component may be missing.",
        control_failed=f"there was no process of {', '.join(lost)}"
        if lost
        else f"{CONTROL_MB} MB show as {difference:.1f}"
        if abs(difference - CONTROL_MB) > 4
        else "",
    )


if __name__ == "__main__":
    sys.exit(main())
