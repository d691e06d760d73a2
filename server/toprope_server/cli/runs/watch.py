"""`toprope watch`: follow runs live, as a picture in a terminal or as a line per change in a pipe.

It reads files, as `toprope status` does, so any number of people can watch without an effect on a run or on an agent's
status interval. It ends when the runs have ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from toprope_tools.status.snapshot import numbers_line, present_numbers

from toprope.analysis.reports.headline import accuracy_on, headline, share_done
from toprope.records.run.metrics import last_rows
from toprope.records.run.status import Event, Status
from toprope.text_format import clip, duration, number, percent
from toprope_server.cli.wording import in_commands

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

CHECK_EVERY_S = 0.25
LINE_EVERY_S = 2.0
"""In a pipe: the least time between two lines of numbers of a run; events and states are printed at once."""
_EVENTS_SHOWN = 6
_SMOOTHED = 20
"""Steps over which numbers are averaged."""
_COLOURS = {"completed": "green", "stopped": "yellow", "failed": "red", "lost": "red", "paused": "yellow"}


@dataclass
class _Watched:
    """The last known state of one run."""

    run_id: str
    status: Status
    events: list[Event] = field(default_factory=list)
    seq: int = 0
    line_at: float = 0.0
    line: str = ""
    state: str = ""
    means: dict[str, float] = field(default_factory=dict)
    """Means of reward and success over the newest steps, because single steps are noise."""
    _step: Any = None

    def update(self, workshop: Workshop) -> list[Event]:
        """Read the run again and return its new events."""
        # The status first: the last events are on disk before the end is.
        self.status = workshop.runs.status(self.run_id)
        new = list(workshop.runs.events(self.run_id, self.seq))
        if new:
            self.seq = new[-1].seq
            self.events = (self.events + new)[-_EVENTS_SHOWN:]
        if self.status.progress.get("step") != self._step:
            self._step = self.status.progress.get("step")
            self.means = _means(last_rows(workshop.runs.folder(self.run_id).metrics, _SMOOTHED))
        return new

    @property
    def over(self) -> bool:
        return self.status.is_over and not self.status.goes_on


def watch(workshop: Workshop, run_ids: Sequence[str], *, out: IO[str] | None = None) -> int:
    """Follow runs until all have ended.

    Args:
        run_ids: The runs; all that are live or will resume by themselves if empty.
        out: Standard output by default.

    Returns:
        The exit status: 1 if a run failed or was lost.

    Raises:
        NotFound, Corrupt: There is no such run, or it cannot be read.
    """
    out = out or sys.stdout
    statuses = [workshop.runs.status(run_id) for run_id in dict.fromkeys(run_ids)]
    if not run_ids:
        statuses = [status for status in workshop.statuses() if not status.ended or status.goes_on]
        if not statuses:
            print("No run is live. 'toprope runs' lists those that ended.", file=out, flush=True)
            return 0
    watched = [_Watched(status.run_id, status) for status in statuses]
    if out.isatty():
        _picture(workshop, watched, out)
    else:
        _lines(workshop, watched, out)
    return 1 if any(run.status.state in ("failed", "lost") for run in watched) else 0


def _lines(workshop: Workshop, watched: list[_Watched], out: IO[str]) -> None:
    while True:
        for run in watched:
            if run.over and run.state:
                continue
            for event in run.update(workshop):
                print(f"{_clock(event.at)} {run.run_id}: {_event_text(event)}", file=out, flush=True)
            now, text = time.monotonic(), numbers_line(present_numbers(run.status)) + _smoothed(run.means)
            due = run.over or run.status.state != run.state or now - run.line_at >= LINE_EVERY_S
            if due and text != run.line:
                print(f"{_clock(time.time())} {run.run_id}: {run.status.state}: {text}", file=out, flush=True)
                run.line_at, run.line = now, text
            run.state = run.status.state
            if run.over:
                print(f"{_clock(time.time())} {run.run_id}: {_end(run.status)}", file=out, flush=True)
        if all(run.over for run in watched):
            return
        time.sleep(CHECK_EVERY_S)


def _picture(workshop: Workshop, watched: list[_Watched], out: IO[str]) -> None:
    console = Console(file=out)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            for run in watched:
                if not run.over or not run.seq:
                    run.update(workshop)
            live.update(Group(*(_panel(run) for run in watched)), refresh=True)
            if all(run.over for run in watched):
                return
            time.sleep(CHECK_EVERY_S)


def _panel(run: _Watched) -> RenderableType:
    status = run.status
    head = Text.assemble((status.state, f"bold {_COLOURS.get(status.state, 'cyan')}"), f"  {status.environment}")
    if status.attempt > 1:
        head.append(f"  attempt {status.attempt}")
    if status.reason and status.failure is None:
        head.append(f"  {clip(status.reason, 160)}", "dim")
    rows: list[RenderableType] = [head]
    done, total = _share(status)
    if total:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=total, completed=min(done, total), width=40), f"{100 * done / total:.0f} %")
        rows.append(bar)
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(*(Text(cell) for cell in _cells(status, run.means)))
    rows.append(numbers)
    crew = Text(overflow="fold")
    for name, member in status.crew.items():
        colour = {"ready": "green", "starting": "yellow", "exited": "red"}.get(member.state, "dim")
        crew.append(f"{name} ").append(member.state, colour).append("   ")
    if status.crew:
        rows.append(crew)
    for event in run.events:
        rows.append(Text(f"{_clock(event.at)}  {_event_text(event)}", "dim", overflow="ellipsis", no_wrap=True))
    if run.over:
        rows.append(Text(_end(status), "bold"))
    return Panel(Group(*rows), title=run.run_id, title_align="left")


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of reward and success over rows, with the number of rows as `steps`; empty if that smooths nothing."""
    means = {}
    for key in ("reward", "success"):
        values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        if len(values) > 1:
            means[key] = sum(values) / len(values)
    return means | {"steps": float(len(rows))} if means else {}


