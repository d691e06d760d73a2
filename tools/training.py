"""Starting, stopping and resuming runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from anyio import to_thread

from tools import answers
from tools.answers import Answer, call, duration
from toprope.errors import ComponentFailed, InvalidValue, NotFound, NotPossibleNow, shown
from toprope.records import start_keys
from toprope.records.index import StartRow
from toprope.records.specification import AskPlan, Specification, TestPlan
from toprope.records.start_keys import StartKey
from toprope.records.status import LIVE
from toprope.workbench.drafts import Draft
from toprope.workbench.freeze import freeze
from toprope.workbench.requirements import require_wandb

if TYPE_CHECKING:
    from tools.workshop import Workshop

__all__ = ["launch", "resume_training", "start_training", "stop_training"]

_LOOK_AGAIN_S = 0.02
_NOT_THERE_YET_S = 10.0
"""A run that was noted so recently may not have its folder yet; it counts as live."""


async def start_training(
    workshop: Workshop, *, draft_id: str, name: str | None = None, again: bool = False, key: str | None = None
) -> Answer:
    """Freezes a draft and starts training; answers as soon as the run has its keeper.

    Args:
        workshop: The server's.
        draft_id: Which draft.
        name: Begins the run's id.
        again: Start although a run of this draft's revision is live.
        key: Names this start. A call with a key that was used is answered with the run that it started.

    Raises:
        NotFound, LockedField, InvalidValue: The draft cannot run, or the key is another draft's; nothing was started.
        NotPossibleNow: A run of this draft's revision is live.
    """
    if key is not None:
        taken = await to_thread.run_sync(_of_key, workshop, key, draft_id)
        if taken is not None:
            return taken
    try:
        specification = await launch(workshop, draft_id=draft_id, kind="train", name=name, again=again, key=key)
    except _Taken as other:
        return await to_thread.run_sync(_awaited, workshop, other.start)
    budget = specification.config.budget
    limit = f"{budget.steps} steps"
    if budget.max_train_seconds is not None:
        limit += f" or {duration(budget.max_train_seconds)} of training"
    text = (
        f"Started {specification.run_id}: {specification.environment.name}, {draft_id} revision "
        f"{specification.draft_revision}, at most {limit}. It goes on whatever happens to this server.\n"
        f"Next: {call('check_status', run_ids=[specification.run_id], wait_s=45)}"
    )
    return Answer(text, _started(specification))


async def stop_training(workshop: Workshop, *, run_id: str) -> Answer:
    """Stops a live run and waits until it has ended. A run that has ended is only told of.

    Raises:
        NotFound: There is no such run.
    """
    before = await to_thread.run_sync(lambda: workshop.runs.status(run_id, revive=False))
    if before.ended and before.resume_at is not None:
        await to_thread.run_sync(workshop.runs.stop, run_id)
        text = f"{run_id} was lost and would have gone on by itself; now it does not. resume_training goes on with it."
        data = answers.Stopped(run_id=run_id, state=before.state, was_live=False)
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
        NotPossibleNow: It lives, is still ending or has completed.
        Corrupt: Its checkpoint cannot be read.
        ComponentFailed: Its keeper did not come up; it is failed again.
    """
    status, specification = await to_thread.run_sync(workshop.resume, run_id)
    budget, kind = specification.config.budget, specification.kind
    step = int(status.checkpoint["step"]) if status.checkpoint else None
    text = f"Resumed {run_id}: attempt {status.attempt}"
    if step is not None:
        text += f" goes on after step {step} of {budget.steps}, from {status.checkpoint['path']}"
        text += "; its metrics, rollouts and evaluation before training stay."
    elif kind == "train":
        text += " starts again at step 0, because the run has no checkpoint."
    else:
        text += " starts again: a run of this kind has no steps."
    from_step = (step or 0) if kind == "train" else None
    data = answers.Resumed(run_id=run_id, kind=kind, attempt=status.attempt, state=status.state, from_step=from_step)
    return Answer(f"{text}\nNext: {call('check_status', run_ids=[run_id], wait_s=45)}", data)


