"""Programs that are forked from one process with their libraries loaded, under guards of their own."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.run_harness import eventually
from toprope.records.messages import ENV_ATTEMPT, ENV_COMPONENT, ENV_FOLDER, ENV_REPORT_FD, Progress
from toprope.supervisor import guard
from toprope.supervisor.keeper import preloading
from toprope.supervisor.keeper.component import Component, Exit, reap_orphans
from toprope.supervisor.keeper.containment import ENV_CONTAINMENT, choose_containment
from toprope.supervisor.keeper.preloading import Preloaded, PreloadingSpawner, can_preload
from toprope.supervisor.keeper.spawner import SpawnRequest
from toprope.supervisor.lock import RunLock, is_held

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are forked on Linux only")
ROOT = str(Path(__file__).resolve().parents[3])
MODULE = "tests.support.forked_program"


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    """As the keeper is one. Later tests end no orphans."""
    guard.become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0)  # prctl(2): PR_SET_CHILD_SUBREAPER


def request(path: Path, name: str, *arguments: str, **options: Any) -> SpawnRequest:
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {
        "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]),
        ENV_FOLDER: str(path),
        ENV_ATTEMPT: "3",
        ENV_COMPONENT: name,
        "OWN": f"of {name}",
    }
    return SpawnRequest(
        argv=[sys.executable, "-P", "-m", MODULE, *arguments],
        variables=variables,
        log=path / f"{name}.log",
        grace_s=1.0,
        folder=path,
        preloadable=True,
        **options,
    )


def children() -> set[int]:
    """Processes below this one; earlier tests may have left some, such as a tracker of shared memory."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def told(component: Component) -> dict[str, Any]:
    """The report of the program about itself."""
    async for report in component:
        if isinstance(report, Progress):
            found: dict[str, Any] = json.loads(report.what)
            return found
    raise AssertionError(f"it ended without a report: {component.exit} {component.excerpt()}")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 120))


def say(component: Component, word: str) -> None:
    os.write(component._orders, word.encode() + b"\n")


@pytest.mark.parametrize("level", ["guard", "bubblewrap"])
def test_forked_programs_are_as_if_executed_and_end_with_their_guards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    if level == "bubblewrap" and choose_containment("auto").level != level:
        pytest.skip("no pid namespaces here")
    monkeypatch.setenv(ENV_CONTAINMENT, level)

    before = children()

    async def work() -> None:
        spawner = PreloadingSpawner(2, ["colorsys"])
        lock = RunLock.acquire(tmp_path / "lock")
        assert lock is not None
        trainer = Component("trainer", request(tmp_path, "trainer", "--fast", lock=lock), spawner)
        inference = Component("inference", request(tmp_path, "inference"), spawner)
        seen = {one.name: await told(one) for one in (trainer, inference)}
        for one in (trainer, inference):
            found = seen[one.name]
            assert found["loaded"], "its libraries were there before it began"
            assert found["shown"][1:4] == ["-P", "-m", MODULE] and found["folder"] == str(tmp_path)
            assert found["parent"] == (one.guard_pid if level == "guard" else 1)
            assert one.pid is not None and psutil.Process(one.pid).ppid() == one.guard_pid
            assert psutil.Process(one.guard_pid).ppid() == os.getpid()
            assert found["variables"][ENV_COMPONENT] == one.name and found["sigpipe"]
            assert found["descriptors"] == sorted([0, 1, 2, int(found["variables"][ENV_REPORT_FD])])
            assert psutil.Process(one.guard_pid).cmdline()[1].endswith("guard.py")
            # By these the reaper knows processes of this run.
            for pid in (one.guard_pid, one.pid):
                marks = psutil.Process(pid).environ()
                assert marks[ENV_FOLDER] == str(tmp_path) and marks[ENV_ATTEMPT] == "3"
        assert seen["trainer"]["arguments"] == ["--fast"]
        assert [seen[name]["variables"]["OWN"] for name in ("trainer", "inference")] == ["of trainer", "of inference"]
        assert spawner._reaper is not None, "the process ends when it has forked all of them"
        await spawner._reaper
        assert spawner._process is None
        say(trainer, "seven, with a daemon")
        say(inference, "end")
        await asyncio.gather(trainer.gone.wait(), inference.gone.wait())
        assert trainer.exit == Exit(7) and inference.exit == Exit(0) and trainer.excerpt() == ["printed"]
        assert children() <= before, "the daemon ended with its guard"
        lock.release()
        assert not is_held(tmp_path / "lock")

    run(work)


