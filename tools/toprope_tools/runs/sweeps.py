"""Tools for sweeps: a population of settings over a draft, each measured by a run of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from anyio import to_thread
from pydantic import BaseModel, Field, ValidationError

from toprope.analysis.reports.headline import headline, measured_share, rivals_sentence
from toprope.errors import Corrupt, InvalidValue, NotPossibleNow
from toprope.records.run.folder import RunFolder, describe_misfits
from toprope.records.run.specification import Specification, SweepPlan, training_plan
from toprope.records.run.status import Status
from toprope.records.sweep_journal import Measured, Standing, read_standing, sweep_of
from toprope.settings.changes import apply_changes
from toprope.sweeps.planning import longest_run_steps, make_plan, measured_differently
from toprope.text_format import call, clip, number, percent, plural, value
from toprope.untrusted import marked
from toprope.workbench.drafts import Draft
from toprope.workbench.fit import warning_lines
from toprope.workbench.launch.preview import Preview, seconds_per_step
from toprope.workbench.launch.start import ConfirmationNeeded, StartRequest
from toprope_tools.answers import runs as answers
from toprope_tools.answers.answer import Answer
from toprope_tools.clients import UNKNOWN, Client
from toprope_tools.planning.fit import memory_warning, misfits_of, remember_tasks
from toprope_tools.planning.preview_text import asked_about, said, structured

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_SHOWN = 12
"""Candidates in the text of get_results; the structure has more."""
_MOST = 64


class Options(BaseModel, extra="forbid", frozen=True):
    """Further options of start_sweep."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps of a candidate's run in the first epoch; the draft's budget if None."""
    evaluate: Literal["train", "test"] = "train"
    """`test` measures the policy without training, for knobs and prompts."""
    selection_ratio: float = Field(0.5, gt=0, le=1)
    """Share that survives an epoch."""
    mutation_rate: float = Field(0.3, ge=0, le=1)
    """Size of the changes in new candidates."""
    name: str | None = Field(None, max_length=64)
    """Begins the run's id."""
    again: bool = False
    """Start although a sweep of this draft's revision is live."""
    key: str | None = Field(None, min_length=1, max_length=80)
    """Names this start, as in start_training."""
    preview: bool = False
    """Start nothing; say what a start would take."""
    confirm: str | None = Field(None, max_length=64)
    """The hash of the preview that is meant, as in start_training."""


def _options(options: Mapping[str, Any]) -> Options:
    try:
        return Options.model_validate(options)
    except ValidationError as error:
        raise InvalidValue(
            f"options: {describe_misfits(error)}. Nothing was started.",
            hint=f"Options: {', '.join(Options.model_fields)}.",
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
    agreed: str | None = None,
    client: Client = UNKNOWN,
) -> Answer:
    """Freeze a draft and start a sweep over some of its fields; answer as soon as it has its keeper.

    Args:
        draft_id: Id of the draft; fields outside `space` are equal for all candidates.
        space: Per field `{"min": .., "max": .., "log": true}` or `{"choices": [..]}`.
        strategy: evolution, pbt, halving, random, optuna, or `file:Class` of the owner's.
        population: Candidates per epoch.
        epochs: Number of epochs.
        options: See `Options`.
        agreed: The hash of the preview that the client showed a person, who agreed.
        client: The caller, who can wait for as long as its client allows.

    Raises:
        NotFound, LockedField, InvalidValue: Not a valid draft, space or strategy; nothing was started.
        NotPossibleNow: A limit forbids it, or a person must confirm it.
    """

    checked_options = _options(options or {})

    def work() -> Answer:
        draft, wait_s = workshop.drafts.get(draft_id), workshop.longest_wait_s(client)
        # Before planning: draft and locks may have changed since the first call with this key.
        if (
            not checked_options.preview
            and (earlier := workshop.starter.find_earlier(checked_options.key, draft.id, SweepPlan.kind)) is not None
        ):
            return _answer_repeated(earlier.specifications[0], wait_s)
        request, plan = _request(workshop, draft, space, strategy, population, epochs, checked_options, agreed)
        if checked_options.preview:
            return _answer_preview(workshop, request, plan)
        try:
            started = workshop.starter.start(request)
        except ConfirmationNeeded as refused:
            raise NotPossibleNow(
                f"{refused.message}\n{_describe_preview(refused.preview, plan)}", hint=refused.hint
            ) from None
        sweep = started.specifications[0]
        if started.repeated:
            return _answer_repeated(sweep, wait_s)
        return _answer_started(sweep, plan, wait_s, _warnings(workshop, draft, plan))

    await remember_tasks(workshop, (await to_thread.run_sync(workshop.drafts.get, draft_id)).config)
    return await to_thread.run_sync(work)


