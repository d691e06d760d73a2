"""Reservation of budgets: check runs against the owner's limits and other runs' usage, and freeze their limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from toprope.analysis.budget import Account, Demand, Refusal, bounds, demand_of, freeze_limits, room_at_once, spent
from toprope.errors import NotPossibleNow
from toprope.machine import gpu_names, processor_count
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.usage import Usage
from toprope.settings.endpoints import Endpoint
from toprope.settings.limits import UNITS, Cap, FrozenLimits, Limit, Limits
from toprope.supervisor.capacity.budget_ledger import read_accounts
from toprope.supervisor.capacity.reservations import Machine, gpus_wanted
from toprope.workbench.launch.budgets.token_costs import token_costs, unpriced


def _is_here(specification: Specification) -> bool:
    """True if the run uses this machine; the members of a sweep, not its conductor, run on a cluster."""
    return specification.config.launcher.kind == "local" or specification.run_kind.starts_runs


def _gpus(specification: Specification, machine: Machine) -> int:
    """Return the number of GPUs of a run: on a cluster those that it asks the engine for."""
    launcher = specification.config.launcher
    return gpus_wanted(specification, machine) if _is_here(specification) else launcher.room().gpus * launcher.nodes


def gpu_of(specification: Specification, machine: Machine) -> str | None:
    """Return the name of the GPU that a run would use: empty if unknown, None if it uses none."""
    if not _gpus(specification, machine):
        return None
    if not _is_here(specification):
        return ""
    names = gpu_names()
    if len(set(names)) == 1:
        return names[0]
    first = machine.gpus[0]
    # The run gets any free GPU. If they differ, the first is the likeliest.
    return names[int(first)] if first.isdigit() and int(first) < len(names) else ""


def demand(specification: Specification, machine: Machine) -> Demand:
    """Return the demand of a run."""
    gpu, costs = gpu_of(specification, machine), token_costs(specification)
    computed = demand_of(specification.config, specification.run_kind, processors=processor_count(), gpu=gpu)
    gpus, launcher = _gpus(specification, machine), specification.config.launcher
    if not _is_here(specification):  # the engine gives it what it asks for, however large this machine is
        computed = dataclasses.replace(computed, processors=launcher.room().cpus * launcher.nodes)
    return dataclasses.replace(computed, tokens_usd=costs.most_usd, unpriced=costs.unpriced, gpus=max(gpus, 1))


def reserve(
    specifications: Sequence[Specification], limits: Limits, machine: Machine, runs: Path
) -> list[Specification]:
    """Return the specifications with their frozen limits. The caller holds the lock of the ledger.

    Args:
        specifications: Of runs that start together, alike but for their seed.
        limits: The owner's present limits.
        machine: The part of the machine that runs may use.
        runs: The folder of runs.

    Raises:
        NotPossibleNow: The machine has fewer GPUs than a run needs.
        NoRoomWithin: Limits forbid it; the message names each with its value, who set it, and what would fit.
    """
    if (wanted := gpus_wanted(specifications[0], machine)) > len(machine.gpus) and _is_here(specifications[0]):
        raise NotPossibleNow(
            f"Nothing was started: the run needs {wanted} GPUs (launcher.num_processes and launcher.inference_gpus), "
            f"and this machine has {len(machine.gpus)} for runs.",
            hint="Lower launcher.num_processes; with launcher.inference_gpus 0 inference shares the trainer's first.",
        )
    if specifications[0].run_kind.starts_runs:
        limits = _limits_of_sweep(limits)
    frozen = freeze_limits(limits, demand(specifications[0], machine), read_accounts(runs), len(specifications))
    if isinstance(frozen, list):
        raise _refusal(frozen)
    return [specification.model_copy(update={"limits": frozen}) for specification in specifications]


def reserve_calls(endpoints: Mapping[str, Endpoint], limits: Limits, runs: Path, spender: str) -> FrozenLimits:
    """Return the limits on the cost of a program that calls models and is no run. The caller holds the ledger's lock.

    The program may spend as much as a run, or what is left of the day: nobody knows how often it asks.

    Args:
        endpoints: The models by name.
        spender: The program's name in the ledger; its own account counts what it spent before.

    Raises:
        NoRoomWithin: A limit on cost leaves nothing, or a model has no price.
    """
    kept = {limit.name: limit for limit in limits if limit.name.endswith(".cost_usd")}
    costs = Limits(kept, limits.prices, source=limits.source)
    missing = unpriced(endpoints)
    demand = Demand(None, 0, tokens_usd=None, unpriced=missing, trains=False)
    frozen = freeze_limits(costs, demand, _accounts(spender, runs))
    if isinstance(frozen, list):
        raise _refusal(frozen)
    return frozen


def with_raised_caps(specification: Specification, limits: Limits, machine: Machine, runs: Path) -> Specification:
    """Return the specification of an ended run with the caps that the owner's present limits raise.

    A limit per run counts as it is now, if it was raised or removed. The limits on all runs together count by what they
    leave, as at a start: on top of the run's use so far it may use what its budget needs, or all that is left. If that
    is less than its former cap, it keeps the former one, unless that was all that was left.
    """
    frozen = specification.limits
    if frozen is None:
        return specification
    if specification.run_kind.starts_runs:
        limits = _limits_of_sweep(limits)
    per_run: dict[str, Cap] = {}
    for quantity, cap in frozen.caps.items():
        if (limit := limits.get(f"per_run.{quantity}")) is not None:
            kept = cap.limit == limit.name and cap.value >= limit.max
            per_run[quantity] = cap if kept else Cap(value=limit.max, limit=limit.name, reason=limit.reason)
    most = bounds(per_run, demand(specification, machine), frozen.cpu_hour_usd, frozen.gpu_hour_usd)
    used, accounts = _usage_of(specification.run_id, runs), _accounts(specification.run_id, runs)
    caps, reserved = dict(frozen.caps), dict(frozen.reserved)
    for quantity, former in frozen.caps.items():
        before, bound = used.get(quantity, 0.0), most.get(quantity, math.inf)
        together = limits.get("disk_gb" if quantity == "disk_gb" else f"per_day.{quantity}")
        # With bound 0 it uses none of it. A former cap above 0 stays: its GPUs may be back at the next resume.
        together = together if bound or former.value else None
        remaining = 0.0 if together is None else _remaining_of(together, quantity, accounts)
        now = _raise_cap(former, per_run.get(quantity), together, remaining, before, bound)
        if now == former:
            continue
        caps.pop(quantity)
        reserved.pop(quantity, None)
        if now is not None:
            caps[quantity] = now
            if together is not None and now.limit != "disk_gb":
                reserved[quantity] = now.value
    if caps == frozen.caps:
        return specification
    changed = {"caps": caps, "reserved": reserved, "source": limits.source}
    return specification.model_copy(update={"limits": frozen.model_copy(update=changed)})


def _raise_cap(
    former: Cap, per_run: Cap | None, together: Limit | None, remaining: float, before: float, bound: float
) -> Cap | None:
    """Return the cap of an ended run under the present limits; None if nothing bounds it any more.

    Example: a run used up its 4 cpu_hours; its budget needs at most 9, and the limit per run is now 10. If the limit
    per day leaves 3, its cap is 4 + 3 = 7, by that limit; if that leaves 20, it is 10, by the limit per run.

    Args:
        former: Its cap so far.
        per_run: The cap by the limit per run, as that is now.
        together: The limit on all runs together.
        remaining: What `together` leaves.
        before: What the run has used.
        bound: The most that its budget needs.
    """
    if together is None:
        return per_run
    room = before + min(remaining, bound)
    if per_run is None or room < per_run.value:
        of_all = together.max if together.name == "disk_gb" else None
        per_run = Cap(value=room, limit=together.name, reason=together.reason, together=of_all)
    took_the_rest = former.limit == together.name and former.value < bound
    return former if per_run.value < former.value and not (took_the_rest and per_run.value > before) else per_run


def _usage_of(run_id: str, runs: Path) -> dict[str, float]:
    return spent(Usage.read(RunFolder(runs / run_id)) or Usage())


def _accounts(run_id: str, runs: Path) -> list[Account]:
    """Return all accounts; an ended run or program that is about to go on holds what it used, even under its lock."""
    return [
        dataclasses.replace(account, live=account.live and account.run_id != run_id) for account in read_accounts(runs)
    ]


def _remaining_of(limit: Limit, quantity: str, accounts: Sequence[Account]) -> float:
    """Return what a limit on all runs together leaves, at least 0."""
    held = (account.disk_gb if quantity == "disk_gb" else account.held(quantity) for account in accounts)
    return max(limit.max - sum(held), 0.0)


def may_go_on(specification: Specification, limits: Limits, runs: Path) -> None:
    """Pass an ended run that may be resumed: its own caps are not used up, and other runs leave room.

    Raises:
        NoRoomWithin: Its caps are used up, or other runs leave no room for the rest.
    """
    frozen = specification.limits
    used = _usage_of(specification.run_id, runs)
    goes_on = (
        "it resumes" if limits.confirm == "never" else f"the owner's `toprope resume {specification.run_id}` may go on"
    )
    refusals = []
    for quantity, cap in (frozen.caps if frozen else {}).items():
        before = used.get(quantity, 0.0)
        if quantity not in ("steps", "disk_gb") and cap.is_used_up(before):
            why = f" (reason: {cap.reason.rstrip('.')})" if cap.reason else ""
            refusals.append(
                Refusal(
                    cap.limit,
                    f"{specification.run_id} has used {before:.3g} of the {cap.value:.3g} "
                    f"{UNITS[quantity]} that {cap.limit} allowed it at its start, set by "
                    f"{frozen.source if frozen else ''}{why}.",
                    f"Its checkpoint stays: once {cap.limit} leaves it more, {goes_on}; a new run can start from it, "
                    "under the limits as they are then.",
                )
            )
    accounts = _accounts(specification.run_id, runs)
    live = sum(account.live and account.is_run for account in accounts)
    limit = limits.get("concurrent_runs")
    if limit is not None and live + 1 > limit.max:
        text = f"concurrent_runs is {limit.max:g}, set by {limits.source}; {live} are live."
        refusals.append(Refusal(limit.name, text, room_at_once(limit, live)))
    for quantity, reserved in (frozen.reserved if frozen else {}).items():
        limit = limits.get(f"per_day.{quantity}")
        unspent = reserved - used.get(quantity, 0.0)
        remaining = 0.0 if limit is None else _remaining_of(limit, quantity, accounts)
        if limit is not None and unspent > remaining + 1e-9:  # both are differences
            text = (
                f"{limit.name} is {limit.max:g} {UNITS[quantity]}, set by {limits.source}; {remaining:.3g} are left "
                f"today, and the run may still use {unspent:.3g}."
            )
            refusals.append(
                Refusal(limit.name, text, "The count starts anew at 0:00 UTC; live runs free what they do not use.")
            )
    if refusals:
        raise _refusal(refusals, "resumed")


def _limits_of_sweep(limits: Limits) -> Limits:
    """Return the limits that apply to a sweep itself: it computes nothing, and its members reserve their own budget.

    It lasts as long as all of them together, so that a limit on the time of one run would end it for good.
    """
    apart = ("per_day.", "per_run.wall_hours")
    kept = {limit.name: limit for limit in limits if limit.name == "per_day.runs" or not limit.name.startswith(apart)}
    return Limits(kept, limits.prices, confirm=limits.confirm, above=limits.above, source=limits.source)


class NoRoomWithin(NotPossibleNow):
    """The owner's limits leave no room; `limits` are their names."""

    limits: tuple[str, ...] = ()


def _refusal(refusals: Sequence[Refusal], action: str = "started") -> NoRoomWithin:
    error = NoRoomWithin(
        f"Nothing was {action}: " + "\n".join(refusal.text for refusal in refusals),
        hint="\n".join(dict.fromkeys(refusal.fits for refusal in refusals if refusal.fits)),
    )
    error.limits = tuple(refusal.limit for refusal in refusals)
    return error
