"""The report of a run: what it reached, how sure that is, how long it took, where things lie.

`build` is pure, so that a report of a run that is still going, was stopped or comes from another machine is made in the
same way as the one that the keeper writes at the end; `gather` reads what it needs from a run folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.analysis.integrity import Integrity, examine
from toprope.analysis.reports.per_environment import curricula_of, rose_each
from toprope.analysis.statistics.intervals import Proportion, rose, wilson
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import EVALUATION_VERSION, LEFT, WANDB_VERSION, RunFolder, misfits, read_json
from toprope.records.run.metrics import read_history, read_rows
from toprope.records.run.specification import Specification
from toprope.records.run.status import Event, Status, read_events
from toprope.records.run.tested import TestedModel, read_answers, read_models

__all__ = [
    "Accuracy",
    "Evaluation",
    "Example",
    "ModelReport",
    "Models",
    "Point",
    "Results",
    "Seconds",
    "build",
    "gather",
    "labels_to_tell",
    "RESULTS_VERSION",
    "read_rows",
]

RESULTS_VERSION = 1
"""Of results.json: the newest that is known here."""
_POINTS = 10
_BEFORE, _AFTER, _TEST = "before", "after", "test"
_TOLD = ("first_step", "state")
"""Events that tell when training began and ended."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Accuracy(_Part):
    """A share of successes with its 95 % interval over `tasks` tasks."""

    accuracy: float
    low: float
    high: float
    tasks: int
    rollouts: int | None = None
    """Where tasks were answered several times. The interval counts tasks: answers to one task are not independent."""
    reward_mean: float | None = None
    truncated: float | None = None
    errors: int = 0
    parts: dict[str, float] = {}
    pass_at_k: float | None = None
    all_wrong_share: float | None = None
    all_right_share: float | None = None
    parse_failures: float | None = None

    def proportion(self) -> Proportion:
        return Proportion(self.accuracy, self.low, self.high, self.tasks)


class EnvironmentAccuracy(_Part):
    """One of several environments' part in an evaluation."""

    sampled: Accuracy | None = None
    greedy: Accuracy | None = None


class Evaluation(_Part):
    """One evaluation of the policy. Parts are None where nothing was measured."""

    split: str = ""
    policy_version: int | None = None
    seconds: float | None = None
    sampled: Accuracy | None = None
    greedy: Accuracy | None = None
    environments: dict[str, EnvironmentAccuracy] = {}
    """Each environment's by itself, where a run has several: the figures above are over all tasks together."""


class Example(_Part):
    """A task and the answers to it, before and after; a test has `before` only."""

    task_id: str
    prompt: str
    reference: str | None = None
    before: str | None = None
    before_success: bool | None = None
    after: str | None = None
    after_success: bool | None = None


class ModelReport(_Part):
    """One model of a test of several. `measured` is None where it failed; `error` says why."""

    name: str
    model: str
    error: str | None = None
    measured: Accuracy | None = None
    examples: list[dict[str, Any]] = []
    seconds: float
    unanswered: int = 0
    retries: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None


class Models(_Part):
    """A test of several models. `best` by accuracy, then reward; `mean_accuracy` over those that were measured;
    `environment_works`: some model's answers were scored, most of them without an error; None where none was."""

    models: list[ModelReport]
    best: str | None = None
    mean_accuracy: float | None = None
    environment_works: bool | None = None


class Point(_Part):
    """Means over the steps up to `step` since the point before."""

    step: int
    reward: float | None = None
    success: float | None = None


class Seconds(_Part):
    """Wall time. `total`: from the request to the end; `to_first_step`: from the request to the end of the first
    optimizer step; `training`: from there to the trainer's end, over all attempts."""

    total: float
    to_first_step: float | None = None
    training: float | None = None


class Results(_Part):
    """results.json. `rose`: the sampled held-out accuracy rose by more than the intervals; None where it was not
    measured twice. Paths are absolute, None where there is nothing."""

    version: int = RESULTS_VERSION
    run_id: str
    kind: str
    state: str
    environment: str
    model: str
    evaluations: dict[str, Evaluation] = {}
    rose: bool | None = None
    rose_each: dict[str, bool] = {}
    """The same of each environment by itself, where there are several."""
    curricula: dict[str, Any] = {}
    """By environment with a curriculum: its knob, its levels, where it stands, and what opened the levels."""
    seconds: Seconds
    steps: int = 0
    rollouts: int = 0
    rollouts_per_second: float | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    weights: str | None = None
    """The folder of the checkpoint that `from_pretrained` loads."""
    wandb: dict[str, str] | None = None
    """What Weights & Biases wrote: `mode`, `folder`, and `url` when online; None where it was disabled."""
    tested: Models | None = None
    answers: list[dict[str, Any]] = []
    plot: str | None = None
    metrics: dict[str, Any] = {}
    time: dict[str, float] = {}
    """Where the trainer's time went, as shares: `wait` (for groups), `prepare`, `passes` (forward and backward), `rest`
    (optimizer, publishing, checkpoints)."""
    history: list[Point] = []
    examples: list[Example] = []
    counts: dict[str, Any] = {}
    integrity: Integrity | None = None
    """Whether these figures may be believed; None for what does not train."""


