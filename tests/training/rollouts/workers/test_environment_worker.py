"""The typed side of the worker protocol: answers of the wrong shape are errors in plain words."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.sdk.errors import WorkerError
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker

NONSENSE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    result = "pong" if request["op"] == "ping" else {"tasks": "many"}
    print(json.dumps({"id": request["id"], "ok": True, "result": result}), flush=True)
"""


@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        ("open", lambda worker: worker.open({}, timeout=20)),
        ("tasks", lambda worker: worker.tasks("train", 0, 1, timeout=20)),
        ("begin", lambda worker: worker.begin("train", 0, 1, timeout=20)),
        ("advance", lambda worker: worker.advance([[1, "x"]], timeout=20)),
        ("score", lambda worker: worker.score("train", 0, "x", timeout=20)),
        ("settle", lambda worker: worker.settle([1], timeout=20)),
        ("run", lambda worker: worker.run("train", 0, [], timeout=20)),
        ("make", lambda worker: worker.make("a.py", "A", {}, wanted=["a"], timeout=20)),
    ],
)
def test_answer_of_wrong_shape_is_worker_error(
    tmp_path: Path, operation: str, ask: Callable[[EnvironmentWorker], Awaitable[Any]]
) -> None:
    program = tmp_path / "nonsense.py"
    program.write_text(NONSENSE)

    async def main() -> None:
        async with await EnvironmentWorker.start(wrapper=[sys.executable, str(program)]) as worker:
            with pytest.raises(
                WorkerError, match=f"the worker's answer to '{operation}' has the wrong shape: "
            ) as found:
                await ask(worker)
            assert found.value.kind == "raised" and worker.alive

    asyncio.run(main())
