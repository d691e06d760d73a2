"""The memory of a server under load: its growth, minute by minute, and with a leak that is planted.

Samples are pairs of seconds since the load began and bytes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

__all__ = ["PLANTED_PERCENT", "by_minute", "settled_growth", "with_leak"]

_SETTLED_MINUTES = 5
"""Until then the threads of the server make their first buffers."""
PLANTED_PERCENT = 10
"""Of memory, over the whole load: a leak of the control. The minutes that count see most of it."""


def settled_growth(samples: list[tuple[float, int]], seconds: float) -> float | None:
    """Percent from the sixth minute to the last one, medians; None if the load was shorter than eight minutes."""
    if seconds < 60 * (_SETTLED_MINUTES + 3):
        return None
    begin = 60 * _SETTLED_MINUTES
    first = statistics.median(memory for at, memory in samples if begin <= at < begin + 60)
    last = statistics.median(memory for at, memory in samples if at >= seconds - 60)
    return 100.0 * (last - first) / first


def with_leak(samples: list[tuple[float, int]], seconds: float) -> list[tuple[float, int]]:
    """The samples of a server that also leaks PLANTED_PERCENT of its first memory, evenly."""
    leak = PLANTED_PERCENT / 100 * samples[0][1] / seconds
    return [(at, memory + int(at * leak)) for at, memory in samples]


def by_minute(samples: list[tuple[float, int]]) -> list[float]:
    """Megabytes, the median of each minute."""
    minutes = defaultdict(list)
    for at, memory in samples:
        minutes[int(at // 60)].append(memory / 2**20)
    return [round(statistics.median(minutes[minute]), 1) for minute in sorted(minutes)]
