"""Noticing that a run is alive and does not move: everybody waits for somebody, no process ends, no error is printed.

A hung scorer, a lost request, a deadlock in the trainer look the same from outside: no step. The keeper says so with an
event once the run has stood still for much longer than it usually takes, names who seems to hold it up by where groups
pile up, and says when it moves again. It ends nothing: a slow run is not a dead one, and whoever reads decides.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from toprope.records.messages import Checkpointed, CountsReport, Evaluated, Finished, Progress, Report, Stepped

if TYPE_CHECKING:
    from toprope.supervisor.watchers.watcher import RunControl

__all__ = ["StallWatcher"]

_WATCHED = frozenset({"starting", "training", "evaluating"})
_REMEMBERED = 101
"""Times whose median is what is usual."""


class StallWatcher:
    """Watches one run. See the module and `Watcher`.

    Args:
        hands: The run.
        clock: Monotonic seconds, the same as `looked` is called with.
    """

    def __init__(self, hands: RunControl, clock: Callable[[], float] = time.monotonic) -> None:
        self._hands, self._clock = hands, clock
        launcher = hands.specification.config.launcher
        self._least_s, self._times = launcher.stall_after_s, launcher.stall_after_steps
        self._state = ""
        self._moved_at = clock()
        self._stepped_at: float | None = None
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._work: tuple[str, int] | None = None
        self._worked_at: float | None = None
        self._accepted = self._accepted_before = 0
        self._stalled_since: float | None = None

    def heard(self, component: str, report: Report) -> None:
        """See `Watcher.heard`."""
        now = self._clock()
        match report:
            case Stepped():
                if self._stepped_at is not None:
                    self._steps.append(now - self._stepped_at)
                self._stepped_at = now
                self._moved(now)
            case Progress(what=what, done=done):
                if self._work == (what, done):
                    return
                if self._work is not None and self._work[0] == what and self._worked_at is not None:
                    self._works.append(now - self._worked_at)
                self._work, self._worked_at = (what, done), now
                self._moved(now)
            case Evaluated() | Checkpointed() | Finished():
                self._moved(now)
            case CountsReport(counts=counts):
                self._accepted = int(counts.get("accepted") or 0)

    def looked(self, now: float) -> None:
        """See `Watcher.looked`."""
        status = self._hands.status()
        if status.state != self._state:
            # What came before, a pause say, is no part of a step.
            self._state, self._stepped_at, self._worked_at = status.state, None, None
            self._moved(now)
        if status.state not in _WATCHED or any(member.state == "starting" for member in status.crew.values()):
            # Starting has a limit of its own, and so have stopping and waiting for room.
            self._moved_at = now
            return
        limit = self._limit_s()
        if self._stalled_since is None and self._least_s > 0 and now - self._moved_at >= limit:
            self._stalled_since = self._moved_at
            self._hands.event("stall", over=False, **self._said(now - self._moved_at, limit))

    def _limit_s(self) -> float:
        """Seconds without a move that are too many."""
        return max(self._least_s, self._times * (self._usual_s() or 0.0))

    def _usual_s(self) -> float | None:
        times = self._steps if self._state in ("starting", "training") else self._works
        return median(times) if times else None

    def _moved(self, now: float) -> None:
        self._moved_at, self._accepted_before = now, self._accepted
        if self._stalled_since is not None:
            stood = now - self._stalled_since
            self._stalled_since = None
            self._hands.event("stall", over=True, what=f"It moves again after {_minutes(stood)}.", seconds=round(stood))

    def _said(self, idle: float, limit: float) -> dict[str, Any]:
        status, usual = self._hands.status(), self._usual_s()
        waiting = int(status.counts.get("waiting") or 0)
        component, why = self._holder(status.state, waiting)
        moves = "step" if status.state in ("starting", "training") else "progress"
        what = f"No {moves} for {_minutes(idle)} while everything is alive"
        what += f", usually one in {usual:.1f} s; " if usual is not None else "; "
        named = component.partition(" ")[0]
        return {
            "component": component,
            "what": f"{what}{component} seems to hold it up: {why}.",
            "next": f'read_logs(run_id="{status.run_id}", component="{named}") shows its last lines; if it hangs, '
            "stop_training, then resume_training.",
            "seconds": round(idle),
            "limit_s": round(limit, 1),
            "usual_s": None if usual is None else round(usual, 3),
            "step": status.progress.get("step"),
            "waiting": waiting,
            "accepted": self._accepted,
            "log_age_s": self._log_ages(),
        }

    def _holder(self, state: str, waiting: int) -> tuple[str, str]:
        """Who seems to be at fault, and by what sign."""
        needed = self._hands.specification.config.rollout.groups_per_step
        came = self._accepted - self._accepted_before
        if state not in ("starting", "training"):
            return "environment or inference", "they do what is left to do"
        if waiting >= needed:
            return "trainer", f"{waiting} groups wait for it and a step takes {needed}"
        if came > 0:
            return "environment", f"{came} groups came since the last step, too few that can be trained on"
        return "environment or inference", f"no group came since the last step, and {waiting} wait"

    def _log_ages(self) -> dict[str, int]:
        """Seconds since each suspect printed something."""
        ages = {}
        for name in ("trainer", "inference", "environment"):
            try:
                ages[name] = round(time.time() - self._hands.folder.log(name).stat().st_mtime)
            except OSError:
                continue
        return ages


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
