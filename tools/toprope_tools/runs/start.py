"""From a draft to runs with keepers: frozen, within the owner's limits, confirmed where the owner wants that, started.

It is one way for every kind of run and for groups of seeds, so that no other way leads past locks and limits. What was
found to fit is pencilled into the books of the runs before they are let go of, so that it fits when it starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyio import to_thread

from toprope.errors import ComponentFailed, InvalidValue, NotFound, NotPossibleNow, shown
from toprope.records.index import idempotency_keys as start_keys
from toprope.records.index.idempotency_keys import StartKey
from toprope.records.index.index import StartRow
from toprope.records.run.specification import AskPlan, Specification, SweepPlan, TestPlan
from toprope.records.run.status import LIVE
from toprope.supervisor.capacity.budget_ledger import ledger_lock, reserved
from toprope.workbench.drafts import Draft
from toprope.workbench.launch.launch import Kind, frozen
from toprope.workbench.launch.preview import Preview, needs_confirmation, preview
from toprope.workbench.launch.reserve_budget import demand, reserve
from toprope.workbench.launch.seeds import as_group, check_seeds, seeded
from toprope_tools.answers.base import call
from toprope_tools.planning.preview_text import confirmation_wanted
from toprope_tools.workshop import machine_of

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = [
    "NOT_THERE_YET_S",
    "Taken",
    "consent_wanted",
    "just_noted",
    "launch",
    "launch_group",
    "preview_of",
    "start_frozen",
    "there",
]

NOT_THERE_YET_S = 10.0
"""A run that was noted so recently may not have its folder yet; it counts as live."""


class Taken(Exception):
    """The key is another start's."""

    def __init__(self, start: StartKey) -> None:
        super().__init__(start.key)
        self.start = start


@dataclass(frozen=True)
class _Order:
    """What is to start."""

    draft_id: str
    kind: Kind
    name: str | None = None
    seeds: int = 1
    test: TestPlan | None = None
    ask: AskPlan | None = None
    sweep: SweepPlan | None = None


async def launch(
    workshop: Workshop,
    *,
    draft_id: str,
    kind: Kind,
    name: str | None = None,
    again: bool = True,
    test: TestPlan | None = None,
    ask: AskPlan | None = None,
) -> Specification:
    """Freezes a draft and hands a single run to its keeper. Raises: see `launch_group`."""
    order = _Order(draft_id, kind, name, 1, test, ask)
    [specification] = await to_thread.run_sync(lambda: _launch(workshop, order, again))
    return specification


async def launch_group(
    workshop: Workshop,
    *,
    draft_id: str,
    name: str | None = None,
    again: bool = False,
    key: str | None = None,
    seeds: int = 1,
    confirm: str | None = None,
) -> list[Specification]:
    """Freezes a draft under `seeds` seeds and hands the runs to their keepers: all or none. Cancelled, it is finished
    none the less.

    Raises:
        NotFound, LockedField, InvalidValue: The draft cannot run; nothing was started.
        NotPossibleNow: A limit does not allow it, it is to be confirmed first, or the revision is running already.
        ComponentFailed: A keeper did not come up.
        Taken: The key started another run before.
    """
    order = _Order(draft_id, "train", name, check_seeds(seeds))
    return await to_thread.run_sync(lambda: _launch(workshop, order, again, key, confirm))


def preview_of(
    workshop: Workshop, *, draft_id: str, name: str | None = None, seeds: int = 1
) -> tuple[Preview, str, list[Specification]]:
    """What starting a draft would take, why the owner wants it confirmed (empty where not), and what would start.

    Raises: See `launch_group`; a limit that does not allow it is found here, too.
    """
    order = _Order(draft_id, "train", name, check_seeds(seeds))
    workshop.drafts.get(order.draft_id)  # before anything is made on disk
    with ledger_lock(workshop.home.ensure().runs):
        _, specifications = _frozen(workshop, order)
        shown = _preview(workshop, specifications)
    return shown, needs_confirmation(workshop.home.limits(), shown), specifications


def consent_wanted(
    workshop: Workshop, *, draft_id: str, name: str | None, seeds: int, key: str | None
) -> Preview | None:
    """What a person has to be shown before this starts; None where the owner wants nobody asked."""
    if workshop.home.limits().confirm == "never":
        return None
    if key is not None and start_keys.taken(workshop.index, key) is not None:
        return None
    shown, why, _ = preview_of(workshop, draft_id=draft_id, name=name, seeds=seeds)
    return shown if why else None


def _frozen(workshop: Workshop, order: _Order) -> tuple[Draft, list[Specification]]:
    """The specifications with the limits that they are held to. The caller holds the books."""
    home, draft = workshop.home, workshop.drafts.get(order.draft_id)
    locks = home.locks()
    drafts = seeded(draft, order.seeds, locks) if order.seeds > 1 else [draft]
    found = frozen(
        home, drafts, order.kind, name=order.name, test=order.test, ask=order.ask, sweep=order.sweep, locks=locks
    )
    machine = machine_of(workshop.settings())
    return draft, reserve(as_group(found), home.limits(), machine, home.runs)


def _preview(workshop: Workshop, specifications: Sequence[Specification]) -> Preview:
    asked = demand(specifications[0], machine_of(workshop.settings()))
    return preview(specifications, workshop.home.limits(), asked, workshop.home.runs)


