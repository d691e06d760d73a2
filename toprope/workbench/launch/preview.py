"""What a start would take, before it is started: time, processors, memory, disk and money, from what was measured.

Nothing is modelled. Runs of the same draft, or else of the same environment, policy and batch on this machine, say how
long a step took and what lay before and after training; a test run says how fast answers are sampled. What nobody
measured is unknown, and is said to be. Where the owner wants a person to confirm a start, the confirmation is bound to
the hash of exactly what was shown.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.analysis.budget import GB, HOUR, Demand
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RUN_ID, RunFolder, read_json
from toprope.records.run.metrics import last_row
from toprope.records.run.specification import Specification
from toprope.settings.limits import FrozenLimits, Limits

__all__ = ["Estimate", "Preview", "needs_confirmation", "preview"]

_MOST_LOOKED_AT = 300
_MOST_USED = 20
_FEWEST_STEPS = 5
_SHAPE = (
    ("environment", "name"),
    ("environment", "knobs"),
    ("environment", "mixture"),
    ("policy", "model"),
    ("policy", "lora"),
    ("algorithm", "name"),
    ("policy", "max_context"),
    ("rollout", "group_size"),
    ("rollout", "groups_per_step"),
    ("rollout", "max_new_tokens"),
    ("optimizer", "micro_batch_size"),
    ("launcher", "device"),
    ("launcher", "threads"),
)
"""What decides how long a step takes: runs that are alike in it are taken to be alike in that."""
_QUANTITIES = ("wall_hours", "cpu_hours", "gpu_hours", "memory_gb", "disk_gb", "cost_usd")


@dataclass(frozen=True)
class Estimate:
    """The median over the runs that it rests on, and their range."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Preview:
    """What a start of `count` runs would take.

    `estimates` by quantity: of the wall time that of one run, of everything else that of all together but for memory;
    None: unknown. `caps`: where each run is stopped.
    """

    count: int
    estimates: dict[str, Estimate | None]
    basis: str
    steps: int
    caps: dict[str, float] = field(default_factory=dict)
    hash: str = ""


@dataclass(frozen=True)
class _Measured:
    run_id: str
    step_s: float
    before_s: float
    after_s: float
    processors: float | None
    memory_bytes: int
    step_bytes: float
    fixed_bytes: float


def preview(specifications: Sequence[Specification], limits: Limits, demand: Demand, runs: Path) -> Preview:
    """What starting these would take.

    Args:
        specifications: Of runs that differ in their seed alone, with their frozen limits where they are known.
        limits: The owner's, for prices.
        demand: What each asks for.
        runs: The folder of runs, whose measurements are used.
    """
    first, count = specifications[0], len(specifications)
    measured, same_draft = _measured(first, runs)
    frozen = first.limits
    found = _estimates(first, measured, demand, limits, count)
    shown = Preview(
        count=count,
        estimates=found,
        basis=_basis(first, measured, same_draft, runs),
        steps=first.config.budget.steps,
        # What the disk has left for all runs moves with every write; it is no property of this start.
        caps={name: cap.value for name, cap in (frozen.caps if frozen else {}).items() if cap.limit != "disk_gb"},
    )
    return Preview(**{**vars(shown), "hash": _hash(specifications, shown, frozen)})


def needs_confirmation(limits: Limits, shown: Preview) -> str:
    """Why the owner wants a start confirmed; empty where they do not. What is unknown counts as much as its cap."""
    if limits.confirm == "never":
        return ""
    if limits.confirm == "always":
        return "The owner wants every start confirmed."
    for quantity, threshold in limits.above.items():
        if quantity == "steps":
            high: float | None = float(shown.steps)
        else:
            estimate, cap = shown.estimates.get(quantity), shown.caps.get(quantity)
            together = 1 if quantity == "wall_hours" else shown.count  # as estimates are; a cap is each run's
            high = (None if cap is None else cap * together) if estimate is None else estimate.high
        if high is None or high > threshold:
            told = "what is not known" if high is None else f"up to {high:.3g}"
            return f"The owner wants starts above {threshold:g} {quantity} confirmed; this may take {told}."
    return ""