async def consent_wanted(
    workshop: Workshop,
    *,
    draft_id: str,
    space: Mapping[str, Any],
    strategy: str,
    population: int,
    epochs: int,
    options: Mapping[str, Any],
) -> tuple[str, str] | None:
    """Return the preview of a sweep and its hash if a person must agree first; None if nobody has to be asked.

    Raises: See `start_sweep`.
    """
    checked_options = _options(options)
    if checked_options.preview:
        return None

    def work() -> tuple[str, str] | None:
        draft = workshop.drafts.get(draft_id)
        if workshop.starter.find_earlier(checked_options.key, draft.id, SweepPlan.kind) is not None:
            return None
        request, plan = _request(workshop, draft, space, strategy, population, epochs, checked_options, None)
        preview = workshop.starter.consent_wanted(request)
        return None if preview is None else (asked_about(draft, _describe_preview(preview, plan)), preview.hash)

    return await to_thread.run_sync(work)


def _request(
    workshop: Workshop,
    draft: Draft,
    space: Mapping[str, Any],
    strategy: str,
    population: int,
    epochs: int,
    options: Options,
    agreed: str | None,
) -> tuple[StartRequest, SweepPlan]:
    plan = make_plan(
        draft,
        workshop.home.locks(draft.preset),
        space=space,
        strategy=strategy,
        population=population,
        epochs=epochs,
        selection_ratio=options.selection_ratio,
        mutation_rate=options.mutation_rate,
        steps=options.steps,
        evaluate=options.evaluate,
        strategies=workshop.home.strategies,
    )
    request = StartRequest(
        draft,
        plan,
        options.name,
        again=options.again,
        key=options.key,
        confirm=options.confirm,
        agreed=agreed,
        longest_member_steps=longest_run_steps(plan),
    )
    return request, plan


def _answer_preview(workshop: Workshop, request: StartRequest, plan: SweepPlan) -> Answer:
    preview, refusal, [sweep] = workshop.starter.preview(request)
    lines = ["Nothing was started.", _describe_preview(preview, plan), *_warnings(workshop, request.draft, plan)]
    if refusal:
        lines.append(f"{refusal} The start asks for it.")
    lines.append("Next: the same call without preview.")
    counted = structured(preview) | {"runs": plan.runs + 1}
    data = _data(sweep).model_copy(update={"run_id": None, "state": "not started", "preview": counted})
    return Answer("\n".join(lines), data)


def _warnings(workshop: Workshop, draft: Draft, plan: SweepPlan) -> list[str]:
    """Return the fit check's warnings about the longest of a sweep's runs."""
    config = draft.config.model_copy(deep=True)
    if plan.evaluate != "train":
        return []
    config.budget.steps = max(longest_run_steps(plan) or 1, 1)
    step_s = seconds_per_step(config, training_plan(config).kind, workshop.home.runs)
    misfits = misfits_of(workshop, config, step_s)
    return [f"Each candidate: {line}" for line in warning_lines(misfits) + memory_warning(workshop, config)]


def _answer_started(sweep: Specification, plan: SweepPlan, wait_s: int, warned: Sequence[str]) -> Answer:
    trains = f", and {plan.total_steps} optimizer steps" if plan.evaluate == "train" else ""
    text = (
        f"Started the sweep {sweep.run_id}: {plan.strategy} over {', '.join(plan.space)}, "
        f"{plural(plan.population, 'candidate')}, {plural(plan.epochs, 'epoch')}, "
        f"at most {plan.runs + 1} runs, its own among them{trains}; then the best candidate is measured on held-out "
        "tasks, once. It goes on if this server ends.\n"
        f"{_next(sweep.run_id, wait_s)}"
    )
    return Answer("\n".join([*warned, *_conditions(plan), text]), _data(sweep))


