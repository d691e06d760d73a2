"""Energy of tool calls: measured if this machine can, else estimated, and always labelled.

The `zeus` library measures (NVML for NVIDIA GPUs, RAPL for the processor), if the environment's interpreter has it.
Without it, the processor's RAPL counters are read if this user may (Linux, admin-guide/pm/powercap). Else power follows
utilisation, as in Fan, Weber and Barroso, Power Provisioning for a Warehouse-Sized Computer, ISCA 2007:

    watts = idle + (busy - idle) * seconds of processor time / seconds

with the processor time of this process and of the programs that it waited for. That is labelled `estimate`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Meter", "Used"]

CPU_WATTS = 15.0
"""One busy core with its share of memory: an order of magnitude."""
IDLE_WATTS = 3.0
"""The share of a core that waits, with its memory."""
_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Used:
    """Time and energy between `Meter.start` and `Meter.stop`."""

    seconds: float
    joules: float
    watts: float
    source: str
    """`measured` or `estimate`."""


class Meter:
    """Measures one call at a time.

    Args:
        measure: Whether to look for an energy counter at all.
    """

    def __init__(self, measure: bool = True) -> None:
        self._monitor = _monitor() if measure else None
        self._rapl = Rapl() if measure and self._monitor is None else None
        self._began = self._cpu_s = 0.0

    def start(self) -> None:
        """Begin a measurement."""
        self._began, self._cpu_s = time.perf_counter(), _processor_seconds()
        if self._rapl is not None:
            self._rapl.start()
        if self._monitor is not None:
            self._monitor.begin_window("call")

    def stop(self) -> Used:
        """Seconds, joules and mean watts since `start`."""
        seconds = time.perf_counter() - self._began
        if self._monitor is not None:
            joules = _joules(self._monitor.end_window("call"))
            if joules > 0:
                return Used(seconds, joules, joules / seconds if seconds > 0 else 0.0, "measured")
        if self._rapl is not None and (joules := self._rapl.stop()) > 0:
            return Used(seconds, joules, joules / seconds if seconds > 0 else 0.0, "measured")
        busy = max(_processor_seconds() - self._cpu_s, 0.0)
        joules = IDLE_WATTS * seconds + (CPU_WATTS - IDLE_WATTS) * busy
        return Used(seconds, joules, joules / seconds if seconds > 0 else 0.0, "estimate")


class Rapl:
    """The energy counters of the processor packages.

    Args:
        place: Folder of the zones.
    """

    def __init__(self, place: Path = _POWERCAP) -> None:
        # Zones with two numbers are parts of a package, which counts them.
        self.zones = [zone for zone in sorted(place.glob("intel-rapl:[0-9]*")) if zone.name.count(":") == 1]
        self.zones = [zone for zone in self.zones if _microjoules(zone, "energy_uj") is not None]
        self._before: list[float] = []

    def start(self) -> None:
        """Begin a measurement."""
        self._before = [_microjoules(zone, "energy_uj") or 0.0 for zone in self.zones]

    def stop(self) -> float:
        """Joules of all packages since `start`."""
        total = 0.0
        for zone, before in zip(self.zones, self._before, strict=True):
            used = (_microjoules(zone, "energy_uj") or before) - before
            if used < 0:  # the counter began again at zero
                used += _microjoules(zone, "max_energy_range_uj") or 0.0
            total += max(used, 0.0)
        return total / 1e6


def _microjoules(zone: Path, name: str) -> float | None:
    try:
        return float((zone / name).read_text())
    except (OSError, ValueError):
        return None


def _processor_seconds() -> float:
    """Processor time of this process with its threads, and of the programs that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _monitor() -> Any:
    """A Zeus monitor; None without the library or a readable counter (on most systems only root reads RAPL)."""
    try:
        from zeus.monitor import ZeusMonitor

        monitor = ZeusMonitor(approx_instant_energy=True)
        monitor.begin_window("trial")
        monitor.end_window("trial")
        has = bool(getattr(monitor, "gpu_indices", ())) or bool(getattr(monitor, "cpu_indices", ()))
        return monitor if has else None
    except Exception:  # drivers raise anything; it cannot measure here
        return None


def _joules(measured: Any) -> float:
    parts = [getattr(measured, name, None) or {} for name in ("gpu_energy", "cpu_energy", "dram_energy")]
    return float(sum(value for part in parts for value in part.values() if value))
