"""Serve an engine over HTTP as the inference component, until the run ends."""

from __future__ import annotations

import asyncio

from toprope.records.messages import Ready
from toprope.training.component.http_server import serve
from toprope.training.component.member import CrewMember, send_heartbeats
from toprope.training.inference.app import InferenceServer
from toprope.training.inference.engine import Engine

BEAT_S = 1.0
"""Seconds between two signs of life."""


async def serve_engine(member: CrewMember, server: InferenceServer, engine: Engine, vocabulary: int) -> None:
    """Serve until the run ends, reporting the address and signs of life."""
    ending = asyncio.Event()

    async def watch() -> None:
        while not member.ending.is_set():
            await asyncio.sleep(BEAT_S)
        ending.set()

    async def follow_orders() -> None:
        async for _ in member.orders():
            if member.ending.is_set():
                break
        ending.set()

    tasks = [
        asyncio.create_task(follow_orders()),
        asyncio.create_task(watch()),
        asyncio.create_task(send_heartbeats(member.report, engine.is_progressing)),
    ]
    await serve(server.app, lambda url: member.report(Ready(url, {"vocabulary": vocabulary})), ending)
    for task in tasks:
        task.cancel()
