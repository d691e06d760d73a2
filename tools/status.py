"""How runs stand: at once, or when there is news.

Agents poll, and every poll costs them context. So fresh numbers of a run come at most once per interval, whoever asks
and through whichever server (the stamp lies in the index); within it the last ones are repeated in one line with their
age. What an agent must know at once always passes: changes of state, evaluations, warnings, the end. Waiting is the
better call: it returns on news and costs one line when there was none.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from tools import answers
from tools.answers import Answer, ago, call, clip, duration, number, percent
from toprope.errors import InvalidValue
from toprope.records.index import Stamp
from toprope.records.status import ENDED, LIVE, Event, Status

if TYPE_CHECKING:
    from tools.workshop import Workshop

__all__ = ["Progress", "check_status", "list_runs", "numbers_line", "open_runs", "run_row"]

Progress = Callable[[float, float | None, str], Awaitable[None]]
"""Tells the client's user how far a wait is: done, total, message."""

MOST_RUNS = 20
LONGEST_WAIT_S = 45.0
_LOOK_EVERY_S = 0.25
_PROGRESS_EVERY_S = 0.5
_PAGE = 20
_PASSING = frozenset({"state", "evaluation", "warning", "finding", "stall", "end"})
_WAKING_STATES = frozenset({"paused"}) | ENDED
"""States whose coming ends a wait. Of the others the next answer tells: an evaluation or numbers follow soon."""
_SETTLE_S = 2.0
"""Seconds that a wait goes on after an evaluation, because the last one is followed by the end of its run."""
_NUMBERS = ("step", "total_steps", "reward", "success", "loss", "rollouts_per_second", "eta_s", "what", "done", "total")


@dataclass
class _Look:
    """One run at one moment, beside what was last told of it."""

    status: Status
    stamp: Stamp | None
    events: list[Event]
    interval_s: float
    now: float

    @property
    def numbers(self) -> dict[str, Any]:
        progress = self.status.progress
        shown = {key: progress[key] for key in _NUMBERS if progress.get(key) is not None}
        if self.status.state != "training":
            shown.pop("eta_s", None)  # it is training's
        if self.status.started_at is not None:
            shown["elapsed_s"] = round((self.status.ended_at or self.now) - self.status.started_at, 1)
        return shown

    @property
    def passing(self) -> list[Event]:
        return [event for event in self.events if event.kind in _PASSING]

    @property
    def due(self) -> bool:
        """Whether fresh numbers may be told: it ended, the interval is over, or none were told so far."""
        if self.status.ended or self.stamp is None or not _work(self.stamp.snapshot):
            return True
        return self.now - self.stamp.at >= self.interval_s

    @property
    def has_new_numbers(self) -> bool:
        """Whether there are numbers of work, and others than were last told."""
        told = self.stamp.snapshot if self.stamp else {}
        return any(told.get(key) != one for key, one in _work(self.numbers).items())

    @property
    def wakes(self) -> bool:
        """Whether a wait ends here: at an event, the end, the first step, or new numbers once the interval is over."""
        if self.status.ended:
            return True
        if any(event.kind != "state" or event.data.get("to") in _WAKING_STATES for event in self.passing):
            return True
        if self.stamp is None:
            return "step" in self.numbers
        return self.has_new_numbers and self.now - self.stamp.at >= self.interval_s


