"""What one environment is like, asked of a worker that lives for that question alone.

User code never runs here: the worker gets time limits, and neither it nor what it started outlives the answer.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.errors import EnvironmentFailed, InvalidValue, visible
from toprope.records.journal.groups import Outcome
from toprope.records.worker_messages import Card, SplitSize
from toprope.sdk.checks.answers import JUNK, near_miss
from toprope.sdk.errors import WorkerDied, WorkerError, WorkerFailure, WorkerTimeout
from toprope.sdk.worker.client import worker_environment
from toprope.training.rollouts.environment_worker import EnvironmentWorker
from toprope.workbench.catalog.describe_cache import Described, question
from toprope.workbench.catalog.stray_processes import MARK, new_mark, sweep
from toprope.workbench.entries import Entry

__all__ = ["JUNK", "Describer", "Description", "Example", "failed", "require_usable"]

_SURVEY_TASKS = 500
_SURVEY_SECONDS = 1.0
_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Example:
    """A training task, and how the environment scores a few answers that say whether its scorer works."""

    messages: tuple[dict[str, Any], ...]
    reference: Any
    scores: dict[str, Outcome]
    """By answer: `reference` (where there is one), `empty`, `junk`, and `near_miss`: wrong by one sign. Each is the
    whole rollout: one answer, scored."""


@dataclass(frozen=True)
class Description:
    """What an environment is like, as its worker saw it."""

    entry: Entry
    card: Card
    examples: tuple[Example, ...]
    splits: dict[str, SplitSize]
    """By name; empty when no examples were asked for."""
    remarks: tuple[str, ...]
    """What looks wrong about the scoring of the examples, in sentences."""
    start_seconds: float
    """From starting the worker to its first answer."""
    load_seconds: float
    """Loading the environment, its imports included."""
    score_seconds: float | None = None
    """To begin a rollout and score one answer, on average over the examples."""
    memory_mb: float | None = None
    """Of the worker, after that."""


class Describer:
    """Asks workers; keeps the answers of what comes with the installation.

    Args:
        shipped: The folder of the environments that ship with us.
    """

    def __init__(self, shipped: Path) -> None:
        self._shipped = shipped
        self._described: Described[Description] = Described()

    async def describe(
        self,
        entry: Entry,
        knobs: Mapping[str, Any] | None = None,
        *,
        reward_weights: Mapping[str, float] | None = None,
        examples: int = 3,
        load_timeout_s: float = 60.0,
        call_timeout_s: float = 20.0,
        variables: Mapping[str, str] | None = None,
        network: bool = True,
    ) -> Description:
        """Asks a worker what an environment is like.

        Args:
            entry: Which.
            knobs: Settings to describe it with; the defaults for the rest.
            reward_weights: Weights to describe it with.
            examples: Training tasks to show and score; fewer where there are fewer. With 0 the card is all that is
                asked for: no task is made.
            load_timeout_s: Seconds for the worker's start, and again for loading.
            call_timeout_s: Seconds for each call after that.
            variables: Variables for the worker beside the usual ones.
            network: Whether it may have one.

        Raises:
            InvalidValue: A knob or weight is wrong.
            EnvironmentFailed: It is not ready, does not load, raises, hangs, or ends its process.
        """
        require_usable(entry)
        source = entry.environment.model_dump()
        asked = question(
            source,
            self._shipped,
            knobs=knobs,
            weights=reward_weights,
            examples=examples,
            variables=variables,
            network=network,
        )
        limits = load_timeout_s, call_timeout_s
        return await self._described.get(
            asked, lambda: self._ask(entry, knobs, reward_weights, examples, *limits, variables, network)
        )

    async def _ask(
        self,
        entry: Entry,
        knobs: Mapping[str, Any] | None,
        reward_weights: Mapping[str, float] | None,
        examples: int,
        load_timeout_s: float,
        call_timeout_s: float,
        variables: Mapping[str, str] | None,
        network: bool,
    ) -> Description:
        began = time.monotonic()
        link: EnvironmentWorker | None = None
        mark, folder = new_mark(), _folder()
        grace = 0.0  # only a worker that answered to the end gets time to end by itself
        try:
            surroundings = worker_environment({**(variables or {}), MARK: mark})
            link = await EnvironmentWorker.start(
                entry.environment.interpreter, env=surroundings, cwd=folder, timeout=load_timeout_s
            )
            started = time.monotonic()
            if not network:
                await link.limit(timeout=load_timeout_s, network=False)
            card = await link.open(
                entry.environment.model_dump(include={"file", "attribute", "adapter", "target"}),
                timeout=load_timeout_s,
                knobs=knobs,
                reward_weights=reward_weights,
            )
            loaded = time.monotonic()
            shown: tuple[Example, ...] = ()
            sizes: dict[str, SplitSize] = {}
            refused, score_s = "", None
            if examples:
                try:
                    shown, score_s = await _examples(link, examples, call_timeout_s)
                    sizes = await link.survey(_SURVEY_TASKS, _SURVEY_SECONDS, timeout=call_timeout_s + _SURVEY_SECONDS)
                except WorkerError as failure:
                    if failure.kind != "invalid":
                        raise
                    refused = failure.message  # it has no tasks with these knobs, and says why: the card stands
            memory_mb = await asyncio.to_thread(_memory_mb, link.pid) if examples else None
            grace = _GRACE_SECONDS
        except WorkerFailure as failure:
            raise failed(entry, failure) from failure
        finally:
            if link is not None:
                await asyncio.shield(link.close(grace))
            await asyncio.shield(asyncio.to_thread(sweep, mark))
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return Description(
            entry=entry,
            card=card,
            examples=shown,
            splits=sizes,
            remarks=(refused,) if refused else tuple(_remarks(card, shown)) if examples else (),
            start_seconds=started - began,
            load_seconds=loaded - started,
            score_seconds=score_s,
            memory_mb=memory_mb,
        )


def _folder() -> str | None:
    """Where a worker may write, since some environments write where they are; None where the disk has no room for it:
    nothing that describes needs it."""
    try:
        return tempfile.mkdtemp(prefix="toprope-")
    except OSError:
        return None


def require_usable(entry: Entry) -> None:
    """Passes where a worker can be asked.

    Raises:
        EnvironmentFailed: The environment is broken or not installed.
    """
    if entry.status == "broken":
        raise EnvironmentFailed(f"{entry.name} is broken: {entry.problem}", hint="Mend it and list again.")
    if not entry.usable:
        raise EnvironmentFailed(f"{entry.name} is not installed.", hint=entry.problem)


async def _examples(link: EnvironmentWorker, count: int, timeout: float) -> tuple[tuple[Example, ...], float | None]:
    """Examples, and the seconds that an answer to one took on average."""
    page = await link.tasks("train", 0, count, timeout=timeout)
    examples, calls, seconds = [], 0, 0.0
    for index, task in enumerate(page.tasks):
        answers = {"empty": "", "junk": JUNK}
        if task.reference is not None:
            answers = {"reference": str(task.reference), **answers}
            if (near := near_miss(answers["reference"])) is not None:
                answers["near_miss"] = near
        scores = {}
        for label, answer in answers.items():
            began = time.monotonic()
            scores[label] = await link.score("train", index, answer, timeout=timeout)
            calls, seconds = calls + 1, seconds + time.monotonic() - began
        examples.append(Example(tuple(task.messages), task.reference, scores))
    return tuple(examples), seconds / calls if calls else None


def _memory_mb(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss / (1 << 20)
    except psutil.Error:
        return None


def _remarks(card: Card, examples: Sequence[Example]) -> list[str]:
    """What the scores of the examples say about the scorer."""
    remarks = []
    if not examples:
        return ["The train split has no tasks."]
    for label in ("reference", "empty", "junk"):
        outcomes = [example.scores[label] for example in examples if label in example.scores]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            remarks.append(f"Scoring the {label} answer raises: {errors[0]} (such a rollout gets reward 0).")
        elif label == "reference" and not all(outcome.success for outcome in outcomes):
            best = max(outcome.reward for outcome in outcomes)
            remarks.append(f"The reference answer does not succeed everywhere (best reward {best:g}).")
        elif label != "reference" and any(outcome.success for outcome in outcomes):
            remarks.append(f"An answer that is {label} succeeds: the scorer can be fooled.")
        elif label != "reference" and any(outcome.reward > 0 for outcome in outcomes):
            most = max(outcome.reward for outcome in outcomes)
            remarks.append(f"An answer that is {label} is rewarded with up to {most:g} of {card.max_reward:g}.")
    return remarks


def failed(entry: Entry, failure: WorkerFailure) -> EnvironmentFailed | InvalidValue:
    """A worker's failure in the words of our own tree; what user code says in it is shown and steers nothing."""
    told = _told(entry, failure)
    told.message = visible(told.message)
    return told


