"""Objects of a user's own classes in a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from toprope.sdk.worker.client import WorkerClient

KEEPS = """
import asyncio, threading

class Keeps:
    def __init__(self):
        self.loop = None

    async def ask(self, text):
        if text == "leave":
            raise SystemExit(text)
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0.01)
        assert threading.current_thread() is threading.main_thread(), "where it was made"
        return text
"""


def test_async_methods_share_one_event_loop(tmp_path: Path) -> None:
    """Clients that an object keeps, such as connections, are bound to the loop of their first use."""
    (tmp_path / "keeps.py").write_text(KEEPS)

    async def work() -> list[Any]:
        async with await WorkerClient.start() as link:
            made = await link.call(
                "make", file=str(tmp_path / "keeps.py"), attribute="Keeps", arguments={}, wanted=["ask"]
            )
            batches = ([["leave"]], [["a"], ["b"]], [["c"]])
            calls = [link.call("invoke", handle=made["handle"], method="ask", calls=batch) for batch in batches]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    left, *answers = asyncio.run(work())
    assert "leave" in str(left) and answers == [["a", "b"], ["c"]]
