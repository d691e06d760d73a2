"""Evaluates the policy: held-out accuracy before and after training, validation during training, and tests.

The held-out split is sealed. Texts of its tasks go into no file, log or message, and of an error that an author's code
raises over one of them only the kind is kept. Each task's result is stored under a hash of its content, so that runs
can be compared task by task. Examples for people come from the validation split.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from toprope.atomic import write_json
from toprope.errors import ComponentFailed
from toprope.records.journal.groups import JUDGE_FAILED, Outcome, comparisons
from toprope.records.run.folder import RunFolder
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.metrics import last_row
from toprope.sdk.errors import WorkerError, WorkerFailure, first_of
from toprope.text_format import said
from toprope.training.inference.client import PromptTooLong, Sampling
from toprope.training.judges.questions import NO_SCORE
from toprope.training.rollouts.endpoint_client import Unanswered
from toprope.training.rollouts.environment_set import EnvironmentSet
from toprope.training.rollouts.group_sampler import SAMPLER_ERRORS, SEALED
from toprope.training.rollouts.sampled_group import SampledGroup, lower_errors
from toprope.training.trainer.batch_source import PARSED

_WRITE_AGAIN_S = 1.0
_LOOK_EVERY_S = 0.25
_MAX_ERROR_LENGTH = 500
_MAX_TEST_EXAMPLES = 8
_RAISED = re.compile(
    r"^((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Failed|Failure|Interrupt|Mistake|Refused|Request|Timeout|Unreachable))"
    r":"
)
"""Kind of an exception at the beginning of an error. Any other word there may be of the task."""


def summarize(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts and means over rollouts: tasks, successes, accuracy, reward_mean, parts, truncated share, errors.

    Unjudged rollouts are only counted, as `unjudged`. Errors are no successes and have no reward nor parts: whatever
    stood for them would decide the mean where rewards have wide bounds.
    """
    unjudged = sum(outcome.unjudged for outcome in outcomes)
    outcomes = [outcome for outcome in outcomes if not outcome.unjudged]
    count, scored = len(outcomes), [outcome for outcome in outcomes if outcome.error is None]
    parts: Counter[str] = Counter()
    for outcome in scored:
        parts.update(outcome.parts)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    successes = sum(outcome.success for outcome in outcomes)
    return {
        "tasks": count,
        "successes": successes,
        "accuracy": successes / count if count else None,
        "reward_mean": sum(outcome.reward for outcome in scored) / len(scored) if scored else None,
        "parts": {name: total / len(scored) for name, total in sorted(parts.items())},
        "truncated": sum(outcome.truncated for outcome in outcomes) / count if count else None,
        "errors": sum(errors.values()),
        "error_kinds": dict(errors.most_common(5)),
        "unjudged": unjudged,
    }