async def launch(
    workshop: Workshop,
    *,
    draft_id: str,
    kind: Literal["train", "test", "ask"],
    name: str | None = None,
    again: bool = True,
    test: TestPlan | None = None,
    ask: AskPlan | None = None,
    key: str | None = None,
) -> Specification:
    """Freezes a draft and hands the run to its keeper. Cancelled, it is finished none the less: there is a run with its
    keeper, or there is none.

    Raises: See `start_training`.
    """

    def work() -> Specification:
        draft = workshop.drafts.get(draft_id)
        locks = workshop.home.locks()
        workshop.home.ensure()
        cache = str(workshop.home.policies)
        specification = freeze(draft, locks, kind=kind, policy_cache=cache, name=name, test=test, ask=ask)
        if kind == "train":
            require_wandb(specification.config, workshop.settings(), workshop.home.settings_file)
        start = StartRow(specification.run_id, draft.id, draft.revision, kind, specification.created_at)
        if key is not None:
            taken = start_keys.take(
                workshop.index, key, draft.id, specification.run_id, lambda earlier: _there(workshop, earlier)
            )
            if taken is not None:
                raise _Taken(taken)
        live = workshop.index.record_start(start, None if again else lambda earlier: _live(workshop, earlier))
        if live is not None:
            if key is not None:
                start_keys.forget(workshop.index, key, specification.run_id)
            raise _running(draft, live)
        try:
            workshop.start(specification)
        except ComponentFailed as error:
            raise ComponentFailed(
                f"{error.message} The run {specification.run_id} is recorded as failed; nothing is running.",
                hint=call("read_logs", run_id=specification.run_id, component="keeper"),
            ) from error
        except BaseException:
            workshop.index.forget_start(specification.run_id)
            if key is not None:
                start_keys.forget(workshop.index, key, specification.run_id)
            raise
        return specification

    return await to_thread.run_sync(work)


def _live(workshop: Workshop, start: StartRow) -> bool:
    try:
        return workshop.runs.status(start.run_id).state in LIVE
    except NotFound:
        return _just_noted(start.at)


def _just_noted(at: float) -> bool:
    """A moment ahead is of a clock that was set back since, and says nothing."""
    return 0 <= time.time() - at < _NOT_THERE_YET_S


class _Taken(Exception):
    """The key is another start's."""

    def __init__(self, start: StartKey) -> None:
        super().__init__(start.key)
        self.start = start


def _there(workshop: Workshop, start: StartKey) -> bool:
    """Whether the run of a key was started, or may be about to appear."""
    return (workshop.home.runs / start.run_id).is_dir() or _just_noted(start.at)


def _of_key(workshop: Workshop, key: str, draft_id: str) -> Answer | None:
    """The answer to a call whose key was used before; None where it was not."""
    taken = start_keys.taken(workshop.index, key)
    if taken is None or not _there(workshop, taken):
        return None
    if taken.draft_id != draft_id:
        raise InvalidValue(
            f"The key {shown(key)} started {taken.run_id} from {taken.draft_id}; it cannot start {draft_id}.",
            hint="Give each start that you mean a key of its own; a key is repeated only to repeat its call.",
        )
    return _awaited(workshop, taken)


def _awaited(workshop: Workshop, start: StartKey) -> Answer:
    """Answers with the run of a key, which another call may be starting right now."""
    limit = time.monotonic() + _NOT_THERE_YET_S
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
    text = f"{start.run_id} was started with this key before and is {status.state}; no second run was started."
    return Answer(f"{text}\nNext: {call('check_status', run_ids=[start.run_id], wait_s=45)}", data)


def _running(draft: Draft, live: StartRow) -> NotPossibleNow:
    return NotPossibleNow(
        f"{draft.id} at revision {draft.revision} is running already, as {live.run_id}; no second run was started.",
        hint=f"{call('check_status', run_ids=[live.run_id], wait_s=45)} follows it; "
        f"{call('start_training', draft_id=draft.id, again=True)} starts another beside it.",
    )


def _started(specification: Specification) -> answers.Started:
    return answers.Started(
        run_id=specification.run_id,
        kind=specification.kind,
        draft_id=specification.draft_id or "",
        revision=specification.draft_revision or 0,
        state="queued",
    )


def _ended(state: str) -> str:
    return {"completed": "completed", "stopped": "was stopped", "failed": "failed", "lost": "was lost"}.get(
        state, state
    )
