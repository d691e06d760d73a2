"""Preview of a start: the time, processors, memory, disk and money that it would take, from earlier measurements.

Nothing is modelled. Earlier runs of the same draft, or else of the same environment, policy and batch, on this machine
tell the seconds per step and the time before and after training; a test tells the rate of sampling. Quantities that
nobody measured are reported as unknown. If a person must confirm a start, the confirmation is bound to the hash of
exactly this preview.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.analysis.budget import GB, HOUR, Demand
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, folder_bytes, read_json
from toprope.records.run.metrics import last_row
from toprope.records.run.specification import Specification
from toprope.settings.limits import UNITS, FrozenLimits, Limits
from toprope.settings.schema import Config
from toprope.text_format import clip, value
from toprope.workbench.launch.baseline import newest_runs
from toprope.workbench.launch.budgets.token_costs import steps_of

HASH_LENGTH = 24
"""Digits of a hash: two previews with the same hash cannot be found by trying."""
_MOST_USED = 20
_FEWEST_STEPS = 5
_MOST_FOR_PACE = 5
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
    ("optimizer", "gradient_checkpointing"),
    ("policy", "load_in_4bit"),
    ("policy", "load_in_8bit"),
    ("inference", "engine"),
    ("launcher", "kind"),
    ("launcher", "cluster"),
    ("launcher", "device"),
    ("launcher", "num_processes"),
    ("launcher", "threads"),
)
"""Fields that decide the duration of a step; runs that agree in them are taken as equally fast."""
_SHAPE_SFT = (("sft", "batch_size"), ("sft", "max_length"))
"""Those of supervised fine-tuning beside them."""
_CORE = (
    ("environment", "name"),
    ("policy", "model"),
    ("rollout", "group_size"),
    ("rollout", "groups_per_step"),
    ("rollout", "max_new_tokens"),
    ("inference", "engine"),
    ("launcher", "kind"),
    ("launcher", "cluster"),
    ("launcher", "device"),
    ("launcher", "num_processes"),
    ("sft", "batch_size"),
)
"""The fields of these that matter most. Runs that agree in them alone are measured against if there are no others."""
_NAMES_OF_CORE = frozenset(f"{section}.{name}" for section, name in _CORE)
_DEFAULTS = Config().model_dump(mode="json")
_QUANTITIES = ("wall_hours", "cpu_hours", "gpu_hours", "memory_gb", "disk_gb", "cost_usd")


@dataclass(frozen=True)
class Estimate:
    """Median over earlier runs, with their range."""

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
    """The cost of starting `count` runs."""

    count: int
    estimates: dict[str, Estimate | None]
    """By quantity; None if unknown. Wall time and memory are those of one run, the others of all runs together."""
    basis: str
    """Sentences that name the measurements used."""
    steps: int
    """Optimizer steps of one run."""
    longest_s: float | None = None
    """Seconds of training after which one run is stopped; None if it trains nothing or has no such limit."""
    caps: dict[str, float] = field(default_factory=dict)
    """Usage at which each run is stopped, by quantity."""
    hash: str = ""
    """Of everything shown and everything that would be started."""


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


def preview(
    specifications: Sequence[Specification], limits: Limits, demand: Demand, runs: Path, job: str = ""
) -> Preview:
    """Estimate the cost of starting runs.

    Args:
        specifications: Of runs that differ in their seed alone, with their frozen limits if known.
        limits: The owner's, which contain prices.
        runs: The folder of runs with the measurements.
        job: What an engine would be asked for, in words.
    """
    first, count = specifications[0], len(specifications)
    measured, alike = _comparable_runs(first, runs)
    frozen = first.limits
    estimates = _estimates(first, measured, demand, limits, count)
    unhashed = Preview(
        count=count,
        estimates=estimates,
        basis=_basis(first, measured, alike, runs) + _KEPT[first.config.logging.keep_rollouts] + job,
        steps=steps_of(first),
        longest_s=first.config.budget.max_train_seconds if first.run_kind.trains else None,
        # Free disk space changes with every write, so it must not be part of the hash.
        caps={name: cap.value for name, cap in (frozen.caps if frozen else {}).items() if cap.limit != "disk_gb"},
    )
    return Preview(**{**vars(unhashed), "hash": _hash(specifications, unhashed, frozen)})


def summarize(specifications: Sequence[Specification], costs: Preview) -> str:
    """Say in one line what would start and what it may take, for the person who approves it."""
    first = specifications[0]
    started = f"{costs.count} runs of kind {first.kind}" if costs.count > 1 else f"a run of kind {first.kind}"
    if first.sweep is not None:
        started = f"a sweep of {first.sweep.runs + 1} runs, its own among them"
    whose = f"repeats {first.reproduces}" if first.reproduces else f"{first.draft_id} revision {first.draft_revision}"
    models = [model.name for model in first.test.models] if first.test else []
    models += [first.teacher.name] if first.teacher else []
    models += first.helpers
    parts = [
        f"{name} up to {estimate.high:.3g}" if estimate is not None else f"{name} unknown"
        for name, estimate in costs.estimates.items()
    ]
    caps = ", ".join(f"{value:.3g} {name}" for name, value in costs.caps.items())
    return (
        f"{started}, environment {first.environment.name}, {whose}"
        + (f", at most {costs.steps} steps" if costs.steps else "")
        + (f", models {', '.join(models)}" if models else "")
        + f"; {'; '.join(parts)}"
        + (f"; stopped at {caps}" if caps else "")
    )


def details_of(specifications: Sequence[Specification], costs: Preview, why: str) -> dict[str, Any]:
    """The start, the reason to ask a person, and the costs, for a page that shows them."""
    first = specifications[0]
    return {
        "what": first.run_kind.title,
        "why": why,
        "environment": first.environment.name,
        "draft_id": first.draft_id,
        "changes": clip(", ".join(f"{name} {value(now)}" for name, (_, now) in first.beside_preset.items()), 400),
        "runs": costs.count if first.sweep is None else first.sweep.runs + 1,
        "steps": costs.steps,
        "caps": costs.caps,
        "estimates": {name: estimate and {**vars(estimate)} for name, estimate in costs.estimates.items()},
    }


def needs_confirmation(limits: Limits, costs: Preview, *, free: bool = False) -> str:
    """Return why the owner wants a start confirmed; empty if not. An unknown quantity counts as its cap. A `free` start
    trains nothing and surely costs nothing: of `above`, only what is known or capped beyond its bound counts."""
    if limits.confirm == "never":
        return ""
    if limits.confirm == "always":
        return "The owner wants every start confirmed."
    for quantity, threshold in limits.above.items():
        if quantity == "steps":
            high: float | None = float(costs.steps)
        else:
            estimate, cap = costs.estimates.get(quantity), costs.caps.get(quantity)
            together = 1 if quantity == "wall_hours" else costs.count  # estimates are for all runs, a cap for each
            high = (None if cap is None else cap * together) if estimate is None else estimate.high
        if free and (high is None or quantity == "cost_usd"):
            continue
        if high is None or high > threshold:
            amount = "an unknown amount" if high is None else f"up to {high:.3g}"
            return f"The owner wants starts above {threshold:g} {UNITS[quantity]} confirmed; this may take {amount}."
    return ""


def _estimates(
    first: Specification, measured: Sequence[_Measured], demand: Demand, limits: Limits, count: int
) -> dict[str, Estimate | None]:
    unknown: dict[str, Estimate | None] = dict.fromkeys(_QUANTITIES)
    if demand.gpu is None:
        unknown["gpu_hours"] = Estimate(0.0, 0.0, 0.0)
    tokens = demand.tokens_usd
    if tokens is not None and limits.prices.cpu_hour_usd is None and demand.gpu is None and tokens:
        unknown["cost_usd"] = Estimate(tokens, 0.0, tokens).times(count)
    served_s = (first.ask and first.ask.serve_s) or 0.0
    if not measured:
        return unknown | ({"wall_hours": Estimate.of([served_s / HOUR])} if served_s else {})
    planned, longest_s = steps_of(first), first.config.budget.max_train_seconds
    walls, cpus, disks, steps = [], [], [], []
    for run in measured:
        train_s = planned * run.step_s
        if longest_s is not None:
            train_s = min(train_s, longest_s)
        wall = run.before_s + train_s + served_s + run.after_s
        walls.append(wall / HOUR)
        steps.append(train_s / run.step_s)
        if run.processors is not None:
            cpus.append(run.processors * wall / HOUR)
        disks.append((run.fixed_bytes + run.step_bytes * steps[-1]) / GB)
    estimates = unknown | {"wall_hours": Estimate.of(walls), "disk_gb": Estimate.of(disks).times(count)}
    estimates["cpu_hours"] = Estimate.of(cpus).times(count) if cpus else None
    if demand.gpu is not None:
        estimates["gpu_hours"] = Estimate.of(walls).times(count * demand.gpus)
    memories = [run.memory_bytes / GB for run in measured if run.memory_bytes]
    estimates["memory_gb"] = Estimate.of(memories) if memories else None
    cpu_price = limits.prices.cpu_hour_usd
    gpu_price = limits.prices.of_gpu(demand.gpu) if demand.gpu is not None else 0.0
    cpu, gpu = estimates["cpu_hours"], estimates["gpu_hours"]
    if cpu is not None and gpu is not None and cpu_price is not None and gpu_price is not None and tokens is not None:
        estimates["cost_usd"] = Estimate(
            cpu.value * cpu_price + gpu.value * gpu_price + tokens * count,
            cpu.low * cpu_price + gpu.low * gpu_price,
            cpu.high * cpu_price + gpu.high * gpu_price + tokens * count,
        )
    return estimates


def seconds_per_step(config: Config, kind: str, runs: Path) -> float | None:
    """Return the median seconds per step of earlier runs with this environment, policy and batch.

    None if unknown, or if the configuration does not limit time, so that nobody asks.
    """
    if config.budget.max_train_seconds is None:
        return None
    shape = config.model_dump(mode="json")
    step_seconds: list[float] = []
    for folder, spec in _newest(runs, kind):
        if not _differences(shape, spec.get("config") or {}) and (run := _measurements_of(folder, spec)) is not None:
            step_seconds.append(run.step_s)
        if len(step_seconds) >= _MOST_FOR_PACE:
            break
    return statistics.median(step_seconds) if step_seconds else None


_KEPT = {
    "all": "",
    "sample": " Of rollouts from before a checkpoint every sixteenth group is kept (logging.keep_rollouts: sample).",
    "none": " Rollouts from before a checkpoint are not kept (logging.keep_rollouts: none).",
}


def _basis(first: Specification, measured: Sequence[_Measured], in_common: str, runs: Path) -> str:
    if measured:
        many = f"{len(measured)} earlier runs" if len(measured) > 1 else "one earlier run"
        return f"Measured in {many} of {in_common}: {', '.join(run.run_id for run in measured[:3])}."
    if first.test or first.ask:
        return "Unknown: no comparable run of this kind with at least as many answers has completed on this machine."
    text = (
        f"Unknown: no run of this environment, policy, batch and length has trained at least {_FEWEST_STEPS} steps in "
        f"one attempt on this machine yet{in_common and f'; {in_common}'}."
    )
    if first.run_kind.samples and (rate := _sampling_rate(first, runs)) is not None:
        run_id, answers_s = rate
        rollout = first.config.rollout
        at_least = rollout.group_size * rollout.groups_per_step / answers_s
        text += (
            f" In the test {run_id} {answers_s:.3g} answers a second were sampled, so sampling alone takes about "
            f"{at_least:.3g} s a step; training was not measured."
        )
    return text + " A short run would measure it."


def _comparable_runs(first: Specification, runs: Path) -> tuple[list[_Measured], str]:
    """Return the runs to estimate from, newest first, and what they have in common with this one, in words; without
    such runs, what tells the nearest one of this environment apart."""
    config, (form, answers) = first.config.model_dump(mode="json"), _form_of(first.model_dump(include={"test", "ask"}))
    of_draft: list[_Measured] = []
    alike: list[_Measured] = []
    similar: list[_Measured] = []
    apart: set[str] = set()
    nearest, between = "", set(_NAMES_OF_CORE)
    for folder, spec in _newest(runs, first.kind):
        if (other := _form_of(spec))[0] != form or other[1] < answers:
            continue
        spec_config = spec.get("config") or {}
        differs = _differences(config, spec_config)
        if in_core := differs & _NAMES_OF_CORE:
            if "environment.name" not in differs and len(in_core) < len(between) and _measurements_of(folder, spec):
                nearest, between = folder.run_id, in_core
            continue
        run = _measurements_of(folder, spec)
        if run is None:
            continue
        if differs:
            similar.append(run)
            apart.update(differs)
        else:
            (of_draft if spec.get("draft_id") == first.draft_id and first.draft_id else alike).append(run)
        if len(of_draft) >= _MOST_USED:
            break
    if of_draft:
        return of_draft, "this draft"
    if alike:
        return alike[:_MOST_USED], "the same environment, policy and batch"
    if not similar:
        return [], nearest and f"{nearest} differs in {', '.join(sorted(between))}"
    return similar[:_MOST_USED], f"the same environment, policy and batch that differ in {', '.join(sorted(apart))}"


def _newest(runs: Path, kind: str) -> Iterable[tuple[RunFolder, dict[str, Any]]]:
    for folder in newest_runs(runs):
        try:
            spec = read_json(folder.spec)
        except (NotFound, Corrupt):
            continue
        if isinstance(spec, dict) and spec.get("kind") == kind:
            yield folder, spec


def _differences(config: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the names of the fields in which two configurations differ, of those that decide a step's duration."""
    fields = _SHAPE + (_SHAPE_SFT if config["algorithm"]["name"] == "sft" else ())
    return {
        f"{section}.{name}"
        for section, name in fields
        if _field_value(config, section, name) != _field_value(other, section, name)
    }


