"""Holds a run to its owner's limits, whoever is connected, and writes down what it takes.

What the kernel says is counted: processor time of the keeper and everything below it (of processes that have ended it
stays with those that waited for them), wall time since the run left the queue, GPUs while it has them, the folder's
size. At a cap the run is stopped in order, with a last checkpoint.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

from toprope.analysis.budget import spent
from toprope.errors import Corrupt, NotFound
from toprope.records.messages import Report, Stepped
from toprope.records.run.folder import read_json
from toprope.records.run.status import Finding
from toprope.records.run.usage import Spent, Usage, day_of
from toprope.settings.limits import UNITS, Cap
from toprope.supervisor.capacity.budget_ledger import folder_bytes
from toprope.supervisor.runs.orders import StopOrder

if TYPE_CHECKING:
    import psutil

    from toprope.supervisor.watchers.watcher import RunControl

__all__ = ["BudgetWatcher", "measure_cpu_and_memory"]

_MEASURE_EVERY_S = 4.0
_DISK_EVERY_S = 20.0
_WRITE_EVERY_S = 10.0
_NEAR = 0.9
_SOURCE = "limits.yaml"


class BudgetWatcher:
    """One run's watcher. See the module."""

    holds_limits = True

    def __init__(self, hands: RunControl) -> None:
        self._hands = hands
        self._limits = hands.specification.limits
        try:
            self._usage = Usage.read(hands.folder) or Usage()
        except Corrupt:
            self._usage = Usage()
        self._gpus = 0
        self._seen_at: float | None = None
        self._cpu_s = measure_cpu_and_memory()[0]
        self._measured = self._weighed = self._written = float("-inf")
        self._told: set[str] = set()

    def heard(self, component: str, report: Report) -> None:
        """Counts steps."""
        if isinstance(report, Stepped):
            self._usage.steps = max(self._usage.steps, report.step)
            self._hold("steps", float(report.step))

    def looked(self, now: float) -> None:
        """Measures what is due, and stops the run where it is at a cap."""
        self._count_time()
        if now - self._measured >= _MEASURE_EVERY_S:
            self._measured = now
            self._gpus = self._count_gpus()
            self._count_cpu()
        if now - self._weighed >= _DISK_EVERY_S:
            self._weighed = now
            self._usage.disk_bytes = folder_bytes(self._hands.folder.path)
        for quantity, used in spent(self._usage).items():
            self._hold(quantity, used)
        if now - self._written >= _WRITE_EVERY_S:
            self._written = now
            self._write()

    def ended(self) -> None:
        """The crew is gone: the last account."""
        self._count_time()
        self._count_cpu()
        self._usage.disk_bytes = folder_bytes(self._hands.folder.path)
        self._write()

    def _count_time(self) -> None:
        """Wall time, and that of GPUs which the run has, since the last look."""
        started = self._hands.status().started_at is not None
        last, self._seen_at = self._seen_at, time.monotonic()
        if last is None or not started:
            return
        passed = self._seen_at - last
        self._add(wall_s=passed, gpu_s=passed * self._gpus)

    def _count_cpu(self) -> None:
        cpu_s, memory = measure_cpu_and_memory()
        self._add(cpu_s=max(0.0, cpu_s - self._cpu_s))
        self._cpu_s = max(self._cpu_s, cpu_s)
        self._usage.peak_memory_bytes = max(self._usage.peak_memory_bytes, memory)

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
        """How many the run has to itself: its reservation says."""
        path = self._hands.folder.path.parent / ".reservations" / f"{self._hands.folder.run_id}.json"
        try:
            entry: dict[str, Any] = read_json(path)
            return len(entry.get("gpus") or ()) if entry.get("granted") else 0
        except (NotFound, Corrupt, AttributeError):
            return 0

    def _hold(self, quantity: str, used: float) -> None:
        cap = None if self._limits is None else self._limits.caps.get(quantity)
        if cap is None:
            return
        steps = quantity == "steps"  # the last one may be done
        if used > cap.value or (used == cap.value and not steps):
            self._tell("budget_spent", quantity, used, cap)
        elif used >= _NEAR * cap.value and not steps:
            self._tell("budget_near", quantity, used, cap)

    def _tell(self, rule: str, quantity: str, used: float, cap: Cap) -> None:
        if f"{rule}:{quantity}" in self._told or f"budget_spent:{quantity}" in self._told:
            return
        self._told.add(f"{rule}:{quantity}")
        over = rule == "budget_spent"
        what = f"{used:.3g} of {cap.value:.3g} {UNITS[quantity]} ({cap.limit}) are used"
        assert self._limits is not None
        finding = Finding(
            rule=rule,
            level="critical" if over else "warning",
            what=f"{what}; the run is stopped with a checkpoint." if over else f"{what}.",
            observed={quantity: round(used, 6)},
            threshold=f"{cap.limit}: {cap.value:g} {UNITS[quantity]}" + (f" ({cap.reason})" if cap.reason else ""),
            source=f"{_SOURCE}: set by {self._limits.source}",
            confidence="high",
            next="get_results tells what it reached; its checkpoint is kept. The owner sets the limit."
            if over
            else "Nothing has to be done: at the limit the run is stopped with a checkpoint.",
            step=self._usage.steps or None,
        )
        self._hands.event("finding", **finding.model_dump(mode="json"))
        if over:
            why = f" Reason: {cap.reason}" if cap.reason else ""
            self._hands.stop(
                StopOrder(
                    reason=f"The limit {cap.limit} of {cap.value:g} {UNITS[quantity]} is reached, set by "
                    f"{self._limits.source}.{why}"
                )
            )

    def _write(self) -> None:
        self._usage.at = time.time()
        try:
            self._usage.write(self._hands.folder)
        except OSError:
            return  # a full disk has its own watcher; the next time may do


def measure_cpu_and_memory() -> tuple[float, int]:
    """Processor seconds of this process and everything below it, ended processes included, and the bytes that those
    which live have in memory now."""
    import psutil

    me = psutil.Process()
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime
    memory = 0
    for process in _below(me):
        try:
            with process.oneshot():
                times = process.cpu_times()
                memory += process.memory_info().rss
        except psutil.Error:
            continue
        seconds += times.user + times.system + getattr(times, "children_user", 0.0)
        seconds += getattr(times, "children_system", 0.0)
    return seconds, memory


def _below(process: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return process.children(recursive=True)
    except (psutil.Error, OSError):
        return []
