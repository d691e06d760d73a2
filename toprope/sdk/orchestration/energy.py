"""Energy of tool calls: measured if this machine can, else estimated, and always labelled.

The `zeus` library measures (NVML for NVIDIA GPUs, RAPL for the processor), if the environment's interpreter has it. The
estimate is seconds times a fixed number of watts, labelled `estimate`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Meter", "Used"]

CPU_WATTS = 15.0
"""One busy core with its share of memory: an order of magnitude."""


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
        watts: Power assumed by the estimate.
        measure: Whether to look for an energy counter at all.
    """

    def __init__(self, watts: float = CPU_WATTS, measure: bool = True) -> None:
        self._watts = watts
        self._monitor = _monitor() if measure else None
        self._began = 0.0

    @property
    def measures(self) -> bool:
        """True if this machine has a readable energy counter."""
        return self._monitor is not None

    def start(self) -> None:
        """Begin a measurement."""
        self._began = time.perf_counter()
        if self._monitor is not None:
            self._monitor.begin_window("call")

    def stop(self) -> Used:
        """Seconds, joules and mean watts since `start`."""
        seconds = time.perf_counter() - self._began
        if self._monitor is not None:
            joules = _joules(self._monitor.end_window("call"))
            if joules > 0:
                return Used(seconds, joules, joules / seconds if seconds > 0 else 0.0, "measured")
        return Used(seconds, seconds * self._watts, self._watts, "estimate")


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
