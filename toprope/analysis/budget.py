"""Whether a run may start under the owner's limits, and where it is stopped: rules over what others use and reserved.

What a run may use at most is known before it starts (by its own budget and the caps of its kind), and counts as used
until it ends. So a day's limit cannot be overrun by runs that were started together, and what a run did not use is free
again the moment it has ended. Pure: the ledger reads the folders, the keeper measures and stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toprope.records.run.kinds import RunKind
from toprope.records.run.usage import Usage
from toprope.settings.limits import UNITS, Cap, FrozenLimits, Limit, Limits
from toprope.settings.schema import Config

__all__ = ["Account", "Demand", "Refusal", "demand_of", "freeze_limits", "spent"]

HOUR = 3600.0
GB = 1e9
_EVALUATIONS_S = 600.0
"""Wall time beside starting and training that a run with budget.max_train_seconds is given: evaluations, the end."""
_BESIDE_TORCH = 2
"""Processors that the rest of a crew keeps busy beside the threads of trainer and inference."""
_ADDED_UP = ("cpu_hours", "gpu_hours", "cost_usd")


@dataclass(frozen=True)
class Account:
    """One run as the books see it. `used_today` by quantity of `per_day`; `reserved` of a live run, by quantity."""

    run_id: str
    live: bool
    started_today: bool
    usage: Usage
    used_today: Mapping[str, float] = field(default_factory=dict)
    reserved: Mapping[str, float] = field(default_factory=dict)

    def held(self, quantity: str) -> float:
        """What this run counts for in a day's limit: what it used today, and while it lives the rest of what it
        reserved."""
        used = self.used_today.get(quantity, 0.0)
        if not self.live:
            return used
        return used + max(0.0, self.reserved.get(quantity, 0.0) - spent(self.usage).get(quantity, 0.0))

    @property
    def disk_gb(self) -> float:
        now = self.usage.disk_bytes / GB
        return max(now, self.reserved.get("disk_gb", 0.0)) if self.live else now


@dataclass(frozen=True)
class Demand:
    """What one run asks for, before anything is known of what is left.

    Args:
        steps: Of its budget; None for runs without steps.
        processors: How many it can keep busy.
        gpu: Name of the GPU that it would have; empty where the name is not known; None where it uses none.
        train_s: budget.max_train_seconds.
        beside_s: Wall time that it is given beside training, where that is limited.
    """

    steps: int | None
    processors: int
    gpu: str | None = None
    train_s: float | None = None
    beside_s: float = 0.0

    @property
    def own_s(self) -> float | None:
        """Wall time that its own budget allows for; None where it sets no limit of time."""
        return None if self.train_s is None else self.train_s + self.beside_s


@dataclass(frozen=True)
class Refusal:
    """Why a run may not start: which limit, its value, who set it and why, how it stands, and what would fit."""

    limit: str
    text: str
    fits: str


def demand_of(config: Config, kind: RunKind, *, processors: int, gpu: str | None) -> Demand:
    """What a configuration asks for.

    Args:
        config: The run's.
        kind: The run's.
        processors: Those of the machine.
        gpu: See `Demand`.
    """
    train_s = config.budget.max_train_seconds if kind.trains else None
    beside_s = config.launcher.start_timeout_s + _EVALUATIONS_S
    busy = min(processors, 2 * config.launcher.threads + _BESIDE_TORCH)
    return Demand(config.budget.steps if kind.samples else None, busy, gpu, train_s, beside_s)


def spent(usage: Usage) -> dict[str, float]:
    """A usage by the quantities of limits. Cost is left out where its price was not known."""
    found = {
        "wall_hours": usage.wall_s / HOUR,
        "cpu_hours": usage.cpu_s / HOUR,
        "gpu_hours": usage.gpu_s / HOUR,
        "disk_gb": usage.disk_bytes / GB,
        "steps": float(usage.steps),
    }
    return found if usage.usd is None else found | {"cost_usd": usage.usd}


def freeze_limits(
    limits: Limits, demand: Demand, accounts: Sequence[Account], count: int = 1
) -> FrozenLimits | list[Refusal]:
    """Decides whether `count` runs of one kind may start together.

    Args:
        limits: The owner's.
        demand: What each of them asks for.
        accounts: Every other run.
        count: How many.

    Returns:
        What each of them is held to, or why none may start; every reason there is.
    """
    refusals: list[Refusal] = []
    caps = _caps(limits)
    prices = limits.prices
    gpu_price = prices.of_gpu(demand.gpu) if demand.gpu is not None else None
    bounds = _bounds(caps, demand, prices.cpu_hour_usd, gpu_price)
    refusals += _unknown_price(limits, demand, prices.cpu_hour_usd, gpu_price)
    refusals += _steps(limits, demand)
    refusals += _at_once(limits, accounts, count)
    reserved: dict[str, float] = {}
    for quantity in _ADDED_UP:
        limit = limits.get(f"per_day.{quantity}")
        if limit is None or (quantity == "gpu_hours" and demand.gpu is None):
            continue
        left = limit.max - sum(account.held(quantity) for account in accounts)
        bound = bounds.get(quantity)
        if bound is None and not any(refusal.limit == limit.name for refusal in refusals):
            bound = max(left, 0.0) / count  # nothing bounds it: it may have what the day has left
        if bound is None:
            continue
        if left <= 0 or bound * count > left * (1 + 1e-9):
            refusals.append(_too_much(limits, limit, quantity, bound, count, left, accounts, demand))
        else:
            reserved[quantity] = bound
            if quantity not in caps or caps[quantity].value > bound:
                caps[quantity] = Cap(value=bound, limit=limit.name, reason=limit.reason)
    refusals += _disk(limits, caps, reserved, accounts, count)
    if refusals:
        return refusals
    return FrozenLimits(
        source=limits.source,
        caps=caps,
        reserved=reserved,
        cpu_hour_usd=prices.cpu_hour_usd,
        gpu_hour_usd=gpu_price,
        gpu=demand.gpu or None,
    )


def _caps(limits: Limits) -> dict[str, Cap]:
    """What a single run is held to by itself."""
    return {
        limit.name.removeprefix("per_run."): Cap(value=limit.max, limit=limit.name, reason=limit.reason)
        for limit in limits
        if limit.name.startswith("per_run.")
    }


def _bounds(
    caps: Mapping[str, Cap], demand: Demand, cpu_price: float | None, gpu_price: float | None
) -> dict[str, float]:
    """What the run can use at most of what is added up; a quantity that nothing bounds is left out."""
    walls = [demand.own_s / HOUR] if demand.own_s is not None else []
    walls += [caps["wall_hours"].value] if "wall_hours" in caps else []
    found: dict[str, float] = {}
    for quantity, factor in (("cpu_hours", demand.processors), ("gpu_hours", 1 if demand.gpu is not None else 0)):
        known = [min(walls) * factor] if walls else []
        known += [caps[quantity].value] if quantity in caps else []
        if not factor:
            known = [0.0]
        if known:
            found[quantity] = min(known)
    if "cpu_hours" in found and cpu_price is not None and (demand.gpu is None or gpu_price is not None):
        if "gpu_hours" in found:
            found["cost_usd"] = found["cpu_hours"] * cpu_price + found["gpu_hours"] * (gpu_price or 0.0)
    if "cost_usd" in caps:
        found["cost_usd"] = min(found.get("cost_usd", caps["cost_usd"].value), caps["cost_usd"].value)
    return found


def _unknown_price(limits: Limits, demand: Demand, cpu_price: float | None, gpu_price: float | None) -> list[Refusal]:
    missing = []
    if cpu_price is None:
        missing.append("prices.cpu_hour_usd")
    if demand.gpu is not None and gpu_price is None:
        missing.append(f"prices.gpu_hour_usd for {demand.gpu or 'a GPU whose name is not known'}")
    refusals = []
    for name in ("per_run.cost_usd", "per_day.cost_usd"):
        limit = limits.get(name)
        if limit is not None and missing:
            refusals.append(
                Refusal(
                    name,
                    f"{_named(limits, limit)}, and what this run would cost is not known: there is no price in "
                    f"{' and '.join(missing)}.",
                    "A run that costs an unknown amount does not start; the owner adds the price to limits.yaml.",
                )
            )
    return refusals


def _steps(limits: Limits, demand: Demand) -> list[Refusal]:
    limit = limits.get("per_run.steps")
    if limit is None or demand.steps is None or demand.steps <= limit.max:
        return []
    text = f"{_named(limits, limit)}; budget.steps is {demand.steps}."
    return [Refusal(limit.name, text, f"budget.steps of at most {limit.max:g} fits.")]


def _at_once(limits: Limits, accounts: Sequence[Account], count: int) -> list[Refusal]:
    refusals = []
    live = [account for account in accounts if account.live]
    limit = limits.get("concurrent_runs")
    if limit is not None and len(live) + count > limit.max:
        names = ", ".join(account.run_id for account in live[:3]) + (" ..." if len(live) > 3 else "")
        refusals.append(
            Refusal(
                limit.name,
                f"{_named(limits, limit)}; {len(live)} are live{f' ({names})' if names else ''}, and this asks for "
                f"{count} more.",
                _room(int(limit.max) - len(live)) + " now; one that ends or is stopped makes room.",
            )
        )
    limit = limits.get("per_day.runs")
    today = sum(account.started_today for account in accounts)
    if limit is not None and today + count > limit.max:
        refusals.append(
            Refusal(
                limit.name,
                f"{_named(limits, limit)}; {today} were started today, and this asks for {count} more.",
                _room(int(limit.max) - today) + " today; tomorrow counts anew.",
            )
        )
    return refusals


def _room(left: int) -> str:
    return f"At most {left} more fit" if left > 0 else "None fits"


def _too_much(
    limits: Limits,
    limit: Limit,
    quantity: str,
    bound: float,
    count: int,
    left: float,
    accounts: Sequence[Account],
    demand: Demand,
) -> Refusal:
    used = sum(account.used_today.get(quantity, 0.0) for account in accounts)
    held = sum(account.held(quantity) for account in accounts) - used
    each = f"{count} times {bound:.3g}" if count > 1 else f"up to {bound:.3g}"
    text = (
        f"{_named(limits, limit)}; {used:.3g} were used today, live runs may still use {held:.3g}, so "
        f"{max(left, 0.0):.3g} are left, and this may use {each}."
    )
    if left <= 0 or bound <= 0:
        return Refusal(limit.name, text, "Nothing fits today; what live runs do not use is free when they end.")
    rate = _an_hour(limits, demand, quantity)
    train_s = int(left / count / rate * HOUR - demand.beside_s) if rate else 0
    if demand.steps is None or train_s < 1:
        return Refusal(limit.name, text, "What is left today is too little; tomorrow counts anew.")
    return Refusal(limit.name, text, f"budget.max_train_seconds of at most {train_s} fits.")


def _an_hour(limits: Limits, demand: Demand, quantity: str) -> float:
    """What an hour of wall time takes at most of a quantity."""
    gpus, prices = int(demand.gpu is not None), limits.prices
    if quantity == "cost_usd":
        gpu_price = prices.of_gpu(demand.gpu) if gpus else None
        return demand.processors * (prices.cpu_hour_usd or 0.0) + (gpu_price or 0.0)
    return float(demand.processors if quantity == "cpu_hours" else gpus)


def _disk(
    limits: Limits, caps: dict[str, Cap], reserved: dict[str, float], accounts: Sequence[Account], count: int
) -> list[Refusal]:
    """Room on the disk for all runs together: `caps` and `reserved` get what is left of it."""
    limit = limits.get("disk_gb")
    if limit is None:
        return []
    held = sum(account.disk_gb for account in accounts)
    left, own = limit.max - held, caps.get("disk_gb")
    wanted = own.value * count if own is not None else 0.0
    if left <= 0 or wanted > left:
        asks = f", and this may use {wanted:.3g}" if own is not None else ""
        text = f"{_named(limits, limit)}; runs have or may still use {held:.3g}{asks}."
        return [Refusal(limit.name, text, "`toprope prune` removes old runs; that is the owner's to do.")]
    if own is None:
        caps["disk_gb"] = Cap(value=left, limit=limit.name, reason=limit.reason)
    else:
        reserved["disk_gb"] = own.value
    return []


def _named(limits: Limits, limit: Limit) -> str:
    unit = UNITS[limit.name.rsplit(".", 1)[-1]]
    text = f"{limit.name} is {limit.max:g} {unit}, set by {limits.source}"
    return f"{text} (reason: {limit.reason.rstrip('.')})" if limit.reason else text
