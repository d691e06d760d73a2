"""One run for the page: what is fixed, and what changes while it lives, after a reader's cursor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toprope.analysis.findings.diagnosis import told as told_by
from toprope.analysis.findings.stored_runs import accuracy_change
from toprope.analysis.reports.headline import HELDOUT, accuracy_on, headline, measured_share
from toprope.analysis.statistics.accuracy_change import AccuracyChange
from toprope.errors import Corrupt, InvalidValue, NotFound
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.series import Followers, Piece, SeriesFollower
from toprope.records.run.specification import Specification
from toprope.records.run.status import RESUMABLE, Event, Status
from toprope.records.run.tested_models import read_models
from toprope.records.run.usage import Usage, spending_in, wall_seconds
from toprope.settings.schema import Config
from toprope.text_format import clip, duration, number, percent, plural, value
from toprope.untrusted import named
from toprope.workbench.history import values_of
from toprope_tools.page import shapes
from toprope_tools.page.findings import Worded, as_written, failure_of, findings_of
from toprope_tools.page.items import Items
from toprope_tools.page.shapes import Share, foreign, plain

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_EVENTS = 200
_FOLLOW_S, _FOLLOW_ON_S = 0.3, 1.0
"""Longest reading of a metrics file for a page's first look, which shows a sample, and for each of the next ones."""


def fixed_part(workshop: Workshop, specification: Specification) -> shapes.RunFixed:
    """The part that stays while the run lives."""
    config, origin = specification.config, specification
    return shapes.RunFixed(
        preset=specification.preset,
        model=clip(config.policy.model, 200),
        algorithm=config.algorithm.name,
        seed=config.algorithm.seed,
        settings=_settings(specification),
        lineage={
            "base_run": origin.base_run,
            "continues": None if origin.continues is None else origin.continued_run,
            "reproduces": origin.reproduces,
            "dataset": None if origin.dataset is None else clip(origin.dataset.name, 80),
            "sweep": None if origin.member is None else origin.member.sweep,
        },
        limits=[
            {"quantity": quantity, "cap": cap.value}
            for quantity, cap in (specification.limits.caps if specification.limits else {}).items()
        ],
        folder=str(workshop.runs.folder(specification.run_id).path),
    )


def _settings(specification: Specification) -> list[shapes.Setting]:
    usual = values_of(Config())
    return [
        _setting(specification, name, setting, usual.get(name))
        for name, setting in values_of(specification.config).items()
        if name not in usual or setting != usual[name] or name in specification.locks
    ]


def _setting(specification: Specification, name: str, setting: Any, usual: Any) -> shapes.Setting:
    lock = specification.locks.get(name)
    bounds_text = None
    if isinstance(lock, dict):
        bounds = [f"≥ {lock['min']}"] if "min" in lock else []
        bounds += [f"≤ {lock['max']}"] if "max" in lock else []
        bounds_text = clip(" ".join(bounds), 60) if bounds else "fixed"
    reason = foreign(lock.get("reason", ""), 200) if isinstance(lock, dict) else None
    return shapes.Setting(clip(name, 80), plain(setting), plain(usual), bounds_text, reason)