def _conditions(plan: SweepPlan) -> list[str]:
    """Say if the candidates are measured under conditions of their own."""
    differ = ", ".join(measured_differently(plan))
    warning = f"Each candidate is measured under its own {differ}: a higher score can mean easier conditions."
    return [warning] if differ else []


def _answer_repeated(sweep: Specification, wait_s: int) -> Answer:
    """Answer a call whose key started this run before."""
    text = f"{sweep.run_id} was started with this key before; no second one was started.\n{_next(sweep.run_id, wait_s)}"
    return Answer(text, _data(sweep).model_copy(update={"state": "started before"}))


def _describe_preview(preview: Preview, plan: SweepPlan) -> str:
    """Say what all of a sweep would take."""
    steps = f" of {plan.total_steps} steps in all at most" if plan.evaluate == "train" else ""
    text = said(dataclasses.replace(preview, count=1, steps=0))
    runs = f"What {plan.runs + 1} runs{steps} would take, the sweep's own among them"
    text = text.replace("What one run would take", runs, 1)
    return f"{text}\nThe time assumes that they run one after the other; those that find room run beside others."


def _data(sweep: Specification) -> answers.Started:
    return answers.Started(
        run_id=sweep.run_id,
        kind="sweep",
        draft_id=sweep.draft_id or "",
        revision=sweep.draft_revision or 0,
        state="queued",
    )


def _next(run_id: str, wait_s: int) -> str:
    return f"Next: {call('check_status', run_ids=[run_id], wait_s=wait_s, until=['evaluation', 'end'])}"


# Results


def member_of(run_id: str) -> str | None:
    """Describe a run's part in its sweep, by its id; None for a run outside sweeps."""
    parts = sweep_of(run_id)
    if parts is None:
        return None
    sweep, number = parts
    if number is None:
        return f"the held-out measurement of the sweep {sweep}"
    return f"candidate c{number:03d} of the sweep {sweep}"


def best_line(sweep: Status) -> str:
    """Summarize the outcome of a sweep in a few words, from its status."""
    if (winner := headline(sweep)) is not None:
        return f"winner: {winner}"
    evaluations = [evaluation for label, evaluation in sweep.evaluations.items() if label.startswith("epoch-")]
    return f"best {number(evaluations[-1].get('score'))} after {len(evaluations)} epochs" if evaluations else ""


def best_of_sweep(folder: RunFolder, sweep: Specification) -> Specification:
    """Return a sweep's specification with the values of its best candidate, for a new draft.

    Raises:
        InvalidValue: No candidate has a score yet.
    """
    standing = read_standing(folder)
    if standing.best is None or sweep.sweep is None:
        raise InvalidValue(
            f"{folder.run_id} has no candidate with a score yet.", hint=call("check_status", run_ids=[folder.run_id])
        )
    values = standing.candidates[standing.best.candidate].values
    config, _ = apply_changes(sweep.config, values, sweep.sweep.knobs)
    return sweep.model_copy(update={"config": config})


def sweep_lines(folder: RunFolder, plan: SweepPlan) -> list[str]:
    """Return the outcome of a sweep as lines of text."""
    try:
        standing = read_standing(folder)
    except Corrupt as error:
        return [str(error)]
    best, final = standing.best, standing.final
    lines = [
        f"{plan.strategy} over {', '.join(plan.space)}: {standing.epochs_completed} of {plural(plan.epochs, 'epoch')}, "
        f"{plural(len(standing.scores), 'candidate')} measured, {plural(standing.steps, 'optimizer step')}.",
        *_conditions(plan),
    ]
    if best is None:
        return [*lines, "No candidate has a score yet."]
    lines.append(
        f"Best: {best.candidate} ({standing.runs[best.candidate]}), score {number(best.score)}, "
        f"{_accuracy(best.measured)} validation tasks: "
        f"{_values(standing, best.candidate)}."
    )
    lines += filter(None, [rivals_sentence(standing)])
    if final is not None and final.measured is not None:
        lines.append(
            f"Held out, measured once, {final.run_id}: "
            f"{_accuracy(final.measured)} tasks that played no part in the choice. The "
            "validation figure of the best of many is biased upwards; this one is not."
        )
    elif final is not None and final.why:
        lines.append(f"Not measured on held-out tasks: {final.why}.")
    lines.append("Candidates, the best first (with ancestors; ^: continued from the parent's weights):")
    lines += [f"  {_row(standing, candidate)}" for candidate in standing.ranked()[:_SHOWN]]
    if len(standing.scores) > _SHOWN:
        lines.append(f"  and {len(standing.scores) - _SHOWN} more, in the structure.")
    lines.append(f"{call('fork_config', run_id=folder.run_id)} makes a draft with the best values.")
    return lines


