"""Sweeps: a population of settings over a draft, each measured by a run of its own; what it takes is known before."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toprope.errors import Corrupt, InvalidValue, NotPossibleNow
from toprope.records.run.folder import RunFolder, misfits
from toprope.records.run.specification import Specification, SweepMember, SweepPlan, TestPlan
from toprope.records.run.status import Status
from toprope.records.sweep_journal import Standing, read_standing, sweep_of
from toprope.settings.changes import apply
from toprope.supervisor.capacity.budget_ledger import ledger_lock, read_accounts, reserved
from toprope.sweeps.planning import longest_run_steps, make_plan
from toprope.workbench.drafts import Draft
from toprope.workbench.launch.launch import frozen
from toprope.workbench.launch.preview import Preview, needs_confirmation, preview
from toprope.workbench.launch.reserve_budget import NoRoomWithin, demand, reserve
from toprope_tools.answers import base as answers
from toprope_tools.answers.base import Answer, call, number, percent
from toprope_tools.planning.preview_text import said, structured
from toprope_tools.runs.start import Taken, start_frozen, started_by
from toprope_tools.workshop import machine_of

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = [
    "best_line",
    "best_of_sweep",
    "lineage",
    "member_of",
    "start_sweep",
    "sweep_lines",
    "sweep_structure",
]

_WAIT_S = 900
_SHOWN = 12
"""Candidates in the text of get_results; the structure has more."""
_MOST = 64


class Options(BaseModel):
    """What else a sweep may be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int | None = Field(None, ge=1)
    """Optimizer steps of a candidate's run in the first epoch; the draft's budget when None."""
    evaluate: Literal["train", "test"] = "train"
    """`test`: measure the policy as it is, for knobs and prompts."""
    selection_ratio: float = Field(0.5, gt=0, le=1)
    """Share that survives an epoch."""
    mutation_rate: float = Field(0.3, ge=0, le=1)
    """How much new candidates differ."""
    name: str | None = Field(None, max_length=64)
    """Begins the run's id."""
    again: bool = False
    """Start although a sweep of this draft's revision is live."""
    key: str | None = Field(None, min_length=1, max_length=80)
    """Names this start, as that of start_training."""
    preview: bool = False
    """Start nothing; tell what it would take."""
    confirm: str | None = Field(None, max_length=64)
    """The hash of a preview that the owner's person agreed to."""


def _options(given: Mapping[str, Any]) -> Options:
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        raise InvalidValue(
            f"options: {misfits(error)}. Nothing was started.", hint=f"There are {', '.join(Options.model_fields)}."
        ) from None


async def start_sweep(
    workshop: Workshop,
    *,
    draft_id: str,
    space: Mapping[str, Any],
    strategy: str = "evolution",
    population: int = 8,
    epochs: int = 3,
    options: Mapping[str, Any] | None = None,
) -> Answer:
    """Freezes a draft and starts a sweep over some of its fields; answers as soon as it has its keeper.

    Args:
        workshop: The server's.
        draft_id: Which draft; what is not in `space` is the same for all.
        space: By field `{"min": .., "max": .., "log": true}` or `{"choices": [..]}`.
        strategy: evolution, pbt, halving, random, optuna, or `file:Class` of the owner's.
        population: Candidates of an epoch.
        epochs: How many.
        options: See `Options`.

    Raises:
        NotFound, LockedField, InvalidValue: Draft, space or strategy do not fit; nothing was started.
        NotPossibleNow: A limit does not allow it, or it is to be confirmed.
    """

    chosen = _options(options or {})
    key = chosen.key

    def work() -> Answer:
        draft = workshop.drafts.get(draft_id)
        if key is not None and not chosen.preview and (known := _of_key(workshop, key, draft_id)) is not None:
            return known
        plan = make_plan(
            draft,
            workshop.home.locks(),
            space=space,
            strategy=strategy,
            population=population,
            epochs=epochs,
            selection_ratio=chosen.selection_ratio,
            mutation_rate=chosen.mutation_rate,
            steps=chosen.steps,
            evaluate=chosen.evaluate,
            strategies=workshop.home.strategies,
        )
        if chosen.preview:
            return _previewed(workshop, draft, plan, chosen.name)
        return _started(workshop, draft, plan, chosen)

    return await to_thread.run_sync(work)


