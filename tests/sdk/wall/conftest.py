"""Shared by the tests of the wall: a question to code behind it, and marks for machines that lack a part of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toprope.sdk.wall import Wall, level_here
from toprope.sdk.wall.groups import ProcessGroup
from toprope.sdk.worker.client import WorkerClient

landlock = pytest.mark.skipif(level_here()[0] != "landlock", reason="this machine has no Landlock")

READS = "def work():\n    try: return open({path!r}).read()\n    except OSError as error: return type(error).__name__\n"
"""Code that reads a file."""


def has_groups() -> bool:
    group = ProcessGroup.make(8)
    if group is not None:
        group.remove()
    return group is not None


def asked(wall: Wall, file: Path, attribute: str = "work", **options: Any) -> Any:
    """Call code behind a wall.

    Args:
        wall: The wall.
        file: Its file.
        attribute: A function without parameters.
        **options: Of `WorkerClient.start`.

    Returns:
        What it returned, and the worker's enclosure.
    """

    async def ask() -> Any:
        async with await WorkerClient.start(wall=wall, timeout=60, **options) as worker:
            made = await worker.call("make", file=str(file), attribute=attribute, arguments={}, wanted=["call"])
            [found] = await worker.call("invoke", handle=made["handle"], method="call", calls=[[]], timeout=60)
            return found, worker.enclosure

    return asyncio.run(ask())