def _smoothed(means: Mapping[str, float]) -> str:
    """The means as the end of a line: `; last 20 steps: reward 0.64, success 62.0%`."""
    if not means:
        return ""
    parts = [f"reward {number(means['reward'])}"] if "reward" in means else []
    parts += [f"success {percent(means['success'])}"] if "success" in means else []
    return f"; last {means['steps']:.0f} steps: {', '.join(parts)}"


def _cells(status: Status, means: Mapping[str, float]) -> list[str]:
    progress, cells = present_numbers(status), []
    if "step" in progress:
        cells.append(f"step {progress['step']}/{progress.get('total_steps') or '?'}")
    elif progress.get("what"):
        cells.append(f"{clip(progress['what'], 50)} {progress.get('done', 0)}/{progress.get('total') or '?'}")
    if progress.get("best") is not None:
        cells.append(f"best {number(progress['best'])}")
    if means:
        cells.append(_smoothed(means).removeprefix("; "))
    else:
        cells += [f"reward {number(progress['reward'])}"] if progress.get("reward") is not None else []
        cells += [f"success {percent(progress['success'])}"] if progress.get("success") is not None else []
    if progress.get("rollouts_per_second") is not None:
        cells.append(f"{number(progress['rollouts_per_second'])} rollouts/s")
    if progress.get("eta_s") is not None:
        cells.append(f"ETA {duration(progress['eta_s'])}")
    if status.started_at is not None:
        cells.append(f"{duration((status.ended_at or time.time()) - status.started_at)} so far")
    return cells or ["no numbers yet"]


def _share(status: Status) -> tuple[float, float]:
    """Return what is done and the total: of training by steps or seconds, whichever is nearer to the end."""
    progress, share = status.progress, share_done(status)
    if share is not None:
        return share, 1.0
    return float(progress.get("done") or 0), float(progress.get("total") or 0)


def _event_text(event: Event) -> str:
    data = event.data
    if event.kind == "state":
        reason = f": {clip(data['reason'], 200)}" if data.get("reason") else ""
        return f"{data.get('from')} -> {data.get('to')}{reason}"
    summary: dict[str, Any] = data["summary"] if isinstance(data.get("summary"), dict) else data
    if event.kind == "evaluation" and summary.get("accuracy") is not None:
        which = accuracy_on(str(summary.get("split", "")))
        return f"evaluation {data.get('label', '')}: {which} {percent(summary['accuracy'])}"
    return f"{event.kind}: {clip(', '.join(f'{key} {value}' for key, value in data.items()), 200)}"


def _end(status: Status) -> str:
    if status.failure is not None:
        failure = status.failure
        text = clip(f"{failure.reason} {failure.hint}", 400)
        return f"{status.state}: {failure.component}: {in_commands(text, status.run_id)}"
    accuracy = headline(status)
    reached = "" if accuracy is None else f", {accuracy}"
    took = f" after {duration((status.ended_at or 0) - status.created_at)}" if status.ended_at else ""
    return f"{status.state}{took}{reached}{f' ({clip(status.reason, 200)})' if status.reason else ''}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