def _of_key(workshop: Workshop, key: str, draft_id: str) -> Answer | None:
    taken = started_by(workshop, key, draft_id)
    if taken is None:
        return None
    return _known(taken.run_id, taken.draft_id)


def _known(run_id: str, draft_id: str) -> Answer:
    text = f"{run_id} was started with this key before; no second one was started.\n{_next(run_id)}"
    data = answers.Started(run_id=run_id, kind="sweep", draft_id=draft_id, revision=0, state="started before")
    return Answer(text, data, brief=True)


def _frozen(
    workshop: Workshop, draft: Draft, plan: SweepPlan, name: str | None, stack: ExitStack
) -> tuple[Specification, Preview]:
    """The sweep's specification, pencilled in within the owner's limits, and what all of it would take.

    Raises:
        NotPossibleNow: There is no room for it and one member, or for all members today.
    """
    home = workshop.home
    limits, machine, runs = home.limits(), machine_of(home.settings()), home.ensure().runs
    [made] = frozen(home, [draft], "sweep", name=name, sweep=plan)
    [sweep] = reserve([made], limits, machine, runs)
    stack.enter_context(reserved(runs, [sweep]))
    per_day = limits.get("per_day.runs")
    today = sum(account.started_today for account in read_accounts(runs, leave_out=[sweep.run_id]))
    if per_day is not None and today + 1 + plan.runs > per_day.max:
        raise NoRoomWithin(
            f"Nothing was started: per_day.runs is {per_day.max:g}, set by {limits.source}; {today} were started "
            f"today, and the sweep is 1 and its members up to {plan.runs}.",
            hint="A smaller population or fewer epochs fit; tomorrow counts anew.",
        )
    # The longest member must be allowed beside the sweep; each reserves what it may use when it starts.
    longest = _member(workshop, draft, plan, longest_run_steps(plan))
    reserve([longest], limits, machine, runs)
    count = plan.runs - 1
    usual = _member(workshop, draft, plan, max(1, math.ceil(plan.total_steps / count)))
    found = preview([usual] * count, limits, demand(usual, machine), runs)
    return sweep, _of_all(found, plan, sweep, draft)


def _member(workshop: Workshop, draft: Draft, plan: SweepPlan, steps: int) -> Specification:
    """A member as the sweep will start them, for what it takes."""
    config, test = draft.config, None
    if plan.evaluate == "train":
        changes = {"budget.steps": steps, "optimizer.warmup_steps": min(config.optimizer.warmup_steps, steps)}
        config, _ = apply(config, changes, draft.knobs)
    else:
        test = TestPlan(tasks=config.evaluation.validation_tasks, group_size=config.rollout.group_size)
    one = dataclasses.replace(draft, config=config)
    [made] = frozen(workshop.home, [one], "train" if test is None else "test", test=test)
    return made.model_copy(update={"member": SweepMember(sweep=made.run_id, candidate="c001", epoch=1)})


def _of_all(found: Preview, plan: SweepPlan, sweep: Specification, draft: Draft) -> Preview:
    """The preview of a sweep: time is that of all members one after the other, steps are all together."""
    estimates = dict(found.estimates)
    if (wall := estimates.get("wall_hours")) is not None:
        estimates["wall_hours"] = wall.times(found.count)
    content = [found.hash, plan.model_dump(mode="json"), sweep.config.model_dump(mode="json"), draft.id, draft.revision]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return dataclasses.replace(found, estimates=estimates, steps=max(plan.total_steps, 1), hash=digest)


def _said(found: Preview, plan: SweepPlan) -> str:
    """What all of a sweep would take."""
    text = said(dataclasses.replace(found, count=1)).replace("What one run of", f"What {plan.runs} runs of", 1)
    return f"{text}\nRuns wait for the machine as others do; time is as if they came one after the other."


def _previewed(workshop: Workshop, draft: Draft, plan: SweepPlan, name: str | None) -> Answer:
    with ExitStack() as stack:
        with ledger_lock(workshop.home.ensure().runs):
            sweep, found = _frozen(workshop, draft, plan, name, stack)
    why = needs_confirmation(workshop.home.limits(), found)
    lines = ["Nothing was started.", _said(found, plan)]
    if why:
        lines.append(f"{why} Show this to the person whom you work for; then pass confirm in options.")
    lines.append(f"Next: the same call without preview{f', with confirm {found.hash!r} in options' if why else ''}.")
    data = _data(sweep).model_copy(update={"run_id": None, "state": "not started", "preview": structured(found)})
    return Answer("\n".join(lines), data)