@pytest.mark.parametrize("fitting", [True, False])
def test_programs_are_forked_from_a_process_that_waited(tmp_path: Path, fitting: bool) -> None:
    wanted = request(tmp_path, "trainer")
    other = {} if fitting else {"PYTHONHASHSEED": "5"}
    waiting = Preloaded({**wanted.variables, **other}, 4000, libraries=["colorsys"])

    async def work() -> None:
        spawner = PreloadingSpawner(1, ["colorsys"], waiting)
        component = Component("trainer", wanted, spawner)
        assert (spawner._process is waiting.process) == fitting and (await told(component))["loaded"]
        say(component, "end")
        await component.gone.wait()
        spawner.close()

    run(work)
    assert waiting.process.poll() is not None
    unused = Preloaded(wanted.variables, 4000, libraries=["colorsys"])
    PreloadingSpawner(1, ["colorsys"], unused).close()
    assert unused.process.poll() is not None
    assert not unused.fits(wanted), "it has ended"


def test_process_that_hangs_in_an_import_ends_with_its_keeper(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(100)\n")
    code = (
        "import os, pathlib, time\nfrom toprope.supervisor.keeper.preloading import Preloaded\n"
        f"made = Preloaded(os.environ, 100, folder=pathlib.Path({str(tmp_path)!r}), libraries=['sleeper'])\n"
        "print(made.process.pid, flush=True)\ntime.sleep(100)\n"
    )
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])}
    keeper = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, env=variables)
    assert keeper.stdout is not None
    process = psutil.Process(int(keeper.stdout.readline()))
    eventually((tmp_path / "began").exists)
    keeper.kill()
    keeper.communicate()
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_stop_before_the_fork_starts_nothing(tmp_path: Path) -> None:
    before = children()

    async def work() -> None:
        spawner = PreloadingSpawner(2, ["colorsys"])
        component = Component("trainer", request(tmp_path, "trainer"), spawner)
        component.stop(0.5)
        await component.gone.wait()
        assert component.exit == Exit()
        spawner.close()
        await reap_orphans([component], 10.0)
        assert children() <= before

    run(work)


@pytest.mark.parametrize("failure", ["library", "killed", "slow"])
def test_programs_start_alone_if_the_process_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    before = children()

    async def work() -> None:
        if failure == "slow":
            monkeypatch.setattr(preloading, "PATIENCE_S", 0.0)
        spawner = PreloadingSpawner(2, ["no_such_library" if failure == "library" else "colorsys"])
        first = Component("trainer", request(tmp_path, "trainer"), spawner)
        if failure == "killed":
            assert spawner._process is not None
            spawner._process.kill()
        found = await told(first)
        second = Component("inference", request(tmp_path, "inference"), spawner)
        assert not found["loaded"] and not (await told(second))["loaded"]
        for one in (first, second):
            say(one, "seven")
            await one.gone.wait()
            assert one.exit == Exit(7)
        spawner.close()
        assert children() <= before

    run(work)


def test_guard_is_killed_like_any_other(tmp_path: Path) -> None:
    async def work() -> None:
        component = Component("trainer", request(tmp_path, "trainer"), PreloadingSpawner(1, ["colorsys"]))
        await told(component)
        component.kill_guard()
        await component.gone.wait()
        assert component.exit == Exit()
        assert await reap_orphans([component], 10.0) == 1

    run(work)


def test_machines_with_a_gpu_do_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "_GPUS", ())
    assert can_preload()
    monkeypatch.setattr(preloading, "_GPUS", (os.devnull,))
    assert not can_preload()
