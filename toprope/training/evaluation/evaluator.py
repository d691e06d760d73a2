"""Measures the policy: held-out accuracy before and after, and the test of an environment.

The held-out split is sealed: its tasks' texts go into no file, no log and no message; of what an author's code raises
over one of them the kind is kept and not the text. How each task went is kept under a hash of its content, so that runs
can be compared task by task. Examples for people come from the validation split.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import msgspec

from toprope.atomic import write_json
from toprope.errors import ComponentFailed
from toprope.records.journal.groups import Outcome
from toprope.records.run.folder import RunFolder
from toprope.records.run.full_disk import NO_ROOM
from toprope.sdk.errors import WorkerError, WorkerFailure
from toprope.training.inference.client import PromptTooLong, Sampling
from toprope.training.rollouts.environment_set import Players
from toprope.training.rollouts.group_sampler import Made
from toprope.training.trainer.batch_source import PARSED

__all__ = [
    "SEALED",
    "Evaluator",
    "by_task",
    "example_of",
    "newest_version",
    "summarize",
    "summary_of",
    "tally",
    "unplayed",
]

SEALED = "heldout"
"""The split whose texts nobody gets to see."""

_WRITE_AGAIN_S = 1.0
_LONGEST_ERROR = 500
_RAISED = re.compile(r"^([A-Za-z_][\w.]*):")
"""How the kind of what an author's code raised begins an error."""