class Evaluator:
    """Evaluates and writes evaluations/<label>.json.

    If a run has several environments, their tasks are counted together, and each environment's separately under
    `environments`. An environment with too few tasks to hold any out is counted there only, with the split `train`,
    unless all are so small. A task that cannot be sampled (its `reset` raises, its prompt is too long) counts as an
    error. Answers whose judge, opponent or model with a role failed count nowhere. Every method raises ComponentFailed
    if no task can be sampled, or no answer judged.

    Args:
        environments: The environments with the policy.
        sampling: Sampling parameters of training.
        concurrency: Groups in progress at most.
        progress: Called with what is done, and how many of how many groups are.
        digests: Returns hashes of the sources that measure, for the file.
        on_group: Called with the split and every sampled group.
    """

    def __init__(
        self,
        folder: RunFolder,
        environments: EnvironmentSet,
        sampling: Sampling,
        *,
        concurrency: int,
        progress: Callable[[str, int, int], None],
        digests: Callable[[], Mapping[str, Any]] = dict,
        on_group: Callable[[str, SampledGroup], None] = lambda split, group: None,
    ) -> None:
        self._folder, self._environments = folder, environments
        self._digests, self._on_group = digests, on_group
        self._sampling, self._progress = sampling, progress
        self._limit = asyncio.Semaphore(concurrency)

    async def evaluate_heldout(self, label: str, tasks: int, examples: int, *, greedy: bool) -> dict[str, Any]:
        """Samples one answer to each held-out task at the training temperature, and a greedy one if `greedy`.

        Returns:
            The summary for the run's status; the file has the rest.
        """
        began = time.time()
        groups = await self._sample(f"evaluating ({label})", SEALED, tasks, 1, self._sampling)
        example_groups = await self._sample("answering examples", "validation", examples, 1, self._sampling.greedy())
        result = self._result(label, began, groups, self._summary(SEALED, groups), example_groups)
        if greedy:
            most_likely = await self._sample(f"evaluating ({label}, greedy)", SEALED, tasks, 1, self._sampling.greedy())
            result["greedy"] = self._summary(SEALED, most_likely)
        return await self._write(label, result, began)

    async def evaluate_validation(self, label: str, tasks: int) -> dict[str, Any]:
        """Samples one answer to each of `tasks` validation tasks, while training goes on; returns the summary."""
        began = time.time()
        groups = await self._sample(f"evaluating ({label})", "validation", tasks, 1, self._sampling)
        result = self._result(label, began, groups, self._summary("validation", groups))
        return await self._write(label, result, began)

    async def test(self, tasks: int, group_size: int) -> dict[str, Any]:
        """Samples `group_size` answers to each of `tasks` validation tasks; returns the summary."""
        began = time.time()
        groups = await self._sample("testing", "validation", tasks, group_size, self._sampling)

        def summary(selected: list[SampledGroup]) -> dict[str, Any]:
            return {"split": self._measured_split("validation", selected)} | summarize_test(selected, group_size)

        counted = self._counted_groups(groups)
        by_task = results_by_task(counted) | {"scores": scores_by_task(_judged_groups(counted))}
        sampled = summary(counted) | {"by_task": by_task} | _by_environment(groups, summary)
        result = self._result("test", began, groups, sampled, groups[:_MAX_TEST_EXAMPLES])
        return await self._write("test", result, began)

    def _summary(self, split: str, groups: list[SampledGroup]) -> dict[str, Any]:
        """Summarize one answer per task, with results by task and figures of each environment."""

        def summary(selected: list[SampledGroup]) -> dict[str, Any]:
            outcomes = [outcome for group in selected for outcome in group.outcomes]
            return {"split": self._measured_split(split, selected)} | summarize(outcomes) | _answer_statistics(selected)

        counted = self._counted_groups(groups)
        return summary(counted) | {"by_task": results_by_task(counted)} | _by_environment(groups, summary)

    def _counted_groups(self, groups: list[SampledGroup]) -> list[SampledGroup]:
        """Return the groups that the figures of all environments together count."""
        apart = self._environments.count_apart()
        return [group for group in groups if group.environment not in apart]

    def _measured_split(self, split: str, groups: list[SampledGroup]) -> str:
        """Return the split that these groups measure; see `EnvironmentSet.measured_split`."""
        labels = {group.environment for group in groups}
        return self._environments.measured_split(split, labels.pop() if len(labels) == 1 else "")

    def _result(
        self,
        label: str,
        began: float,
        groups: list[SampledGroup],
        sampled: dict[str, Any],
        examples: list[SampledGroup] | None = None,
    ) -> dict[str, Any]:
        """The content of an evaluation's file."""
        return {
            "version": 1,
            "label": label,
            "at": began,
            "policy_version": _oldest_version(groups),
            "newest_version": max(_versions(groups), default=None),
            "temperature": self._sampling.temperature,
            "evaluator": dict(self._digests()),
            "sampled": sampled,
            "greedy": None,
            "examples": [example_record(group) for group in examples or []],
        }

    async def _sample(self, activity: str, split: str, tasks: int, size: int, sampling: Sampling) -> list[SampledGroup]:
        done = 0

        async def sample(index: int) -> SampledGroup:
            nonlocal done
            may_quote = split == SEALED
            async with self._limit:
                try:
                    group = await self._environments.sample(split, index, size, sampling)
                    self._on_group(split, group)
                except (WorkerError, PromptTooLong) as error:
                    group = failed_group(index, size, str(error), self._environments.environment_of(split, index))
                    may_quote = may_quote and isinstance(error, WorkerError)  # the other tells numbers only
                except Unanswered as error:  # by an opponent or a model with a role: no fault of the policy
                    environment = self._environments.environment_of(split, index)
                    group = failed_group(index, size, f"{JUDGE_FAILED}: {error}", environment)
            if may_quote:
                group = _without_error_texts(group)
            done += 1
            if done % 20 == 0 or done == tasks:
                self._progress(activity, done, tasks)
            return group

        try:
            async with self._environments.sealed() if split == SEALED else nullcontext():
                async with asyncio.TaskGroup() as group:
                    sampling_tasks = [group.create_task(sample(index)) for index in range(tasks)]
            return [task.result() for task in sampling_tasks]
        except (WorkerFailure, BaseExceptionGroup) as error:
            failure = first_of(error)
            if split != SEALED or not isinstance(failure, WorkerFailure):
                raise failure from failure.__cause__
            # The worker's last lines may quote the task that it died of.
            raise ComponentFailed(
                f"The worker of {failure.environment or 'the environment'} failed during held-out tasks "
                f"({type(failure).__name__}); its output is sealed with them.",
                hint="test_inference samples validation tasks, whose failures are reported in full.",
            ) from None

    async def _write(self, label: str, result: dict[str, Any], began: float) -> dict[str, Any]:
        result["seconds"] = round(time.time() - began, 3)
        while True:
            try:
                write_json(self._folder.evaluation(label), result)
                break
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
            self._progress(f"waiting for room on the disk ({label})", 0, 1)
            await asyncio.sleep(_WRITE_AGAIN_S)
        return status_summary(result)


