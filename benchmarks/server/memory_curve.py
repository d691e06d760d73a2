"""The memory of a server under load: its growth, minute by minute, and with a leak that is planted.

Samples are pairs of seconds since the load began and bytes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["PLANTED_PERCENT", "by_minute", "draw", "leaking", "settled_growth", "with_leak"]

_SETTLED_MINUTES = 5
"""Until then the threads of the server make their first buffers."""
PLANTED_PERCENT = 15
"""Of memory, over the whole load: the leak of both controls. The minutes that count see most of it."""
_HELD_MB = 100
_LEAK = """
import os, sys, time
parent = os.getppid()
megabytes, leak, seconds = map(float, sys.argv[1:])
held, began = [b"x" * int(megabytes * 2**20)], time.monotonic()
print(flush=True)
while os.getppid() == parent:
    due = megabytes * (1 + leak * (time.monotonic() - began) / seconds) * 2**20
    held.append(b"x" * max(0, int(due) - sum(map(len, held))))
    time.sleep(min(1.0, seconds / 100))
"""


def settled_growth(samples: list[tuple[float, int]], seconds: float) -> float | None:
    """Percent from the sixth minute to the last one, medians; None if the load was shorter than eight minutes."""
    if seconds < 60 * (_SETTLED_MINUTES + 3):
        return None
    begin = 60 * _SETTLED_MINUTES
    first = statistics.median(memory for at, memory in samples if begin <= at < begin + 60)
    last = statistics.median(memory for at, memory in samples if at >= seconds - 60)
    return 100.0 * (last - first) / first


def with_leak(samples: list[tuple[float, int]], seconds: float) -> list[tuple[float, int]]:
    """The samples of a server that also leaks PLANTED_PERCENT, evenly. A server that shrinks would hide that."""
    leak = PLANTED_PERCENT / 100 * samples[0][1] / seconds
    return [(at, memory + int(at * leak)) for at, memory in samples]


@contextmanager
def leaking(seconds: float, percent: float = PLANTED_PERCENT) -> Iterator[psutil.Process]:
    """A process that leaks `percent` of the memory that it holds over `seconds`, evenly."""
    command = [sys.executable, "-I", "-S", "-c", _LEAK, str(_HELD_MB), str(percent / 100), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def by_minute(samples: list[tuple[float, int]]) -> list[float]:
    """Megabytes, the median of each minute."""
    minutes = defaultdict(list)
    for at, memory in samples:
        minutes[int(at // 60)].append(memory / 2**20)
    return [round(statistics.median(minutes[minute]), 1) for minute in sorted(minutes)]


def draw(minutes: list[float], path: Path) -> None:
    """Draw megabytes by minute into a PNG, from zero, with the minutes that count apart from those before."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.6))
    axes.plot(range(1, len(minutes) + 1), minutes, marker="o", markersize=3)
    axes.axvspan(0.5, _SETTLED_MINUTES + 0.5, color="0.92")
    axes.set(xlim=(0.5, len(minutes) + 0.5), ylim=(0, 1.2 * max(minutes)), xlabel="minute", ylabel="MB")
    axes.set_title("Memory of a server under load; it is to be flat after the grey minutes", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
