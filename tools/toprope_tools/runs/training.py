"""Tools that start, stop and resume training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from toprope.errors import Corrupt, NotFound
from toprope.records.run.digests import measured_otherwise
from toprope.records.run.folder import EVALUATION_VERSION, RunFolder, read_json
from toprope.records.run.metrics import last_row
from toprope.records.run.specification import Specification, training_plan
from toprope.records.run.status import Status
from toprope.records.sweep_journal import members_in
from toprope.settings.schema import Config
from toprope.settings.sections.environment import RUN, members_of
from toprope.supervisor.environment_variables import hub_variables
from toprope.supervisor.runs.cleanup import stop_members
from toprope.text_format import call, duration, environments, plural, value
from toprope.untrusted import named
from toprope.workbench.drafts import Draft
from toprope.workbench.fit import Misfit, unknown_task, warning_lines
from toprope.workbench.launch.budgets.token_costs import steps_of
from toprope.workbench.launch.continuation import freeze_continuation
from toprope.workbench.launch.open_runs import resume_run
from toprope.workbench.launch.preview import seconds_per_step
from toprope.workbench.launch.requirements import missing_keys
from toprope.workbench.launch.seeds import expand
from toprope.workbench.launch.start import ConfirmationNeeded, StartRequest
from toprope_tools.answers import runs as answers
from toprope_tools.answers.answer import Answer
from toprope_tools.clients import UNKNOWN, Client
from toprope_tools.planning.fit import memory_lines, memory_warning, misfits_of, remember_tasks
from toprope_tools.planning.preview_text import ask_to_confirm, said, structured

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_STARTS = 64
"""Starts of a draft, newest first, whose seeds are compared with those of another start."""


async def start_training(
    workshop: Workshop,
    *,
    draft_id: str,
    name: str | None = None,
    again: bool = False,
    key: str | None = None,
    seeds: int = 1,
    preview: bool = False,
    confirm: str | None = None,
    agreed: str | None = None,
    client: Client = UNKNOWN,
) -> Answer:
    """Freeze a draft and start training; answer as soon as every run has its keeper.

    Args:
        name: Begins the run's id.
        again: Start although a run of this draft's revision is live.
        key: Names this start. A call with a used key is answered with the runs that it started.
        seeds: Number of runs that differ in their seed alone, as a group.
        preview: Start nothing; say what a start would take.
        confirm: The hash of the preview that is meant; another start is refused.
        agreed: The hash of a preview that a person agreed to when the client asked.
        client: The caller, who can wait for as long as its client allows.

    Raises:
        NotFound, LockedField, InvalidValue: The draft cannot run, or the key belongs to another draft.
        NotPossibleNow: A run of this revision is live, a limit forbids the start, or a person must confirm it.
        ComponentFailed: A keeper did not come up.
    """
    wait_s = await to_thread.run_sync(workshop.longest_wait_s, client)
    draft = await to_thread.run_sync(workshop.drafts.get, draft_id)
    await remember_tasks(workshop, draft.config)
    misfits = await to_thread.run_sync(_misfits, workshop, draft)
    plan = training_plan(draft.config)
    request = StartRequest(draft, plan, name, seeds, again, key, confirm, agreed, unknown_task=unknown_task(misfits))
    if preview:
        return await to_thread.run_sync(_answer_preview, workshop, request, warning_lines(misfits))
    try:
        started = await to_thread.run_sync(workshop.starter.start, request)
    except ConfirmationNeeded as refused:
        raise ask_to_confirm(refused) from None
    if started.repeated:
        status = await to_thread.run_sync(workshop.runs.status, started.specifications[0].run_id)
        return _answer_repeated(started.specifications, status, wait_s)
    repeated = await to_thread.run_sync(_repeated_seeds, workshop, started.specifications)
    memory = await to_thread.run_sync(memory_warning, workshop, started.specifications[0].config)
    before = await to_thread.run_sync(_training_before, workshop, started.specifications)
    return _answer_started(started.specifications, wait_s, warning_lines(misfits) + repeated + memory, before)


def _repeated_seeds(workshop: Workshop, started: Sequence[Specification]) -> list[str]:
    """Warn of seeds that ran with the same code at this revision: with the same seed a run is no further evidence."""
    first, own = started[0], {specification.run_id for specification in started}
    ran: dict[int, str] = {}
    for start in workshop.index.starts(first.draft_id or "")[:_MOST_STARTS]:
        if (start.revision, start.kind) == (first.draft_revision, first.kind) and start.run_id not in own:
            with suppress(NotFound, Corrupt):
                status = workshop.runs.status(start.run_id, revive=False)
                folder = workshop.runs.folder(start.run_id)
                earlier = Specification.read(folder)
                counts = status.state == "completed" or not status.ended
                if counts and not _changed_since_before(folder, earlier):
                    ran[earlier.config.algorithm.seed] = start.run_id
    seeds = [specification.config.algorithm.seed for specification in started]
    repeated = [seed for seed in seeds if seed in ran]
    if not repeated:
        return []
    fresh = call("edit_config", draft_id=first.draft_id, changes={"algorithm.seed": max([*ran, *seeds]) + 1})
    return [
        f"Warning (seeds_repeated): {plural(len(repeated), 'seed')} of this start ran at this revision before "
        f"({', '.join(f'{seed} as {ran[seed]}' for seed in repeated)}). The same seed draws the same tasks and "
        f"weights, so this repeats those runs and is no further evidence. {fresh} takes seeds that did not run."
    ]


def _training_before(workshop: Workshop, started: Sequence[Specification]) -> list[str]:
    """Return the other live runs that train on this machine or wait for it."""
    own = {specification.run_id for specification in started}
    if not _is_here(started[0].config):
        return []
    before = []
    for run in workshop.statuses():
        if not run.ended and run.run_kind.trains and run.run_id not in own and run.created_at < started[0].created_at:
            with suppress(NotFound, Corrupt):
                if _is_here(Specification.read(workshop.runs.folder(run.run_id)).config):
                    before.append(run.run_id)
    return before


def _is_here(config: Config) -> bool:
    """True if a run takes the time of this machine."""
    return config.launcher.kind == "local" and not config.is_hosted


def _misfits(workshop: Workshop, draft: Draft) -> list[Misfit]:
    """Return what the fit check finds in a draft that starts or would start."""
    step_s = seconds_per_step(draft.config, training_plan(draft.config).kind, workshop.home.runs)
    return misfits_of(workshop, draft.config, step_s)


async def stop_training(workshop: Workshop, *, run_id: str) -> Answer:
    """Stop a live run, or all runs of a group, and wait for the end. An ended run is only reported.

    Raises:
        NotFound: There is no such run.
    """
    group = await to_thread.run_sync(expand, workshop.home.runs, [run_id])
    if group != [run_id]:
        return await _stop_group(workshop, run_id, group)
    status_before = await to_thread.run_sync(lambda: workshop.runs.status(run_id, revive=False))
    if status_before.run_kind.starts_runs:
        return await _stop_sweep(workshop, status_before)
    if status_before.ended and status_before.resume_at is not None:
        status_after = await to_thread.run_sync(workshop.runs.stop, run_id)
        text = f"{run_id} was lost, about to go on by itself; now it is {status_after.state}. "
        text += "resume_training continues it."
        data = answers.Stopped(run_id=run_id, state=status_after.state, was_live=False)
    elif status_before.ended:
        text = f"{run_id} is not running: it {_ended(status_before.state)} already. Nothing was stopped."
        data = answers.Stopped(run_id=run_id, state=status_before.state, was_live=False)
    else:
        status_after = await workshop.stop(run_id)
        text = f"{run_id}: {status_after.state}."
        if status_after.checkpoint:
            text += (
                f" Last checkpoint: step {status_after.checkpoint.get('step')}, {status_after.checkpoint.get('path')}."
            )
        if not status_after.ended:
            text += f" It is still ending; {call('check_status', run_ids=[run_id], wait_s=45)} waits for the end."
        data = answers.Stopped(run_id=run_id, state=status_after.state, was_live=True)
    return Answer(f"{text}\nNext: {call('get_results', run_id=run_id)}", data)


async def resume_training(
    workshop: Workshop,
    *,
    run_id: str,
    steps: int | None = None,
    seconds: float | None = None,
    by_owner: bool = False,
    client: Client = UNKNOWN,
) -> Answer:
    """Resume a run that was stopped, failed or lost; answer as soon as it has its keeper.

    Args:
        steps: Go on with a completed run for this number of steps, in a run of its own.
        seconds: Go on with a completed run for this many seconds of training, in a run of its own.
        by_owner: The owner asks, and so accepts the environment's code as it is now.
        client: As in `start_training`.

    Raises:
        NotFound: There is no such run.
        NotPossibleNow: The run is live, still ending, or its limits are used up; its code changed; it is completed and
            no budget is given, or a budget is given and it is not completed.
        LockedField: The owner does not allow its configuration any more, or the budget.
        InvalidValue: The budget is impossible for the run.
        Corrupt: Its checkpoint cannot be read.
        ComponentFailed: Its keeper did not come up; the run has failed again.
    """
    wait_s = await to_thread.run_sync(workshop.longest_wait_s, client)
    if steps is not None or seconds is not None:
        return await to_thread.run_sync(_continue, workshop, run_id, steps, seconds, wait_s)
    resume = partial(resume_run, workshop.home, workshop.runs, run_id, by_owner=by_owner)
    status, specification = await to_thread.run_sync(resume)
    kind = specification.run_kind
    step = int(status.checkpoint["step"]) if status.checkpoint else None
    text = f"Resumed {run_id}: attempt {status.attempt}"
    if status.checkpoint is not None:
        text += f" continues after step {step} of {steps_of(specification)}, from {status.checkpoint['path']}"
        text += "; its metrics, rollouts and the evaluations until then are kept."
    elif kind.trains:
        text += " starts again at step 0, because the run has no checkpoint."
    elif kind.starts_runs:
        text += " continues after what was measured so far and waits for live members."
    else:
        text += " starts again, because runs of this kind have no steps."
    if changed := await to_thread.run_sync(_changed_since_before, workshop.runs.folder(run_id), specification):
        names = ", ".join(named(path, 4096) for path in changed)
        text += (
            f"\nWarning: changed since the evaluation before training: {names}. The one after it will not be "
            "comparable with it. Put the former code back, or start a new run."
        )
    from_step = (step or 0) if kind.trains else None
    data = answers.Resumed(
        run_id=run_id, kind=kind.name, attempt=status.attempt, state=status.state, from_step=from_step
    )
    return Answer(f"{text}\n{_next(run_id, wait_s)}", data)


def _changed_since_before(folder: RunFolder, specification: Specification) -> list[str]:
    """Return what changed of the code that measured before training; empty if that was not measured or recorded."""
    with suppress(NotFound, Corrupt, OSError, AttributeError, KeyError, TypeError):
        loaded = read_json(folder.evaluation("before"), EVALUATION_VERSION)["evaluator"]["loaded"]
        return measured_otherwise([specification.environment, *specification.mixture], loaded)
    return []


def _continue(workshop: Workshop, run_id: str, steps: int | None, seconds: float | None, wait_s: int) -> Answer:
    """Start a run that goes on with a completed one."""
    folder = workshop.runs.folder(run_id)
    workshop.runs.status(run_id, revive=False)  # a run without a keeper is settled first
    locks = workshop.home.locks(Specification.read(folder).preset)
    frozen = freeze_continuation(folder, locks, steps=steps, seconds=seconds)
    [started] = start_frozen(workshop, [frozen])
    own = started.config.algorithm.name == "custom"  # its optimizer and its schedule are its own affair
    kept = "the weights alone" if own else "the weights and the optimizer"
    text = (
        f"Started {started.run_id}: it goes on with {kept} of {run_id}, which stays as it is, "
        f"for at most {_limit(started)} more. Tasks follow those that {run_id} trained on.\n"
        f"{'' if own else _rate_again(folder, started)}"
        f"{_next(started.run_id, wait_s)}; then {call('compare_runs', a=run_id, b=started.run_id)}."
    )
    data = answers.Resumed(
        run_id=started.run_id, kind=started.kind, attempt=1, state="queued", from_step=0, continues=run_id
    )
    return Answer(text, data)


def _rate_again(folder: RunFolder, started: Specification) -> str:
    """Say that a falling learning rate goes back to its peak, and how to train on at a lower one."""
    optimizer, reached = started.config.optimizer, last_row(folder.metrics).get("learning_rate")
    if optimizer.lr_scheduler_type not in ("linear", "cosine"):
        return ""
    peak = optimizer.learning_rate
    lower = {"policy.model": f"{RUN}{folder.run_id}", "optimizer.learning_rate": float(f"{peak / 10:.3g}")}
    return (
        f"Its learning rate goes back to {value(peak)} and falls again ({optimizer.lr_scheduler_type})"
        + (f"; {folder.run_id} ended at {reached:.2g}" if isinstance(reached, int | float) else "")
        + f", so accuracy may fall at first. At a lower rate: {call('stop_training', run_id=started.run_id)}, "
        f"{call('fork_config', run_id=folder.run_id)}, "
        f"edit_config(draft_id=..., changes={json.dumps(lower)}) and start_training; its optimizer begins anew.\n"
    )


def start_frozen(workshop: Workshop, specifications: list[Specification]) -> list[Specification]:
    """Start runs that were frozen from another run.

    Raises:
        NotPossibleNow: The owner wants a person to confirm it, or a limit forbids it.
        ComponentFailed: A keeper did not come up.
    """
    try:
        return workshop.starter.start_frozen(specifications).specifications
    except ConfirmationNeeded as refused:
        raise ask_to_confirm(refused) from None


def _limit(specification: Specification) -> str:
    """Return the budget in words: 400 steps or 2 min of training."""
    budget = specification.config.budget
    limit = plural(steps_of(specification), "step")
    if budget.max_train_seconds is not None:
        limit += f" or {duration(budget.max_train_seconds)} of training"
    return limit


async def _stop_group(workshop: Workshop, group: str, run_ids: list[str]) -> Answer:
    statuses_before = await to_thread.run_sync(_statuses, workshop, run_ids)
    stopping = await _stop_each(workshop, statuses_before)
    statuses_after = await to_thread.run_sync(_statuses, workshop, run_ids)
    outcomes = ", ".join(f"{run_id} {status.state}" for run_id, status in statuses_after.items())
    states = {status.state for status in statuses_after.values()}
    data = answers.Stopped(
        run_id=group,
        state=states.pop() if len(states) == 1 else "mixed",
        was_live=any(not status.ended for status in statuses_before.values()),
        runs={run_id: status.state for run_id, status in statuses_after.items()},
    )
    head = f"Stopped {len(stopping)} of the {len(run_ids)} runs" if stopping else "No run is live"
    return Answer(f"{head} of the group {group}: {outcomes}.\nNext: {call('get_results', run_id=run_ids[0])}", data)


async def _stop_sweep(workshop: Workshop, status_before: Status) -> Answer:
    """Stop a sweep, then the members that a lost keeper may have left."""
    run_id, folder = status_before.run_id, workshop.runs.folder(status_before.run_id)
    status_after = await workshop.stop(run_id)
    await to_thread.run_sync(stop_members, folder)
    ids = await to_thread.run_sync(members_in, workshop.home.runs, run_id)
    await _stop_each(workshop, await to_thread.run_sync(_statuses, workshop, ids))
    status_after = await to_thread.run_sync(lambda: workshop.runs.status(run_id, revive=False))
    live = [
        member_id
        for member_id, status in (await to_thread.run_sync(_statuses, workshop, ids)).items()
        if not status.ended
    ]
    text = f"{run_id}: {status_after.state}"
    if status_before.ended and status_after.state == status_before.state:
        text = f"{run_id} is not running: it {_ended(status_before.state)} already"
    text += f"; still ending: {', '.join(live)}." if live else "; none of its runs is live."
    if status_after.state != "completed":
        text += " What was measured so far is kept; resume_training continues from there."
    data = answers.Stopped(run_id=run_id, state=status_after.state, was_live=not status_before.ended)
    return Answer(f"{text}\nNext: {call('get_results', run_id=run_id)}", data)


async def _stop_each(workshop: Workshop, statuses: Mapping[str, Status]) -> list[str]:
    """Stop the runs that are live, and those that are lost and about to go on by themselves; return their ids."""
    stopping = [run_id for run_id, status in statuses.items() if not status.ended or status.resume_at is not None]
    async with anyio.create_task_group() as tasks:
        for run_id in stopping:
            tasks.start_soon(workshop.stop, run_id)
    return stopping


def _statuses(workshop: Workshop, run_ids: Sequence[str]) -> dict[str, Status]:
    """Read the statuses of runs without reviving any."""
    return {run_id: workshop.runs.status(run_id, revive=False) for run_id in run_ids}


def _answer_preview(workshop: Workshop, request: StartRequest, warned: Sequence[str]) -> Answer:
    preview, reason, specifications = workshop.starter.preview(request, with_keys=False)
    home = workshop.home
    missing = [error.message for error in missing_keys(specifications[0], home.settings(), home.settings_file)]
    arguments: dict[str, Any] = {"draft_id": request.draft.id}
    if request.name is not None:
        arguments["name"] = request.name
    if request.seeds > 1:
        arguments["seeds"] = request.seeds
    if reason:
        reason = f"\n{reason} The start asks for it."
    warnings = [f"Warning (key_missing): {message}" for message in missing] + [*warned]
    warnings += _repeated_seeds(workshop, specifications)
    warning_text = "".join(f"\n{line}" for line in warnings)
    config, settings = specifications[0].config, home.settings()
    memory = "\n".join(memory_lines(config, hub_variables(settings.variables), allowed=settings.machine.gpus))
    text = f"Nothing was started.\n{said(preview)}\n{memory}{warning_text}{reason}\n"
    text += f"Next: {call('start_training', **arguments)}"
    data = _started(specifications[:1]).model_copy(
        update={
            "run_id": None,
            "group_id": None,
            "run_ids": None,
            "state": "not started",
            "preview": structured(preview),
        }
    )
    return Answer(text, data)


def _answer_started(
    specifications: Sequence[Specification], wait_s: int, warnings: Sequence[str], before: Sequence[str]
) -> Answer:
    first_run, limit = specifications[0], _limit(specifications[0])
    labels = [member.label for member in members_of(first_run.config.environment)]
    subject = f"{environments(labels)}, {first_run.draft_id} revision {first_run.draft_revision}"
    if (group := first_run.seed_group) is None:
        text = f"Started {first_run.run_id}: {subject}, at most {limit}. It goes on if this server ends.\n"
        if before:
            others = f"{before[-1]}{f' and {len(before) - 1} more' if len(before) > 1 else ''}"
            text += f"It is queued: the machine may be taken until the end of {others}.\n"
        text += _next(first_run.run_id, wait_s)
    else:
        seeds = ", ".join(str(run.config.algorithm.seed) for run in specifications)
        text = (
            f"Started the group {group.id}: {len(specifications)} runs of {subject}, seeds {seeds}, each at most "
            f"{limit}. Those without room wait, and all go on if this server ends: "
            f"{first_run.run_id}{''.join(f', -s{number}' for number in range(1, len(specifications)))}.\n"
            f"{_next(group.id, wait_s, grouped=True)}; then compare_runs compares the group with another."
        )
    return Answer("\n".join([*warnings, text]), _started(specifications))


def _answer_repeated(specifications: Sequence[Specification], status: Status, wait_s: int) -> Answer:
    """Answer a call whose key started these runs before."""
    first_run = specifications[0]
    data = _started(specifications).model_copy(update={"state": status.state})
    if (group := first_run.seed_group) is not None:
        ids = ", ".join(run.run_id for run in specifications)
        text = f"The group {group.id} ({ids}) was started with this key before; no second one was started."
        return Answer(f"{text}\n{_next(group.id, wait_s, grouped=True)}", data)
    text = f"{first_run.run_id} was started with this key before and is {status.state}; no second run was started."
    return Answer(f"{text}\n{_next(first_run.run_id, wait_s)}", data)


def _started(specifications: Sequence[Specification]) -> answers.Started:
    first_run = specifications[0]
    grouped = first_run.seed_group is not None
    return answers.Started(
        run_id=first_run.run_id,
        kind=first_run.kind,
        draft_id=first_run.draft_id or "",
        revision=first_run.draft_revision or 0,
        state="queued",
        group_id=first_run.seed_group.id if first_run.seed_group else None,
        run_ids=[run.run_id for run in specifications] if grouped else None,
    )


def _next(run_id: str, wait_s: int, *, grouped: bool = False) -> str:
    """Propose the wait after a start; it ends at important news, or at the client's call limit."""
    until = ["all ended", "failed"] if grouped else ["finding", "stall", "end"]
    return f"Next: {call('check_status', run_ids=[run_id], wait_s=wait_s, until=until)}"


def _ended(state: str) -> str:
    return {"completed": "completed", "stopped": "was stopped", "failed": "failed", "lost": "was lost"}.get(
        state, state
    )