def next_due(folder: RunFolder, step: int, every: int) -> int:
    """The step at which the next evaluation during training is due, if they are due every `every` steps.

    Earlier attempts' evaluations count unless they are of later steps, which are taken again.
    """
    labels = [path.stem.removeprefix("step-") for path in folder.evaluations.glob("step-*.json")]
    newest = max((int(number) for number in labels if number.isdecimal() and int(number) <= step), default=0)
    return (newest // every + 1) * every


async def evaluate_repeatedly(folder: RunFolder, every: int, evaluate: Callable[[str], Awaitable[None]]) -> None:
    """Evaluates every `every` steps of a run whose trainer samples no rollouts; ends when it is cancelled.

    It begins with the first step that is made from now on: until then, inference may still serve the first weights to
    a run that resumed.

    Args:
        folder: The run's, whose metrics show how far training is.
        every: Steps between evaluations. A step that passes while an evaluation goes on has none of its own.
        evaluate: Called with the label `step-N`, N being the step at which it begins.
    """
    due, earlier = 0, _size(folder.metrics)
    while True:
        if _size(folder.metrics) == earlier:
            await asyncio.sleep(_LOOK_EVERY_S)
            continue
        step = int(last_row(folder.metrics).get("step") or 0)
        due = due or next_due(folder, step, every)
        if step >= due:
            await evaluate(f"step-{step}")
            due = (step // every + 1) * every
        await asyncio.sleep(_LOOK_EVERY_S)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def status_summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an evaluation's file that goes into the run's status."""
    sampled, greedy = result["sampled"], result["greedy"]
    summary = {key: sampled[key] for key in ("split", "accuracy", "tasks", "successes", "reward_mean", "errors")}
    if "rollouts" in sampled:
        summary |= {key: sampled[key] for key in ("rollouts", "all_wrong_share", "all_right_share")}
    if greedy is not None:
        summary["greedy_accuracy"] = greedy["accuracy"]
    if environments := sampled.get("environments"):
        keys = ("split", "accuracy", "tasks", "successes", "reward_mean", "errors")
        summary["environments"] = {
            label: {key: figures[key] for key in keys if key in figures} for label, figures in environments.items()
        }
    return summary | {name: result.get(name) for name in ("seconds", "policy_version", "newest_version")}


def results_by_task(groups: list[SampledGroup]) -> dict[str, Any]:
    """Results in the order of the split: `tasks`, the hashes of the tasks' contents, and `wins`, the number of
    successful answers to each. Tasks with an unjudged answer are in `unjudged`: their wins compare with no others."""
    judged = _judged_groups(groups)
    results: dict[str, Any] = {
        "tasks": [_task_of(group) for group in judged],
        "wins": [sum(outcome.success for outcome in group.outcomes) for group in judged],
    }
    if len(judged) < len(groups):
        results["unjudged"] = sorted({_task_of(group) for group in groups} - set(results["tasks"]))
    return results


def _task_of(group: SampledGroup) -> str:
    return f"{group.environment}/{group.task_id}" if group.environment else group.task_id


def scores_by_task(groups: list[SampledGroup]) -> list[list[float]]:
    """The rewards of all answers to each task, with six significant digits; errors have none."""
    return [[float(f"{outcome.reward:.6g}") for outcome in group.outcomes if outcome.error is None] for group in groups]


def _judged_groups(groups: list[SampledGroup]) -> list[SampledGroup]:
    """Return the groups without an unjudged answer."""
    return [group for group in groups if not any(outcome.unjudged for outcome in group.outcomes)]


def _by_environment(
    groups: list[SampledGroup], summary: Callable[[list[SampledGroup]], dict[str, Any]]
) -> dict[str, Any]:
    """The summary of each environment, if there are several."""
    labels = list(dict.fromkeys(group.environment for group in groups))
    if labels in ([], [""]):
        return {}
    environments = {label: summary([group for group in groups if group.environment == label]) for label in labels}
    return {"parts": {}, "environments": environments}  # a mean over tasks that lack a part would mislead


def _answer_statistics(groups: list[SampledGroup]) -> dict[str, float | None]:
    """Mean length of the answers in tokens, and the share that could not be parsed."""
    lengths = [sum(len(turn.completion_ids) for turn in turns) for group in groups for turns in group.turns]
    return {
        "parse_failures": _parse_failures(groups),
        "answer_tokens": round(sum(lengths) / len(lengths), 3) if lengths else None,
    }


def _parse_failures(groups: list[SampledGroup]) -> float | None:
    """Share of answers without text, or with part `parsed` 0; None without answers."""
    failures = [
        not text.strip() or outcome.parts.get(PARSED, 1.0) <= 0
        for group in groups
        for text, outcome in zip(group.texts, group.outcomes, strict=True)
    ]
    return sum(failures) / len(failures) if failures else None


def _without_error_texts(group: SampledGroup) -> SampledGroup:
    """The group with the kinds of its errors only, because errors of an author's code may quote the task."""
    outcomes = [msgspec.structs.replace(outcome, error=_kind_of(outcome.error)) for outcome in group.outcomes]
    return dataclasses.replace(group, outcomes=outcomes)


def _kind_of(error: str | None) -> str | None:
    if not error or error in SAMPLER_ERRORS:
        return error
    if error.startswith(f"{JUDGE_FAILED}:") and error.endswith(NO_SCORE):  # between them an author's code may quote
        return f"{JUDGE_FAILED} ({NO_SCORE}; the rest is sealed)"
    raised = _RAISED.match(error)
    return f"{raised[1] if raised else 'an error'} (its text is sealed)"


def _versions(groups: list[SampledGroup]) -> list[int]:
    return [version for group in groups for turns in group.turns for turn in turns for version, _ in turn.versions]


def _oldest_version(groups: list[SampledGroup]) -> int | None:
    """The oldest policy version that sampled a token; None if no answer was asked for, as in games won by forfeit.

    Raises:
        ComponentFailed: No task could be sampled, or no answer judged.
    """
    versions = _versions(groups)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    errors = [outcome.error for outcome in outcomes]
    if outcomes and all(outcome.unjudged for outcome in outcomes):
        raise ComponentFailed(
            f"No answer to the {len(groups)} tasks could be judged; the first: {errors[0]}",
            hint="test_inference shows what the judge answers about validation tasks; reword its rubric "
            "(environment.rewards) or take another judge."
            if NO_SCORE in (errors[0] or "")
            else "Once the judge answers again, resume_training continues the run.",
        )
    if not versions and all(errors):
        raise ComponentFailed(
            f"None of the {len(groups)} tasks could be sampled; the first: {errors[0] if errors else None}",
            hint="check_environment shows the errors of training tasks; policy.max_context is the room for a prompt.",
        )
    return min(versions, default=None)


def newest_version(group: SampledGroup) -> int:
    """The newest policy version that sampled a token of a group; 0 if unknown."""
    return max(_versions([group]), default=0)


def summarize_test(groups: list[SampledGroup], group_size: int) -> dict[str, Any]:
    """Summary over all judged answers of a test, and shares of tasks that were solved at least once, never, or always.

    `signal_share` is the share of groups whose rewards differ.

    `parse_failures` is the share of answers that have no text, or that the environment could not parse (its part
    `parsed` is 0).
    """
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    successes_by_task = [[outcome.success for outcome in group.outcomes if not outcome.unjudged] for group in groups]
    solved = [successes for successes in successes_by_task if successes]
    return summarize(outcomes) | {
        "rollouts": sum(map(len, solved)),
        "tasks": len(solved),
        "group_size": group_size,
        "parse_failures": _parse_failures(groups),
        "pass_at_k": sum(map(any, solved)) / len(solved) if solved else None,
        "all_wrong_share": sum(not any(successes) for successes in solved) / len(solved) if solved else None,
        "all_right_share": sum(map(all, solved)) / len(solved) if solved else None,
        "signal_share": sum(map(_has_signal, groups)) / len(groups) if groups else None,
    }


def _has_signal(group: SampledGroup) -> bool:
    """Return True if rewards that are compared differ, so that training on the group teaches something."""
    rewards = [outcome.reward for outcome in lower_errors(group.outcomes)]
    sets = [[rewards[peer] for peer in peers] for _, peers in comparisons(group.outcomes)]
    return any(max(compared) - min(compared) > 1e-9 for compared in sets)


def failed_group(index: int, size: int, error: str, environment: str = "") -> SampledGroup:
    """A group of a task that could not be sampled: an error for each rollout."""
    outcomes = [Outcome(0.0, turns=0, error=error[:_MAX_ERROR_LENGTH])] * size
    return SampledGroup(f"number {index}", [], [""] * size, outcomes, [[]] * size, 0.0, environment=environment)


def example_record(group: SampledGroup) -> dict[str, Any]:
    """A task with the first answer to it, all turns of it, for people."""
    return {
        "task_id": group.task_id,
        **({"environment": group.environment} if group.environment else {}),
        "prompt": "\n".join(said(message) for message in group.messages),
        "answer": group.transcripts[0] if group.transcripts else group.texts[0],
        "turns": group.outcomes[0].turns,
        "reward": group.outcomes[0].reward,
        "success": group.outcomes[0].success,
        "error": group.outcomes[0].error,
    }