def _estimates(
    first: Specification, measured: Sequence[_Measured], demand: Demand, limits: Limits, count: int
) -> dict[str, Estimate | None]:
    unknown: dict[str, Estimate | None] = dict.fromkeys(_QUANTITIES)
    if demand.gpu is None:
        unknown["gpu_hours"] = Estimate(0.0, 0.0, 0.0)
    if not measured:
        return unknown
    budget = first.config.budget
    walls, cpus, disks, steps = [], [], [], []
    for one in measured:
        train_s = budget.steps * one.step_s
        if budget.max_train_seconds is not None:
            train_s = min(train_s, budget.max_train_seconds)
        wall = one.before_s + train_s + one.after_s
        walls.append(wall / HOUR)
        steps.append(train_s / one.step_s)
        if one.processors is not None:
            cpus.append(one.processors * wall / HOUR)
        disks.append((one.fixed_bytes + one.step_bytes * steps[-1]) / GB)
    found = unknown | {"wall_hours": Estimate.of(walls), "disk_gb": Estimate.of(disks).times(count)}
    found["cpu_hours"] = Estimate.of(cpus).times(count) if cpus else None
    if demand.gpu is not None:
        found["gpu_hours"] = Estimate.of(walls).times(count)
    memories = [one.memory_bytes / GB for one in measured if one.memory_bytes]
    found["memory_gb"] = Estimate.of(memories) if memories else None
    cpu_price = limits.prices.cpu_hour_usd
    gpu_price = limits.prices.of_gpu(demand.gpu) if demand.gpu is not None else 0.0
    cpu, gpu = found["cpu_hours"], found["gpu_hours"]
    if cpu is not None and gpu is not None and cpu_price is not None and gpu_price is not None:
        found["cost_usd"] = Estimate(
            cpu.value * cpu_price + gpu.value * gpu_price,
            cpu.low * cpu_price + gpu.low * gpu_price,
            cpu.high * cpu_price + gpu.high * gpu_price,
        )
    return found


def _basis(first: Specification, measured: Sequence[_Measured], same_draft: bool, runs: Path) -> str:
    if measured:
        what = "this draft" if same_draft else "the same environment, policy and batch"
        many = f"{len(measured)} earlier runs" if len(measured) > 1 else "one earlier run"
        return f"Measured on this machine in {many} of {what}: {', '.join(one.run_id for one in measured[:3])}."
    text = "Unknown: no run of this environment, policy and batch has trained on this machine yet."
    if (rate := _sampling(first, runs)) is not None:
        run_id, answers_s = rate
        rollout = first.config.rollout
        at_least = rollout.group_size * rollout.groups_per_step / answers_s
        text += (
            f" In the test {run_id} {answers_s:.3g} answers a second were sampled, so sampling alone takes about "
            f"{at_least:.3g} s a step; training was not measured."
        )
    return text + " A short run with few steps would measure it."


def _measured(first: Specification, runs: Path) -> tuple[list[_Measured], bool]:
    """The runs to go by, newest first, and whether they are this draft's."""
    shape = _shape(first.config.model_dump(mode="json"))
    own: list[_Measured] = []
    alike: list[_Measured] = []
    for folder, spec in _newest(runs, first.kind):
        if _shape(spec.get("config") or {}) != shape:
            continue
        one = _of(folder, spec)
        if one is not None:
            (own if spec.get("draft_id") == first.draft_id and first.draft_id else alike).append(one)
        if len(own) >= _MOST_USED:
            break
    return (own, True) if own else (alike[:_MOST_USED], False)


