"""The one way from a draft or a frozen specification to live runs, for tools, commands and sweeps.

`RunStarter.start` freezes a draft under the owner's locks; `start_frozen` checks the owner's limits and a person's
confirmation while it holds the lock of the budget ledger, reserves the budget, and gives each run its keeper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from toprope.errors import ComponentFailed, InvalidValue, NotFound, NotPossibleNow, shown
from toprope.extras import HOSTED, TRAINING, require
from toprope.records.index import idempotency_keys
from toprope.records.index.database import Index, StartRow
from toprope.records.index.idempotency_keys import StartKey
from toprope.records.run.kinds import kind_named
from toprope.records.run.specification import RunPlan, Specification
from toprope.records.run.status import LIVE
from toprope.settings.owner import Home
from toprope.settings.presets import load_preset
from toprope.supervisor.capacity.budget_ledger import ledger_lock, reserved
from toprope.supervisor.launchers.engine import NotReached, QueueFull
from toprope.supervisor.notices import tell
from toprope.supervisor.runs.freezing import require_thawed
from toprope.supervisor.runs.manager import RunManager
from toprope.text_format import call
from toprope.workbench.approvals import Approvals
from toprope.workbench.drafts import Draft
from toprope.workbench.history import beside_preset
from toprope.workbench.interpreters.engines import engine_python
from toprope.workbench.launch.accepted_code import accepted_code
from toprope.workbench.launch.budgets.reserve_budget import demand, reserve
from toprope.workbench.launch.budgets.sweep_budget import require_room_for_members
from toprope.workbench.launch.budgets.token_costs import token_costs
from toprope.workbench.launch.freeze import freeze_drafts
from toprope.workbench.launch.lent import renewed
from toprope.workbench.launch.open_runs import variables_of
from toprope.workbench.launch.preview import Preview, details_of, needs_confirmation, preview, summarize
from toprope.workbench.launch.requirements import describe_job, require_interpreters, require_memory
from toprope.workbench.launch.seeds import as_group, check_seeds, members, seeded

UNREAD = "unread"
"""Stands for the hash that a person agreed to if the client's answer could not be read; equal to no hash."""
_APPEARS_WITHIN_S = 10.0
"""A run that was recorded so recently may not have its folder yet; it counts as live."""
_POLL_S = 0.02
_KEYS = "Give every intended start a key of its own; repeat a key only to repeat its call."


@dataclass(frozen=True)
class StartRequest:
    """A draft to start, and how."""

    draft: Draft
    plan: RunPlan
    name: str | None = None
    """Begins the runs' ids."""
    seeds: int = 1
    """Number of runs that differ in their seed alone."""
    again: bool = True
    """Start although a run of this kind and of the draft's revision is live."""
    key: str | None = None
    """Idempotency key: a repeated request is answered with the runs that the first one started."""
    confirm: str | None = None
    """Hash of the preview that the caller means. It refuses a start that would be another, and confirms nothing."""
    agreed: str | None = None
    """Hash of the preview that a person agreed to, as the client told after asking; UNREAD for an unreadable answer."""
    longest_member_steps: int | None = None
    """Of a sweep: optimizer steps of its longest single run, for which there must be room."""
    unknown_task: str = ""
    """The warning that the policy does not know the task; the runs keep it."""


@dataclass(frozen=True)
class Started:
    """Runs that have their keepers."""

    specifications: list[Specification]
    repeated: bool = False
    """An earlier request with the same key started them."""


class ConfirmationNeeded(NotPossibleNow):
    """The owner wants a person to confirm a start, and nobody confirmed what would start now."""

    def __init__(self, preview: Preview, why: str, confirm: str | None, source: str) -> None:
        if confirm is None:
            message = f"Nothing was started: {why} (confirm, set by {source})"
        else:
            message = f"Nothing was started: {confirm!r} names something else than what would start now, which is this"
        super().__init__(message, hint=how_to_approve(preview.hash))
        self.preview, self.why = preview, why


def how_to_approve(hash: str) -> str:
    """Return what a person and then the agent do to start what has this hash."""
    return (
        f"Show this to the person you work for. They approve it with: toprope approve {hash}. The page of `toprope "
        "dashboard` has a button. Then repeat the call; what you type confirms nothing, and a change needs another "
        "approval."
    )