def _launch(
    workshop: Workshop, order: _Order, again: bool, key: str | None = None, confirm: str | None = None
) -> list[Specification]:
    workshop.drafts.get(order.draft_id)  # before anything is made on disk
    runs = workshop.home.ensure().runs
    with ExitStack() as pencil:
        with ledger_lock(runs):
            draft, specifications = _frozen(workshop, order)
            if order.kind == "train":
                _require_confirmation(workshop, order, specifications, confirm)
            pencil.enter_context(reserved(runs, specifications))
        start_frozen(workshop, draft, specifications, again=again, key=key)
        return specifications


def start_frozen(
    workshop: Workshop, draft: Draft, specifications: Sequence[Specification], *, again: bool, key: str | None
) -> None:
    """Gives runs that were pencilled in their keepers, all or none.

    Raises:
        NotPossibleNow: The draft's revision is running already.
        ComponentFailed: A keeper did not come up.
        Taken: The key started another run before.
    """
    first = specifications[0]
    if key is not None:
        taken = start_keys.take(workshop.index, key, draft.id, first.run_id, lambda earlier: there(workshop, earlier))
        if taken is not None:
            raise Taken(taken)
    live = _record(workshop, draft, specifications, again)
    if live is not None:
        if key is not None:
            start_keys.forget(workshop.index, key, first.run_id)
        raise _running(draft, live)
    _start(workshop, specifications, key)


def _require_confirmation(
    workshop: Workshop, order: _Order, specifications: Sequence[Specification], confirm: str | None
) -> None:
    """Passes a start that nobody has to confirm, or that was confirmed as it would be now."""
    limits = workshop.home.limits()
    if limits.confirm == "never" and confirm is None:
        return
    shown = _preview(workshop, specifications)
    why = needs_confirmation(limits, shown)
    if confirm == shown.hash or (not why and confirm is None):
        return
    raise confirmation_wanted(order.draft_id, order.name, shown, why, confirm, limits.source)


def _record(workshop: Workshop, draft: Draft, specifications: Sequence[Specification], again: bool) -> StartRow | None:
    """Notes the starts in the index; a live run of the same revision that stands against it, where there is one."""
    for place, one in enumerate(specifications):
        start = StartRow(one.run_id, draft.id, draft.revision, one.kind, one.created_at)
        look = again or place > 0  # the others of a group stand beside the first
        live = workshop.index.record_start(start, None if look else lambda earlier: _live(workshop, earlier))
        if live is not None:
            return live
    return None


def _start(workshop: Workshop, specifications: Sequence[Specification], key: str | None) -> None:
    begun: list[str] = []
    for place, one in enumerate(specifications):
        try:
            workshop.start(one)
        except ComponentFailed as error:
            _give_up(workshop, specifications[place + 1 :], begun)
            others = f" {', '.join(begun)} had been started and were stopped." if begun else ""
            raise ComponentFailed(
                f"{error.message} The run {one.run_id} is recorded as failed; nothing is running.{others}",
                hint=call("read_logs", run_id=one.run_id, component="keeper"),
            ) from error
        except BaseException:
            _give_up(workshop, specifications[place:], begun)
            if key is not None and not begun:
                start_keys.forget(workshop.index, key, one.run_id)
            raise
        begun.append(one.run_id)


def _give_up(workshop: Workshop, never: Sequence[Specification], begun: Sequence[str]) -> None:
    for one in never:
        workshop.index.forget_start(one.run_id)
    for run_id in begun:
        workshop.runs.stop(run_id)


def _live(workshop: Workshop, start: StartRow) -> bool:
    try:
        return workshop.runs.status(start.run_id).state in LIVE
    except NotFound:
        return just_noted(start.at)


def just_noted(at: float) -> bool:
    """A moment ahead is of a clock that was set back since, and says nothing."""
    return 0 <= time.time() - at < NOT_THERE_YET_S


def started_by(workshop: Workshop, key: str, draft_id: str) -> StartKey | None:
    """The start that a key was used for before, of this draft; None where there was none.

    Raises:
        InvalidValue: It started another draft; nothing was started.
    """
    taken = start_keys.taken(workshop.index, key)
    if taken is None or not there(workshop, taken):
        return None
    if taken.draft_id != draft_id:
        raise InvalidValue(
            f"The key {shown(key)} started {taken.run_id} from {taken.draft_id}; it cannot start {draft_id}.",
            hint="Give each start that you mean a key of its own; a key is repeated only to repeat its call.",
        )
    return taken


def there(workshop: Workshop, start: StartKey) -> bool:
    """Whether the run of a key was started, or may be about to appear."""
    return (workshop.home.runs / start.run_id).is_dir() or just_noted(start.at)


def _running(draft: Draft, live: StartRow) -> NotPossibleNow:
    return NotPossibleNow(
        f"{draft.id} at revision {draft.revision} is running already, as {live.run_id}; no second run was started.",
        hint=f"{call('check_status', run_ids=[live.run_id], wait_s=45)} follows it; "
        f"{call('start_sweep' if live.kind == 'sweep' else 'start_training', draft_id=draft.id, again=True)} "
        "starts another beside it.",
    )