class RunLooks:
    """Makes the changing part of runs.

    Args:
        buckets: Most buckets of a series.
        owner: Show the newest numbers; otherwise those that check_status may tell.
        worded: Words the next steps for the reader.
    """

    def __init__(
        self,
        workshop: Workshop,
        items: Items,
        followers: Followers,
        *,
        owner: bool,
        buckets: int,
        may_act: bool,
        worded: Worded = as_written,
    ) -> None:
        self._workshop, self._items, self._followers = workshop, items, followers
        self._owner, self._buckets, self._may_act, self._worded = owner, buckets, may_act, worded

    def look(self, run_id: str, after: str | None = None) -> shapes.RunLive:
        """The run now; events and series after a cursor.

        Raises:
            NotFound: There is no such run.
            Corrupt: Its records cannot be read.
            InvalidValue: Not a cursor.
        """
        seq, generation, rows_seen = _places(after)
        workshop, folder = self._workshop, self._workshop.runs.folder(run_id)
        status = workshop.runs.status(run_id)
        events = workshop.runs.events(run_id)
        numbers = self._items.numbers(status)
        until = None if self._owner or status.ended else int(numbers.get("step") or 0)
        piece = self._piece(folder, status, generation, rows_seen, until)
        if piece is not None:
            generation, rows_seen = piece.generation, piece.rows
        new = [event for event in events if event.seq > seq]
        shown_events = new if after is not None else new[-_EVENTS:]
        damage = _damage_of(self._followers.of(folder.metrics)) if status.run_kind.trains else []
        results = None
        try:
            results = _results(folder) if status.ended else None
        except Corrupt as error:
            damage.append(clip(self._worded(str(error), run_id), 400))
        last_seq = events[-1].seq if events else 0
        return shapes.RunLive(
            cursor=f"{last_seq}.{generation}.{rows_seen}",
            run=self._items.item(status),
            state=shapes.Standing(
                reason=foreign(status.reason, 400) if status.reason else None,
                since=status.since,
                attempt=status.attempt,
            ),
            verdict=_verdict(folder, status, results),
            facts=_facts(folder, status, numbers, results),
            integrity=_integrity(results),
            evaluations=_evaluations(status),
            models=_models(folder) if status.run_kind.name == "test" else [],
            checkpoints=[
                {"step": event.data["step"], "at": event.at}
                for event in events
                if event.kind == "checkpoint" and isinstance(event.data.get("step"), int)
            ][-_EVENTS:],
            findings=findings_of(events, status, self._worded),
            crew=[
                shapes.Member(
                    clip(name, 40),
                    member.state,
                    member.since,
                    member.restarts,
                    member.worker_restarts,
                    member.exit_code,
                )
                for name, member in status.crew.items()
            ],
            account=_account(status),
            failure=failure_of(status, self._worded),
            damage=damage,
            may={
                "stop": self._may_act and not status.ended,
                "resume": self._may_act and self._owner and status.state in RESUMABLE,
            },
            events=[_happened(event) for event in shown_events],
            events_before=len(new) - len(shown_events),
            series=None if piece is None else series_of(piece),
        )

    def _piece(
        self, folder: RunFolder, status: Status, generation: int, rows_seen: int, until: int | None
    ) -> Piece | None:
        if not status.run_kind.trains:
            return None
        follower = self._followers.of(folder.metrics)
        follower.read(_FOLLOW_ON_S if generation else _FOLLOW_S)
        return follower.piece(generation, rows_seen, most=self._buckets, until=until)


def series_of(piece: Piece) -> shapes.Series:
    """A piece of a series as the page reads it."""
    return shapes.Series(
        generation=piece.generation,
        start=piece.start,
        width=piece.width,
        rows=piece.rows,
        last_step=piece.last_step,
        complete=piece.complete,
        x=piece.x,
        columns={
            name: {"mean": column.mean, "low": column.low, "high": column.high}
            for name, column in piece.columns.items()
        },
        names={f"part:{place}": foreign(name, 60) for place, name in enumerate(piece.parts)},
    )


def _places(after: str | None) -> tuple[int, int, int]:
    if after is None:
        return 0, 0, 0
    parts = after.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise InvalidValue("That is not a cursor of this run.", hint="Ask for the whole run, without a cursor.")
    return int(parts[0]), int(parts[1]), int(parts[2])


def share_of(summary: Mapping[str, Any], name: str = "accuracy") -> Share | None:
    """The accuracy in an evaluation's summary with its interval."""
    share, measured = summary.get(name), measured_share(summary, name)
    if measured is None:
        return Share(float(share)) if isinstance(share, int | float) else None
    return Share(measured.value, measured.low, measured.high, measured.n)


