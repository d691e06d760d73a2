"""Answers of workers that callers cannot read as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from toprope.sdk.errors import WorkerDied, WorkerError
from toprope.sdk.worker.client import WorkerClient

FORGER = """import os
for descriptor in range(3, 30):
    try:
        os.write(descriptor, b'%s' + b'\\n')
    except OSError:
        pass
os.environ["no such variable"]
"""


async def opened(folder: Path, line: str) -> None:
    (folder / "forger.py").write_text(FORGER % line)
    async with await WorkerClient.start() as link:
        source = {"file": str(folder / "forger.py"), "attribute": "Mine"}
        await asyncio.wait_for(link.call("open", source=source, timeout=60), 30)


@pytest.mark.parametrize(
    "line",
    [
        '{"id": 1}',
        '{"id": 1, "ok": true}',
        '{"id": 1, "ok": false, "error": "x"}',
        '{"id": 1, "ok": false, "error": {"kind": "raised", "type": "E"}}',
        '{"id": 1, "ok": false, "error": {"kind": "raised", "type": "E", "message": "m", "more": "x"}}',
        '{"id": [1], "ok": true, "result": 1}',
    ],
)
def test_answer_of_the_wrong_form_ends_the_worker(tmp_path: Path, line: str) -> None:
    with pytest.raises(WorkerDied, match="wrong form"):
        asyncio.run(opened(tmp_path, line))


def test_line_too_deep_to_read_is_ignored(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no such variable"):
        asyncio.run(opened(tmp_path, "[" * 200_000))


def test_half_a_character_in_a_reference_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "from toprope.sdk import Environment, Task\n"
        "class Half(Environment):\n"
        "    def tasks(self):\n        yield Task('Say a', reference='a\\udcff')\n"
        "        yield Task('Say b', reference={'b': ['\\udcff', 1]})\n"
        "    def score(self): return 0.0\n"
    )

    async def run() -> None:
        async with await WorkerClient.start() as link:
            card = await link.call("open", source={"file": str(tmp_path / "half.py")})
            found = (await link.call("tasks", split="train", start=0, count=2))["tasks"]
            shown = [task["reference"] for task in found]
            assert sorted(map(str, shown)) == ["a?", "{'b': ['?', 1]}"] and not card["solves"]
            [handle] = (await link.call("begin", split="train", index=0, count=1))["rollouts"]
            assert "\udcff" not in (await link.call("solve", asked=[[handle, 0]]))[0]

    asyncio.run(run())
