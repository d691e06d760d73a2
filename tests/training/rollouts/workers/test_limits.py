"""Limits of an environment's memory and network, and free restarts of productive workers."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from toprope.records.messages import Renewed
from toprope.sdk.errors import WorkerDied, WorkerError
from toprope.sdk.wall import Wall, network_refusal
from toprope.settings.sections.launcher import LauncherSection
from toprope.training.driver.producer import ErrorCounts, failure_reason
from toprope.training.rollouts.workers import restarting_worker as workers
from toprope.training.rollouts.workers import worker_watch
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.restarting_worker import RestartingWorker
from toprope.training.rollouts.workers.worker_watch import Family, used_by, watch_worker

GREEDY = '''import socket, subprocess, sys, tempfile, threading, time
from toprope.sdk import Environment, Task
LEAVE = """import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(0); os.close(1); os.close(2)
        held = bytearray(b"x" * (int(sys.argv[1]) << 20))
        time.sleep(120)
    os._exit(0)
"""
kept = []
class Greedy(Environment):
    def tasks(self):
        for n in range(60): yield Task(f"Say {n}", reference=str(n))
    def score(self):
        word, _, size = self.answer.partition(" ")
        if word == "keep": kept.append(bytearray(b"x" * (int(size) << 20)))
        if word == "dial": socket.create_connection(("127.0.0.1", int(size)), 5).close()
        if word == "start": subprocess.run([sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {size}))"], check=True)
        if word == "threads": [threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(int(size))]
        if word == "fill": tempfile.NamedTemporaryFile(delete=False).write(b"x" * (int(size) << 20))
        if word == "leave": subprocess.run([sys.executable, "-c", LEAVE, size], check=True)
        if word == "pair": [end.close() for end in socket.socketpair()]
        return 1.0
'''  # noqa: E501


async def opened(folder: Path, **limits: Any) -> EnvironmentWorker:
    (folder / "greedy.py").write_text(GREEDY)
    link = await EnvironmentWorker.behind(Wall(reads=(str(folder),), **limits))
    await link.call("open", source={"file": str(folder / "greedy.py"), "attribute": "Greedy"})
    return link


async def said(link: EnvironmentWorker, answer: str) -> dict[str, Any]:
    found: dict[str, Any] = await link.call("score", split="train", index=0, answer=answer)
    return found


@pytest.mark.skipif(bool(network_refusal("deny")), reason="this machine has no seccomp")
def test_denied_network_covers_children_but_not_socket_pairs(tmp_path: Path) -> None:
    async def run() -> None:
        async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(nothing, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, await opened(tmp_path) as free:
            assert (await said(free, f"dial {port}"))["error"] is None
        async with await asyncio.start_server(nothing, "127.0.0.1", 0), await opened(tmp_path, network="deny") as held:
            assert "unreachable" in (await said(held, f"dial {port}"))["error"]
            assert "CalledProcessError" in (await said(held, f"start {port}"))["error"]
            assert (await said(held, "pair"))["error"] is None

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_large_allocation_is_error_of_rollout(tmp_path: Path) -> None:
    async def run() -> None:
        async with await opened(tmp_path, memory_mb=300) as link:
            assert "MemoryError" in (await said(link, "keep 600"))["error"]
            assert (await said(link, "fine"))["reward"] == 1.0

    asyncio.run(run())


def test_memory_growth_ends_worker_with_reason(tmp_path: Path) -> None:
    async def run() -> None:
        link = await opened(tmp_path)
        limit = round(used_by(Family(link.pid).look()).memory_mb) + 60
        watch = asyncio.create_task(watch_worker(link, limit, 0.02))
        with pytest.raises(WorkerDied, match=r"more than environment.memory_mb \(\d+\)") as ended:
            async with asyncio.timeout(60):
                while True:
                    await said(link, "keep 8")
        assert ended.value.code is None  # not as by a stranger's kill: what it was at is given up
        await watch
        await link.close()

    asyncio.run(run())


def test_process_that_left_the_family_counts_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon, found without a control group: by the folder for temporary files that it inherited."""

    async def run() -> set[psutil.Process]:
        link = await opened(tmp_path)
        assert link.enclosure is not None
        family = Family(link.pid, None, link.enclosure.scratch)
        limit = round(used_by(family.look()).memory_mb) + 150
        await said(link, "leave 300")
        monkeypatch.setattr(link.enclosure, "group", None)
        async with asyncio.timeout(30):
            # The command ends before its daemon has begun; the daemon is the one with the memory.
            while used_by(left := {one for one in family.look() if one.pid != link.pid}).memory_mb < 300:
                await asyncio.sleep(0.02)
        assert not set(psutil.Process(link.pid).children(recursive=True)) & left
        watch = asyncio.create_task(watch_worker(link, limit, 0.02))
        async with asyncio.timeout(30):
            await watch
        with pytest.raises(WorkerDied, match="more than environment.memory_mb"):
            await said(link, "fine")
        await link.close()
        return left

    left = asyncio.run(run())
    assert not psutil.wait_procs(left, timeout=10)[1], "the daemon is still there"