def summarize(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts and means over rollouts: tasks, successes, accuracy, reward_mean, parts, truncated share, errors."""
    count = len(outcomes)
    parts: Counter[str] = Counter()
    for outcome in outcomes:
        parts.update(outcome.parts)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    successes = sum(outcome.success for outcome in outcomes)
    return {
        "tasks": count,
        "successes": successes,
        "accuracy": successes / count if count else None,
        "reward_mean": sum(outcome.reward for outcome in outcomes) / count if count else None,
        "parts": {name: total / count for name, total in sorted(parts.items())},
        "truncated": sum(outcome.truncated for outcome in outcomes) / count if count else None,
        "errors": sum(errors.values()),
        "error_kinds": dict(errors.most_common(5)),
    }


class Evaluator:
    """Evaluates and writes evaluations/<label>.json. Where a run has several environments, their tasks are counted
    together, and each environment's by itself under `environments`.

    A task that cannot be played (its `reset` raises, its prompt is too long) counts as an error with reward 0. Every
    method raises ComponentFailed where that goes for all of them.
    """

    def __init__(
        self,
        folder: RunFolder,
        players: Players,
        sampling: Sampling,
        *,
        concurrency: int,
        progress: Callable[[str, int, int], None],
        evaluator: Callable[[], Mapping[str, Any]] = dict,
        seen: Callable[[str, Made], None] = lambda split, made: None,
    ) -> None:
        """`evaluator` tells what measures (hashes of sources), for the file; `seen` hears of whatever is played."""
        self._folder, self._players = folder, players
        self._evaluator, self._seen = evaluator, seen
        self._sampling, self._progress = sampling, progress
        self._limit = asyncio.Semaphore(concurrency)

    async def heldout(self, label: str, tasks: int, examples: int, *, greedy: bool) -> dict[str, Any]:
        """One sampled answer to each held-out task at the training temperature, and greedy ones beside them.

        Returns:
            The summary that goes into the run's status; the whole lies in the file.
        """
        began = time.time()
        sampled = await self._play(f"evaluating ({label})", SEALED, tasks, 1, self._sampling)
        result: dict[str, Any] = {
            "version": 1,
            "label": label,
            "at": began,
            "policy_version": _version(sampled),
            "temperature": self._sampling.temperature,
            "evaluator": dict(self._evaluator()),
            "sampled": self._counted(SEALED, sampled),
            "greedy": None,
            "examples": await self._examples(examples),
        }
        if greedy:
            most_likely = await self._play(f"evaluating ({label}, greedy)", SEALED, tasks, 1, self._sampling.greedy())
            result["greedy"] = self._counted(SEALED, most_likely)
        return await self._write(label, result, began)

    async def along(self, label: str, tasks: int) -> dict[str, Any]:
        """One sampled answer to each of `tasks` validation tasks, while training goes on."""
        began = time.time()
        groups = await self._play(f"evaluating ({label})", "validation", tasks, 1, self._sampling)
        result = {
            "version": 1,
            "label": label,
            "at": began,
            "policy_version": _version(groups),
            "temperature": self._sampling.temperature,
            "evaluator": dict(self._evaluator()),
            "sampled": self._counted("validation", groups),
            "greedy": None,
            "examples": [],
        }
        return await self._write(label, result, began)

    async def test(self, tasks: int, group_size: int) -> dict[str, Any]:
        """`group_size` sampled answers to each of `tasks` validation tasks."""
        began = time.time()
        groups = await self._play("testing", "validation", tasks, group_size, self._sampling)
        sampled = {"split": "validation"} | tally(groups, group_size) | {"by_task": by_task(groups)}
        sampled |= _each(groups, lambda own: {"split": "validation"} | tally(own, group_size))
        result = {
            "version": 1,
            "label": "test",
            "at": began,
            "policy_version": _version(groups),
            "temperature": self._sampling.temperature,
            "evaluator": dict(self._evaluator()),
            "sampled": sampled,
            "greedy": None,
            "examples": [example_of(made) for made in groups[:8]],
        }
        return await self._write("test", result, began)

    async def _examples(self, count: int) -> list[dict[str, Any]]:
        groups = await self._play("answering examples", "validation", count, 1, self._sampling.greedy())
        return [example_of(made) for made in groups]

    async def _play(self, what: str, split: str, tasks: int, size: int, sampling: Sampling) -> list[Made]:
        done = 0

        async def one(index: int) -> Made:
            nonlocal done
            async with self._limit:
                try:
                    made = await self._players.make(split, index, size, sampling)
                    self._seen(split, made)
                except (WorkerError, PromptTooLong) as error:
                    made = unplayed(index, size, str(error), self._players.environment_of(split, index))
            if split == SEALED:
                made = _without_texts(made)
            done += 1
            if done % 20 == 0 or done == tasks:
                self._progress(what, done, tasks)
            return made

        try:
            async with self._players.sealed() if split == SEALED else nullcontext():
                return list(await asyncio.gather(*(one(index) for index in range(tasks))))
        except WorkerFailure as failure:
            if split != SEALED:
                raise
            # Its last words may be about the task that it died of.
            raise ComponentFailed(
                f"The worker of {failure.environment or 'the environment'} failed while held-out tasks were played "
                f"({type(failure).__name__}); what it said is sealed with them.",
                hint="test_inference plays validation tasks, whose failures are told in full.",
            ) from None

    def _counted(self, split: str, groups: list[Made]) -> dict[str, Any]:
        """The summary of one answer to each task, how each went, and what the answers look like."""

        def counted(own: list[Made]) -> dict[str, Any]:
            return {"split": split} | summarize(_outcomes(own)) | _looks(own)

        return counted(groups) | {"by_task": by_task(groups)} | _each(groups, counted)

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
        return summary_of(result)


def summary_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What of an evaluation's file goes into the run's status."""
    sampled, greedy = result["sampled"], result["greedy"]
    summary = {key: sampled[key] for key in ("split", "accuracy", "tasks", "successes", "reward_mean", "errors")}
    if "rollouts" in sampled:
        summary |= {key: sampled[key] for key in ("rollouts", "all_wrong_share", "all_right_share")}
    if greedy is not None:
        summary["greedy_accuracy"] = greedy["accuracy"]
    if each := sampled.get("environments"):
        told = ("accuracy", "tasks", "successes", "reward_mean", "errors")
        summary["environments"] = {label: {key: one[key] for key in told} for label, one in each.items()}
    return summary | {"seconds": result["seconds"], "policy_version": result["policy_version"]}


def by_task(groups: list[Made]) -> dict[str, Any]:
    """How each task went, in the order of the split: `tasks`, the hashes of their contents, and `wins`, how many of the
    answers to each were a success."""
    return {
        "tasks": [f"{made.environment}/{made.task_id}" if made.environment else made.task_id for made in groups],
        "wins": [sum(outcome.success for outcome in made.outcomes) for made in groups],
    }


def _each(groups: list[Made], counted: Callable[[list[Made]], dict[str, Any]]) -> dict[str, Any]:
    """The same figures for each environment by itself, where there are several."""
    labels = list(dict.fromkeys(made.environment for made in groups))
    if labels in ([], [""]):
        return {}
    each = {one: counted([made for made in groups if made.environment == one]) for one in labels}
    return {"parts": {}, "environments": each}  # a mean over tasks of which some do not have the part would mislead


def _looks(groups: list[Made]) -> dict[str, float | None]:
    """What answers look like, whatever they earn: their mean length in tokens, and the share nobody could read."""
    played = [(text, outcome) for made in groups for text, outcome in zip(made.texts, made.outcomes, strict=True)]
    lengths = [sum(len(turn.completion_ids) for turn in turns) for made in groups for turns in made.turns]
    return {
        "parse_failures": _unread(played) / len(played) if played else None,
        "answer_tokens": round(sum(lengths) / len(lengths), 3) if lengths else None,
    }


def _unread(played: list[tuple[str, Outcome]]) -> int:
    return sum(not text.strip() or outcome.parts.get(PARSED, 1.0) <= 0 for text, outcome in played)


def _without_texts(made: Made) -> Made:
    """The group with the kinds of its errors alone: what an author's code raises may quote the task."""
    outcomes = [
        msgspec.structs.replace(outcome, error=f"{raised[1]} (its text is sealed)")
        if outcome.error and (raised := _RAISED.match(outcome.error))
        else outcome
        for outcome in made.outcomes
    ]
    return dataclasses.replace(made, outcomes=outcomes)


def _outcomes(groups: list[Made]) -> list[Outcome]:
    return [outcome for made in groups for outcome in made.outcomes]


def _version(groups: list[Made]) -> int:
    """The policy version that was measured: the oldest that sampled a token.

    Raises:
        ComponentFailed: None did: no task could be played.
    """
    versions = [version for made in groups for turns in made.turns for turn in turns for version, _ in turn.versions]
    if not versions:
        raise ComponentFailed(
            f"None of the {len(groups)} tasks could be played; the first: {groups[0].outcomes[0].error}",
            hint="describe_environment shows what the environment asks; policy.max_context is the room there is.",
        )
    return min(versions)


def newest_version(made: Made) -> int:
    """The newest policy version that sampled a token of a group; 0 where none is known."""
    return max((version for turns in made.turns for turn in turns for version, _ in turn.versions), default=0)


def tally(groups: list[Made], group_size: int) -> dict[str, Any]:
    """What a test counts: the summary over all answers, and over tasks how many were solved at least once or always.

    `parse_failures` is the share of answers that hold no text, or that the environment says it could not read (its part
    `parsed` is 0).
    """
    played = [(text, outcome) for made in groups for text, outcome in zip(made.texts, made.outcomes, strict=True)]
    wins = [sum(outcome.success for outcome in made.outcomes) for made in groups]
    summary = summarize([outcome for _, outcome in played])
    return summary | {
        "rollouts": len(played),
        "tasks": len(groups),
        "group_size": group_size,
        "parse_failures": _unread(played) / len(played) if played else None,
        "pass_at_k": sum(won > 0 for won in wins) / len(wins) if wins else None,
        "all_wrong_share": sum(won == 0 for won in wins) / len(wins) if wins else None,
        "all_right_share": sum(won == group_size for won in wins) / len(wins) if wins else None,
    }


def unplayed(index: int, size: int, error: str, environment: str = "") -> Made:
    """A group of a task that could not be played: an error with reward 0 for each rollout."""
    outcomes = [Outcome(0.0, turns=0, error=error[:_LONGEST_ERROR])] * size
    return Made(f"number {index}", [], [""] * size, outcomes, [[]] * size, 0.0, environment=environment)


def example_of(made: Made) -> dict[str, Any]:
    """A task with the first answer to it, for people."""
    return {
        "task_id": made.task_id,
        **({"environment": made.environment} if made.environment else {}),
        "prompt": "\n".join(str(message.get("content", "")) for message in made.messages),
        "answer": made.texts[0],
        "reward": made.outcomes[0].reward,
        "success": made.outcomes[0].success,
        "error": made.outcomes[0].error,
    }
