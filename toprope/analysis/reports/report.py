"""Build the report of a run: accuracies with intervals, times and paths.

`build` is pure, so the report of a live, stopped or foreign run is made in the same way as the one that the keeper
writes at the end. `gather` reads a run folder and calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toprope.analysis.integrity import examine
from toprope.analysis.reports.results import (
    Accuracy,
    EnvironmentAccuracy,
    Evaluation,
    Example,
    ModelReport,
    Models,
    Point,
    Results,
    Seconds,
)
from toprope.analysis.statistics.accuracy_change import change_by_training
from toprope.analysis.statistics.intervals import wilson
from toprope.errors import Corrupt, NotFound
from toprope.records.run.curriculum import Curricula
from toprope.records.run.folder import (
    EVALUATION_VERSION,
    REPAIR_HINT,
    TRACKERS_VERSION,
    RunFolder,
    describe_misfits,
    read_json,
    translate_paths,
)
from toprope.records.run.metrics import read_history
from toprope.records.run.specification import Specification, moved_home
from toprope.records.run.status import Event, Status, read_events
from toprope.records.run.tested_models import TestedModel, best_model, read_answers, read_measurements, read_models

_POINTS = 10
_TIMING_EVENTS = ("first_step", "state")
"""Kinds of events that mark the start and the end of training."""


def gather(folder: RunFolder, specification: Specification, status: Status) -> Results:
    """Build the report of a run folder as it is now.

    Args:
        folder: The run folder; evaluations, metrics and events are read from it.
        status: The run's status, which may be newer than the one on disk.

    Raises:
        Corrupt: An evaluation or a metric does not have the expected form.
    """
    evaluations = {path.stem: read_json(path, EVALUATION_VERSION) for path in sorted(folder.evaluations.glob("*.json"))}
    checkpoint = (status.checkpoint or {}).get("path")
    rows, trackers = read_history(folder.metrics).rows, trackers_of(folder)
    try:
        report = build(
            specification,
            status,
            evaluations,
            rows,
            list(read_events(folder.events, kinds=_TIMING_EVENTS)),
            checkpoint=_existing(folder.path / checkpoint) if checkpoint else None,
            plot=_existing(folder.plot),
        )
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise Corrupt(
            f"The records in {folder.path} do not have the expected form: "
            f"{describe_misfits(error) if isinstance(error, ValidationError) else error!r}.",
            hint=REPAIR_HINT,
        ) from None
    return report.model_copy(
        update={
            "weights": _existing(Path(report.checkpoint) / "model") if report.checkpoint else None,
            "wandb": _wandb(trackers, specification.config.logging.wandb),
            "trackers": trackers,
            "tested": _summarise_test(read_models(folder)),
            "curricula": curricula_of(folder),
            "standard": read_measurements(folder),
            "answers": [answer.model_dump(mode="json") for answer in read_answers(folder)],
            "integrity": None
            if not specification.run_kind.trains
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
    """Build the report from records that were read already.

    Args:
        evaluations: Label -> content of evaluations/<label>.json.
        rows: Rows of metrics.jsonl, oldest first: one per step, or a thinned sample at even distances.
        events: Events of kind `first_step` and `state`.
        checkpoint: Path of the last checkpoint.
        plot: Path of the plot.

    Raises:
        Corrupt: An evaluation does not have the expected form.
    """
    measured = {label: evaluation_of(label, content) for label, content in evaluations.items()}
    change, change_each = change_by_training(evaluations)
    last_metrics = dict(rows[-1]) if rows else {}
    return Results(
        run_id=status.run_id,
        kind=status.kind,
        state=status.state,
        environment=specification.environment.name,
        model=specification.config.policy.model,
        evaluations=measured,
        change=change,
        change_each=change_each,
        rose=None if change is None else change.verdict == "rose",
        seconds=_seconds(status, events, last_metrics),
        steps=int(last_metrics.get("step") or 0),
        rollouts=_rollouts(rows),
        rollouts_per_second=last_metrics.get("rollouts_per_second"),
        checkpoint=checkpoint,
        checkpoint_step=(status.checkpoint or {}).get("step"),
        plot=plot,
        metrics=last_metrics,
        time=_time(rows),
        history=_history(rows),
        examples=_examples(evaluations),
        counts=status.counts,
    )


def labels_to_tell(labels: Iterable[str], most: int) -> list[str]:
    """Order evaluation labels and thin those between `before` and `after` to `most` at even distances.

    A run may have thousands of evaluations. The last one is always kept.

    Args:
        labels: `before`, `step-N`, `after`, or others.
        most: Labels `step-N` to keep; at least 2.
    """

    def place(label: str) -> tuple[int, int]:
        step = label.removeprefix("step-")
        return {"before": 0, "after": 2}.get(label, 1), int(step) if step.isdigit() else 0

    ordered = sorted(labels, key=place)
    steps = [label for label in ordered if label.startswith("step-")]
    if len(steps) > most:
        kept_steps = {steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)}
        ordered = [label for label in ordered if label in kept_steps or not label.startswith("step-")]
    return ordered


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _wandb(trackers: Mapping[str, Mapping[str, Any]], mode: str) -> dict[str, str] | None:
    if mode == "disabled":
        return None
    noted = trackers.get("wandb", {})
    return {"mode": mode} | {key: value for key, value in noted.items() if isinstance(value, str)}


def trackers_of(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Return what each tracker of a run told about itself: `folder`, `url`, and `folders` of all attempts.

    Raises:
        Corrupt: The file cannot be read; TooNew if a newer version wrote it.
    """
    try:
        trackers = dict(read_json(folder.path / "trackers.json", TRACKERS_VERSION).get("trackers", {}))
    except NotFound:
        return {}
    return {name: translate_paths(told, moved_home(folder)) for name, told in trackers.items()}