def _verdict(folder: RunFolder, status: Status, results: Mapping[str, Any] | None) -> shapes.Verdict | None:
    accuracy = headline(status)
    label = next((name for name in ("after", HELDOUT, "test") if name in status.evaluations), None)
    summary_before = status.evaluations.get("before") or {}
    if accuracy is None or label is None:
        return _start_alone(summary_before, status)
    summary_after = status.evaluations[label]
    share_before = share_of(summary_before) if label == "after" else None
    share_after = share_of(summary_after)
    change = None
    if label == "after":
        stored = (results or {}).get("change")
        change = AccuracyChange.model_validate(stored) if stored else accuracy_change(folder, status)
    words = "" if change is None else change.phrase()
    measure = _measure(accuracy.split, accuracy.tasks)
    return shapes.Verdict(
        split=accuracy.split,
        before=share_before,
        after=share_after,
        greedy=share_of(summary_after, "greedy_accuracy"),
        sentence=" · ".join(filter(None, (measure, words))),
    )


def _start_alone(summary: Mapping[str, Any], status: Status) -> shapes.Verdict | None:
    """The accuracy before training, of a run without its last evaluation."""
    share, split = share_of(summary), str(summary.get("split") or HELDOUT)
    if share is None:
        return None
    sentence = "The run ended before its last evaluation" if status.ended else "it is measured again at the end"
    return shapes.Verdict(split, share, None, None, f"{_measure(split, share.tasks)} · {sentence}")


def _measure(split: str, tasks: int) -> str:
    return f"held-out accuracy, {tasks} sealed tasks" if split == HELDOUT else accuracy_on(split)


def _facts(
    folder: RunFolder, status: Status, numbers: Mapping[str, Any], results: Mapping[str, Any] | None
) -> shapes.Facts:
    try:
        usage = Usage.read(folder)
    except Corrupt:
        usage = None
    seconds = (results or {}).get("seconds") or {}
    spent = usage.cost_usd if usage is not None else sum(spending_in(folder.path).values()) or None
    return shapes.Facts(
        steps=int(numbers.get("step") or 0),
        total_steps=numbers.get("total_steps"),
        rollouts=None if numbers.get("rollouts") is None else int(numbers["rollouts"]),
        rollouts_per_second=numbers.get("rollouts_per_second"),
        training_s=seconds.get("training"),
        total_s=wall_seconds(usage, status, time.time()),
        cpu_s=None if usage is None else usage.cpu_s,
        gpu_s=None if usage is None else usage.gpu_s,
        usd=spent,
    )


def _damage_of(follower: SeriesFollower) -> list[str]:
    unreadable = follower.unreadable
    if not unreadable:
        return []
    return [f"Curves and counts of steps lack {plural(unreadable, 'line')} of metrics.jsonl, which cannot be read."]


def _results(folder: RunFolder) -> Mapping[str, Any] | None:
    try:
        results = read_json(folder.results)
    except NotFound:
        return None
    return results if isinstance(results, dict) else None


def _integrity(results: Mapping[str, Any] | None) -> list[shapes.Check] | None:
    checks = ((results or {}).get("integrity") or {}).get("checks")
    if not isinstance(checks, list):
        return None
    return [
        shapes.Check(
            clip(str(check.get("name")), 40), clip(str(check.get("state")), 10), clip(str(check.get("what")), 400)
        )
        for check in checks
        if isinstance(check, dict)
    ]


def _evaluations(status: Status) -> list[shapes.Measured]:
    last_step = status.progress.get("step")
    evaluations = []
    for label, summary in status.evaluations.items():
        tail = label.removeprefix("step-")
        step = {"before": 0, "after": last_step}.get(label, int(tail) if tail.isdecimal() else None)
        measured = shapes.Measured(
            clip(label, 40),
            step,
            clip(str(summary.get("split", "")), 20),
            share_of(summary),
            share_of(summary, "greedy_accuracy"),
        )
        evaluations.append(measured)
    return sorted(evaluations, key=lambda evaluation: (evaluation.step is None, evaluation.step or 0))


