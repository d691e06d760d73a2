"""Environments that limit their own calls by SIGALRM, in the worker's main thread and in its others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from toprope.sdk.worker.client import WorkerClient

LIMITED = """
import signal, threading, time
from toprope.sdk import Environment, Task

class Late(Exception): ...

def late(number, frame):
    raise Late("over time")

def limited(call):
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(600)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        return call()
    except Late as error:
        return str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

def wait():
    while True:
        time.sleep(0.01)

class Mine(Environment):
    max_turns = 3

    def tasks(self):
        for number in range(40):
            yield Task(f"What is {number}?")

    def step(self, text):
        if text == "main":
            return limited(wait), False
        said = []
        def work():
            said.append(limited(lambda: sum(range(1000000)) and time.sleep(0.05) or "finished"))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return said[0] if said else "the thread ended", False

    def score(self):
        return 0.0
"""


def test_alarms_limit_calls_of_the_main_thread_and_break_none_of_others(tmp_path: Path) -> None:
    file = tmp_path / "limited.py"
    file.write_text(LIMITED)

    async def run() -> list[Any]:
        async with await WorkerClient.start() as link:
            await link.call("open", source={"file": str(file), "attribute": "Mine"})
            begun = await link.call("begin", split="train", index=0, count=2)
            turns = []
            for handle, text in zip(begun["rollouts"], ("thread", "main"), strict=True):
                turns += await link.call("advance", moves=[[handle, text, False]])
            return [turn["messages"][0]["content"] for turn in turns]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["finished", "over time"]
