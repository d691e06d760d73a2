"""Run one case of `make bench-findings`: a real run under its real keeper, from start to end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toprope
from benchmarks.findings.cases import STEPS, Case
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import Event, Finding, Status, read_events
from toprope.settings.changes import apply_changes
from toprope.settings.presets import load_preset
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager

__all__ = ["Played", "play"]

ROOT = Path(toprope.__file__).resolve().parent.parent
LIMIT_S = 240.0
"""A run that has not ended this long after it was ready is stopped: it stands still."""
_START_LIMIT_S = 900.0
"""The first run makes the embedded policy: a minute on a quiet machine."""
_SPELL = EnvironmentSource(name="reasoning_gym/spell_backward", adapter="reasoning_gym", target="spell_backward")
_SORT = EnvironmentSource(name="sort_letters", file=str(ROOT / "environments" / "template.py"), attribute="SortLetters")


@dataclass(frozen=True)
class Played:
    """The result of a case."""

    case: Case
    folder: RunFolder
    status: Status
    events: list[Event]
    seconds: float

    @property
    def told(self) -> list[Finding]:
        """The findings that an agent saw while it ran, oldest first: findings, standstills as the rule `stall`, and the
        name of a failure.
        """
        told = []
        for event in self.events:
            if event.kind == "finding":
                told.append(Finding.model_validate(event.data))
            elif event.kind == "stall" and not event.data.get("over"):
                told.append(Finding(rule="stall", level="critical", what=event.data["what"], step=event.data["step"]))
        failure = self.status.failure
        if failure is not None and failure.kind:
            step = self.status.progress.get("step", 0)
            told.append(Finding(rule=failure.kind, level="critical", what=failure.reason, step=step))
        return told


def play(case: Case, home: Path) -> Played:
    """Run a case to its end.

    Args:
        case: The run.
        home: Folder for runs and the embedded policy, which is made there once.
    """
    runs = RunManager(home / "runs", LocalLauncher(), lambda: Machine(threads=64))
    began = time.monotonic()
    folder = runs.start(_specification(case, home))
    try:
        _follow(case, folder)
    finally:
        status = Status.read(folder)
        if not status.ended:
            for member in status.crew.values():
                _signal(member.pid, signal.SIGCONT)
            runs.stop(folder.run_id, 0.5)
        while runs.status(folder.run_id).ended_at is None:
            time.sleep(0.05)
    events = list(read_events(folder.events))
    return Played(case, folder, Status.read(folder), events, time.monotonic() - began)


def _follow(case: Case, folder: RunFolder) -> None:
    """Wait for the end, or until a run that stands still is diagnosed."""
    frozen, limit = False, time.monotonic() + _START_LIMIT_S
    starting = True
    while time.monotonic() < limit:
        status = Status.read(folder)
        if starting and status.state not in ("queued", "validating"):
            starting, limit = False, time.monotonic() + LIMIT_S
        if status.ended:
            return
        step = status.progress.get("step", 0)
        if case.freeze is not None and not frozen and step >= case.freeze[1]:
            frozen = True
            _signal(status.crew[case.freeze[0]].pid, signal.SIGSTOP)
        if step < STEPS / 2 and any(_settles(case, event) for event in read_events(folder.events)):
            return
        time.sleep(0.05)


def _settles(case: Case, event: Event) -> bool:
    """Return true if a run that will never step again has been diagnosed: there is nothing more to wait for."""
    if case.label == "stalled":
        return event.kind == "stall"
    return event.kind == "finding" and "last_step" in event.data.get("observed", {})


def _signal(pid: int | None, number: int) -> None:
    if pid is not None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _specification(case: Case, home: Path) -> Specification:
    source = {"spell_backward": _SPELL, "sort_letters": _SORT}.get(case.environment)
    if source is None:
        path = Path(__file__).with_name("environments.py")
        source = EnvironmentSource(name=case.name, file=str(path), attribute=case.environment)
    preset = load_preset("cpu-embedded", [ROOT / "configs" / "presets"])
    short: dict[str, Any] = {
        "launcher.device": "cpu",
        "launcher.stall_after_s": 15.0,
        "budget.steps": STEPS,
        "budget.max_train_seconds": None,
        "evaluation.heldout_tasks": 16,
        "evaluation.greedy": False,
        "evaluation.examples": 0,
        "environment.unchecked_reason": "what a run's findings say of a sick environment is what is measured",
    }
    config, _ = apply_changes(preset.config(source.name), short | case.changes)
    knobs = preset.knobs(source.name) | case.knobs
    config.environment.knobs = knobs
    return Specification(
        run_id=f"{case.name}-{os.getpid()}",
        kind="train",
        created_at=time.time(),
        toprope_version=toprope.__version__,
        environment=source,
        config=config,
        policy_cache=str(home / "policies"),
    )