def gather(folder: RunFolder, specification: Specification, status: Status) -> Results:
    """The report of a run folder as it is now.

    Args:
        folder: Where evaluations, metrics and events are read.
        specification: The run's.
        status: The run's, which may be ahead of the one on disk.

    Raises:
        Corrupt: An evaluation is not what the driver writes.
    """
    evaluations = {path.stem: read_json(path, EVALUATION_VERSION) for path in sorted(folder.evaluations.glob("*.json"))}
    checkpoint = (status.checkpoint or {}).get("path")
    rows = read_history(folder.metrics).rows
    try:
        report = build(
            specification,
            status,
            evaluations,
            rows,
            list(read_events(folder.events, kinds=_TOLD)),
            checkpoint=_existing(folder.path / checkpoint) if checkpoint else None,
            plot=_existing(folder.plot),
        )
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise Corrupt(
            f"The records in {folder.path} are not what the crew writes: "
            f"{misfits(error) if isinstance(error, ValidationError) else error!r}.",
            hint=LEFT,
        ) from None
    return report.model_copy(
        update={
            "weights": _existing(Path(report.checkpoint) / "model") if report.checkpoint else None,
            "wandb": _wandb(folder, specification.config.logging.wandb),
            "tested": _tested(read_models(folder)),
            "curricula": curricula_of(folder),
            "answers": [answer.model_dump(mode="json") for answer in read_answers(folder)],
            "integrity": None
            if specification.kind in ("test", "ask", "sweep")
            else examine(folder, specification, evaluations, rows),
        }
    )


def build(
    specification: Specification,
    status: Status,
    evaluations: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event] = (),
    *,
    checkpoint: str | None = None,
    plot: str | None = None,
) -> Results:
    """The report, from records alone.

    Args:
        specification: The run's.
        status: The run's.
        evaluations: Label -> content of evaluations/<label>.json.
        rows: metrics.jsonl, oldest first: a row a step, or rows at about even distances.
        events: Tell when training began and ended.
        checkpoint: Path of the last checkpoint.
        plot: Path of the picture.

    Raises:
        Corrupt: An evaluation is not what the driver writes.
    """
    measured = {label: _evaluation(label, content) for label, content in evaluations.items()}
    before, after = (_sampled(measured.get(label)) for label in (_BEFORE, _AFTER))
    last = dict(rows[-1]) if rows else {}
    return Results(
        run_id=status.run_id,
        kind=status.kind,
        state=status.state,
        environment=specification.environment.name,
        model=specification.config.policy.model,
        evaluations=measured,
        rose=rose(before.proportion(), after.proportion()) if before and after else None,
        rose_each=rose_each(measured.get(_BEFORE), measured.get(_AFTER)),
        seconds=_seconds(status, events, last),
        steps=int(last.get("step") or 0),
        rollouts=_rollouts(rows),
        rollouts_per_second=last.get("rollouts_per_second"),
        checkpoint=checkpoint,
        checkpoint_step=(status.checkpoint or {}).get("step"),
        plot=plot,
        metrics=last,
        time=_time(rows),
        history=_history(rows),
        examples=_examples(evaluations),
        counts=status.counts,
    )


def labels_to_tell(labels: Iterable[str], most: int) -> list[str]:
    """Labels of evaluations in their order, with at most `most` of those along the way, at even distances and the last
    one among them: a run may have thousands.

    Args:
        labels: `before`, `step-N`, `after`, or others.
        most: At least 2.
    """

    def place(label: str) -> tuple[int, int]:
        step = label.removeprefix("step-")
        return {"before": 0, "after": 2}.get(label, 1), int(step) if step.isdigit() else 0

    ordered = sorted(labels, key=place)
    steps = [label for label in ordered if label.startswith("step-")]
    if len(steps) > most:
        kept = {steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)}
        ordered = [label for label in ordered if label in kept or not label.startswith("step-")]
    return ordered


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _wandb(folder: RunFolder, mode: str) -> dict[str, str] | None:
    """What the trainer noted of Weights & Biases; the mode alone where nothing came of it."""
    if mode == "disabled":
        return None
    try:
        noted = read_json(folder.path / "wandb.json", WANDB_VERSION)
    except NotFound:
        return {"mode": mode}
    if not isinstance(noted, dict):
        return {"mode": mode}
    return {key: str(value) for key, value in noted.items() if key != "version"}


