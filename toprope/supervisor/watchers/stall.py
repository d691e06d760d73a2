"""Notices a run that is alive and does not move: members wait for each other, no process ends, no error is printed.

A hung scorer, a lost request or a deadlock in the trainer look the same from outside: no step. Once the run has stood
still for much longer than usual, the keeper records an event that names the likely cause, judged by where groups pile
up, and a second event when the run moves again. It ends nothing: a slow run is not a dead one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from toprope.records.messages import Checkpointed, CountsReport, Evaluated, Finished, Progress, Report, Stepped
from toprope.supervisor.watchers.watcher import RunControl, Watcher
from toprope.text_format import duration

_WATCHED_STATES = frozenset({"starting", "training", "evaluating"})
_TRAINING_STATES = frozenset({"starting", "training"})
_REMEMBERED = 101
"""Number of intervals whose median counts as usual."""


class StallWatcher(Watcher):
    """Watches the progress of one run.

    Args:
        clock: Monotonic seconds, the same as `on_tick` is called with.
    """

    def __init__(self, control: RunControl, clock: Callable[[], float] = time.monotonic) -> None:
        self._control, self._clock = control, clock
        launcher = control.specification.config.launcher
        self._least_s, self._factor = launcher.stall_after_s, launcher.stall_after_steps
        self._state = ""
        self._moved_at = clock()
        self._stepped_at: float | None = None
        self._step_intervals: deque[float] = deque(maxlen=_REMEMBERED)
        self._work_intervals: deque[float] = deque(maxlen=_REMEMBERED)
        self._work: tuple[str, int] | None = None
        self._worked_at: float | None = None
        self._accepted = self._accepted_before = 0
        self._stalled_since: float | None = None

    def on_report(self, component: str, report: Report) -> None:
        now = self._clock()
        match report:
            case Stepped():
                if self._stepped_at is not None:
                    self._step_intervals.append(now - self._stepped_at)
                self._stepped_at = now
                self._mark_move(now)
            case Progress(what=what, done=done):
                if self._work == (what, done):
                    return
                if self._work is not None and self._work[0] == what and self._worked_at is not None:
                    self._work_intervals.append(now - self._worked_at)
                self._work, self._worked_at = (what, done), now
                self._mark_move(now)
            case Evaluated() | Checkpointed() | Finished():
                self._mark_move(now)
            case CountsReport(counts=counts):
                self._accepted = int(counts.get("accepted") or 0)

    def on_tick(self, now: float) -> None:
        status = self._control.status()
        if status.state != self._state:
            # The time before, for example in a pause, does not belong to a step.
            self._state, self._stepped_at, self._worked_at = status.state, None, None
            self._mark_move(now)
        if status.state not in _WATCHED_STATES or any(member.state == "starting" for member in status.crew.values()):
            # Starting, stopping and waiting for room have limits of their own.
            self._moved_at = now
            return
        limit = self._limit_s()
        if self._stalled_since is None and self._least_s > 0 and now - self._moved_at >= limit:
            self._stalled_since = self._moved_at
            self._control.record_event("stall", over=False, **self._describe_stall(now - self._moved_at, limit))

    def _limit_s(self) -> float:
        """Seconds without a move that count as a stall."""
        return max(self._least_s, self._factor * (self._usual_s() or 0.0))

    def _usual_s(self) -> float | None:
        intervals = self._step_intervals if self._state in _TRAINING_STATES else self._work_intervals
        return median(intervals) if intervals else None

    def _mark_move(self, now: float) -> None:
        self._moved_at, self._accepted_before = now, self._accepted
        if self._stalled_since is not None:
            stood = now - self._stalled_since
            self._stalled_since = None
            text = f"It moves again after {duration(stood)}."
            self._control.record_event("stall", over=True, what=text, seconds=round(stood))

    def _describe_stall(self, idle: float, limit: float) -> dict[str, Any]:
        status, usual = self._control.status(), self._usual_s()
        waiting = int(status.counts.get("waiting") or 0)
        component, why = self._likely_cause(status.state, waiting)
        moves = "step" if status.state in _TRAINING_STATES else "progress"
        text = f"No {moves} for {duration(idle)} while everything is alive"
        text += f", usually one in {usual:.1f} s; " if usual is not None else "; "
        suspect = component.partition(" ")[0]
        return {
            "component": component,
            "what": f"{text}{component} seems to hold it up: {why}.",
            "next": f'read_logs(run_id="{status.run_id}", component="{suspect}") shows its last lines; if it hangs, '
            "stop_training, then resume_training.",
            "seconds": round(idle),
            "limit_s": round(limit, 1),
            "usual_s": None if usual is None else round(usual, 3),
            "step": status.progress.get("step"),
            "waiting": waiting,
            "accepted": self._accepted,
            "log_age_s": self._log_ages(),
        }

    def _likely_cause(self, state: str, waiting: int) -> tuple[str, str]:
        """Return the component that seems to hold up the run, and the sign of it."""
        needed = self._control.specification.config.rollout.groups_per_step
        arrived = self._accepted - self._accepted_before
        if state not in _TRAINING_STATES:
            return "environment or inference", "they do the remaining work"
        if waiting >= needed:
            return "trainer", f"{waiting} groups wait for it and a step takes {needed}"
        if arrived > 0:
            return "environment", f"{arrived} groups came since the last step, too few that can be trained on"
        return "environment or inference", f"no group came since the last step, and {waiting} wait"

    def _log_ages(self) -> dict[str, int]:
        """Seconds since each suspect printed something."""
        ages = {}
        for name in ("trainer", "inference", "environment"):
            try:
                ages[name] = round(time.time() - self._control.folder.log(name).stat().st_mtime)
            except OSError:
                continue
        return ages
