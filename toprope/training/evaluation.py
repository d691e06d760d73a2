"""Measures the policy: held-out accuracy before and after, and the test of an environment.

The held-out split is sealed: its tasks' texts go into no file. Examples for people come from the validation split.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from toprope.errors import ComponentFailed
from toprope.records.folder import RunFolder, write_json
from toprope.records.groups import Outcome
from toprope.sdk.errors import WorkerError
from toprope.training.batches import PARSED
from toprope.training.inference.client import PromptTooLong, Sampling
from toprope.training.rollouts import Made, RolloutMaker

__all__ = ["Evaluator", "example_of", "newest_version", "summarize", "tally", "unplayed"]

_LONGEST_ERROR = 500


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
    """Evaluates with a maker of rollouts and writes evaluations/<label>.json.

    A task that cannot be played (its `reset` raises, its prompt is too long) counts as an error with reward 0. Every
    method raises ComponentFailed where that goes for all of them.
    """

    def __init__(
        self,
        folder: RunFolder,
        maker: RolloutMaker,
        sampling: Sampling,
        *,
        concurrency: int,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._folder, self._maker = folder, maker
        self._sampling, self._progress = sampling, progress
        self._limit = asyncio.Semaphore(concurrency)

    async def heldout(self, label: str, tasks: int, examples: int, *, greedy: bool) -> dict[str, Any]:
        """One sampled answer to each held-out task at the training temperature, and greedy ones beside them.

        Returns:
            The summary that goes into the run's status; the whole lies in the file.
        """
        began = time.time()
        sampled = await self._play(f"evaluating ({label})", "heldout", tasks, 1, self._sampling)
        result: dict[str, Any] = {
            "version": 1,
            "label": label,
            "at": began,
            "policy_version": _version(sampled),
            "temperature": self._sampling.temperature,
            "sampled": {"split": "heldout"} | summarize(_outcomes(sampled)),
            "greedy": None,
            "examples": await self._examples(examples),
        }
        if greedy:
            most_likely = await self._play(
                f"evaluating ({label}, greedy)", "heldout", tasks, 1, self._sampling.greedy()
            )
            result["greedy"] = {"split": "heldout"} | summarize(_outcomes(most_likely))
        return self._write(label, result, began)

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
            "sampled": {"split": "validation"} | summarize(_outcomes(groups)),
            "greedy": None,
            "examples": [],
        }
        return self._write(label, result, began)

    async def test(self, tasks: int, group_size: int) -> dict[str, Any]:
        """`group_size` sampled answers to each of `tasks` validation tasks."""
        began = time.time()
        groups = await self._play("testing", "validation", tasks, group_size, self._sampling)
        sampled = {"split": "validation"} | tally(groups, group_size)
        result = {
            "version": 1,
            "label": "test",
            "at": began,
            "policy_version": _version(groups),
            "temperature": self._sampling.temperature,
            "sampled": sampled,
            "greedy": None,
            "examples": [example_of(made) for made in groups[:8]],
        }
        return self._write("test", result, began)

    async def _examples(self, count: int) -> list[dict[str, Any]]:
        groups = await self._play("answering examples", "validation", count, 1, self._sampling.greedy())
        return [example_of(made) for made in groups]

    async def _play(self, what: str, split: str, tasks: int, size: int, sampling: Sampling) -> list[Made]:
        done = 0

        async def one(index: int) -> Made:
            nonlocal done
            async with self._limit:
                try:
                    made = await self._maker.make(split, index, size, sampling)
                except (WorkerError, PromptTooLong) as error:
                    made = unplayed(index, size, str(error))
            done += 1
            if done % 20 == 0 or done == tasks:
                self._progress(what, done, tasks)
            return made

        return list(await asyncio.gather(*(one(index) for index in range(tasks))))

    def _write(self, label: str, result: dict[str, Any], began: float) -> dict[str, Any]:
        result["seconds"] = round(time.time() - began, 3)
        write_json(self._folder.evaluation(label), result)
        sampled, greedy = result["sampled"], result["greedy"]
        summary = {key: sampled[key] for key in ("split", "accuracy", "tasks", "successes", "reward_mean", "errors")}
        if "rollouts" in sampled:
            summary |= {key: sampled[key] for key in ("rollouts", "all_wrong_share", "all_right_share")}
        if greedy is not None:
            summary["greedy_accuracy"] = greedy["accuracy"]
        return summary | {"seconds": result["seconds"], "policy_version": result["policy_version"]}


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
    unread = sum(not text.strip() or outcome.parts.get(PARSED, 1.0) <= 0 for text, outcome in played)
    wins = [sum(outcome.success for outcome in made.outcomes) for made in groups]
    summary = summarize([outcome for _, outcome in played])
    return summary | {
        "rollouts": len(played),
        "tasks": len(groups),
        "group_size": group_size,
        "parse_failures": unread / len(played) if played else None,
        "pass_at_k": sum(won > 0 for won in wins) / len(wins) if wins else None,
        "all_wrong_share": sum(won == 0 for won in wins) / len(wins) if wins else None,
        "all_right_share": sum(won == group_size for won in wins) / len(wins) if wins else None,
    }


def unplayed(index: int, size: int, error: str) -> Made:
    """A group of a task that could not be played: an error with reward 0 for each rollout."""
    outcomes = [Outcome(0.0, turns=0, error=error[:_LONGEST_ERROR])] * size
    return Made(f"number {index}", [], [""] * size, outcomes, [[]] * size, 0.0)


def example_of(made: Made) -> dict[str, Any]:
    """A task with the first answer to it, for people."""
    return {
        "task_id": made.task_id,
        "prompt": "\n".join(str(message.get("content", "")) for message in made.messages),
        "answer": made.texts[0],
        "reward": made.outcomes[0].reward,
        "success": made.outcomes[0].success,
        "error": made.outcomes[0].error,
    }
