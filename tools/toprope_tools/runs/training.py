"""Starting, stopping and resuming runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from toprope.errors import NotFound, NotPossibleNow, shown
from toprope.records.index.idempotency_keys import StartKey
from toprope.records.run.specification import Specification
from toprope.records.run.status import RESUMABLE, Status
from toprope.records.sweep_journal import members_in
from toprope.supervisor.capacity.budget_ledger import ledger_lock
from toprope.supervisor.watchers.sweep_members import stop_members
from toprope.workbench.launch.reserve_budget import may_go_on
from toprope.workbench.launch.seeds import expand, group_of, members
from toprope_tools.answers import base as answers
from toprope_tools.answers.base import Answer, call, duration
from toprope_tools.planning.preview_text import said, structured
from toprope_tools.runs.start import NOT_THERE_YET_S, Taken, launch, launch_group, preview_of, started_by

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = ["launch", "resume_training", "start_training", "stop_training"]

_LOOK_AGAIN_S = 0.02
_WAIT_S = 900
"""What a start advises to wait; a client that holds out less is cut to that and told so."""


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
) -> Answer:
    """Freezes a draft and starts training; answers as soon as the run has its keeper.

    Args:
        workshop: The server's.
        draft_id: Which draft.
        name: Begins the run's id.
        again: Start although a run of this draft's revision is live.
        key: Names this start. A call with a key that was used is answered with the run that it started.
        seeds: So many runs that differ in their seed alone, as a group.
        preview: Start nothing; tell what starting would take.
        confirm: The hash of a preview that the owner's person agreed to.

    Raises:
        NotFound, LockedField, InvalidValue: The draft cannot run, or the key is another draft's; nothing was started.
        NotPossibleNow: A run of this draft's revision is live, a limit does not allow it, or it is to be confirmed.
    """
    if preview:
        return await to_thread.run_sync(lambda: _previewed(workshop, draft_id, name, seeds))
    if key is not None:
        taken = await to_thread.run_sync(_of_key, workshop, key, draft_id)
        if taken is not None:
            return taken
    try:
        specifications = await launch_group(
            workshop, draft_id=draft_id, name=name, again=again, key=key, seeds=seeds, confirm=confirm
        )
    except Taken as other:
        return await to_thread.run_sync(_awaited, workshop, other.start)
    specification = specifications[0]
    budget = specification.config.budget
    limit = f"{budget.steps} steps"
    if budget.max_train_seconds is not None:
        limit += f" or {duration(budget.max_train_seconds)} of training"
    if specification.seed_group is not None:
        return _group_started(specifications, limit)
    text = (
        f"Started {specification.run_id}: {specification.environment.name}, {draft_id} revision "
        f"{specification.draft_revision}, at most {limit}. It goes on whatever happens to this server.\n"
        f"{_next(specification.run_id)}"
    )
    return Answer(text, _started(specification), brief=True)


async def stop_training(workshop: Workshop, *, run_id: str) -> Answer:
    """Stops a live run and waits until it has ended; by a group's id all its runs. One that has ended is only told of.

    Raises:
        NotFound: There is no such run.
    """
    group = await to_thread.run_sync(expand, workshop.home.runs, [run_id])
    if group != [run_id]:
        return await _stop_group(workshop, run_id, group)
    before = await to_thread.run_sync(lambda: workshop.runs.status(run_id, revive=False))
    if before.run_kind.starts_runs:
        return await _stop_sweep(workshop, before)
    if before.ended and before.resume_at is not None:
        after = await to_thread.run_sync(workshop.runs.stop, run_id)
        text = f"{run_id} was lost and would have gone on by itself; now it is {after.state}. resume_training goes on."
        data = answers.Stopped(run_id=run_id, state=after.state, was_live=False)
    elif before.ended:
        text = f"{run_id} is not running: it {_ended(before.state)} already. Nothing was stopped."
        data = answers.Stopped(run_id=run_id, state=before.state, was_live=False)
    else:
        after = await workshop.stop(run_id)
        text = f"{run_id}: {after.state}."
        if after.checkpoint:
            text += f" Last checkpoint: step {after.checkpoint.get('step')}, {after.checkpoint.get('path')}."
        if not after.ended:
            text += f" It still ends; {call('check_status', run_ids=[run_id], wait_s=45)} tells when it has."
        data = answers.Stopped(run_id=run_id, state=after.state, was_live=True)
    return Answer(f"{text}\nNext: {call('get_results', run_id=run_id)}", data)


async def resume_training(workshop: Workshop, *, run_id: str) -> Answer:
    """Goes on with a run that was stopped, failed or lost; answers as soon as it has its keeper.

    Raises:
        NotFound: There is no such run.
        NotPossibleNow: It lives, is still ending or has completed, or a limit leaves it nothing.
        Corrupt: Its checkpoint cannot be read.
        ComponentFailed: Its keeper did not come up; it is failed again.
    """
    status, specification = await to_thread.run_sync(_resume, workshop, run_id)
    budget, kind = specification.config.budget, specification.run_kind
    step = int(status.checkpoint["step"]) if status.checkpoint else None
    text = f"Resumed {run_id}: attempt {status.attempt}"
    if step is not None:
        text += f" goes on after step {step} of {budget.steps}, from {status.checkpoint['path']}"
        text += "; its metrics, rollouts and evaluation before training stay."
    elif kind.trains:
        text += " starts again at step 0, because the run has no checkpoint."
    elif kind.starts_runs:
        text += " goes on after what was measured so far; members that live are waited for."
    else:
        text += " starts again: a run of this kind has no steps."
    from_step = (step or 0) if kind.trains else None
    data = answers.Resumed(
        run_id=run_id, kind=kind.name, attempt=status.attempt, state=status.state, from_step=from_step
    )
    return Answer(f"{text}\n{_next(run_id)}", data)


def _resume(workshop: Workshop, run_id: str) -> tuple[Status, Specification]:
    """Goes on with a run if the owner's limits leave it anything."""
    runs = workshop.home.runs
    with ledger_lock(runs) if runs.is_dir() else nullcontext():
        status = workshop.runs.status(run_id, revive=False)
        if status.ended and status.state in RESUMABLE:
            specification = Specification.read(workshop.runs.folder(run_id))
            may_go_on(specification, workshop.home.limits(), runs)
        return workshop.resume(run_id)


