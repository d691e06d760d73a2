"""Holds an environment's worker to the memory that it may have, with everything that it started.

An environment that leaks takes the whole machine along in the end. The worker has a bound in the kernel for what one
process allocates at once (toprope.sdk.worker.resource_limits); what a worker and its children hold together, and what
creeps up, is
watched from here. One that has too much is ended: what it was at is given up and counted, its neighbours' rollouts are
begun again in the next one.
"""

from __future__ import annotations

import asyncio

import psutil

from toprope.sdk.worker.client import WorkerClient

__all__ = ["AT_ONCE", "held_mb", "watch_memory"]

AT_ONCE = 2.0
"""The bound in the kernel, as a multiple of the limit: address space that is allocated and never touched counts there,
and does not count here."""
_POLL_S = 0.5
_MB = 1 << 20


def held_mb(pid: int) -> float:
    """Resident memory of a process and all that it started, in MB; 0 where it is gone."""
    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
    except psutil.Error:
        return 0.0
    total = 0
    for member in family:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total / _MB


async def watch_memory(link: WorkerClient, limit_mb: int, poll_s: float = _POLL_S) -> None:
    """Looks after a worker until it is gone, and ends it when it has too much."""
    while link.alive:
        held = held_mb(link.pid)
        if held > limit_mb:
            link.kill(
                f"The worker had {held:.0f} MB with what it started, more than environment.memory_mb ({limit_mb}), "
                "and was ended."
            )
            return
        await asyncio.sleep(poll_s)
