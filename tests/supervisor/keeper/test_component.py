"""Reports of a component on their way to the keeper, and its end."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from toprope.errors import NotPossibleNow
from toprope.machine import has_pidfd
from toprope.records.messages import Beat, Progress, Report, encode_line
from toprope.supervisor.heartbeat import watch_parent
from toprope.supervisor.keeper import component as component_module
from toprope.supervisor.keeper.component import Component, Exit
from toprope.supervisor.keeper.preloading import can_preload
from toprope.supervisor.keeper.spawner import LocalSpawner, SpawnRequest


class StandInGuard:
    """A guard without a program; the test writes its reports and decides when it ends."""

    pid = 1
    node: str | None = None
    silence_limit_s: float | None = None

    def __init__(self) -> None:
        self.orders = os.open(os.devnull, os.O_WRONLY)
        self.reports, self.writer = os.pipe()
        os.set_blocking(self.reports, False)
        self.ended = asyncio.Event()

    def spawn(self, member: str, request: SpawnRequest) -> StandInGuard:
        return self

    def stop(self, grace_s: float) -> None:
        pass

    def kill(self) -> None:
        pass

    async def wait(self) -> int | None:
        await self.ended.wait()
        return 0

    def report(self, report: Report) -> None:
        os.write(self.writer, encode_line(report))


def test_first_report_after_a_silence_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_module, "_BUNDLE_S", 600.0)

    async def live() -> Report:
        guard = StandInGuard()
        reports = aiter(Component("trainer", SpawnRequest(["-"], {}, tmp_path / "log", 1.0), guard))
        guard.report(Beat())
        found = await anext(reports)
        guard.ended.set()
        assert [report async for report in reports] == []
        os.close(guard.writer)
        return found

    assert isinstance(asyncio.run(asyncio.wait_for(live(), 60)), Beat)


def test_frequent_reports_are_read_together_and_the_last_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = os.read
    monkeypatch.setattr(component_module.os, "read", lambda fd, size: (reads.append(fd), real(fd, size))[1])

    async def live() -> list[Report]:
        guard = StandInGuard()
        reports = aiter(Component("trainer", SpawnRequest(["-"], {}, tmp_path / "log", 1.0), guard))
        seen = []
        for number in range(100):
            guard.report(Progress("step", number, 101))
            await asyncio.sleep(0)
        while len(seen) < 100:
            seen.append(await anext(reports))
        assert len(reads) < 20, "reports are read one by one"
        guard.report(Progress("step", 100, 101))
        guard.ended.set()
        seen += [report async for report in reports]
        os.close(guard.writer)
        return seen

    seen = asyncio.run(asyncio.wait_for(live(), 60))
    assert [report.done for report in seen if isinstance(report, Progress)] == list(range(101))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")
def test_end_of_a_program_that_just_reported_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_module, "_BUNDLE_S", 600.0)

    async def live() -> None:
        guard = StandInGuard()
        program = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", "input()", stdin=PIPE)
        os.write(guard.writer, b'{"type":"guard_started","pid":%d}\n' % program.pid)
        component = Component("trainer", SpawnRequest(["-"], {}, tmp_path / "log", 1.0), guard)
        assert await component.wait_started() == program.pid
        program.kill()
        await program.wait()
        os.write(guard.writer, b'{"type":"guard_exited","code":null,"signal":"SIGKILL"}\n')
        assert [report async for report in component] == []
        assert component.exit == Exit(signal="SIGKILL") and not component.gone.is_set()
        guard.ended.set()
        await component.gone.wait()
        os.close(guard.writer)

    asyncio.run(asyncio.wait_for(live(), 60))


def test_silent_component_of_another_node_is_cut_off_and_one_beside_the_keeper_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        near, far = StandInGuard(), StandInGuard()
        far.silence_limit_s = 0.05
        found = [Component("environment", SpawnRequest(["-"], {}, tmp_path / "log", 1.0), one) for one in (near, far)]
        assert not found[1].is_cut_off  # it may still be starting
        for guard, component in zip((near, far), found, strict=True):
            guard.report(Beat())
            assert isinstance(await anext(aiter(component)), Beat)
        while not found[1].is_cut_off:
            await asyncio.sleep(0.005)
        assert not found[0].is_cut_off
        far.report(Beat())
        while found[1].is_cut_off:
            await asyncio.sleep(0.005)
        far.silence_limit_s = 60.0
        assert not found[1].is_cut_off
        moment = asyncio.get_running_loop().time
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: moment() + 3600.0)
        assert found[1].is_cut_off
        for component in found:
            component.restart_silence()  # the keeper was suspended for an hour
        assert not found[1].is_cut_off
        monkeypatch.undo()
        for guard, component in zip((near, far), found, strict=True):
            guard.ended.set()
            await component.gone.wait()
            os.close(guard.writer)
        assert not found[1].is_cut_off

    asyncio.run(asyncio.wait_for(live(), 60))


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
def test_system_that_refuses_pidfds_shows_the_end_of_a_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(refusal, os.strerror(refusal))

    async def live() -> None:
        request = SpawnRequest([sys.executable, "-I", "-S", "-c", "pass"], dict(os.environ), tmp_path / "log", 1.0)
        component = Component("trainer", request, LocalSpawner())
        await component.gone.wait()
        assert component.exit == Exit(code=0)
        with pytest.raises(NotPossibleNow, match="refuses pidfd_open"):
            watch_parent(os.getppid(), lambda: None)

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    has_pidfd.cache_clear()
    try:
        assert not can_preload()
        asyncio.run(asyncio.wait_for(live(), 20))
    finally:
        has_pidfd.cache_clear()
