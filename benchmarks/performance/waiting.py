"""An environment whose scoring waits, as one does that asks a sandbox or another service."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from toprope.sdk import Environment, Part, Task, knob


class Waiting(Environment):
    """Answer anything; the score comes late."""

    name = "waiting"
    parts = {"length": Part(weight=1.0)}

    class Knobs:
        wait_s: float = knob(0.5, ge=0, le=60, help="seconds that each turn waits")
        lock: str = knob("", help="file that workers lock while they wait, so that they wait one after the other")

    def tasks(self) -> Iterator[Task]:
        for number in range(1_000_000):
            yield Task(f"Say something about {number}.", reference=str(number))

    def score(self) -> dict[str, float]:
        if self.knobs.lock:
            with Path(self.knobs.lock).open("rb") as file:  # workers may not write there
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(self.knobs.wait_s)
        else:
            time.sleep(self.knobs.wait_s)
        return {"length": len(self.answer) % 7 / 7}