@pytest.mark.parametrize(("answer", "why"), [("threads 60", "processes and threads"), ("fill 60", "MB of its folders")])
def test_watch_ends_worker_that_uses_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, why: str
) -> None:
    free, looked = [100 << 20], threading.Event()

    def usage(place: str) -> SimpleNamespace:
        looked.set()
        return SimpleNamespace(free=free[-1])

    monkeypatch.setattr(worker_watch, "most_tasks", lambda: 50)
    monkeypatch.setattr(worker_watch.psutil, "disk_usage", usage)

    async def run() -> None:
        link = await opened(tmp_path)
        watch = asyncio.create_task(watch_worker(link, poll_s=0.02))
        assert await asyncio.to_thread(looked.wait, 20)
        assert (await said(link, "fine"))["reward"] == 1.0
        with suppress(WorkerDied):  # the watch may see it before the answer comes
            await said(link, answer)
        free.append(40 << 20)
        async with asyncio.timeout(30):
            await watch
        with pytest.raises(WorkerDied, match=why):
            await said(link, "fine")
        await link.close()

    asyncio.run(run())


def test_productive_worker_restarts_for_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GROUPS_PER_FREE_RESTART", 5)
    reports: list[Any] = []

    async def run() -> None:
        section = LauncherSection(restarts=1, restart_backoff_s=0.01)
        async with await RestartingWorker.start(lambda: opened(tmp_path), section, reports.append) as worker:
            for groups in (5, 7, 0):
                for _ in range(groups):
                    worker.count_group()
                await worker.replace(await worker.current(), WorkerDied("gone", 7))
            with pytest.raises(WorkerDied, match="once more"):
                await worker.replace(await worker.current(), WorkerDied("gone", 7))

    asyncio.run(run())
    assert [(one.number, one.limit) for one in reports if isinstance(one, Renewed)] == [(0, 1), (0, 1), (1, 1)]


def test_failure_reasons_and_error_kinds_are_few() -> None:
    from toprope.records.journal.groups import Outcome

    assert failure_reason(WorkerError("raised", "KeyError", "x")) == "the environment failed"
    assert failure_reason(WorkerError("ended", "WorkerTimeout", "x")) == "the environment hung"
    assert failure_reason(WorkerError("ended", "WorkerDied", "x")) == "the environment's process ended"
    errors = ErrorCounts()
    errors.add([Outcome(1.0), Outcome(0.0, error="ValueError: no (a.py:3)"), Outcome(0.0, error="context is full")])
    errors.add([Outcome(0.0, error=f"Kind{number}: x") for number in range(40)])
    assert (errors.rollouts, errors.by_kind["ValueError"], errors.by_kind["context is full"]) == (43, 1, 1)
    assert len(errors.by_kind) <= 13 and errors.by_kind["other"] == 30


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "from toprope.sdk import Environment, Task\nclass Odd(Environment):\n    max_turns = 2\n"
        "    def tasks(self):\n        for n in range(60): yield Task(f'Say \\ud800 {n}')\n"
        "    def step(self, text): return 'more \\udfff', False\n"
        "    def score(self): raise ValueError('no \\ud801')\n"
    )

    async def run() -> None:
        async with await EnvironmentWorker.start() as link:
            await link.call("open", source={"file": str(tmp_path / "odd.py"), "attribute": "Odd"})
            begun = await link.call("begin", split="train", index=0, count=1)
            [first] = await link.call("advance", moves=[[begun["rollouts"][0], "a"]])
            [last] = await link.call("advance", moves=[[begun["rollouts"][0], "b"]])
            said = [begun["messages"][0]["content"], first["messages"][0]["content"], last["outcome"]["error"]]
            assert all("?" in text and text.encode() for text in said), said

    asyncio.run(run())