def _started(
    workshop: Workshop,
    draft: Draft,
    plan: SweepPlan,
    chosen: Options,
) -> Answer:
    with ExitStack() as stack:
        with ledger_lock(workshop.home.ensure().runs):
            sweep, found = _frozen(workshop, draft, plan, chosen.name, stack)
            limits, confirm = workshop.home.limits(), chosen.confirm
            why = needs_confirmation(limits, found)
            if confirm != found.hash and (why or confirm is not None):
                head = f"{why} (confirm, set by {limits.source})"
                if confirm is not None:
                    head = f"{confirm!r} confirms something else than what would start now, which is this"
                raise NotPossibleNow(
                    f"Nothing was started: {head}\n{_said(found, plan)}",
                    hint="Show this to the person whom you work for. Once they agree repeat the call with "
                    f"confirm {found.hash!r} in options. A changed draft or sweep has another hash.",
                )
        try:
            start_frozen(workshop, draft, [sweep], again=chosen.again, key=chosen.key)
        except Taken as other:
            return _known(other.start.run_id, other.start.draft_id)
    trains = f" and {plan.total_steps} optimizer steps" if plan.evaluate == "train" else ""
    text = (
        f"Started the sweep {sweep.run_id}: {plan.strategy} over {', '.join(plan.space)}, {plan.population} "
        f"candidates, {plan.epochs} epochs, at most {plan.runs} runs{trains}; then the best is measured on held-out "
        f"tasks, once. "
        f"It goes on whatever happens to this server.\n{_next(sweep.run_id)}"
    )
    return Answer(text, _data(sweep), brief=True)


def _data(sweep: Specification) -> answers.Started:
    return answers.Started(
        run_id=sweep.run_id,
        kind="sweep",
        draft_id=sweep.draft_id or "",
        revision=sweep.draft_revision or 0,
        state="queued",
    )


def _next(run_id: str) -> str:
    return f"Next: {call('check_status', run_ids=[run_id], wait_s=_WAIT_S, until=['evaluation', 'end'])}"


# Results


def member_of(run_id: str) -> str | None:
    """What a run is to its sweep, in words; None for a run of none, as its id tells."""
    found = sweep_of(run_id)
    if found is None:
        return None
    sweep, number = found
    if number is None:
        return f"the held-out measurement of the sweep {sweep}"
    return f"candidate c{number:03d} of the sweep {sweep}"


def best_line(sweep: Status) -> str:
    """What a sweep has come to, in a few words of its status."""
    heldout = sweep.evaluations.get("heldout", {})
    if heldout.get("accuracy") is not None:
        return f"best {percent(heldout['accuracy'])} held out"
    found = [one for label, one in sweep.evaluations.items() if label.startswith("epoch-")]
    return f"best {number(found[-1].get('score'))} after {len(found)} epochs" if found else ""


def best_of_sweep(folder: RunFolder, sweep: Specification) -> Specification:
    """A sweep's specification with the values of its best candidate, for a draft that goes on from there.

    Raises:
        InvalidValue: No candidate has a score yet.
    """
    standing = read_standing(folder)
    if standing.best is None or sweep.sweep is None:
        raise InvalidValue(
            f"{folder.run_id} has no candidate with a score yet.", hint=call("check_status", run_ids=[folder.run_id])
        )
    values = standing.candidates[standing.best.candidate].values
    config, _ = apply(sweep.config, values, sweep.sweep.knobs)
    return sweep.model_copy(update={"config": config})


