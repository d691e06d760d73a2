"""Runs beside each other for the page: two sides compared, and sweeps with their candidates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from toprope.analysis.reports.headline import rivals_sentence
from toprope.errors import Corrupt, InvalidValue, NotFound, TopropeError
from toprope.records.run.series import Followers
from toprope.records.run.specification import Specification, SweepPlan
from toprope.records.run.status import Status
from toprope.records.sweep_journal import Standing, read_standing
from toprope.text_format import clip, number, value
from toprope.workbench.launch.seeds import expand
from toprope_tools.answers.results import CompareAnswer
from toprope_tools.page.findings import Worded, as_written
from toprope_tools.page.items import Items
from toprope_tools.page.run import share_of
from toprope_tools.page.shapes import Answer, Foreign, RunItem, Value, foreign
from toprope_tools.results.compare import compared_sides

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_RUNS = 16
_MOST_SWEEPS = 100
_MOST_CANDIDATES = 400
_FOLLOW_S = 0.3


class Problem(msgspec.Struct):
    """The reason that two sides cannot be compared."""

    message: str
    hint: str


class Overlaid(msgspec.Struct):
    """One run of the overlay; `series` has x, and the mean (as `reward`), low and high of the measure."""

    run: RunItem
    side: str
    series: dict[str, Any] | None


class Compared(Answer, kw_only=True):
    """Two sides. With a problem there is the overlay alone. `measure` names what its curves show."""

    a: dict[str, Any]
    b: dict[str, Any]
    problem: Problem | None
    tasks: int | None
    split: str | None
    sampled: dict[str, Any] | None
    greedy: dict[str, Any] | None
    remarks: list[str]
    measure: str
    runs: list[Overlaid]


class SweepItem(msgspec.Struct):
    """A sweep in the list."""

    run: RunItem
    strategy: str
    fields: list[str]
    epochs: int
    epochs_completed: int
    measured: int
    planned: int
    best: dict[str, Any] | None


class Sweeps(Answer, kw_only=True):
    """All sweeps, newest first."""

    sweeps: list[SweepItem]


class CandidateItem(msgspec.Struct):
    """One candidate of a sweep."""

    id: str
    run_id: str | None
    epoch: int
    parent: str | None
    continues: str | None
    values: dict[str, Foreign | Value]
    score: float | None
    accuracy: float | None
    line_steps: int
    why: Foreign | None
    survived: bool
    state: str | None
    spark: list[float | None] | None


class Sweep(Answer, kw_only=True):
    """One sweep; candidates by score, the best first."""

    run: RunItem
    strategy: str
    space: list[dict[str, str]]
    epochs: int
    epochs_completed: int
    steps: int
    most_steps: int | None
    candidates: list[CandidateItem]
    best: str | None
    rivals: str
    heldout: dict[str, Any] | None


def compare(
    workshop: Workshop,
    items: Items,
    followers: Followers,
    a: Sequence[str],
    b: Sequence[str],
    *,
    owner: bool,
    buckets: int,
    worded: Worded = as_written,
) -> Compared:
    """Compare two sides of runs or seed groups; a side that cannot be compared is drawn all the same.

    Raises:
        NotFound: There is no such run.
        InvalidValue: A side is empty or has too many runs.
    """
    sides = {"a": expand(workshop.home.runs, a), "b": expand(workshop.home.runs, b)}
    for side, ids in sides.items():
        if not 1 <= len(ids) <= _MOST_RUNS:
            raise InvalidValue(f"{side} names {len(ids)} runs.", hint=f"Name 1 to {_MOST_RUNS} on each side.")
    shown = [(side, workshop.runs.status(run_id)) for side, ids in sides.items() for run_id in ids]
    # A loss is no reward: beside runs that sample, fine-tuning has no curve.
    measure = "reward" if any(status.run_kind.samples for _, status in shown) else "loss"
    overlay = [_overlaid(workshop, items, followers, status, side, measure, owner, buckets) for side, status in shown]
    comparison, problem = None, None
    try:
        comparison = compared_sides(workshop, list(a), list(b)).data
    except TopropeError as error:
        problem = Problem(clip(worded(error.message, None), 1000), clip(worded(error.hint, None), 400))
    answer = comparison if isinstance(comparison, CompareAnswer) else None
    fields = answer.model_dump(mode="json") if answer is not None else {}
    shown_sides = {
        side: {"name": ", ".join(ids), "runs": ids, "seeds": [], "cost": None} for side, ids in sides.items()
    }
    for side in sides:
        if side in fields:
            shown_sides[side] = {**fields[side], "cost": fields[side]["cost"].get("total")}
    return Compared(
        what="compare",
        at=time.time(),
        a=shown_sides["a"],
        b=shown_sides["b"],
        problem=problem,
        tasks=fields.get("tasks"),
        split=fields.get("split"),
        sampled=fields.get("sampled"),
        greedy=fields.get("greedy"),
        remarks=fields.get("remarks") or [],
        measure=measure.capitalize(),
        runs=overlay,
    )


def _overlaid(
    workshop: Workshop,
    items: Items,
    followers: Followers,
    status: Status,
    side: str,
    measure: str,
    owner: bool,
    buckets: int,
) -> Overlaid:
    kind = status.run_kind
    if not kind.trains or (measure == "reward" and not kind.samples):
        return Overlaid(items.item(status, spark=False), side, None)
    follower = followers.of(workshop.runs.folder(status.run_id).metrics)
    follower.read(_FOLLOW_S)
    until = None if owner or status.ended else int(items.numbers(status).get("step") or 0)
    piece = follower.piece(most=min(buckets, 200), until=until)
    bands = None if piece is None else piece.columns.get(measure)
    series = None
    if piece is not None and bands is not None:
        series = {"x": piece.x, "reward": bands.mean, "low": bands.low, "high": bands.high}
    return Overlaid(items.item(status, spark=False), side, series)


def sweeps(workshop: Workshop, items: Items) -> Sweeps:
    """All sweeps, newest first."""
    sweep_items = []
    for status in [run for run in workshop.statuses() if run.run_kind.starts_runs][:_MOST_SWEEPS]:
        try:
            plan, standing = _read_sweep(workshop, status.run_id)
        except (NotFound, Corrupt, InvalidValue):
            continue
        best = standing.best
        sweep_items.append(
            SweepItem(
                run=items.item(status),
                strategy=clip(plan.strategy, 60),
                fields=[clip(field, 80) for field in plan.space],
                epochs=plan.epochs,
                epochs_completed=standing.epochs_completed,
                measured=len(standing.scores),
                planned=plan.runs,
                best=None if best is None else {"id": best.candidate, "score": best.score},
            )
        )
    return Sweeps(what="sweeps", at=time.time(), sweeps=sweep_items)


def sweep(workshop: Workshop, items: Items, run_id: str, *, most: int = _MOST_CANDIDATES) -> Sweep:
    """One sweep with its candidates.

    Raises:
        NotFound: There is no such run.
        InvalidValue: It is no sweep.
    """
    status = workshop.runs.status(run_id)
    plan, standing = _read_sweep(workshop, run_id)
    live = {run.run_id: run for run in workshop.statuses()}
    survived = {candidate_id for ids in standing.survivors.values() for candidate_id in ids}
    final = standing.final
    heldout: dict[str, Any] | None = None
    if final is not None:
        share = share_of(final.measured.model_dump()) if final.measured is not None else None
        reason = foreign(final.why, 300) if final.why else None
        heldout = {"run_id": final.run_id, "accuracy": share, "why": reason}
    best = standing.best
    return Sweep(
        what="sweep",
        at=time.time(),
        run=items.item(status),
        strategy=clip(plan.strategy, 60),
        space=[
            {"field": clip(field, 80), "says": _describe_dimension(dimension.model_dump())}
            for field, dimension in plan.space.items()
        ],
        epochs=plan.epochs,
        epochs_completed=standing.epochs_completed,
        steps=standing.steps,
        most_steps=plan.total_steps or None,
        candidates=[
            _candidate(standing, candidate_id, survived, live, items) for candidate_id in standing.ranked()[:most]
        ],
        best=None if best is None else best.candidate,
        rivals=rivals_sentence(standing),
        heldout=heldout,
    )


def _read_sweep(workshop: Workshop, run_id: str) -> tuple[SweepPlan, Standing]:
    folder = workshop.runs.folder(run_id)
    plan = Specification.read(folder).sweep
    if plan is None:
        raise InvalidValue(f"{run_id} is no sweep.")
    return plan, read_standing(folder)


def _describe_dimension(dimension: dict[str, Any]) -> str:
    if dimension.get("choices"):
        return clip(" or ".join(value(choice) for choice in dimension["choices"]), 200)
    scale = ", on a logarithmic scale" if dimension.get("log") else ""
    return f"{number(dimension.get('low'))} to {number(dimension.get('high'))}{scale}"


def _candidate(
    standing: Standing, candidate_id: str, survived: set[str], statuses: dict[str, Status], items: Items
) -> CandidateItem:
    candidate, scored = standing.candidates[candidate_id], standing.scores.get(candidate_id)
    run_id = standing.runs.get(candidate_id)
    status = None if run_id is None else statuses.get(run_id)
    return CandidateItem(
        id=clip(candidate_id, 40),
        run_id=run_id,
        epoch=standing.born[candidate_id],
        parent=candidate.parent,
        continues=candidate.continues,
        values={
            clip(name, 80): setting
            if setting is None or isinstance(setting, bool | int | float)
            else foreign(setting, 120)
            for name, setting in candidate.values.items()
        },
        score=scored.score if scored else None,
        accuracy=scored.measured.accuracy if scored else None,
        line_steps=standing.line_steps(candidate_id),
        why=foreign(scored.why, 300) if scored is not None and scored.why else None,
        survived=candidate_id in survived,
        state=None if status is None else status.state,
        spark=None if status is None else items.item(status).spark,
    )