async def _stop_group(workshop: Workshop, group: str, run_ids: list[str]) -> Answer:
    before = {run_id: await to_thread.run_sync(workshop.runs.status, run_id) for run_id in run_ids}
    live = [run_id for run_id, status in before.items() if not status.ended]
    async with anyio.create_task_group() as tasks:
        for run_id in live:
            tasks.start_soon(workshop.stop, run_id)
    after = {run_id: await to_thread.run_sync(workshop.runs.status, run_id) for run_id in run_ids}
    told = ", ".join(f"{run_id} {status.state}" for run_id, status in after.items())
    states = {status.state for status in after.values()}
    data = answers.Stopped(
        run_id=group,
        state=states.pop() if len(states) == 1 else "mixed",
        was_live=bool(live),
        runs={run_id: status.state for run_id, status in after.items()},
    )
    head = f"Stopped {len(live)} of the {len(run_ids)} runs" if live else "No run is live"
    return Answer(f"{head} of the group {group}: {told}.\nNext: {call('get_results', run_id=run_ids[0])}", data)


async def _stop_sweep(workshop: Workshop, before: Status) -> Answer:
    """Stops a sweep and then its members, of which its keeper may leave some where it was lost."""
    run_id, folder = before.run_id, workshop.runs.folder(before.run_id)
    after = await workshop.stop(run_id)
    await to_thread.run_sync(stop_members, folder)
    ids = await to_thread.run_sync(members_in, workshop.home.runs, run_id)
    statuses = [await to_thread.run_sync(lambda one=one: workshop.runs.status(one, revive=False)) for one in ids]
    async with anyio.create_task_group() as tasks:
        for status in statuses:
            if not status.ended or status.resume_at is not None:
                tasks.start_soon(workshop.stop, status.run_id)
    after = await to_thread.run_sync(lambda: workshop.runs.status(run_id, revive=False))
    left = {one: await to_thread.run_sync(lambda one=one: workshop.runs.status(one, revive=False)) for one in ids}
    live = [one for one, status in left.items() if not status.ended]
    text = f"{run_id}: {after.state}"
    if before.ended and after.state == before.state:
        text = f"{run_id} is not running: it {_ended(before.state)} already"
    text += f"; still ending: {', '.join(live)}." if live else "; none of its runs is live."
    if after.state != "completed":
        text += " What was measured stays, and resume_training goes on from there."
    data = answers.Stopped(run_id=run_id, state=after.state, was_live=not before.ended)
    return Answer(f"{text}\nNext: {call('get_results', run_id=run_id)}", data)


