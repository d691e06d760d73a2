"""The rows and summaries that trackers get, made from the records of a run.

Names: `train/...` for a row of metrics.jsonl, `heldout/...` and `validation/...` for an evaluation during training,
`test/...` for a test, `sweep/...` for a candidate. Only figures over tasks leave the run's folder, never a held-out
task or the hash of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from toprope.analysis.reports.report import evaluation_of
from toprope.analysis.reports.results import Accuracy, Evaluation
from toprope.records.run.tested_models import TestedModel
from toprope.records.sweep_journal import Scored, Standing
from toprope.trackers.tracker import Value

_FIGURES = ("accuracy", "low", "high", "tasks", "reward_mean", "truncated", "errors", "pass_at_k")
_POSITION = ("step", "time")


def step_row(row: Mapping[str, Any]) -> dict[str, Value]:
    """A row of metrics.jsonl."""
    values: dict[str, Value] = {f"train/{name}": value for name, value in _numbers(row) if name not in _POSITION}
    return values | {"train/global_step": int(row["step"])}


def evaluation_rows(label: str, content: Mapping[str, Any], step: int) -> Iterator[dict[str, Value]]:
    """The rows of evaluations/<label>.json: one, and for a test of tasks that are not held out one per task.

    Figures on training tasks, of an environment with too few to hold any out, are below `evaluation`, because `train`
    has the trainer's.

    Args:
        step: Steps done when it was made.

    Raises:
        Corrupt: It does not have the form that the driver writes.
    """
    evaluation = evaluation_of(label, content)
    size = content["sampled"].get("group_size")
    if label == "test" and (evaluation.split == "validation" or size):
        yield from _task_rows("test", content["sampled"].get("by_task") or {}, size)
        return
    prefix = "evaluation" if evaluation.split == "train" else evaluation.split or label
    yield dict(_evaluation(evaluation, prefix)) | {"train/global_step": step}


def evaluation_summary(label: str, content: Mapping[str, Any]) -> dict[str, Value]:
    """The figures of an evaluation below its label, such as `after/heldout/accuracy`. Raises: see `evaluation_rows`."""
    evaluation = evaluation_of(label, content)
    return dict(_evaluation(evaluation, f"{label}/{evaluation.split}" if evaluation.split else label))


def model_rows(models: list[TestedModel]) -> Iterator[dict[str, Value]]:
    """The tasks of a test, one row each, with the mean reward of every model's answers."""
    for place in range(max((len(model.scores) for model in models), default=0)):
        row: dict[str, Value] = {"test/step": place + 1}
        for model in models:
            if place < len(model.scores) and model.scores[place]:
                row[f"test/{model.name}/score"] = sum(model.scores[place]) / len(model.scores[place])
        yield row


def model_summary(models: list[TestedModel]) -> dict[str, Value]:
    """The figures of each model of a test."""
    summary: dict[str, Value] = {}
    for model in models:
        prefix = f"test/{model.name}"
        summary[f"{prefix}/model"] = model.model
        if model.error is not None:
            summary[f"{prefix}/error"] = model.error[:300]
        if model.sampled is not None:
            content = {"sampled": model.sampled}
            summary |= dict(_evaluation(evaluation_of("test", content), prefix))
        if model.cost_usd is not None:
            summary[f"{prefix}/cost_usd"] = model.cost_usd
    return summary


def candidate_row(number: int, scored: Scored, standing: Standing, best: float | None) -> dict[str, Value]:
    """A candidate of a sweep with its score, values and the `best` score so far.

    Args:
        number: Its place in the order of scores, from 1.
    """
    candidate = standing.candidates[scored.candidate]
    row: dict[str, Value] = {"sweep/candidate": number, "sweep/id": scored.candidate}
    row["sweep/epoch"] = standing.born[scored.candidate]
    row |= {f"sweep/{name}": value for name, value in candidate.values.items() if isinstance(value, int | float | str)}
    for name, value in (("score", scored.score), ("best", best)):
        if value is not None and math.isfinite(value):
            row[f"sweep/{name}"] = value
    return row


def sweep_summary(standing: Standing) -> dict[str, Value]:
    """The best candidate of a sweep and its measurement on held-out tasks."""
    summary: dict[str, Value] = {"sweep/candidates": len(standing.scores), "sweep/steps": standing.steps}
    if (best := standing.best) is not None and best.score is not None:
        summary |= {"sweep/best": best.score, "sweep/best_id": best.candidate}
        run = standing.runs.get(best.candidate)
        summary |= {"sweep/best_run": run} if run else {}
    measured = standing.final.measured if standing.final else None
    if measured is not None and measured.tasks and measured.successes is not None:
        content = {"sampled": {"split": "heldout", **measured.model_dump(include={"tasks", "successes", "accuracy"})}}
        summary |= dict(_evaluation(evaluation_of("final", content), "final/heldout"))
    return summary


def own_row(values: Mapping[str, Any], step: int) -> dict[str, Value]:
    """The evaluation that a custom trainer made itself."""
    return {f"own/{name}": value for name, value in _numbers(values)} | {"train/global_step": step}


def _task_rows(prefix: str, by_task: Mapping[str, Any], size: int | None) -> Iterator[dict[str, Value]]:
    scores = by_task.get("scores") or []
    for place, wins in enumerate(by_task.get("wins") or []):
        row: dict[str, Value] = {f"{prefix}/step": place + 1, f"{prefix}/successes": wins}
        if size:
            row[f"{prefix}/success"] = wins / size
        if place < len(scores) and scores[place]:
            row[f"{prefix}/score"] = sum(scores[place]) / len(scores[place])
        yield row


def _evaluation(evaluation: Evaluation, prefix: str) -> Iterator[tuple[str, Value]]:
    yield from _accuracy(evaluation.sampled, prefix)
    yield from _accuracy(evaluation.greedy, f"{prefix}/greedy")
    for label, environment in evaluation.environments.items():
        yield from _accuracy(environment.sampled, f"{prefix}/{label}")
        yield from _accuracy(environment.greedy, f"{prefix}/{label}/greedy")


def _accuracy(measured: Accuracy | None, prefix: str) -> Iterator[tuple[str, Value]]:
    if measured is not None:
        for name, value in _numbers(measured.model_dump(include=set(_FIGURES))):
            yield f"{prefix}/accuracy_{name}" if name in ("low", "high") else f"{prefix}/{name}", value


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for name, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, value
