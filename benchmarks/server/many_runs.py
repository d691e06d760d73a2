"""Measure a home with a thousand runs: `make bench-many-runs`.

A home is written with the records' own writers: runs of every end, some of them live and moving, a million rows of
metrics, half of them in ten long runs. Then a server is called over stdio, as a client calls it: lists by page and
filter, status of one run and of twenty, results of short and long, completed and stopped runs, concise and detailed.
The first call of each kind, before anything was read, is reported separately, and so are results of runs whose stored
explanation is gone, as after an update, short ones and long ones, whose answers have to be equal; a tenth of a second
is the limit for them, because that happens once a run. Estimated time: five minutes.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.report import report, wait_until_quiet
from benchmarks.scratch import scratch
from benchmarks.server.server import Session
from toprope.analysis.findings.stored_runs import explain_run
from toprope.analysis.reports.report import gather
from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import header, read_rows
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import EventLog, Failure, Status
from toprope.settings.schema import Config
from toprope.supervisor.lock import RunLock

RUNS = 1_000
ROWS = 1_000_000
LONG_RUNS = 10
LIVE = 4
CALLS = 300
UNEXPLAINED = 30
CALL_MS, UNEXPLAINED_MS = 20, 100
"""Goals: for a call, and for one that explains a run first."""
_DAY_S = 86_400.0
_EVALUATED = {"before": 8, "after": 131}


def row(step: int, steps: int, began: float) -> dict[str, Any]:
    """The row that the trainer writes for a step."""
    share = step / steps
    return {
        "step": step,
        "time": began + 0.2 * step,
        "train_seconds": 0.2 * step,
        "loss": 0.02 * random.random(),
        "reward": share + 0.05 * random.random(),
        "reward_std": 0.3,
        "success": share,
        "entropy": 2.0 - share,
        "kl": 0.001 * step / steps,
        "grad_norm": random.random(),
        "learning_rate": 1e-4 * (1 - share),
        "clip_ratio": 0.01,
        "completions/mean_length": 12.0,
        "completions/clipped_ratio": 0.0,
        "frac_reward_zero_std": 0.1,
        "rollouts": 32 * step,
        "rollouts_per_second": 1450.0 + random.random(),
        "version": step,
        "groups": 4,
        "eta_s": 0.2 * (steps - step),
    }


def make_run(runs: Path, number: int, rows: int, now: float) -> RunFolder:
    """Write one run's folder, as its crew leaves it."""
    live = number < LIVE
    end = "training" if live else ("completed", "completed", "completed", "stopped", "failed")[number % 5]
    created = now - _DAY_S * (number + 1) / 24
    folder = RunFolder.create(runs, f"sort-letters-{number:04d}")
    specification = Specification(
        run_id=folder.run_id,
        kind="train",
        created_at=created,
        toprope_version="bench",
        environment=EnvironmentSource(name="sort_letters", file="/nowhere.py", attribute="SortLetters"),
        config=Config(),
        policy_cache=str(runs.parent / "policies"),
    )
    specification.write(folder)
    encode = msgspec.json.Encoder().encode
    with folder.metrics.open("wb") as file:
        file.write(header(1))
        for step in range(1, rows + 1):
            file.write(encode(row(step, rows, created)) + b"\n")
    events = EventLog(folder)
    for before, after in (("queued", "validating"), ("validating", "starting"), ("starting", "training")):
        events.append("state", **{"from": before, "to": after, "reason": ""})
    events.append("first_step", step=1, seconds=2.0)
    for step in range(rows // 20, rows + 1, max(1, rows // 20)):
        events.append("checkpoint", step=step, path=f"checkpoints/step-{step:06d}", cursor=step)
    evaluations = {}
    for label, wins in _EVALUATED.items():
        if label == "after" and end != "completed":
            continue
        sampled = {"split": "heldout", "tasks": 200, "successes": wins, "accuracy": wins / 200, "reward_mean": 0.5}
        examples = [
            {"task_id": f"t{task}", "prompt": "Sort the letters: " + "zyx" * 5, "answer": label, "success": False}
            for task in range(8)
        ]
        write_json(folder.evaluation(label), {"label": label, "sampled": sampled, "greedy": None, "examples": examples})
        evaluations[label] = sampled
        events.append("evaluation", label=label, summary=sampled)
    failure = Failure(component="trainer", reason="trainer exited with code 1", excerpt=["a line"] * 20)
    status = Status(
        run_id=folder.run_id,
        kind="train",
        environment="sort_letters",
        state=end,
        created_at=created,
        started_at=created + 1,
        training_at=created + 3,
        ended_at=None if live else created + 3 + 0.2 * rows,
        since=created,
        updated_at=created,
        progress={"step": rows, "total_steps": rows, "reward": 0.9, "success": 0.9, "rollouts_per_second": 1450.0},
        counts={"accepted": 4 * rows, "waiting": 0, "delivered": 0, "committed": 4 * rows},
        evaluations=evaluations,
        failure=failure if end == "failed" else None,
    )
    status.write(folder)
    if not live:
        events.append("state", **{"from": "training", "to": end, "reason": ""})
        events.append("end", state=end, seconds=1.0)
    if not live:
        explain_run(folder, specification, status)
    if end == "completed":
        write_json(folder.results, gather(folder, specification, status).model_dump(mode="json"))
    return folder


class Keepers(threading.Thread):
    """Stand in for the keepers of the live runs: hold their locks, and write their numbers four times a second."""

    def __init__(self, folders: list[RunFolder]) -> None:
        super().__init__(daemon=True)
        self._folders = folders
        self._over = threading.Event()
        self._locks = [RunLock.acquire(folder.lock) for folder in folders]

    def run(self) -> None:
        step = 0
        while not self._over.wait(0.25):
            step += 1
            for folder in self._folders:
                status = Status.read(folder)
                progress = {**status.progress, "step": step, "eta_s": 1000.0}
                status.model_copy(update={"progress": progress, "updated_at": time.time()}).write(folder)

    def close(self) -> None:
        self._over.set()
        self.join()
        for lock in self._locks:
            if lock is not None:
                lock.release()


def make_home(home: Path) -> tuple[list[RunFolder], int]:
    """Write the runs, the newest first; return their number of rows."""
    random.seed(0)
    long_rows = ROWS // 2 // LONG_RUNS
    short_rows, rest = divmod(ROWS - long_rows * LONG_RUNS, RUNS - LONG_RUNS)
    folders, total, now = [], 0, time.time()
    for number in range(RUNS):
        long = LIVE <= number < LIVE + LONG_RUNS
        rows = long_rows if long else short_rows + (1 if rest > 0 else 0)
        rest -= not long
        folders.append(make_run(home / "runs", number, rows, now))
        total += rows
    return folders, total


def calls(folders: list[RunFolder]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the calls of each kind, varied as an agent's are."""
    ids = [folder.run_id for folder in folders]
    ended, chance = ids[LIVE:], random.Random(1)
    pages = [{}, {"state": "live"}, {"state": "ended"}, {"query": "failed"}, {"query": "sort_letters stopped"}]
    status = [{"run_ids": [chance.choice(ids[:LIVE])]} for _ in range(CALLS // 2)]
    status += [{"run_ids": [chance.choice(ids)]} for _ in range(CALLS // 4)]
    status += [{"run_ids": [*ids[:LIVE], *chance.sample(ended, 16)]} for _ in range(CALLS // 4)]
    results = [{"run_id": chance.choice(ended), "detail": chance.choice(("concise", "detailed"))} for _ in range(CALLS)]
    for call in results[::5]:
        call["run_id"] = chance.choice(ids[LIVE : LIVE + LONG_RUNS])
    chance.shuffle(status)
    return {
        "list_runs": [("list_runs", pages[number % len(pages)]) for number in range(CALLS)],
        "check_status": [("check_status", one) for one in status],
        "get_results": [("get_results", one) for one in results],
    }


def ask_unexplained(session: Session, folders: list[RunFolder]) -> tuple[float, int]:
    """Ask for the results of runs whose stored explanation is gone; return the milliseconds (median), and the number of
    answers that differ from those with it.
    """
    times, differing = [], 0
    for folder in folders:
        wanted = {"name": "get_results", "arguments": {"run_id": folder.run_id}}
        stored = session.ask("tools/call", wanted)["structuredContent"]
        folder.explanation.unlink()
        began = time.perf_counter()
        differing += session.ask("tools/call", wanted)["structuredContent"] != stored
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2], differing


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds so far, which other programs on the machine hardly change."""
    used = process.cpu_times()
    return used.user + used.system


def main() -> int:
    """Print the table and the figures."""
    quiet = wait_until_quiet()
    with scratch("many-runs") as home:
        began = time.perf_counter()
        folders, rows = make_home(home)
        figures: dict[str, Any] = {"runs": len(folders), "metric_rows": rows, "live": LIVE, "calls": CALLS}
        figures["seconds_to_write"] = time.perf_counter() - began
        began = time.perf_counter()
        for folder in folders:
            read_rows(folder.metrics)
        figures["read_all_ms"] = 1e3 * (time.perf_counter() - began)
        longest = folders[LIVE : LIVE + LONG_RUNS]
        began = time.perf_counter()
        for folder in longest:
            read_rows(folder.metrics)
        figures["read_long_ms"] = 1e3 * (time.perf_counter() - began) / len(longest)
        keepers = Keepers(folders[:LIVE])
        keepers.start()
        session = Session([sys.executable, "-P", "-m", "toprope_server.cli", "serve"], home)
        try:
            session.list_tools()
            server = psutil.Process(session.process.pid)
            for name, wanted in calls(folders).items():
                figures[f"{name}_first_ms"] = session.call(*wanted[0])
                worked = cpu_s(server)
                times = sorted(session.call(*one) for one in wanted)
                figures[f"{name}_ms"] = times[len(times) // 2]
                figures[f"{name}_p99_ms"] = times[int(len(times) * 0.99)]
                figures[f"{name}_cpu_ms"] = (cpu_s(server) - worked) / len(times) * 1e3
            figures["answers_differing"] = 0
            for name, some in {"": folders[-UNEXPLAINED:], "long_": longest}.items():
                figures[f"get_results_unexplained_{name}ms"], differing = ask_unexplained(session, some)
                figures["answers_differing"] += differing
        finally:
            session.close()
            keepers.close()
    goals = dict.fromkeys(("list_runs_ms", "check_status_ms", "get_results_ms"), f"<= {CALL_MS}")
    goals |= dict.fromkeys(("get_results_unexplained_ms", "get_results_unexplained_long_ms"), f"<= {UNEXPLAINED_MS}")
    failed = "" if (read := figures["read_all_ms"]) > CALL_MS else f"all rows were read in {read:.1f} ms"
    if not failed and (read := figures["read_long_ms"]) <= UNEXPLAINED_MS:
        failed = f"all rows of a long run were read in {read:.1f} ms"
    if not failed and figures["get_results_unexplained_ms"] <= figures["get_results_ms"]:
        failed = "answers are as fast without their stored explanations"
    return report(
        "A home with many runs",
        figures,
        goals=goals | {"answers_differing": "== 0"},
        control="reading the rows of all runs must take longer than a call may, those of a long run longer than an "
        "answer without its stored explanation may, and such an answer longer than one with it.",
        control_failed=failed,
        quiet=quiet,
    )


if __name__ == "__main__":
    sys.exit(main())
