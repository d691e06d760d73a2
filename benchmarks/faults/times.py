"""Measure the times around faults: from a death to the state on disk, of a stop, of a list after a crash."""

from __future__ import annotations

import shutil
import statistics
import time
import uuid
from pathlib import Path

from benchmarks.faults.lives import BEHAVIOURS, deaths, eventually
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import EventLog, Status
from toprope.settings.schema import Config
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager

from tests.support.run_harness import RunHarness  # isort: skip  (found by benchmarks._lives)

__all__ = ["deaths", "readopt_ms", "stops", "stubborn_stops"]

_SAVING_S = 0.5


def stops(harness: RunHarness, times: int) -> list[float]:
    """Return the seconds from a stop order to the run's end, less the trainer's time to write its checkpoint."""
    crew = {**BEHAVIOURS["endless"], "trainer": {"endless": True, "patient": True, "saving": _SAVING_S}}
    took = []
    for _ in range(times):
        runs, folder = harness.start(crew, stop_grace_s=10.0)
        eventually(lambda runs=runs, folder=folder: runs.status(folder.run_id).state == "training", "training")
        began = time.monotonic()
        runs.stop(folder.run_id)
        _ended(folder)
        took.append(time.monotonic() - began - _SAVING_S)
    return took


def stubborn_stops(harness: RunHarness, times: int) -> list[float]:
    """Return the seconds from a stop order to the end of a crew that ignores SIGTERM and has nothing to save."""
    sleeps = {"deaf": True, "at": "ready", "do": "sleep"}
    crew = {
        "api": sleeps,
        "inference": sleeps,
        "environment": {"deaf": True, "at": "before", "do": "sleep"},
        "trainer": {"deaf": True, "steps": 3, "at": "saved", "do": "sleep"},
    }
    took = []
    for _ in range(times):
        runs, folder = harness.start(crew, stop_grace_s=Config().launcher.stop_grace_s)
        eventually(lambda folder=folder: Status.read(folder).checkpoint, "the checkpoint")
        began = time.monotonic()
        runs.stop(folder.run_id)
        _ended(folder)
        took.append(time.monotonic() - began)
    return took


def readopt_ms(harness: RunHarness, stored: int = 200, lost: int = 5, times: int = 3) -> float:
    """Return the milliseconds of the first list of `stored` runs, of which `lost` just lost their keepers, by a front
    end that has the owner's variables: all of them are reported, marked, and about to be resumed. The median of `times`
    tries.
    """
    template = _stored(harness)
    return statistics.median(_readopt_ms(harness.path / f"stored-{n}", template, stored, lost) for n in range(times))


def _readopt_ms(path: Path, template: RunFolder, stored: int, lost: int) -> float:
    path.mkdir()
    for number in range(stored):
        run_id = f"run-{number:03d}-{uuid.uuid4().hex[:4]}"
        folder = RunFolder(path / run_id)
        shutil.copytree(template.path, folder.path)
        _renamed(folder, number, live=number % (stored // lost) == 7)
    runs = RunManager(path, _NoKeepers(), lambda: Machine(threads=64), lambda _: {})
    began = time.monotonic()
    found = runs.list()
    took = 1000 * (time.monotonic() - began)
    told = sum(status.state == "lost" for status in found)
    if len(found) != stored or told != lost:
        raise RuntimeError(f"{len(found)} runs were listed and {told} were lost; {stored} and {lost} were expected")
    eventually(
        lambda: sum(run.attempt == 2 for run in runs.list()) == lost, "the next attempts of those that were lost"
    )
    return took


class _NoKeepers(LocalLauncher):
    """A launcher that starts nothing: the list is measured, not the machine's capacity for keepers."""

    def submit(self, folder: RunFolder, variables: object, lock: object = None) -> None:  # type: ignore[override]
        return None


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
