"""Budget of a sweep: room for its longest run beside it, and an estimate for all of its runs together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable

from toprope.records.run.specification import (
    RunPlan,
    Specification,
    SweepMember,
    SweepPlan,
    TestPlan,
    training_plan,
)
from toprope.settings.changes import apply_changes
from toprope.settings.limits import Limits
from toprope.settings.owner import Home
from toprope.settings.schema import Config
from toprope.supervisor.capacity.budget_ledger import read_accounts
from toprope.supervisor.capacity.reservations import Machine
from toprope.workbench.drafts import Draft
from toprope.workbench.launch.budgets.reserve_budget import NoRoomWithin, demand, reserve
from toprope.workbench.launch.freeze import freeze_drafts
from toprope.workbench.launch.preview import HASH_LENGTH, Preview, preview
from toprope.workbench.launch.requirements import describe_job


def draft_of_sweep(sweep: Specification, config: Config) -> Draft:
    """Return the draft that a sweep was started from, with the configuration of one of its runs."""
    return Draft(
        id=sweep.draft_id or "",
        environment=sweep.environment,
        preset=sweep.preset or "",
        config=config,
        knobs=sweep.sweep.knobs if sweep.sweep else [],
        revision=sweep.draft_revision or 0,
        created_at=sweep.created_at,
        updated_at=sweep.created_at,
    )


def require_room_for_members(
    sweep: Specification, plan: SweepPlan, longest_steps: int, home: Home, machine: Machine
) -> Callable[[], Preview]:
    """Pass a sweep whose runs the owner's limits allow. The caller holds the lock of the ledger.

    Args:
        sweep: Frozen and reserved.
        longest_steps: Optimizer steps of its longest single run.
        machine: The part of the machine that runs may use.

    Returns:
        A function that estimates what all of its runs take.

    Raises:
        NoRoomWithin: There is no room for one run beside the sweep, or for all runs today.
    """
    limits = home.limits()
    _require_room_today(sweep, plan, limits, home)
    # Each run reserves its own budget when it starts; the longest must fit beside the sweep.
    reserve([_member(sweep, plan, longest_steps, home)], limits, machine, home.runs)

    def estimate() -> Preview:
        count = plan.runs - 1
        usual = _member(sweep, plan, max(1, math.ceil(plan.total_steps / count)), home)
        costs = preview([usual] * count, limits, demand(usual, machine), home.runs, describe_job(sweep, home))
        return _for_whole_sweep(costs, plan, sweep)

    return estimate


def _require_room_today(sweep: Specification, plan: SweepPlan, limits: Limits, home: Home) -> None:
    per_day = limits.get("per_day.runs")
    today = sum(account.started_today for account in read_accounts(home.runs, leave_out=[sweep.run_id]))
    if per_day is not None and today + 1 + plan.runs > per_day.max:
        raise NoRoomWithin(
            f"Nothing was started: per_day.runs is {per_day.max:g}, set by {limits.source}; {today} were started "
            f"today, and the sweep is 1 and its members up to {plan.runs}.",
            hint="A smaller population or fewer epochs fit; the count starts anew at 0:00 UTC.",
        )


def _member(sweep: Specification, plan: SweepPlan, steps: int, home: Home) -> Specification:
    """Freeze a run like those that the sweep will start."""
    config = sweep.config
    run_plan: RunPlan
    if plan.evaluate == "train":
        changes = {"budget.steps": steps, "optimizer.warmup_steps": min(config.optimizer.warmup_steps, steps)}
        config, _ = apply_changes(config, changes, plan.knobs)
        run_plan = training_plan(config)
    else:
        run_plan = TestPlan(tasks=config.evaluation.validation_tasks, group_size=config.rollout.group_size)
    [frozen] = freeze_drafts(home, [draft_of_sweep(sweep, config)], run_plan)
    member = SweepMember(sweep=frozen.run_id, candidate="c001", epoch=1)
    return frozen.model_copy(update={"member": member, "code": sweep.code})


def _for_whole_sweep(costs: Preview, plan: SweepPlan, sweep: Specification) -> Preview:
    """Turn the preview of parallel runs into that of a sweep: times and steps add up, and the plan is hashed too."""
    estimates = dict(costs.estimates)
    if (wall := estimates.get("wall_hours")) is not None:
        estimates["wall_hours"] = wall.times(costs.count)
    content = [
        costs.hash,
        plan.model_dump(mode="json"),
        sweep.config.model_dump(mode="json"),
        sweep.draft_id,
        sweep.draft_revision,
    ]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:HASH_LENGTH]
    return dataclasses.replace(costs, estimates=estimates, steps=max(plan.total_steps, 1), hash=digest)