def _newest(runs: Path, kind: str) -> Iterable[tuple[RunFolder, dict[str, Any]]]:
    try:
        entries = [entry for entry in os.scandir(runs) if RUN_ID.fullmatch(entry.name) and entry.is_dir()]
        entries.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return
    for entry in entries[:_MOST_LOOKED_AT]:
        folder = RunFolder(Path(entry.path))
        try:
            spec = read_json(folder.spec)
        except (NotFound, Corrupt):
            continue
        if isinstance(spec, dict) and spec.get("kind") == kind:
            yield folder, spec


def _shape(config: dict[str, Any]) -> str:
    # What an earlier version did not know yet was empty then.
    return json.dumps([(config.get(section) or {}).get(name) or None for section, name in _SHAPE], sort_keys=True)


def _of(folder: RunFolder, spec: dict[str, Any]) -> _Measured | None:
    """What a run measured; None where it did not train long enough to say, or still trains: its figures move from look
    to look, and with them the hash that somebody is about to confirm."""
    try:
        status, row = read_json(folder.status), last_row(folder.metrics)
        if status.get("ended_at") is None:
            return None
        steps, train_s = int(row["step"]), float(row["train_seconds"])
        if steps < _FEWEST_STEPS or train_s <= 0 or int(status.get("attempt", 1)) > 1:
            return None  # of several attempts nobody knows what lay between them
        before_s = max(0.0, float(status["training_at"]) - float(status["started_at"]))
        after_s = 0.0
        if status.get("state") == "completed":
            after_s = max(0.0, float(status["ended_at"]) - float(status["training_at"]) - train_s)
    except (NotFound, Corrupt, AttributeError, KeyError, TypeError, ValueError):
        return None
    processors, memory, disk = None, 0, 0.0
    try:
        usage = read_json(folder.path / "usage.json")
        memory, disk = int(usage["peak_memory_bytes"]), float(usage["disk_bytes"])
        if float(usage["wall_s"]) > 0:
            processors = float(usage["cpu_s"]) / float(usage["wall_s"])
    except (NotFound, Corrupt, KeyError, TypeError, ValueError):
        pass
    kept = min(disk, _bytes(folder.checkpoints))
    return _Measured(folder.run_id, train_s / steps, before_s, after_s, processors, memory, (disk - kept) / steps, kept)


def _bytes(path: Path) -> float:
    from toprope.supervisor.capacity.budget_ledger import folder_bytes

    return float(folder_bytes(path))


def _sampling(first: Specification, runs: Path) -> tuple[str, float] | None:
    """Answers a second of the newest test of the same environment and policy."""
    config = first.config.model_dump(mode="json")
    for folder, spec in _newest(runs, "test"):
        other = spec.get("config") or {}
        same = all(
            (other.get(section) or {}).get(name) == config[section][name]
            for section, name in (("environment", "name"), ("policy", "model"), ("rollout", "max_new_tokens"))
        )
        if not same:
            continue
        try:
            test = read_json(folder.evaluation("test"))
            answers, seconds = float(test["sampled"]["rollouts"]), float(test["seconds"])
        except (NotFound, Corrupt, KeyError, TypeError, ValueError):
            continue
        if seconds > 0:
            return folder.run_id, answers / seconds
    return None


def _hash(specifications: Sequence[Specification], shown: Preview, frozen: FrozenLimits | None) -> str:
    """Of everything that was shown and would be started; what does not matter (the run's id, the time) is left out."""
    first = specifications[0]
    content = {
        "draft": [first.draft_id, first.draft_revision, first.kind],
        "environment": first.environment.model_dump(mode="json"),
        "mixture": [source.model_dump(mode="json") for source in first.mixture],
        "config": [one.config.model_dump(mode="json") for one in specifications],
        "estimates": {
            name: None if one is None else [f"{value:.3g}" for value in (one.value, one.low, one.high)]
            for name, one in shown.estimates.items()
        },
        "caps": {name: f"{value:.3g}" for name, value in shown.caps.items()},
        "prices": [] if frozen is None else [frozen.cpu_hour_usd, frozen.gpu_hour_usd],
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