def _tested(models: Sequence[TestedModel]) -> Models | None:
    """What several models reached; None where no such test was made."""
    if not models:
        return None
    reports = [
        ModelReport(**model.model_dump(exclude={"sampled", "answered"}), measured=_accuracy(model.sampled))
        for model in models
    ]
    measured = [(report.name, report.measured) for report in reports if report.measured is not None]
    best = max(measured, key=lambda one: (one[1].accuracy, one[1].reward_mean or 0.0), default=None)
    works = [2 * one.errors < (one.rollouts or one.tasks) for _, one in measured]
    return Models(
        models=reports,
        best=best[0] if best else None,
        mean_accuracy=_mean(one.accuracy for _, one in measured),
        environment_works=any(works) if works else None,
    )


def _each(measured: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return (measured or {}).get("environments") or {}


def _sampled(evaluation: Evaluation | None) -> Accuracy | None:
    return evaluation.sampled if evaluation else None


def _evaluation(label: str, content: Mapping[str, Any]) -> Evaluation:
    try:
        return Evaluation(
            split=content["sampled"].get("split", ""),
            policy_version=content.get("policy_version"),
            seconds=content.get("seconds"),
            sampled=_accuracy(content["sampled"]),
            greedy=_accuracy(content.get("greedy")),
            environments={
                label: EnvironmentAccuracy(
                    sampled=_accuracy(one), greedy=_accuracy(_each(content.get("greedy")).get(label))
                )
                for label, one in _each(content["sampled"]).items()
            },
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Corrupt(
            f"The evaluation {label!r} is not what the rollout driver writes: {type(error).__name__} {error}.",
            hint=f"See evaluations/{label}.json in the run folder. {LEFT}",
        ) from None


def _accuracy(measured: Mapping[str, Any] | None) -> Accuracy | None:
    if not measured or not measured["tasks"]:
        return None
    tasks, rollouts = int(measured["tasks"]), measured.get("rollouts")
    share = wilson(measured["successes"] / (rollouts / tasks if rollouts else 1), tasks)
    kept = {name: measured[name] for name in Accuracy.model_fields if name in measured and name != "accuracy"}
    return Accuracy(**kept, accuracy=share.value, low=share.low, high=share.high)


def _seconds(status: Status, events: Sequence[Event], last: Mapping[str, Any]) -> Seconds:
    end = status.ended_at or status.updated_at
    began = next((event.at for event in events if event.kind == "first_step"), status.training_at)
    left = next((event.at for event in events if event.kind == "state" and event.data.get("from") == "training"), end)
    training = None if began is None else left - began
    if status.attempt > 1 and last.get("train_seconds") is not None:
        # Between attempts nobody trained, and when a lost one ended nobody knows: the trainer's own clock goes on.
        training = float(last["train_seconds"])
    return Seconds(
        total=round(end - status.created_at, 3),
        to_first_step=None if began is None else round(began - status.created_at, 3),
        training=None if training is None else round(training, 3),
    )


def _rollouts(rows: Sequence[Mapping[str, Any]]) -> int:
    """`rollouts` of a row is how many had been delivered by then, trained on or not."""
    return max((int(row["rollouts"]) for row in rows if row.get("rollouts") is not None), default=0)


def _history(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """At most ten points, each the mean of its share of the steps."""
    count = min(_POINTS, len(rows))
    points = []
    for number in range(count):
        share = rows[number * len(rows) // count : (number + 1) * len(rows) // count]
        points.append(
            Point(
                step=share[-1]["step"],
                reward=_mean(row.get("reward") for row in share),
                success=_mean(row.get("success") for row in share),
            )
        )
    return points


def _time(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of a step's wall time, over all steps but the first, which has the start in it."""
    whole = sum(row.get("time/step") or 0.0 for row in rows[1:])
    if whole <= 0:
        return {}
    parts = ("wait", "prepare", "passes", "rest")
    return {part: round(sum(row.get(f"time/{part}") or 0.0 for row in rows[1:]) / whole, 4) for part in parts}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return round(sum(known) / len(known), 6) if known else None


def _examples(evaluations: Mapping[str, Mapping[str, Any]]) -> list[Example]:
    """The answers to the same task side by side, in the order of the first evaluation that has them."""
    found: dict[str, dict[str, Any]] = {}
    for label, side in ((_BEFORE, "before"), (_TEST, "before"), (_AFTER, "after")):
        for example in evaluations.get(label, {}).get("examples") or ():
            entry = found.setdefault(str(example["task_id"]), {"task_id": str(example["task_id"])})
            entry.setdefault("prompt", example.get("prompt", ""))
            if example.get("reference") is not None:
                entry.setdefault("reference", str(example["reference"]))
            entry[side], entry[f"{side}_success"] = example.get("answer"), example.get("success")
    return [Example(**entry) for entry in found.values()]