def _summarise_test(models: Sequence[TestedModel]) -> Models | None:
    """Summarise a test of several models; None if there was none."""
    if not models:
        return None
    reports = [
        ModelReport(**model.model_dump(exclude={"sampled"}), measured=_accuracy(model.sampled)) for model in models
    ]
    measured = [(report.name, report.measured) for report in reports if report.measured is not None]
    best = best_model(models)
    works = [2 * accuracy.errors < (accuracy.rollouts or accuracy.tasks) for _, accuracy in measured]
    return Models(
        models=reports,
        best=best.name if best else None,
        mean_accuracy=_mean(accuracy.accuracy for _, accuracy in measured),
        environment_works=any(works) if works else None,
    )


def _by_environment(measured: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return (measured or {}).get("environments") or {}


def evaluation_of(label: str, content: Mapping[str, Any]) -> Evaluation:
    """Build the report of one evaluation from the content of its file.

    Raises:
        Corrupt: It does not have the form that the driver writes.
    """
    try:
        return Evaluation(
            split=content["sampled"].get("split", ""),
            policy_version=content.get("policy_version"),
            newest_version=content.get("newest_version"),
            seconds=content.get("seconds"),
            sampled=_accuracy(content["sampled"]),
            greedy=_accuracy(content.get("greedy")),
            environments={
                label: EnvironmentAccuracy(
                    split=environment.get("split", ""),
                    sampled=_accuracy(environment),
                    greedy=_accuracy(_by_environment(content.get("greedy")).get(label)),
                )
                for label, environment in _by_environment(content["sampled"]).items()
            },
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Corrupt(
            f"The evaluation {label!r} does not have the form that the driver writes: {type(error).__name__} {error}.",
            hint=f"See evaluations/{label}.json in the run folder. {REPAIR_HINT}",
        ) from None


def _accuracy(measured: Mapping[str, Any] | None) -> Accuracy | None:
    if not measured or not measured["tasks"]:
        return None
    tasks, rollouts = int(measured["tasks"]), measured.get("rollouts")
    successes = measured["successes"] * tasks / rollouts if rollouts else measured["successes"]
    share = wilson(min(successes, tasks), tasks)
    fields = {name: measured[name] for name in Accuracy.model_fields if name in measured and name != "accuracy"}
    return Accuracy(**fields, accuracy=share.value, low=share.low, high=share.high)


def _seconds(status: Status, events: Sequence[Event], last_metrics: Mapping[str, Any]) -> Seconds:
    end = status.ended_at or status.updated_at
    began = next((event.at for event in events if event.kind == "first_step"), status.training_at)
    left = [event for event in events if event.kind == "state" and event.data.get("from") == "training"]
    paused = [event for event in left if event.data.get("to") == "paused"]
    training_end = next((event.at for event in left if event not in paused), end)
    training = None if began is None else training_end - began
    if (paused or status.attempt > 1) and last_metrics.get("train_seconds") is not None:
        # Time between attempts is not training, and the end of a lost attempt, or of training in a pause, is unknown:
        # use the trainer's own clock.
        training = float(last_metrics["train_seconds"])
    return Seconds(
        total=round(end - status.created_at, 3),
        to_first_step=None if began is None else round(began - status.created_at, 3),
        training=None if training is None else round(training, 3),
    )


def _rollouts(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the rollouts delivered to the trainer so far, used or not."""
    return max((int(row["rollouts"]) for row in rows if row.get("rollouts") is not None), default=0)


def _history(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Average the rows to at most ten points."""
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
    """Return shares of a step's wall time, without the first step, which includes start-up."""
    whole = sum(row.get("time/step") or 0.0 for row in rows[1:])
    if whole <= 0:
        return {}
    parts = ("wait", "prepare", "passes", "rest")
    return {part: round(sum(row.get(f"time/{part}") or 0.0 for row in rows[1:]) / whole, 4) for part in parts}


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return round(sum(finite) / len(finite), 6) if finite else None


def _examples(evaluations: Mapping[str, Mapping[str, Any]]) -> list[Example]:
    """Pair the answers to each task before and after, in the order of the first evaluation that has them."""
    entries: dict[str, dict[str, Any]] = {}
    for label, side in (("before", "before"), ("test", "before"), ("after", "after")):
        for example in evaluations.get(label, {}).get("examples") or ():
            entry = entries.setdefault(str(example["task_id"]), {"task_id": str(example["task_id"])})
            entry.setdefault("prompt", example.get("prompt", ""))
            if example.get("reference") is not None:
                entry.setdefault("reference", str(example["reference"]))
            entry[side], entry[f"{side}_success"] = example.get("answer"), example.get("success")
    return [Example(**entry) for entry in entries.values()]


def curricula_of(folder: RunFolder) -> dict[str, Any]:
    """Return each environment's curriculum: knob, levels, present level and its first step, and its measurements.

    `opened` lists the measurements that raised the level, `last` is the newest one.
    """
    try:
        curricula = Curricula.read(folder)
    except Corrupt:
        return {}
    return {
        label: {
            "knob": curriculum.knob,
            "levels": curriculum.levels,
            "level": curriculum.level,
            "since": curriculum.since,
            "opened": [measure.model_dump(exclude={"moved"}) for measure in curriculum.measures if measure.moved],
            "last": curriculum.measures[-1].model_dump(exclude={"moved"}) if curriculum.measures else None,
        }
        for label, curriculum in (curricula.environments if curricula else {}).items()
    }
