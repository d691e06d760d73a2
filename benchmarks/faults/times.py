"""Measure the times around faults: from a death to the state on disk, of a stop, of a list after a crash."""

from __future__ import annotations

import shutil
import statistics
import time
import uuid
from pathlib import Path

from benchmarks.faults.lives import BEHAVIOURS, RealHarness, eventually
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import EventLog, Status
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.runs.manager import RunManager

from tests.support.run_harness import RunHarness  # isort: skip  (found by benchmarks._lives)

__all__ = ["readopted", "stops"]

_SAVING_S = 0.5


def stops(harness: RunHarness, times: int) -> list[float]:
    """Return the seconds from a stop order to the run's end.

    Real trainers write a checkpoint in that time; of stand-ins the time that they feign for it is subtracted.
    """
    crew = {**BEHAVIOURS["endless"], "trainer": {"endless": True, "patient": True, "saving": _SAVING_S}}
    saving, took = 0.0 if isinstance(harness, RealHarness) else _SAVING_S, []
    for _ in range(times):
        runs, folder = harness.start(crew, stop_grace_s=10.0)
        eventually(lambda runs=runs, folder=folder: runs.status(folder.run_id).state == "training", "training")
        began = time.monotonic()
        runs.stop(folder.run_id)
        _ended(folder)
        took.append(time.monotonic() - began - saving)
    return took


def readopted(harness: RunHarness, stored: int = 200, lost: int = 5, times: int = 3) -> tuple[float, float]:
    """Return the milliseconds of the first list of `stored` runs, of which `lost` just lost their keepers, by a front
    end that has the owner's variables, and the seconds from there until real keepers have all of them training again.
    All are reported, marked, and about to be resumed. Medians of `times` tries.
    """
    template = _stored(harness)
    took = [_readopted(harness, harness.path / f"stored-{number}", template, stored, lost) for number in range(times)]
    return statistics.median(one for one, _ in took), statistics.median(two for _, two in took)


def _readopted(harness: RunHarness, path: Path, template: RunFolder, stored: int, lost: int) -> tuple[float, float]:
    path.mkdir()
    mine = []
    for number in range(stored):
        folder = RunFolder(path / f"run-{number:03d}-{uuid.uuid4().hex[:4]}")
        shutil.copytree(template.path, folder.path)
        live = number % (stored // lost) == 7
        _renamed(folder, number, live=live)
        mine += [folder] if live else []
    harness.started += mine
    launcher = harness.runs(BEHAVIOURS["endless"]).launcher
    runs = RunManager(path, launcher, lambda: Machine(threads=64), lambda _: {})
    began = time.monotonic()
    found = runs.list()
    took = 1000 * (time.monotonic() - began)
    told = sum(status.state == "lost" for status in found)
    if len(found) != stored or told != lost:
        raise RuntimeError(f"{len(found)} runs were listed and {told} were lost; {stored} and {lost} were expected")

    def again() -> bool:
        runs.list()
        return all((now := Status.read(one)).attempt == 2 and now.state == "training" for one in mine)

    eventually(again, "the next attempts of those that were lost")
    seconds = time.monotonic() - began
    for one in mine:
        runs.stop(one.run_id, 0)
        _ended(one)
    return took, seconds


def _stored(harness: RunHarness) -> RunFolder:
    """Write a run that has completed, with all its files."""
    runs, folder = harness.start({})
    _ended(folder)
    assert runs.status(folder.run_id).state == "completed"
    return folder


def _renamed(folder: RunFolder, number: int, *, live: bool) -> None:
    specification = Specification.read(RunFolder(folder.path)).model_copy(update={"run_id": folder.run_id})
    specification.write(folder)
    status = Status.read(folder).model_copy(update={"run_id": folder.run_id, "created_at": 1000.0 + number})
    if live:
        status = status.model_copy(update={"state": "training", "ended_at": None})
        folder.events.unlink()
        EventLog(folder).append("state", **{"from": "starting", "to": "training", "reason": ""})
    status.write(folder)


def _ended(folder: RunFolder) -> None:
    eventually(lambda: Status.read(folder).ended_at is not None, f"the end of {folder.run_id}")
