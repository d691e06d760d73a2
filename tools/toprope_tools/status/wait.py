"""Waiting for news of runs, so that an agent need not poll: four looks per second, with progress to the client.

A wait ends when a condition is met, and at the latest before the client drops the call. The last evaluation of a run is
followed by its end within a moment; both are told together. An end is told once the run's processes are gone.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from toprope.analysis.reports.headline import share_done
from toprope_tools.status.snapshot import Look, look_at, numbers_line
from toprope_tools.status.wait_conditions import Condition

if TYPE_CHECKING:
    from toprope.settings.owner import StatusLimit
    from toprope_tools.workshop import Workshop

Progress = Callable[[float, float | None, str], Awaitable[None]]
"""Reports the progress of a wait to the client's user: done, total, message."""

_LOOK_EVERY_S = 0.25
_PROGRESS_EVERY_S = 0.5
_SIGN_OF_LIFE_S = 15.0
"""Seconds between messages at most; clients drop silent calls."""
_SETTLE_S = 2.0
"""Seconds that a finished wait goes on at most for the end that follows the last evaluation."""
_CLOSE_S = 30.0
"""The same for the processes of a run that has ended: its usage and events are complete only after them."""


@dataclass(frozen=True)
class Met:
    """A condition that a run has met."""

    run_id: str
    condition: str


@dataclass(frozen=True)
class Waited:
    """The end of a wait: the runs at that moment, the conditions met, and the seconds that it took."""

    looks: list[Look]
    met: list[Met]
    seconds: float


async def wait_for_news(
    workshop: Workshop,
    run_ids: Sequence[str],
    *,
    wait_s: float,
    until: Sequence[Condition] = (),
    places: Mapping[str, int] | None = None,
    limit: StatusLimit | None = None,
    progress: Progress | None = None,
) -> Waited:
    """Look at runs until one has news or the time is over.

    Args:
        wait_s: Longest wait in seconds; 0 looks once.
        until: Conditions of which the first ends the wait; any news if none. The end of a run ends the wait, too.
        places: The caller's own places in the runs' events.
        limit: The owner's limit on fresh numbers.
        progress: Called at once and at every change, at most twice a second.

    Raises: see `look_at`.
    """
    began = time.monotonic()
    deadline = began + wait_s
    reporter = _ProgressReporter(progress)
    woken_at = None
    while True:
        looks = await to_thread.run_sync(look_at, workshop, run_ids, places, limit)
        met = _met(looks, until)
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            break
        if met or _over(looks, until):
            woken_at = woken_at or time.monotonic()
            if time.monotonic() - woken_at >= _settling_s(looks, met):
                break
        await reporter.report(looks)
        await anyio.sleep(min(_LOOK_EVERY_S, seconds_left))
    if wait_s:
        await reporter.report(looks, is_final=True)
    return Waited(looks, met, time.monotonic() - began)


def _met(looks: Sequence[Look], until: Sequence[Condition]) -> list[Met]:
    """Return the conditions met. A run whose end the caller knows meets none while others live."""
    over = all(map(_is_over, looks))
    judged = looks if over else [look for look in looks if not look.told_the_end]
    met = [
        Met(look.run_id, condition.name)
        for condition in until
        for look in judged
        if condition.met(look.status, look.news)
    ]
    if over:
        last_look = max(looks, key=lambda look: look.status.ended_at or look.now)
        met += [Met(last_look.run_id, condition.name) for condition in until if condition.of_all]
    return met


def _over(looks: Sequence[Look], until: Sequence[Condition]) -> bool:
    if all(map(_is_over, looks)):
        return True
    if any(condition.of_all for condition in until):
        return False  # the end of one run does not end it; `failed` is a condition of its own
    if until:
        return any(_is_over(look) and not look.told_the_end for look in looks)
    return any(look.wakes for look in looks)


def _is_over(look: Look) -> bool:
    """True if nothing follows by itself: a lost run may resume."""
    return look.status.ended and not look.status.goes_on


def _settling_s(looks: Sequence[Look], met: Sequence[Met]) -> float:
    """Return the seconds that a finished wait goes on at most, because the complete end of a run is near; 0 if not."""
    if any(look.status.ended and not look.status.is_over for look in looks):
        return _CLOSE_S
    evaluated = not met or any(met_condition.condition == "evaluation" for met_condition in met)
    return _SETTLE_S if evaluated and any(look.status.state == "evaluating" for look in looks) else 0.0


class _ProgressReporter:
    """Reports the progress of a wait to the client's user, without repeating itself."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._at, self._message, self._done = 0.0, "", -1.0

    async def report(self, looks: Sequence[Look], *, is_final: bool = False) -> None:
        """Report the runs' progress if it is new; at most every half second unless it is the last report."""
        if self._progress is None:
            return
        since = time.monotonic() - self._at
        done, total, message = _progress_of(looks)
        if message == self._message and (is_final or since < _SIGN_OF_LIFE_S):
            return
        if since < _PROGRESS_EVERY_S and not is_final:
            return
        # The protocol demands that `done` grows with every message.
        done = done if done > self._done else self._done + 1e-6
        self._at, self._message, self._done = time.monotonic(), message, done
        await self._progress(done, total, message)


def _progress_of(looks: Sequence[Look]) -> tuple[float, float | None, str]:
    """Return done, total and message: the live numbers of a single run, a count of several."""
    if len(looks) == 1:
        look = looks[0]
        numbers = {key: number for key, number in look.numbers.items() if key != "elapsed_s"}
        message = f"{look.status.state}: {numbers_line(numbers)}" if numbers else look.status.state
        step = numbers.get("step", 0) if "step" in numbers or look.status.run_kind.trains else numbers.get("done", 0)
        total = numbers.get("total_steps") if "step" in numbers else numbers.get("total")
        share = share_done(look.status, look.now)
        if total and share is not None:
            step = max(float(step), round(share * total, 2))  # time may end the run before its steps
        return float(step), float(total) if total else None, message
    done = sum(look.status.ended for look in looks)
    states = ", ".join(f"{look.run_id} {look.status.state} {numbers_line(look.numbers)}" for look in looks[:3])
    return float(done), float(len(looks)), f"{done}/{len(looks)} ended: {states}"