def _models(folder: RunFolder) -> list[shapes.Model]:
    models = []
    for model in read_models(folder):
        share = None
        if model.sampled and model.sampled.get("tasks"):
            rollouts = model.sampled.get("rollouts") or model.sampled["tasks"]
            share = share_of({"accuracy": model.sampled["successes"] / rollouts, "tasks": model.sampled["tasks"]})
        error = None if model.error is None else foreign(model.error, 300)
        models.append(shapes.Model(foreign(model.name, 80), share, error, model.seconds, model.cost_usd))
    return models


def _account(status: Status) -> shapes.Account | None:
    making, counts = status.making, status.counts
    if not making and not counts:
        return None
    return shapes.Account(
        begun=int(making.get("begun") or 0),
        posted=int(making.get("posted") or 0),
        unanswered=int(making.get("unanswered") or 0),
        given_up=_counted(making.get("given_up")),
        accepted=int(counts.get("accepted") or 0),
        waiting=int(counts.get("waiting") or 0),
        delivered=int(counts.get("delivered") or 0),
        committed=int(counts.get("committed") or 0),
        dropped=_counted(counts.get("dropped")),
    )


def _counted(counts: Any) -> dict[str, int]:
    return {clip(str(name), 60): int(count) for name, count in (counts or {}).items()}


def _happened(event: Event) -> shapes.Happened:
    data, text, detail, level = event.data, event.kind.replace("_", " "), None, None
    step = data.get("step") if isinstance(data.get("step"), int) else None
    if event.kind == "state":
        text = f"{data.get('from')} → {data.get('to')}"
        detail = foreign(data["reason"], 200) if data.get("reason") else None
    elif event.kind == "evaluation":
        own_summary = data.get("summary")
        summary: Mapping[str, Any] = own_summary if isinstance(own_summary, dict) else data
        share = share_of(summary)
        text = f"evaluation {clip(str(data.get('label', '')), 40)}"
        text += "" if share is None else f": {percent(share.value)}"
    elif event.kind == "finding":
        level = str(data.get("level"))
        text = f"{clip(str(data.get('rule', '')), 60)} {'is over' if level == 'over' else f'({level})'}"
    elif event.kind == "checkpoint":
        text = f"checkpoint at step {step}"
    elif event.kind == "first_step":
        text = f"first step after {duration(float(data.get('seconds') or 0))}"
    elif event.kind == "end":
        text = f"ended: {data.get('state')}"
    elif isinstance(data.get("what"), str):
        detail = foreign(data["what"], 300)
    else:
        fields = ", ".join(f"{key} {value(field_value)}" for key, field_value in data.items())
        detail = foreign(fields, 300) if fields else None
    return shapes.Happened(event.seq, event.at, event.kind, clip(text, 120), detail, level, step)


def text_of(live: shapes.RunLive) -> str:
    """The run in a few lines, for clients that show no page."""
    run, verdict = live.run, live.verdict
    head = f"{run.run_id}: {run.state}, {run.kind} on {run.environment}"
    progress = run.progress
    if progress.step is not None:
        head += f", step {progress.step}{f' of {progress.total_steps}' if progress.total_steps else ''}"
    if progress.reward is not None:
        head += f", reward {number(progress.reward)}"
    if progress.eta_s is not None:
        head += f", {duration(progress.eta_s)} to go"
    lines = [f"{head}."]
    if verdict is not None and verdict.after is not None:
        start = "" if verdict.before is None else f"{percent(verdict.before.value)} -> "
        accuracy = verdict.after
        share = percent(accuracy.value)
        if accuracy.low is not None and accuracy.high is not None:
            share += f" [{percent(accuracy.low)}, {percent(accuracy.high)}]"
        lines.append(f"{start}{share}, {verdict.sentence}.")
    open_findings = [finding for finding in live.findings if finding.open]
    lines += [
        f"{finding.level}: {named(finding.rule)}: {told_by(finding.rule, finding.what, 400)}"
        for finding in open_findings[:3]
    ]
    if len(open_findings) > 3:
        lines.append(f"And {plural(len(open_findings) - 3, 'more finding')}.")
    return "\n".join(lines)