def _field_value(config: dict[str, Any], section: str, name: str) -> Any:
    """Return a field's value; its default if an earlier version lacks it."""
    return (config.get(section) or {}).get(name, _DEFAULTS[section].get(name)) or None


def _form_of(spec: dict[str, Any]) -> tuple[Any, int]:
    """Return what is equal in comparable tests or uses of a policy, and their answers; 0 for runs that train."""
    test, ask = spec.get("test") or {}, spec.get("ask") or {}
    if test:
        return sorted(model["name"] for model in test.get("models") or ()), test["tasks"] * test["group_size"]
    standard = ask.get("standard") or {}
    form = bool(ask.get("serve_s")), standard.get("names"), standard.get("limit")
    return form, len(ask.get("conversations") or ()) * (ask.get("answers") or 1)


def _measurements_of(folder: RunFolder, spec: dict[str, Any]) -> _Measured | None:
    """Return the measurements of a run; None if it trained too briefly or is not over. Without training all is before.

    The figures of a live run change constantly, and would change the hash that a person is about to confirm.
    """
    try:
        status, row = read_json(folder.status), last_row(folder.metrics)
        if status.get("ended_at") is None or int(status.get("attempt", 1)) > 1:
            return None  # the time between several attempts is unknown
        trains = not (spec.get("test") or spec.get("ask"))
        steps, train_s = (int(row["step"]), float(row["train_seconds"])) if trains else (1, 1.0)
        if steps < _FEWEST_STEPS * trains or train_s <= 0 or not (trains or status["state"] == "completed"):
            return None
        until_s = float(status["training_at" if trains else "ended_at"]) - ((spec.get("ask") or {}).get("serve_s") or 0)
        before_s = max(0.0, until_s - float(status["started_at"]))
        after_s = 0.0
        if trains and status.get("state") == "completed":
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
    kept = min(disk, float(folder_bytes(folder.checkpoints))) if trains else disk
    return _Measured(folder.run_id, train_s / steps, before_s, after_s, processors, memory, (disk - kept) / steps, kept)


