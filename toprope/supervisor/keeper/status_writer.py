"""A run's life on disk, as its keeper writes it: state by state, with the numbers in between.

A change of state is on disk before anything else happens; the rest is written at most four times a second, because
steps of a small policy come faster than anybody reads. No process is started or watched here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from toprope.analysis.failures import named
from toprope.records.messages import Leveled, Progress, Stepped
from toprope.records.run.folder import RunFolder
from toprope.records.run.full_disk import NO_ROOM, Ballast
from toprope.records.run.status import TRANSITIONS, CrewMember, EventLog, Failure, State, Status

__all__ = ["StatusWriter"]

_WRITE_EVERY_S = 0.25
_RETRY_S = 1.0
_AT_LAST_S, _LOOK_AGAIN_S = 30.0, 0.25
_TOWARDS: dict[str, State] = {"queued": "validating", "validating": "starting", "starting": "training"}
_EACH, _SHOWN_EACH = "environments/", ("reward", "success", "share")
_SHOWN = ("reward", "success", "loss", "rollouts_per_second", "rollouts", "entropy", "version")


class StatusWriter:
    """The status and the events of one run. Only the holder of the run's lock may have one."""

    def __init__(self, folder: RunFolder, status: Status) -> None:
        self.status = status
        self._folder = folder
        self._events = EventLog(folder)
        self._ballast = Ballast(folder.crew / "ballast")
        self._written = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._work: dict[str, Any] = {}
        self._steps: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None

    @property
    def state(self) -> str:
        return self.status.state

    def to(self, state: State, reason: str = "", *, can_wait: bool = False, **fields: Any) -> None:
        """Enters `state` and writes it. To the state it is in: nothing. A disk without room delays the writing.

        Args:
            state: A state that TRANSITIONS allows now.
            reason: Why, for people.
            can_wait: Whether whatever else the disk says only delays it, too.
            fields: More of the status to replace.

        Raises:
            OSError: It cannot be written, and not for lack of room.
            ValueError: There is no way from the present state to that one: a bug of ours.
        """
        now, old = time.time(), self.status.state
        if state == old:
            return
        if state not in TRANSITIONS[old]:
            raise ValueError(f"a run that is {old} does not become {state}")
        if not self.status.run_kind.starts_runs:  # whose phase and best are no matter of the state
            self._work = {}
        if fields.get("failure") is not None:
            fields["failure"] = named(fields["failure"])
        update = {"state": state, "reason": reason, "since": now, "progress": {**self._steps, **self._work}, **fields}
        self.status = self.status.model_copy(update=update)
        try:
            self.write()
        except OSError as error:
            if not can_wait and error.errno not in NO_ROOM:
                raise
            self._write_later()
        failure: Failure | None = fields.get("failure")
        detail = {"component": failure.component, "failure": failure.kind} if failure else {}
        self.event("state", **{"from": old, "to": state, "reason": reason, **detail})

    def reach(self, state: State) -> None:
        """Enters `state` by way of those that a run of its kind passes before."""
        while state not in TRANSITIONS[self.state] and self.state in _TOWARDS:
            self.to(_TOWARDS[self.state])
        self.to(state)

    def event(self, kind: str, **data: Any) -> None:
        """Appends an event."""
        self._events.append(kind, **data)

    def update(self, **fields: Any) -> None:
        """Replaces fields of the status; on disk soon."""
        self.status = self.status.model_copy(update=fields)
        self.touch()

    def member(self, name: str, state: str, **fields: Any) -> None:
        """Sets one member's state; on disk soon."""
        known = self.status.crew.get(name)
        fields.setdefault("pid", known.pid if known else None)
        for counted in ("restarts", "worker_restarts"):
            fields.setdefault(counted, getattr(known, counted, 0))
        since = known.since if known and known.state == state else time.time()
        member = CrewMember(state=state, since=since, **fields)  # type: ignore[arg-type]
        self.update(crew={**self.status.crew, name: member})

    def restarted(self, name: str) -> None:
        """A member that ended is going to be started again."""
        known = self.status.crew[name]
        self.member(name, known.state, exit_code=known.exit_code, restarts=known.restarts + 1)

    def renewed(self, name: str) -> None:
        """A member started its worker again."""
        known = self.status.crew[name]
        self.member(name, known.state, exit_code=known.exit_code, worker_restarts=known.worker_restarts + 1)

    def fell_back(self) -> None:
        """Steps are going to be done again: the pace is measured anew."""
        self._first = None

    def progressed(self, progress: Progress) -> None:
        """Shows work that has no steps beside the newest step, until the next step or state."""
        self._work = {**progress.values, "what": progress.what, "done": progress.done, "total": progress.total}
        self.update(progress={**self._steps, **self._work})

    def levelled(self, report: Leveled) -> None:
        """A curriculum opened its next level."""
        value, share = report.value, report.successes / report.tasks if report.tasks else 0.0
        stands = {"knob": report.knob, "value": value, "level": report.level, "levels": report.levels}
        self.update(curricula={**self.status.curricula, report.environment: stands})
        what = (
            f"{report.environment}: {report.knob} is {value!r} now, level {report.level + 1} of {report.levels}; "
            f"{share:.0%} of {report.tasks} validation tasks of the level before were solved at step {report.step}"
        )
        self.event("curriculum", what=what, step=report.step, environment=report.environment, **stands)

    def stepped(self, step: Stepped, limit_s: float | None = None) -> None:
        """Shows an optimizer step, with the seconds that the rest will take: the trainer's own figure (`eta_s` of the
        values), or at the pace so far.

        Args:
            step: What the trainer reported.
            limit_s: Seconds after which training ends whatever the step.
        """
        now = time.time()
        # The first step's own time is not known: its end is where the clock starts.
        if self._first is None:
            self._first = (step.step, now)
        done, elapsed = step.step - self._first[0], now - self._first[1]
        eta = step.values.get("eta_s")
        if eta is None and done > 0:
            eta = elapsed / done * (step.total - step.step)
            if limit_s is not None:
                eta = max(0.0, min(eta, limit_s - elapsed))
        self._work = {}
        self._steps = {
            "step": step.step,
            "total_steps": step.total,
            **{key: step.values[key] for key in _SHOWN if step.values.get(key) is not None},
            **_by_environment(step.values),
            "eta_s": None if eta is None else round(eta, 1),
        }
        if self.state in _TOWARDS:
            self.reach("training")
            started = self.status.started_at or self.status.created_at
            self.status = self.status.model_copy(update={"training_at": now})
            self.event("first_step", step=step.step, seconds=round(now - started, 3))
        self.update(progress=dict(self._steps))

    def touch(self) -> None:
        """Has the status written when a quarter of a second has passed since the last time."""
        if self._due is None:
            wait = max(0.0, self._written + _WRITE_EVERY_S - time.monotonic())
            self._due = asyncio.get_running_loop().call_later(wait, self._write_later)

    def write(self) -> None:
        """Writes the status now, behind the events that waited for room. Raises: OSError."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._written = time.monotonic()
        self.status = self.status.model_copy(update={"updated_at": time.time()})
        try:
            self._events.catch_up()
            self.status.write(self._folder)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._ballast.drop():
                raise
            self._events.catch_up()
            self.status.write(self._folder)

    def write_if_possible(self) -> None:
        """Writes the status now; where that fails, as soon as it can be."""
        self._write_later()

    def set_aside(self) -> None:
        """Takes room on the disk again for what has to be said when it is full."""
        self._ballast.take()

    def write_at_last(self) -> None:
        """Writes the status and every event before this returns, for which it waits a while on a full disk: with the
        crew gone nothing else is left to do.

        Raises:
            OSError: It cannot be written, or there was no room for half a minute.
        """
        deadline = time.monotonic() + _AT_LAST_S
        while True:
            try:
                self.write()
                if not self._events.behind:
                    return
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder.events))
            except OSError as failed:
                error = failed
            if error.errno not in NO_ROOM or time.monotonic() > deadline:
                raise error
            time.sleep(_LOOK_AGAIN_S)

    def _write_later(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        try:
            self.write()
        except OSError as error:
            print(f"status.json could not be written: {error}", file=sys.stderr, flush=True)
            self._due = asyncio.get_running_loop().call_later(_RETRY_S, self._write_later)


def _by_environment(values: Mapping[str, float | None]) -> dict[str, Any]:
    """The numbers of each environment of several: reward, success and share by its label."""
    found: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        head, _, name = key.rpartition("/")
        if head.startswith(_EACH) and name in _SHOWN_EACH and value is not None:
            found.setdefault(head.removeprefix(_EACH), {})[name] = value
    return {"environments": found} if found else {}