def _told(entry: Entry, failure: WorkerFailure) -> EnvironmentFailed | InvalidValue:
    if isinstance(failure, WorkerError):
        if failure.kind == "invalid":
            return InvalidValue(f"{entry.name}: {failure.message}")
        place = f" at {failure.where}" if failure.where else ""
        if failure.kind == "load":
            return EnvironmentFailed(f"{failure.message}{place}", hint=f"{entry.name} was not loaded; mend this first.")
        return EnvironmentFailed(
            f"{entry.name} raised {failure.type}: {failure.message.rstrip('.')}{place}.",
            hint="Mend the environment's code.",
        )
    if isinstance(failure, WorkerTimeout):
        return EnvironmentFailed(
            f"{entry.name} hangs or is slow. {failure}",
            hint="Look for an endless loop, a download, or tasks that take long to make.",
        )
    if isinstance(failure, WorkerDied) and failure.code is None:
        return EnvironmentFailed(
            f"{entry.name} was not loaded. {failure}.",
            hint="Look at this machine's limits (ulimit -a: open files, processes, memory), then call again.",
        )
    died = f"{entry.name} ended its own process. {failure}" if isinstance(failure, WorkerDied) else str(failure)
    return EnvironmentFailed(died, hint="Look for os._exit, a crash in native code, or too little memory.")