class RunStarter:
    """Starts runs in one home.

    Args:
        runs: The run manager of its folder of runs.
        index: Records starts and their keys; only `start` needs it.
    """

    def __init__(self, home: Home, runs: RunManager, index: Index | None = None) -> None:
        self._home, self._runs, self._index = home, runs, index
        self._approvals = Approvals(home)

    def start(self, request: StartRequest) -> Started:
        """Freeze a draft and start its runs, all or none.

        Raises:
            NotFound, LockedField, InvalidValue: The draft cannot run, or the key belongs to another draft.
            ConfirmationNeeded: A person must confirm it first.
            NotPossibleNow: A limit forbids it, the policy's weights exceed the memory, or the revision is running
                already.
            ComponentFailed: A keeper did not come up.
        """
        if (earlier := self.find_earlier(request.key, request.draft.id, request.plan.kind)) is not None:
            return earlier
        return self.start_frozen(self._freeze(request), request)

    def start_frozen(self, specifications: Sequence[Specification], request: StartRequest | None = None) -> Started:
        """Start frozen runs, all or none. Raises: as `start`.

        Args:
            specifications: Of runs that differ in their seed alone.
            request: The draft's, if they come from a draft: the start is recorded with it.
        """
        require_thawed(self._home.path)
        if request is None:  # frozen from another run
            specifications = [self._with_engine(specification) for specification in renewed(specifications, self._home)]
            require_interpreters(specifications[0])
        if specifications[0].config.is_hosted:
            require("A run at a service", *HOSTED, extra="tinker")
        else:
            require("A run", *TRAINING)
        require_memory(specifications[0], self._home.settings())
        specifications = self._with_code(specifications)
        with ExitStack() as stack:
            with ledger_lock(self._home.ensure().runs):
                specifications, make_preview = self._reserve(specifications, request, stack)
                confirmed = self._require_confirmation(specifications, make_preview, request)
                taken = self._record(specifications, request)
                if taken is None and confirmed is not None:  # an approval is for one start that takes place
                    self._approvals.forget(confirmed)
            if taken is not None:
                stack.close()
                return self._await_runs(taken, request.plan.kind if request else "")
            begun: list[str] = []
            for place, specification in enumerate(specifications):
                try:
                    self._runs.start(
                        self._with_changes_to_preset(specification), variables_of(specification, self._home)
                    )
                except ComponentFailed as error:
                    self._give_up(specifications[place + 1 :], begun, request)
                    others = f" {', '.join(begun)} had been started and were stopped." if begun else ""
                    kind = type(error) if isinstance(error, NotReached | QueueFull) else ComponentFailed
                    raise kind(
                        f"{error.message} The run {specification.run_id} is recorded as failed; nothing is "
                        f"running.{others}",
                        hint=error.hint or self._how_to_find_out(specification),
                    ) from error
                except BaseException:
                    self._give_up(specifications[place:], begun, request)
                    raise
                begun.append(specification.run_id)
        return Started(list(specifications))

    def _how_to_find_out(self, specification: Specification) -> str:
        launcher = specification.config.launcher
        if launcher.kind == "local" or self._runs.folder(specification.run_id).log("keeper").exists():
            return call("read_logs", run_id=specification.run_id, component="keeper")
        return f"The owner tries it with: toprope doctor --cluster {launcher.cluster or 'NAME'}."

    def _with_engine(self, specification: Specification) -> Specification:
        """Take the interpreter that the engine has now: that of the run it was frozen from may be gone."""
        python = engine_python(self._home, specification.config.inference.engine)
        return specification.model_copy(update={"engine_python": python})

    def _with_code(self, specifications: Sequence[Specification]) -> list[Specification]:
        """Take the code that may run, part of the preview's hash; before the ledger's lock, because it is slow."""
        code = accepted_code(specifications[0], self._home)
        return [specification.model_copy(update={"code": code}) for specification in specifications]

    def preview(self, request: StartRequest, *, with_keys: bool = True) -> tuple[Preview, str, list[Specification]]:
        """Return what a start would take, why the owner wants it confirmed (empty if not), and what would start.

        Args:
            with_keys: Require the keys that the runs need, as a start does.

        Raises: As `start`; a limit that forbids the start is found here, too.
        """
        specifications = self._with_code(self._freeze(request, with_keys=with_keys))
        require_memory(specifications[0], self._home.settings())
        with ExitStack() as stack, ledger_lock(self._home.ensure().runs):
            specifications, make_preview = self._reserve(specifications, request, stack)
            costs = make_preview()
        return costs, needs_confirmation(self._home.limits(), costs), specifications

    def consent_wanted(self, request: StartRequest) -> Preview | None:
        """Return what the client must show a person before this start; None if it must ask nobody.

        Raises: As `start`; the owner's refusal holds without a question.
        """
        if self._home.limits().confirm == "never" or self._home.settings().confirm_by != "client":
            return None
        if request.key is not None and self._index and idempotency_keys.taken(self._index, request.key) is not None:
            return None
        costs, why, _ = self.preview(request)
        self._require_not_refused(costs)
        return costs if why and not self._approvals.has(costs.hash) else None

    def _freeze(self, request: StartRequest, *, with_keys: bool = True) -> list[Specification]:
        locks, draft = self._home.locks(request.draft.preset), request.draft
        drafts = seeded(draft, check_seeds(request.seeds), locks) if request.seeds != 1 else [draft]
        plan, name = request.plan, request.name
        frozen = freeze_drafts(self._home, drafts, plan, name=name, locks=locks, with_keys=with_keys)
        frozen = [run.model_copy(update={"unknown_task": request.unknown_task}) for run in frozen]
        return as_group(renewed(frozen, self._home))

    def _reserve(
        self, specifications: Sequence[Specification], request: StartRequest | None, stack: ExitStack
    ) -> tuple[list[Specification], Callable[[], Preview]]:
        """Reserve the budget of runs until `stack` is closed. The caller holds the lock of the ledger.

        Returns:
            The specifications with the limits that they are held to, and a function that estimates what they take.
        """
        limits, machine, runs = self._home.limits(), self._runs.machine(), self._home.runs
        limited = reserve(specifications, limits, machine, runs)
        stack.enter_context(reserved(runs, limited))
        if limited[0].sweep is not None and request is not None and request.longest_member_steps is not None:
            longest = request.longest_member_steps
            return limited, require_room_for_members(limited[0], limited[0].sweep, longest, self._home, machine)
        job = describe_job(limited[0], self._home)
        return limited, lambda: preview(limited, limits, demand(limited[0], machine), runs, job)

    def _require_confirmation(
        self,
        specifications: Sequence[Specification],
        make_preview: Callable[[], Preview],
        request: StartRequest | None,
    ) -> str | None:
        """Pass a start that needs no confirmation, or that a person confirmed as it would be now.

        Returns:
            The hash of what a person may have been asked about; None if nobody was.
        """
        first, limits = specifications[0], self._home.limits()
        confirm, agreed = (request.confirm, request.agreed) if request else (None, None)
        if limits.confirm == "never" and confirm is None:
            return None
        # Members were agreed to with their sweep. A repeated one is a start of its own.
        if first.member is not None and not first.reproduces:
            return None
        kind, prices = first.run_kind, first.limits
        free = not (first.reproduces or kind.trains or kind.starts_runs) and token_costs(first).free
        free = free and not (prices and (prices.cpu_hour_usd or prices.gpu_hour_usd))
        if free and limits.confirm == "always":
            return None
        costs = make_preview()
        if confirm not in (None, costs.hash):
            raise ConfirmationNeeded(costs, "", confirm, limits.source)
        self._require_not_refused(costs)
        why = needs_confirmation(limits, costs, free=free)
        if why and agreed != costs.hash and not self._approvals.has(costs.hash):
            self._request_approval(specifications, costs, why)
            unread = "the client's answer could not be read. " if agreed == UNREAD else ""
            raise ConfirmationNeeded(costs, f"{unread}{why}", None, limits.source)
        return costs.hash

    def _require_not_refused(self, costs: Preview) -> None:
        if self._approvals.refused(costs.hash):
            raise NotPossibleNow(
                f"Nothing was started: the owner refused this start ({costs.hash}).",
                hint="Ask the owner what to change; another draft, or an edited one, is another start.",
            )

    def _request_approval(self, specifications: Sequence[Specification], costs: Preview, why: str) -> None:
        text = summarize(specifications, costs)
        specifications = [self._with_changes_to_preset(specification) for specification in specifications]
        if self._approvals.ask(costs.hash, text, details_of(specifications, costs, why)):
            tell(self._home, "waiting", f"A start waits for you: {text}. toprope approve {costs.hash}", hash=costs.hash)

    def _record(self, specifications: Sequence[Specification], request: StartRequest | None) -> StartKey | None:
        """Take the request's key and record the starts; record nothing and return the key if another run holds it."""
        if request is None:
            self._record_successor(specifications[0])
            return None
        assert self._index is not None
        draft, first = request.draft, specifications[0]
        if request.key is not None:
            taken = idempotency_keys.take(self._index, request.key, draft.id, first.run_id, self._appears)
            if taken is not None:
                return taken
        for position, specification in enumerate(specifications):
            row = StartRow(specification.run_id, draft.id, draft.revision, specification.kind, specification.created_at)
            # The later runs of a group start beside the first.
            live = self._index.record_start(row, None if request.again or position > 0 else self._is_live)
            if live is not None:
                if request.key is not None:
                    idempotency_keys.forget(self._index, request.key, first.run_id)
                tool, repeat = first.run_kind.start_tool, call(first.run_kind.start_tool, draft_id=draft.id, again=True)
                if first.run_kind.starts_runs:  # it takes more than a draft
                    repeat = f"the same {tool} with again=true in its options"
                raise NotPossibleNow(
                    f"{draft.id} at revision {draft.revision} is running already, as {live.run_id}; no second run was "
                    "started.",
                    hint=f"{call('check_status', run_ids=[live.run_id], wait_s=45)} follows it; "
                    f"{repeat} starts another beside it.",
                )
        return None

    def _record_successor(self, first: Specification) -> None:
        """Record a run that repeats or continues another, unless one that does the same is live."""
        origin = first.reproduces or (first.continues.run if first.continues else None)
        if self._index is None or origin is None:
            return
        does = "repeated" if first.reproduces else "continued"
        row = StartRow(first.run_id, origin, 0, does, first.created_at)
        if (live := self._index.record_start(row, self._is_live)) is not None:
            raise NotPossibleNow(
                f"{origin} is being {does} already, as {live.run_id}; nothing was started.",
                hint=f"{call('check_status', run_ids=[live.run_id], wait_s=45)} follows it.",
            )

    def _with_changes_to_preset(self, specification: Specification) -> Specification:
        """Add the fields that differ from the preset, for the run's manifest."""
        if specification.beside_preset or not specification.preset:
            return specification
        try:
            preset = load_preset(specification.preset, self._home.preset_folders)
        except (NotFound, InvalidValue):
            return specification
        changes = beside_preset(specification.config, preset, specification.environment.name)
        return specification.model_copy(update={"beside_preset": changes})

    def _give_up(self, never: Sequence[Specification], begun: Sequence[str], request: StartRequest | None) -> None:
        """Take back the records of runs that did not start, and stop those that did."""
        if self._index is not None:
            for specification in never:
                self._index.forget_start(specification.run_id)
            if request is not None and request.key is not None and never and not begun:
                idempotency_keys.forget(self._index, request.key, never[0].run_id)
        for run_id in begun:
            self._runs.stop(run_id)

    def find_earlier(self, key: str | None, draft_id: str, kind: str) -> Started | None:
        """Return the runs that a request with this key started; None if there are none.

        Raises:
            InvalidValue: The key started another draft, or with another tool than starts runs of this kind.
            NotPossibleNow: Another call with the key is starting its run and takes long.
        """
        if key is None or self._index is None:
            return None
        taken = idempotency_keys.taken(self._index, key)
        if taken is None or not self._appears(taken):
            return None
        if taken.draft_id != draft_id:
            raise InvalidValue(
                f"The key {shown(key)} started {taken.run_id} from {taken.draft_id}; it cannot start {draft_id}.",
                hint=_KEYS,
            )
        return self._await_runs(taken, kind)

    def _await_runs(self, start: StartKey, kind: str) -> Started:
        """Return the runs of a key; another request may be starting them right now."""
        limit = time.monotonic() + _APPEARS_WITHIN_S
        while True:
            try:
                first = Specification.read(self._runs.folder(start.run_id))
                break
            except NotFound:
                if time.monotonic() > limit:
                    raise NotPossibleNow(
                        f"Another call with the key {shown(start.key)} is starting {start.run_id}, which does not "
                        "exist yet.",
                        hint="Repeat the call with the same key in a few seconds.",
                    ) from None
                time.sleep(_POLL_S)
        if first.run_kind.start_tool != (tool := kind_named(kind).start_tool):
            raise InvalidValue(
                f"The key {shown(start.key)} started {first.run_id} with {first.run_kind.start_tool}; it cannot start "
                f"anything with {tool}.",
                hint=_KEYS,
            )
        if first.seed_group is None:
            return Started([first], repeated=True)
        ids = members(self._home.runs, first.seed_group.id)
        return Started([Specification.read(self._runs.folder(run_id)) for run_id in ids], repeated=True)

    def _appears(self, start: StartKey) -> bool:
        """Return True if the run of a key was started or may be about to appear."""
        return (self._home.runs / start.run_id).is_dir() or _was_just_now(start.at)

    def _is_live(self, start: StartRow) -> bool:
        """Return True if a run is live, will resume by itself, or may be about to appear."""
        try:
            # Resuming a lost run takes the ledger's lock, which the caller holds.
            status = self._runs.status(start.run_id, revive=False)
            return status.state in LIVE or status.goes_on
        except NotFound:
            return _was_just_now(start.at)


def _was_just_now(at: float) -> bool:
    """Return True if a start is so recent that its run may still appear; False if the clock was set back since."""
    return 0 <= time.time() - at < _APPEARS_WITHIN_S