def _previewed(workshop: Workshop, draft_id: str, name: str | None, seeds: int) -> Answer:
    found, why, specifications = preview_of(workshop, draft_id=draft_id, name=name, seeds=seeds)
    arguments: dict[str, Any] = {"draft_id": draft_id}
    if name is not None:
        arguments["name"] = name
    if seeds > 1:
        arguments["seeds"] = seeds
    if why:
        arguments["confirm"] = found.hash
        why = f"\n{why} Show this to the person whom you work for first."
    text = f"Nothing was started.\n{said(found)}{why}\nNext: {call('start_training', **arguments)}"
    data = _started(specifications[0]).model_copy(
        update={"run_id": None, "state": "not started", "preview": structured(found)}
    )
    return Answer(text, data)


def _group_started(specifications: Sequence[Specification], limit: str) -> Answer:
    first = specifications[0]
    assert first.seed_group is not None
    group, ids = first.seed_group.id, [one.run_id for one in specifications]
    seeds = ", ".join(str(one.config.algorithm.seed) for one in specifications)
    text = (
        f"Started the group {group}: {len(ids)} runs of {first.environment.name}, {first.draft_id} revision "
        f"{first.draft_revision}, seeds {seeds}, each at most {limit}. They queue for the machine and go on whatever "
        f"happens to this server: {', '.join(ids)}.\n"
        f"{_next(group, grouped=True)}; compare_runs then holds the group against another."
    )
    return Answer(text, _started(first).model_copy(update={"run_ids": ids, "group_id": group}), brief=True)


def _of_key(workshop: Workshop, key: str, draft_id: str) -> Answer | None:
    """The answer to a call whose key was used before; None where it was not."""
    taken = started_by(workshop, key, draft_id)
    if taken is None:
        return None
    return _awaited(workshop, taken)


def _awaited(workshop: Workshop, start: StartKey) -> Answer:
    """Answers with the run of a key, which another call may be starting right now."""
    limit = time.monotonic() + NOT_THERE_YET_S
    while True:
        try:
            status = workshop.runs.status(start.run_id)
            specification = Specification.read(workshop.runs.folder(start.run_id))
            break
        except NotFound:
            if time.monotonic() > limit:
                raise NotPossibleNow(
                    f"Another call with the key {shown(start.key)} is starting {start.run_id}, which is not there yet.",
                    hint="Repeat the call with the same key in a few seconds.",
                ) from None
            time.sleep(_LOOK_AGAIN_S)
    data = _started(specification).model_copy(update={"state": status.state})
    if (found := group_of(start.run_id)) is not None:
        group, ids = found[0], members(workshop.home.runs, found[0])
        data = data.model_copy(update={"group_id": group, "run_ids": ids})
        text = f"The group {group} ({', '.join(ids)}) was started with this key before; no second one was started."
        return Answer(f"{text}\n{_next(group, grouped=True)}", data, brief=True)
    text = f"{start.run_id} was started with this key before and is {status.state}; no second run was started."
    return Answer(f"{text}\n{_next(start.run_id)}", data, brief=True)


def _started(specification: Specification) -> answers.Started:
    return answers.Started(
        run_id=specification.run_id,
        kind=specification.kind,
        draft_id=specification.draft_id or "",
        revision=specification.draft_revision or 0,
        state="queued",
    )


def _next(run_id: str, *, grouped: bool = False) -> str:
    """The wait that follows a start: one that ends at what matters, and that each client cuts to what it holds out."""
    until = ["all ended", "failed"] if grouped else ["finding", "stall", "end"]
    return f"Next: {call('check_status', run_ids=[run_id], wait_s=_WAIT_S, until=until)}"


def _ended(state: str) -> str:
    return {"completed": "completed", "stopped": "was stopped", "failed": "failed", "lost": "was lost"}.get(
        state, state
    )
