"""Decide if runs may start under the owner's limits, and at which usage each is stopped.

The most that a run can use is known before it starts, from its own budget and the caps of its kind. That amount counts
as used until the run ends, so runs that start together cannot exceed a daily limit, and unused budget is free again as
soon as a run has ended. This module is pure: the budget ledger reads the folders, the keeper measures and stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from toprope.records.run.kinds import RunKind
from toprope.records.run.usage import Usage
from toprope.settings.limits import UNITS, Cap, FrozenLimits, Limit, Limits
from toprope.settings.schema import Config

HOUR = 3600.0
GB = 1e9
_EVALUATIONS_S = 600.0
"""Seconds of wall time that a run with budget.max_train_seconds gets for evaluations and shutdown."""
_BESIDE_TORCH = 1
"""Processors that the crew keeps busy besides the threads of trainer and inference, and workers of environments."""
_NOTHING = "Nothing starts while it is 0; the owner raises it."
_ADDED_UP = ("cpu_hours", "gpu_hours", "cost_usd")


@dataclass(frozen=True)
class Account:
    """One spender in the budget ledger: `used_today` by quantity of `per_day`, and what a live one has `reserved`."""

    run_id: str
    live: bool
    started_today: bool
    usage: Usage
    used_today: Mapping[str, float] = field(default_factory=dict)
    reserved: Mapping[str, float] = field(default_factory=dict)
    is_run: bool = True
    """False for a program that builds a data set; it is not counted among runs."""

    def held(self, quantity: str) -> float:
        """Return what counts towards the daily limit: the use of today, plus the unused reservation of a live run."""
        used = self.used_today.get(quantity, 0.0)
        if not self.live:
            return used
        return used + max(0.0, self.reserved.get(quantity, 0.0) - spent(self.usage).get(quantity, 0.0))

    @property
    def disk_gb(self) -> float:
        used = self.usage.disk_bytes / GB
        return max(used, self.reserved.get("disk_gb", 0.0)) if self.live else used


@dataclass(frozen=True)
class Demand:
    """The resources that one run asks for.

    Args:
        steps: Optimizer steps of its budget; None for runs without steps.
        processors: Processors that it can keep busy.
        gpu: Name of its GPU; empty if unknown, None if it uses no GPU.
        train_s: budget.max_train_seconds.
        beside_s: Seconds of wall time besides training, if training time is limited.
        tokens_usd: The most that its calls to priced models cost; None if it is unknown.
        unpriced: Names of models that it calls and that have no price.
        gpus: Number of its GPUs, if it uses any.
        trains: budget.max_train_seconds limits it.
    """

    steps: int | None
    processors: int
    gpu: str | None = None
    train_s: float | None = None
    beside_s: float = 0.0
    tokens_usd: float | None = 0.0
    unpriced: Sequence[str] = ()
    gpus: int = 1
    trains: bool = True

    @property
    def own_s(self) -> float | None:
        """Seconds of wall time that its own budget allows; None if the budget does not limit time."""
        return None if self.train_s is None else self.train_s + self.beside_s


@dataclass(frozen=True)
class Refusal:
    """A limit that forbids a start: its value, who set it and why, present use, and what would fit."""

    limit: str
    text: str
    fits: str
    by_budget: bool = False
    """A smaller budget in the draft would fit."""


def demand_of(config: Config, kind: RunKind, *, processors: int, gpu: str | None) -> Demand:
    """Compute the demand of a configuration.

    Args:
        processors: Processors of the machine.
        gpu: See `Demand`.
    """
    train_s = config.budget.max_train_seconds if kind.trains else None
    beside_s = config.launcher.start_timeout_s + _EVALUATIONS_S
    workers = config.launcher.driver_count * (1 + len(config.environment.mixture))
    busy = (config.launcher.num_processes + 1) * config.launcher.threads + _BESIDE_TORCH + workers
    steps = config.budget.steps if kind.samples else None
    return Demand(steps, min(processors, busy), gpu, train_s, beside_s, trains=kind.trains)


def spent(usage: Usage) -> dict[str, float]:
    """Return usage by the quantities of limits; cost is left out if its price is unknown."""
    quantities = {
        "wall_hours": usage.wall_s / HOUR,
        "cpu_hours": usage.cpu_s / HOUR,
        "gpu_hours": usage.gpu_s / HOUR,
        "disk_gb": usage.disk_bytes / GB,
        "steps": float(usage.steps),
    }
    return quantities if usage.cost_usd is None else quantities | {"cost_usd": usage.cost_usd}


def freeze_limits(
    limits: Limits, demand: Demand, accounts: Sequence[Account], count: int = 1
) -> FrozenLimits | list[Refusal]:
    """Decide if `count` runs of one kind may start together.

    Args:
        demand: Demand of each run.
        accounts: All other runs.

    Returns:
        The limits that each run is held to, or every reason why none may start.
    """
    refusals: list[Refusal] = []
    caps = _caps(limits)
    prices = limits.prices
    gpu_price = prices.of_gpu(demand.gpu) if demand.gpu is not None else None
    bound_by = bounds(caps, demand, prices.cpu_hour_usd, gpu_price)
    refusals += _unknown_price(limits, demand, prices.cpu_hour_usd, gpu_price)
    refusals += _steps(limits, demand)
    refusals += _at_once(limits, accounts, count)
    reserved: dict[str, float] = {}
    for quantity in _ADDED_UP:
        limit = limits.get(f"per_day.{quantity}")
        if limit is None or (quantity == "gpu_hours" and demand.gpu is None):
            continue
        remaining = limit.max - sum(account.held(quantity) for account in accounts)
        bound = bound_by.get(quantity)
        if bound is None and not any(refusal.limit == limit.name for refusal in refusals):
            bound = max(remaining, 0.0) / count  # unbounded: it may use what is left of the day
        if bound is None:
            continue
        free = bound_by.get(quantity) == 0
        if not free and (remaining <= 0 or bound * count > remaining * (1 + 1e-9)):
            refusals.append(_too_much(limits, limit, quantity, bound, count, remaining, accounts, demand))
        else:
            reserved[quantity] = bound
            if quantity not in caps or caps[quantity].value > bound:
                caps[quantity] = Cap(value=bound, limit=limit.name, reason=limit.reason)
    refusals += _disk(limits, caps, reserved, accounts, count)
    if refusals:
        return _helpful(refusals)
    return FrozenLimits(
        source=limits.source,
        caps=caps,
        reserved=reserved,
        cpu_hour_usd=prices.cpu_hour_usd,
        gpu_hour_usd=gpu_price,
        gpu=demand.gpu or None,
    )


def _helpful(refusals: Sequence[Refusal]) -> list[Refusal]:
    """Leave out the smaller budget that would fit if it cannot help, because another limit forbids any."""
    if all(refusal.by_budget for refusal in refusals):
        return list(refusals)
    return [replace(refusal, fits="") if refusal.by_budget else refusal for refusal in refusals]


def _caps(limits: Limits) -> dict[str, Cap]:
    """Return the caps of a single run."""
    return {
        limit.name.removeprefix("per_run."): Cap(value=limit.max, limit=limit.name, reason=limit.reason)
        for limit in limits
        if limit.name.startswith("per_run.")
    }


def bounds(
    caps: Mapping[str, Cap], demand: Demand, cpu_price: float | None, gpu_price: float | None
) -> dict[str, float]:
    """Return the most that a run can use by quantity; unbounded quantities are left out.

    Args:
        caps: Set by the limits per run.
        demand: Of the run.
        cpu_price: USD for an hour of a CPU; None if unknown.
        gpu_price: USD for an hour of its GPU; None if unknown.
    """
    walls = [demand.own_s / HOUR] if demand.own_s is not None else []
    walls += [caps["wall_hours"].value] if "wall_hours" in caps else []
    most_used: dict[str, float] = {}
    for quantity, factor in (
        ("cpu_hours", demand.processors),
        ("gpu_hours", demand.gpus if demand.gpu is not None else 0),
    ):
        candidates = [min(walls) * factor] if walls else []
        candidates += [caps[quantity].value] if quantity in caps else []
        if not factor:
            candidates = [0.0]
        if candidates:
            most_used[quantity] = min(candidates)
    priced = (cpu_price is not None or not demand.processors) and (demand.gpu is None or gpu_price is not None)
    priced = priced and demand.tokens_usd is not None
    if "cpu_hours" in most_used and "gpu_hours" in most_used and priced:
        machine_usd = most_used["cpu_hours"] * (cpu_price or 0.0) + most_used["gpu_hours"] * (gpu_price or 0.0)
        most_used["cost_usd"] = machine_usd + (demand.tokens_usd or 0.0)
    if "cost_usd" in caps:
        most_used["cost_usd"] = min(most_used.get("cost_usd", caps["cost_usd"].value), caps["cost_usd"].value)
    return most_used


def _unknown_price(limits: Limits, demand: Demand, cpu_price: float | None, gpu_price: float | None) -> list[Refusal]:
    missing = []
    if cpu_price is None and demand.processors:
        missing.append("prices.cpu_hour_usd")
    if demand.gpu is not None and gpu_price is None:
        missing.append(f"prices.gpu_hour_usd for {demand.gpu or 'a GPU of unknown name'}")
    missing += [f"prompt_usd and completion_usd of the model {name}" for name in demand.unpriced]
    refusals = []
    for name in ("per_run.cost_usd", "per_day.cost_usd"):
        limit = limits.get(name)
        if limit is not None and missing:
            refusals.append(
                Refusal(
                    name,
                    f"{_describe(limits, limit)}, and the cost of this run is unknown: there is no price in "
                    f"{' and '.join(missing)}.",
                    "A run of unknown cost does not start; the owner adds the price to limits.yaml, or to the model in "
                    "settings.yaml.",
                )
            )
    return refusals


def _steps(limits: Limits, demand: Demand) -> list[Refusal]:
    limit = limits.get("per_run.steps")
    if limit is None or demand.steps is None or demand.steps <= limit.max:
        return []
    text = f"{_describe(limits, limit)}; budget.steps is {demand.steps}."
    if not limit.max:
        return [Refusal(limit.name, text, _NOTHING)]
    return [Refusal(limit.name, text, f"budget.steps of at most {limit.max:g} fits.", by_budget=True)]


def _at_once(limits: Limits, accounts: Sequence[Account], count: int) -> list[Refusal]:
    refusals = []
    live = [account for account in accounts if account.live and account.is_run]
    limit = limits.get("concurrent_runs")
    if limit is not None and len(live) + count > limit.max:
        names = ", ".join(account.run_id for account in live[:3]) + (" ..." if len(live) > 3 else "")
        refusals.append(
            Refusal(
                limit.name,
                f"{_describe(limits, limit)}; {len(live)} are live{f' ({names})' if names else ''}, and this asks for "
                f"{count} more.",
                room_at_once(limit, len(live)),
            )
        )
    limit = limits.get("per_day.runs")
    today = sum(account.started_today for account in accounts)
    if limit is not None and today + count > limit.max:
        refusals.append(
            Refusal(
                limit.name,
                f"{_describe(limits, limit)}; {today} were started today, and this asks for {count} more.",
                _room(int(limit.max) - today) + " today; the count begins again at 0:00 UTC."
                if limit.max
                else _NOTHING,
            )
        )
    return refusals


def room_at_once(limit: Limit, live: int) -> str:
    """Say how many more runs the limit `concurrent_runs` leaves room for, and what makes room."""
    return _room(int(limit.max) - live) + " now; a run that ends or is stopped makes room." if limit.max else _NOTHING


def _room(count: int) -> str:
    return f"At most {count} more fit" if count > 0 else "None fits"


def _too_much(
    limits: Limits,
    limit: Limit,
    quantity: str,
    bound: float,
    count: int,
    remaining: float,
    accounts: Sequence[Account],
    demand: Demand,
) -> Refusal:
    used = sum(account.used_today.get(quantity, 0.0) for account in accounts)
    reserved = sum(account.held(quantity) for account in accounts) - used
    demanded = f"{count} times {bound:.3g}" if count > 1 else f"up to {bound:.3g}"
    text = (
        f"{_describe(limits, limit)}; {used:.3g} were used today, live runs may still use {reserved:.3g}, so "
        f"{max(remaining, 0.0):.3g} are left, and this may use {demanded}."
    )
    if remaining <= 0 or bound <= 0:
        return Refusal(limit.name, text, "Nothing fits today; what live runs leave unused is free when they end.")
    rate = _an_hour(limits, demand, quantity)
    calls = (demand.tokens_usd or 0.0) if quantity == "cost_usd" else 0.0  # whatever the time
    without_calls_s = remaining / count / rate * HOUR - demand.beside_s if rate else 0.0
    train_s = int(without_calls_s - calls / rate * HOUR) if rate else 0
    if demand.trains and train_s < 1 and calls and (without_calls_s >= 1 or not rate):
        fewer = "budget.steps" if demand.steps is not None else "sft.tasks or sft.epochs"
        fits = f"Calls to priced models alone may cost {calls:.3g} USD a run: a smaller {fewer} lowers that."
        return Refusal(limit.name, text, fits, by_budget=True)
    if not demand.trains or train_s < 1:
        return Refusal(limit.name, text, "Too little is left today; the count begins again at 0:00 UTC.")
    return Refusal(limit.name, text, f"budget.max_train_seconds of at most {train_s} fits.", by_budget=True)


def _an_hour(limits: Limits, demand: Demand, quantity: str) -> float:
    """Return the most that one hour of wall time uses of a quantity."""
    gpus, prices = demand.gpus if demand.gpu is not None else 0, limits.prices
    if quantity == "cost_usd":
        gpu_price = prices.of_gpu(demand.gpu) if gpus else None
        return demand.processors * (prices.cpu_hour_usd or 0.0) + gpus * (gpu_price or 0.0)
    return float(demand.processors if quantity == "cpu_hours" else gpus)


def _disk(
    limits: Limits, caps: dict[str, Cap], reserved: dict[str, float], accounts: Sequence[Account], count: int
) -> list[Refusal]:
    """Limit the disk use of all runs together; writes the remaining room into `caps` and `reserved`."""
    limit = limits.get("disk_gb")
    if limit is None:
        return []
    held_gb = sum(account.disk_gb for account in accounts)
    remaining, cap = limit.max - held_gb, caps.get("disk_gb")
    wanted = cap.value * count if cap is not None else 0.0
    if remaining <= 0 or wanted > remaining:
        asks = f", and this may use {wanted:.3g}" if cap is not None else ""
        text = f"{_describe(limits, limit)}; runs have or may still use {held_gb:.3g}{asks}."
        return [Refusal(limit.name, text, "The owner can remove old runs with `toprope prune`.")]
    if cap is None:
        # Nothing is reserved, because that would take the room of later runs: the keeper adds up what all have.
        caps["disk_gb"] = Cap(value=remaining / count, limit=limit.name, reason=limit.reason, together=limit.max)
    else:
        reserved["disk_gb"] = cap.value
    return []


def _describe(limits: Limits, limit: Limit) -> str:
    unit = UNITS[limit.name.rsplit(".", 1)[-1]]
    text = f"{limit.name} is {limit.max:g} {unit}, set by {limits.source}"
    return f"{text} (reason: {limit.reason.rstrip('.')})" if limit.reason else text
