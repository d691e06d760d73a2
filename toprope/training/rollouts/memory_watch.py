"""Limits the memory of an environment's worker and of everything that it started.

An environment that leaks would take the whole machine down. The kernel bounds how much one process allocates at once
(toprope.sdk.worker.resource_limits). The memory that a worker and its children hold together, and slow growth, are
watched here: a worker above the limit is ended, the task at work is given up and counted, and the other rollouts begin
anew in the next worker.
"""

from __future__ import annotations

import asyncio

import psutil

from toprope.sdk.worker.client import WorkerClient

ADDRESS_SPACE_FACTOR = 2.0
"""The kernel's bound as a multiple of the limit: address space that is never touched counts there, and not here."""
_POLL_S = 0.5
_MB = 1 << 20


def resident_mb(pid: int) -> float:
    """Resident memory of a process and all its descendants in MB; 0 if it is gone."""
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


async def watch_memory(worker: WorkerClient, limit_mb: int, poll_s: float = _POLL_S) -> None:
    """Watches a worker until it is gone; ends it if it holds more than `limit_mb`."""
    while worker.alive:
        held = resident_mb(worker.pid)
        if held > limit_mb:
            worker.kill(
                f"The worker had {held:.0f} MB with what it started, more than environment.memory_mb ({limit_mb}), "
                "and was ended."
            )
            return
        await asyncio.sleep(poll_s)
