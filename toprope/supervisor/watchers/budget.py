"""Enforces the owner's limits on one run and writes down its use of resources.

The kernel's figures count: processor time of the keeper and everything below it (that of ended processes stays with the
parent that waited for them), and what members on other nodes report; wall time since the run left the queue, GPUs while
it has them, the size of its folder. At a cap the run is stopped in order, with a last checkpoint.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from toprope.analysis.budget import GB, spent
from toprope.errors import Corrupt, NotFound, TopropeError
from toprope.machine import cpu_and_memory
from toprope.records.messages import OutOfBudget, Report, Stepped, Used
from toprope.records.run.folder import RUN_ID, RunFolder, folder_bytes, read_json
from toprope.records.run.status import Finding
from toprope.records.run.usage import Spent, Usage, day_of, spending_in
from toprope.settings.limits import UNITS, Cap
from toprope.supervisor.notices import home_of_keeper
from toprope.supervisor.runs.orders import StopOrder
from toprope.supervisor.watchers.watcher import RunControl, Watcher

_MEASURE_EVERY_S = 4.0
_DISK_EVERY_S = 20.0
_ADD_UP_EVERY_S = 60.0
"""Seconds between two sums over all runs, of which there may be thousands."""
_WRITE_EVERY_S = 10.0
_NEAR = 0.9
_SOURCE = "limits.yaml"


class BudgetWatcher(Watcher):
    """Measures one run and stops it at its caps."""

    holds_limits = True

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._limits = control.specification.limits
        self._damage = ""
        try:
            self._usage = Usage.read(control.folder) or Usage()
        except Corrupt as error:
            self._usage, self._damage = Usage(), error.message
        self._disk = ThreadPoolExecutor(1, "usage")
        limited = self._limits is not None and (self._limits.caps or self._limits.reserved)
        self._counts = not (self._damage and limited)
        self._gpus = 0
        self._counted_at: float | None = None
        self._cpu_s = cpu_and_memory()[0]
        self._far_memory: dict[str, int] = {}
        self._measured_at = self._weighed_at = self._added_up_at = self._written_at = float("-inf")
        self._recorded: set[str] = set()

    def on_report(self, component: str, report: Report) -> None:
        if isinstance(report, Stepped):
            self._usage.steps = max(self._usage.steps, report.step)
            self._check_cap("steps", float(report.step))
        elif isinstance(report, Used):
            self._add(cpu_s=max(0.0, report.cpu_s))
            self._far_memory[component] = report.memory_bytes
        elif isinstance(report, OutOfBudget) and self._limits is not None and "cost_usd" in self._limits.caps:
            self._record("budget_spent", "cost_usd", report.used, self._limits.caps["cost_usd"], report.needed)

    def on_tick(self, now: float) -> None:
        if self._damage:
            self._tell_damage()
        self._count_time()
        if now - self._measured_at >= _MEASURE_EVERY_S:
            self._measured_at = now
            self._gpus = self._count_gpus()
            self._count_cpu()
            self._count_tokens()
        if now - self._weighed_at >= _DISK_EVERY_S:
            self._weighed_at = now
            self._usage.disk_bytes = folder_bytes(self._control.folder.path)
        for quantity, used in spent(self._usage).items():
            self._check_cap(quantity, used)
        if now - self._added_up_at >= _ADD_UP_EVERY_S:
            self._added_up_at = now
            self._check_disk_of_all()
        if now - self._written_at >= _WRITE_EVERY_S:
            self._written_at = now
            self._write()  # in its thread, because a busy disk takes seconds

    def on_end(self) -> None:
        self._count_time()
        self._count_cpu()
        self._count_tokens()
        self._usage.disk_bytes = folder_bytes(self._control.folder.path)
        self._write()
        self._disk.submit(lambda: None).result()

    def _tell_damage(self) -> None:
        """Say that the use of former attempts is unknown, and stop a run with limits: they cannot be kept."""
        text = f"What the run has used is unknown: {self._damage}"
        self._damage = ""
        if self._counts:
            self._control.record_event("warning", what=f"{text} It is counted from zero.")
            return
        why = f"{text} Its limits cannot be kept. The owner repairs the file, or removes it to count from zero."
        self._control.stop(StopOrder(reason=why))

    def _count_time(self) -> None:
        """Add the wall time since the last call, and the same for each GPU that the run has."""
        started = self._control.status().started_at is not None
        former, self._counted_at = self._counted_at, time.monotonic()
        if former is None or not started:
            return
        passed = self._counted_at - former
        self._add(wall_s=passed, gpu_s=passed * self._gpus)

    def _count_cpu(self) -> None:
        cpu_s, memory = cpu_and_memory()
        self._add(cpu_s=max(0.0, cpu_s - self._cpu_s))
        self._cpu_s = max(self._cpu_s, cpu_s)
        memory += sum(self._far_memory.values())
        self._usage.peak_memory_bytes = max(self._usage.peak_memory_bytes, memory)

    def _count_tokens(self) -> None:
        with suppress(OSError):
            self._usage.count_tokens(spending_in(self._control.folder.path))

    def _add(self, **seconds: float) -> None:
        usage, day = self._usage, day_of(time.time())
        today = usage.days.setdefault(day, Spent())
        for target in (usage, today):
            for name, value in seconds.items():
                setattr(target, name, getattr(target, name) + value)
            target.usd = self._price(target)

    def _price(self, of: Spent) -> float | None:
        limits = self._limits
        if limits is None or limits.cpu_hour_usd is None or (of.gpu_s and limits.gpu_hour_usd is None):
            return None
        return (of.cpu_s * limits.cpu_hour_usd + of.gpu_s * (limits.gpu_hour_usd or 0.0)) / 3600

    def _count_gpus(self) -> int:
        """Return the number of GPUs that the run has reserved for itself, here or from an engine on all nodes."""
        launcher = self._control.specification.config.launcher
        if self._control.folder.launch.exists():
            return launcher.room().gpus * launcher.nodes
        path = self._control.folder.path.parent / ".reservations" / f"{self._control.folder.run_id}.json"
        try:
            entry: dict[str, Any] = read_json(path)
            return len(entry.get("gpus") or ()) if entry.get("granted") else 0
        except (NotFound, Corrupt, AttributeError):
            return 0

    def _check_cap(self, quantity: str, used: float) -> None:
        cap = None if self._limits is None else self._limits.caps.get(quantity)
        if cap is not None:
            self._hold_to(cap, quantity, used)

    def _check_disk_of_all(self) -> None:
        """Hold the disk use of all runs of this folder to the limit on their sum; each keeper knows only its own."""
        cap = None if self._limits is None else self._limits.caps.get("disk_gb")
        if cap is None or cap.together is None:
            return
        total, own = self._usage.disk_bytes, self._control.folder
        with suppress(OSError):  # the disk with the folder of runs does not answer
            for name in os.listdir(own.path.parent):
                if name != own.run_id and RUN_ID.fullmatch(name):
                    with suppress(Corrupt, OSError):  # such as another user's folder
                        usage = Usage.read(RunFolder(own.path.parent / name))
                        total += usage.disk_bytes if usage is not None else 0
        most = max(cap.together, _present_limit_on_disk())
        self._hold_to(cap.model_copy(update={"value": most}), "disk_gb", total / GB)

    def _hold_to(self, cap: Cap, quantity: str, used: float) -> None:
        steps = quantity == "steps"  # a run may do its last step
        if cap.is_used_up(used) and not (steps and used == cap.value):
            self._record("budget_spent", quantity, used, cap)
        elif used >= _NEAR * cap.value > 0 and not steps:
            self._record("budget_near", quantity, used, cap)

    def _record(self, rule: str, quantity: str, used: float, cap: Cap, needed: float = 0.0) -> None:
        """Record a finding, once for each rule and quantity, and stop the run if the budget is spent, or if its next
        call does not fit: that may cost `needed`."""
        if f"{rule}:{quantity}" in self._recorded or f"budget_spent:{quantity}" in self._recorded:
            return
        self._recorded.add(f"{rule}:{quantity}")
        is_spent = rule == "budget_spent"
        unit, total = UNITS[quantity], self._control.status().progress.get("total_steps")
        after = f" after step {self._usage.steps} of {total}" if needed and total else ""
        next_call = f", and the next call may cost {needed:.3g}" if needed else ""
        text = f"{used:.3g} of {cap.value:.3g} {unit} ({cap.limit}) are used{after}{next_call}"
        assert self._limits is not None
        finding = Finding(
            rule=rule,
            level="critical" if is_spent else "warning",
            what=f"{text}; the run is stopped with a checkpoint." if is_spent else f"{text}.",
            observed={quantity: round(used, 6)},
            threshold=f"{cap.limit}: {cap.value:g} {unit}" + (f" ({cap.reason})" if cap.reason else ""),
            source=f"{_SOURCE}: set by {self._limits.source}",
            confidence="high",
            next="get_results shows the result so far; the checkpoint is kept. The owner sets the limit."
            if is_spent
            else "Nothing has to be done: at the limit the run is stopped with a checkpoint.",
            step=self._usage.steps or None,
        )
        self._control.record_event("finding", **finding.model_dump(mode="json"))
        if is_spent:
            why = f" Reason: {cap.reason}" if cap.reason else ""
            limit = f"{cap.limit} of {cap.value:g} {unit}"
            reached = f"is reached{after}" + (f" ({used:.3g} are used{next_call})" if next_call else "")
            self._control.stop(StopOrder(reason=f"The limit {limit} {reached}, set by {self._limits.source}.{why}"))

    def _write(self) -> None:
        if self._counts:
            self._usage.at = time.time()
            self._disk.submit(_write, self._usage.model_copy(deep=True), self._control.folder)


def _write(usage: Usage, folder: RunFolder) -> None:
    with suppress(OSError):  # the disk watcher handles a full disk; the next write may succeed
        usage.write(folder)


def _present_limit_on_disk() -> float:
    """The owner's present limit on all runs, under which later runs may have started; 0 if it cannot be read here."""
    if (home := home_of_keeper(os.environ)) is None:
        return 0.0
    try:
        limit = home.limits().get("disk_gb")
    except (TopropeError, OSError):
        return 0.0
    return float("inf") if limit is None else limit.max