def sweep_structure(folder: RunFolder, plan: SweepPlan) -> dict[str, Any]:
    """Return the outcome of a sweep as a structure."""
    try:
        standing = read_standing(folder)
    except Corrupt:
        return {}
    best, final = standing.best, standing.final
    structure: dict[str, Any] = {
        "strategy": plan.strategy,
        "epochs": plan.epochs,
        "epochs_completed": standing.epochs_completed,
        "steps": standing.steps,
        "most_steps": plan.total_steps,
        "best": None,
        "heldout": None,
        "candidates": [_item(standing, candidate) for candidate in standing.ranked()[:_MOST]],
        "survivors": {str(epoch): ids for epoch, ids in standing.survivors.items()},
    }
    if best is not None:
        structure["best"] = _item(standing, best.candidate) | {"line_steps": standing.line_steps(best.candidate)}
    if final is not None and final.measured is not None:
        structure["heldout"] = {
            "run_id": final.run_id,
            **final.measured.model_dump(exclude={"steps", "groups", "state"}),
        }
    return structure


def lineage(standing: Standing, candidate: str) -> list[str]:
    """Return a candidate and its ancestors, itself first."""
    ids, ancestor = [], standing.candidates.get(candidate)
    while ancestor is not None and ancestor.id not in ids:
        ids.append(ancestor.id)
        ancestor = standing.candidates.get(ancestor.parent) if ancestor.parent else None
    return ids


def _item(standing: Standing, candidate_id: str) -> dict[str, Any]:
    candidate, scored = standing.candidates[candidate_id], standing.scores.get(candidate_id)
    item: dict[str, Any] = {
        "id": candidate_id,
        "run_id": standing.runs.get(candidate_id),
        "epoch": standing.born[candidate_id],
        "parent": candidate.parent,
        "continues": candidate.continues,
        "values": candidate.values,
        "score": scored.score if scored else None,
    }
    if scored is not None:
        item |= {"steps": scored.measured.steps, "accuracy": scored.measured.accuracy}
        if scored.why:
            item["why"] = clip(scored.why, 200)
    return item


def _row(standing: Standing, candidate_id: str) -> str:
    candidate, scored = standing.candidates[candidate_id], standing.scores.get(candidate_id)
    line = " < ".join(lineage(standing, candidate_id)[1:5])
    ancestors = f" < {line}{'^' if candidate.continues else ''}" if line else ""
    if scored is None:
        outcome = "not measured yet"
    elif scored.score is None:
        outcome = f"no score ({marked(scored.why, 120)})"
    else:
        outcome = f"score {number(scored.score)} after {standing.line_steps(candidate_id)} steps"
    return (
        f"{candidate_id}{ancestors}, epoch {standing.born[candidate_id]}: {outcome}; {_values(standing, candidate_id)}"
    )


def _values(standing: Standing, candidate_id: str) -> str:
    return ", ".join(f"{name}={value(setting)}" for name, setting in standing.candidates[candidate_id].values.items())


def _accuracy(measured: Measured) -> str:
    share = measured_share(measured.model_dump())
    interval = "" if share is None else f" [{percent(share.low)}, {percent(share.high)}]"
    return (
        f"accuracy {percent(measured.accuracy)}{interval} on {measured.tasks if measured.tasks is not None else 'no'}"
    )