async def check_status(
    workshop: Workshop,
    *,
    run_ids: Sequence[str] | None = None,
    wait_s: float | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Where runs stand, now or at the first news of any of them.

    Args:
        workshop: The server's.
        run_ids: Which; none: the answer names the open runs.
        wait_s: Longest wait in seconds, at most 45; None or 0: none.
        progress: Called at once and then at most twice a second while waiting.

    Raises:
        NotFound: There is no such run.
        InvalidValue: Too many runs.
    """
    wanted = list(dict.fromkeys(run_ids or []))
    if not wanted:
        return await _open(workshop)
    if len(wanted) > MOST_RUNS:
        raise InvalidValue(f"{len(wanted)} runs are too many for one call.", hint=f"Ask for at most {MOST_RUNS}.")
    deadline = time.monotonic() + min(max(wait_s or 0.0, 0.0), LONGEST_WAIT_S)
    told_at, told, woken_at = 0.0, "", None
    while True:
        looks = await to_thread.run_sync(lambda: [_look(workshop, run_id) for run_id in wanted])
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if any(look.wakes for look in looks):
            woken_at = woken_at or time.monotonic()
            ending = any(look.status.state == "evaluating" for look in looks)
            if not ending or time.monotonic() - woken_at >= _SETTLE_S:
                break
        if progress is not None and time.monotonic() - told_at >= _PROGRESS_EVERY_S:
            done, total, message = _progress(looks)
            if message != told:
                told_at, told = time.monotonic(), message
                await progress(done, total, message)
        await anyio.sleep(min(_LOOK_EVERY_S, left))
    if progress is not None and wait_s:
        # The last one always goes out, so that a bar ends where the run is.
        done, total, message = _progress(looks)
        if message != told:
            await progress(done, total, message)
    return await to_thread.run_sync(lambda: _answer(workshop, looks))


async def list_runs(
    workshop: Workshop, *, state: str = "any", query: str | None = None, cursor: str | None = None
) -> Answer:
    """Runs on this machine, newest first, 20 a page.

    Args:
        workshop: The server's.
        state: any, live or ended.
        query: Text that id, environment, kind or state must contain.
        cursor: `next_cursor` of the page before: the id of its last run.

    Raises:
        InvalidValue: The cursor is none.
    """
    runs = await to_thread.run_sync(workshop.statuses)
    if state != "any":
        runs = [run for run in runs if run.ended == (state == "ended")]
    if query:
        words = query.lower().split()
        runs = [
            run
            for run in runs
            if all(word in f"{run.run_id} {run.environment} {run.kind} {run.state}".lower() for word in words)
        ]
    total, start = len(runs), 0
    if cursor is not None:
        places = [place for place, run in enumerate(runs) if run.run_id == cursor]
        if not places:
            raise InvalidValue(f"{clip(cursor, 80)!r} is no cursor of this list.", hint="Omit it for the first page.")
        start = places[0] + 1
    page = runs[start : start + _PAGE]
    more = page[-1].run_id if page and start + len(page) < total else None
    if not page:
        what = f"{state} runs" if state != "any" else "runs"
        text = f"There are no {what}{f' with {query!r}' if query else ''}. start_training starts one from a draft."
    else:
        lines = [f"{total} runs, {start + 1} to {start + len(page)}, newest first:"]
        lines += [run_row(run) for run in page]
        if more:
            asked = {"state": state, "query": query} if query else {"state": state}
            lines.append(f"More: {call('list_runs', **asked, cursor=more)}")
        text = "\n".join(lines)
    return Answer(text, answers.Runs(runs=[_item(run) for run in page], total=total, next_cursor=more))


async def open_runs(workshop: Workshop) -> str:
    """One line that names the live runs and the last ended ones, for a call that named none."""
    runs = await to_thread.run_sync(workshop.statuses)
    live = [run for run in runs if run.state in LIVE]
    if not runs:
        return "There are no runs yet; start_training starts one from a draft."
    shown = (live + [run for run in runs if run.ended][:5])[:10]
    return "Runs: " + "; ".join(f"{run.run_id} ({run.state}, {run.kind})" for run in shown)


def _work(numbers: dict[str, Any]) -> dict[str, Any]:
    """Numbers that work moves; time moves the others."""
    return {key: one for key, one in numbers.items() if key not in ("elapsed_s", "eta_s")}


def numbers_line(numbers: dict[str, Any]) -> str:
    """Numbers as short text: `step 120/1500, reward 0.43, success 31.0%, 1450 rollouts/s, ETA 52 s`."""
    parts = []
    if "what" in numbers:
        total = f"/{numbers['total']}" if numbers.get("total") else ""
        parts.append(f"{clip(numbers['what'], 60)} {numbers.get('done', 0)}{total}")
    if "step" in numbers:
        total = f"/{numbers['total_steps']}" if numbers.get("total_steps") else ""
        parts.append(f"step {numbers['step']}{total}")
    if "reward" in numbers:
        parts.append(f"reward {number(numbers['reward'])}")
    if "success" in numbers:
        parts.append(f"success {percent(numbers['success'])}")
    if "rollouts_per_second" in numbers:
        parts.append(f"{number(numbers['rollouts_per_second'])} rollouts/s")
    if "elapsed_s" in numbers:
        parts.append(f"{duration(numbers['elapsed_s'])} so far")
    if "eta_s" in numbers:
        parts.append(f"ETA {duration(numbers['eta_s'])}")
    return ", ".join(parts) or "no numbers yet"


def _look(workshop: Workshop, run_id: str) -> _Look:
    status = workshop.runs.status(run_id)
    stamp = workshop.index.stamp(run_id)
    events = list(workshop.runs.events(run_id, stamp.seq if stamp else 0))
    limit = workshop.settings().status
    return _Look(status, stamp, events, limit.interval(_expected_s(workshop, status)), time.time())


def _expected_s(workshop: Workshop, status: Status) -> float | None:
    """How long training will have taken: by its pace so far, else by its budget, else unknown."""
    eta = status.progress.get("eta_s")
    if status.training_at is not None and eta is not None:
        return time.time() - status.training_at + float(eta)
    return workshop.longest_s(status.run_id)


def _answer(workshop: Workshop, looks: list[_Look]) -> Answer:
    lines, items = [], []
    for look in looks:
        line, item = _told(workshop, look)
        lines.append(line)
        items.append(item)
    live = [item for item in items if item.state in LIVE]
    if live:
        ids = [item.run_id for item in live]
        lines.append(f"Next: {call('check_status', run_ids=ids, wait_s=45)}")
    done = [item.run_id for item in items if item.state in ENDED]
    if done:
        lines.append(f"Ended: {', '.join(call('get_results', run_id=run_id) for run_id in done[:3])}")
    return Answer("\n".join(lines), answers.StatusAnswer(runs=items))


def _told(workshop: Workshop, look: _Look) -> tuple[str, answers.RunStatus]:
    """One run's lines, and the stamp that says what was told."""
    status, stamp = look.status, look.stamp
    seq = look.events[-1].seq if look.events else (stamp.seq if stamp else 0)
    if look.due or stamp is None:
        fresh, numbers, at = True, look.numbers, look.now
    else:
        fresh, numbers, at = False, stamp.snapshot, stamp.at
    if fresh or (stamp is not None and seq != stamp.seq):
        workshop.index.set_stamp(status.run_id, Stamp(at, seq, numbers))
    limited = not status.ended and bool(_work(numbers))
    next_in = max(0.0, round(at + look.interval_s - look.now, 1)) if limited else None
    head = f"{status.run_id}: {status.state}"
    if status.reason and status.failure is None:
        head += f" ({clip(status.reason, 200)})"
    if fresh:
        line = f"{head}; {numbers_line(numbers)}."
        if next_in:
            line += f" Next numbers in {duration(next_in)}."
    else:
        line = f"{head}; numbers of {ago(at, look.now)}: {numbers_line(numbers)}. Next in {duration(next_in or 0)}."
    news = _news(look.passing)
    line += "".join(f"\n  {text}" for text in news)
    failure = status.failure
    if failure is not None:
        line += f"\n  failed: {failure.component}: {clip(failure.reason, 300)} {clip(failure.hint, 300)}".rstrip()
    item = answers.RunStatus(
        run_id=status.run_id,
        kind=status.kind,
        environment=status.environment,
        state=status.state,
        fresh=fresh,
        numbers=numbers,
        numbers_age_s=round(look.now - at, 1),
        next_numbers_in_s=next_in,
        events=[
            {"seq": event.seq, "at": event.at, "kind": event.kind, "data": event.data} for event in look.passing[-10:]
        ],
        failure=None if failure is None else {**failure.model_dump(mode="json"), "excerpt": failure.excerpt[-10:]},
    )
    return line, item


def _news(events: list[Event]) -> list[str]:
    """Events as short lines; a chain of states is one line."""
    states = [str(event.data.get("to")) for event in events if event.kind == "state"]
    lines = [f"new: {' -> '.join(states[-6:])}"] if states else []
    for event in [event for event in events if event.kind not in ("state", "end")][-6:]:
        if event.kind == "evaluation":
            lines.append(f"new: evaluation {_evaluation(event.data)}")
        else:
            said = ", ".join(f"{key} {answers.value(one)}" for key, one in event.data.items())
            lines.append(f"new: {event.kind}: {clip(said, 200)}")
    return lines


def _evaluation(data: dict[str, Any]) -> str:
    summary = data.get("summary") if isinstance(data.get("summary"), dict) else data
    label = data.get("label", "")
    if summary.get("accuracy") is None:
        return f"{label}: {clip(', '.join(f'{key} {answers.value(one)}' for key, one in summary.items()), 200)}"
    text = f"{label}: accuracy {percent(summary['accuracy'])}"
    if summary.get("tasks"):
        text += f" on {summary['tasks']} {summary.get('split', '')} tasks".replace("  ", " ")
    return text


def _progress(looks: list[_Look]) -> tuple[float, float | None, str]:
    """Done, total and message over the runs that are waited for: the live numbers of one, a count of many."""
    if len(looks) == 1:
        look = looks[0]
        numbers = {key: one for key, one in look.numbers.items() if key != "elapsed_s"}
        message = f"{look.status.state}: {numbers_line(numbers)}" if numbers else look.status.state
        step = numbers.get("step", 0) if "step" in numbers or look.status.kind == "train" else numbers.get("done", 0)
        total = numbers.get("total_steps") if "step" in numbers else numbers.get("total")
        return float(step), float(total) if total else None, message
    done = sum(look.status.ended for look in looks)
    said = ", ".join(f"{look.status.run_id} {look.status.state} {numbers_line(look.numbers)}" for look in looks[:3])
    return float(done), float(len(looks)), f"{done}/{len(looks)} ended: {said}"


async def _open(workshop: Workshop) -> Answer:
    runs = await to_thread.run_sync(workshop.statuses)
    live = [run for run in runs if run.state in LIVE][:MOST_RUNS]
    if live:
        text = "Open runs (name them in run_ids to see how they stand):\n" + "\n".join(map(run_row, live))
        text += f"\nNext: {call('check_status', run_ids=[run.run_id for run in live], wait_s=45)}"
    else:
        text = "No run is open. list_runs names those that ended; start_training starts one from a draft."
    return Answer(text, answers.StatusAnswer(runs=[], open_runs=[_item(run) for run in live]))


def _item(run: Status) -> answers.RunItem:
    return answers.RunItem(
        run_id=run.run_id,
        kind=run.kind,
        environment=run.environment,
        state=run.state,
        created_at=run.created_at,
        ended_at=run.ended_at,
        summary=_summary(run),
    )


def run_row(run: Status) -> str:
    """A run as one line of a list."""
    summary = _summary(run)
    parts = [run.state, run.kind, run.environment, ago(run.created_at), *([summary] if summary else [])]
    return f"{run.run_id}: {', '.join(parts)}"


def _summary(run: Status) -> str:
    """What is worth a few words in a list; a live run's numbers are check_status's."""
    if run.failure is not None:
        return clip(f"{run.failure.component}: {run.failure.reason}", 100)
    before, after = run.evaluations.get("before", {}), run.evaluations.get("after", {})
    if after.get("accuracy") is not None:
        return f"accuracy {percent(before.get('accuracy'))} -> {percent(after['accuracy'])}"
    test = run.evaluations.get("test", {})
    return f"accuracy {percent(test['accuracy'])}" if test.get("accuracy") is not None else ""