def _sampling_rate(first: Specification, runs: Path) -> tuple[str, float] | None:
    """Return the newest test of the same environment and policy, with its answers per second."""
    config = first.config.model_dump(mode="json")
    for folder, spec in _newest(runs, "test"):
        other = spec.get("config") or {}
        shape = (("environment", "name"), ("policy", "model"), ("rollout", "max_new_tokens"))
        if any((other.get(section) or {}).get(name) != config[section][name] for section, name in shape):
            continue
        try:
            test = read_json(folder.evaluation("test"))
            answers, seconds = float(test["sampled"]["rollouts"]), float(test["seconds"])
        except (NotFound, Corrupt, KeyError, TypeError, ValueError):
            continue
        if seconds > 0:
            return folder.run_id, answers / seconds
    return None


def _hash(specifications: Sequence[Specification], costs: Preview, frozen: FrozenLimits | None) -> str:
    """Hash everything that was shown and would be started, without run ids and times."""
    first = specifications[0]
    content = {
        "draft": [first.draft_id, first.draft_revision, first.kind],
        "plan": [
            None if part is None else part.model_dump(mode="json")
            for part in (first.test, first.ask, first.sweep, first.teacher, first.trainer, first.dataset)
        ],
        "from": [first.base_run, first.reproduces],
        "helpers": [helper.model_dump(mode="json") for helper in first.helpers.values()] + [first.opponent_policy],
        "environment": first.environment.model_dump(mode="json"),
        "mixture": [source.model_dump(mode="json") for source in first.mixture],
        # A start runs what is hashed here: read twice, the code could be replaced in between.
        "code": [file.model_dump() for file in first.code or ()],
        "config": [specification.config.model_dump(mode="json") for specification in specifications],
        "estimates": {
            name: None
            if estimate is None
            else [f"{value:.3g}" for value in (estimate.value, estimate.low, estimate.high)]
            for name, estimate in costs.estimates.items()
        },
        "caps": {name: f"{value:.3g}" for name, value in costs.caps.items()},
        "prices": [] if frozen is None else [frozen.cpu_hour_usd, frozen.gpu_hour_usd],
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