def sweep_lines(folder: RunFolder, plan: SweepPlan) -> list[str]:
    """What a sweep has come to, for the text of its results."""
    try:
        standing = read_standing(folder)
    except Corrupt as error:
        return [str(error)]
    best, final = standing.best, standing.final
    lines = [
        f"{plan.strategy} over {', '.join(plan.space)}: {standing.epochs_completed} of {plan.epochs} epochs, "
        f"{len(standing.scores)} candidates measured, {standing.steps} optimizer steps."
    ]
    if best is None:
        return [*lines, "No candidate has a score yet."]
    lines.append(
        f"Best: {best.candidate} ({standing.runs[best.candidate]}), score {number(best.score)}, "
        f"{_accuracy(best.measured.accuracy, best.measured.tasks)} validation tasks: "
        f"{_values(standing, best.candidate)}."
    )
    if final is not None and final.measured is not None:
        lines.append(
            f"Held out, measured once, {final.run_id}: "
            f"{_accuracy(final.measured.accuracy, final.measured.tasks)} tasks that no candidate was chosen by. The "
            "validation figure of a best of many is flattered; this one is not."
        )
    elif final is not None and final.why:
        lines.append(f"Not measured on held-out tasks: {final.why}.")
    lines.append("Candidates, the best first (what each was made from; ^: went on with its weights):")
    lines += [f"  {_row(standing, one)}" for one in _ranked(standing)[:_SHOWN]]
    if len(standing.scores) > _SHOWN:
        lines.append(f"  and {len(standing.scores) - _SHOWN} more, in the structure.")
    lines.append(f"{call('fork_config', run_id=folder.run_id)} makes a draft with the best values.")
    return lines


def sweep_structure(folder: RunFolder, plan: SweepPlan) -> dict[str, Any]:
    """The same as a structure."""
    try:
        standing = read_standing(folder)
    except Corrupt:
        return {}
    best, final = standing.best, standing.final
    found: dict[str, Any] = {
        "strategy": plan.strategy,
        "epochs": plan.epochs,
        "epochs_completed": standing.epochs_completed,
        "steps": standing.steps,
        "most_steps": plan.total_steps,
        "best": None,
        "heldout": None,
        "candidates": [_item(standing, one) for one in _ranked(standing)[:_MOST]],
        "survivors": {str(epoch): ids for epoch, ids in standing.survivors.items()},
    }
    if best is not None:
        found["best"] = _item(standing, best.candidate) | {"line_steps": standing.line_steps(best.candidate)}
    if final is not None and final.measured is not None:
        found["heldout"] = {"run_id": final.run_id, **final.measured.model_dump(exclude={"steps", "groups", "state"})}
    return found


def lineage(standing: Standing, candidate: str) -> list[str]:
    """A candidate and those that it came from, itself first."""
    found, at = [], standing.candidates.get(candidate)
    while at is not None and at.id not in found:
        found.append(at.id)
        at = standing.candidates.get(at.parent) if at.parent else None
    return found


def _ranked(standing: Standing) -> list[str]:
    """Candidates by score, those without one last."""
    order = {one: place for place, one in enumerate(standing.candidates)}

    def place(one: str) -> tuple[float, int, int]:
        scored = standing.scores.get(one)
        score = scored.score if scored and scored.score is not None else -math.inf
        return (-score, -standing.line_steps(one), order[one])

    return sorted(standing.candidates, key=place)


def _item(standing: Standing, one: str) -> dict[str, Any]:
    candidate, scored = standing.candidates[one], standing.scores.get(one)
    item: dict[str, Any] = {
        "id": one,
        "run_id": standing.runs.get(one),
        "epoch": standing.born[one],
        "parent": candidate.parent,
        "continues": candidate.continues,
        "values": candidate.values,
        "score": scored.score if scored else None,
    }
    if scored is not None:
        item |= {"steps": scored.measured.steps, "accuracy": scored.measured.accuracy}
        if scored.why:
            item["why"] = answers.clip(scored.why, 200)
    return item


def _row(standing: Standing, one: str) -> str:
    candidate, scored = standing.candidates[one], standing.scores.get(one)
    line = " < ".join(lineage(standing, one)[1:5])
    came = f" < {line}{'^' if candidate.continues else ''}" if line else ""
    if scored is None:
        how = "not measured yet"
    elif scored.score is None:
        how = f"no score ({answers.clip(scored.why, 120)})"
    else:
        how = f"score {number(scored.score)} after {standing.line_steps(one)} steps"
    return f"{one}{came}, epoch {standing.born[one]}: {how}; {_values(standing, one)}"


def _values(standing: Standing, one: str) -> str:
    return ", ".join(f"{name}={answers.value(value)}" for name, value in standing.candidates[one].values.items())


def _accuracy(accuracy: float | None, tasks: int | None) -> str:
    return f"accuracy {percent(accuracy)} on {tasks if tasks is not None else 'no'}"
