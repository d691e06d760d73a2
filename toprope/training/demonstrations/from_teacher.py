"""Collects demonstrations for supervised fine-tuning: a teacher plays training tasks, what was solved is kept.

The teacher is the environment's own solver (`Environment.solve`), or a model at an endpoint. Demonstrations are cached
in a file by everything that they depend on, so that the next run has them at once, and an interrupted one goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toprope.atomic import replacing
from toprope.errors import ComponentFailed, TopropeError
from toprope.records.journal.demonstrations import Trace, append_traces, read_traces
from toprope.records.run.specification import Specification
from toprope.sdk.errors import WorkerError, WorkerFailure
from toprope.training.inference.client import Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient, Unanswered
from toprope.training.rollouts.environment_host import Hosted
from toprope.training.rollouts.environment_worker import EnvironmentWorker
from toprope.training.rollouts.mixture_weights import Claim, shares
from toprope.training.rollouts.restarting_worker import Worker

__all__ = ["Collector", "cache_of", "demonstrate"]

_AT_ONCE = 8
_KEEP_EVERY = 32
_GIVE_UP_AFTER = 64
"""Tasks in a row that nobody could solve, before any was."""


async def demonstrate(
    hosts: Sequence[Hosted],
    specification: Specification,
    path: Path,
    teacher: EndpointClient | None,
    tell: Callable[[str, int, int], None],
) -> Path:
    """Has a teacher solve training tasks of every environment of a run, as many of each as it has shares.

    Args:
        hosts: The environments.
        specification: The run's.
        path: The file to write, at once.
        teacher: A model at an endpoint; None: the environments' own solvers.
        tell: Progress: what, done, total.

    Raises: see `Collector.collect`.
    """
    wanted = specification.config.sft.tasks
    parts = shares([Claim(host.label, host.plan.weight, host.plan.min_share) for host in hosts])
    found: list[Trace] = []
    for host in hosts:
        cache, timeout_s = cache_of(specification, host), host.plan.section.call_timeout_s
        collector = Collector(host.worker, specification, cache, teacher, tell, timeout_s)
        try:
            found += await collector.collect(max(1, round(wanted * parts[host.label])))
        except (TopropeError, WorkerFailure) as error:
            raise host.named(error) from error
    with replacing(path) as temporary:
        append_traces(temporary, found)
    return path


def cache_of(specification: Specification, host: Hosted) -> Path:
    """Where the demonstrations of an environment of such a run lie, beside the embedded policies."""
    section = specification.config.sft
    teacher = specification.teacher.model_dump(mode="json") if specification.teacher else "solver"
    depends = [
        host.source.model_dump(mode="json"),
        host.loaded["loaded"],
        host.plan.section.knobs,
        teacher,
        section.temperature,
        section.max_new_tokens,
    ]
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return Path(specification.policy_cache).parent / "traces" / f"{digest}.jsonl"


class Collector:
    """Plays tasks with a teacher.

    Args:
        worker: The environment's.
        specification: The run's.
        cache: File of what was collected before, which grows.
        teacher: A model at an endpoint; None: the environment's own solver.
        tell: Progress: what, done, total.
        timeout_s: Seconds a call into the environment may take.
    """

    def __init__(
        self,
        worker: Worker,
        specification: Specification,
        cache: Path,
        teacher: EndpointClient | None,
        tell: Callable[[str, int, int], None],
        timeout_s: float,
    ) -> None:
        self._worker, self._section, self._cache = worker, specification.config.sft, cache
        self._teacher, self._tell, self._timeout = teacher, tell, timeout_s
        self._name = specification.config.sft.teacher
        self._temperature = Sampling(self._section.temperature, 1.0, self._section.max_new_tokens)
        self._failed_in_a_row, self._solved = 0, 0

    async def collect(self, tasks: int) -> list[Trace]:
        """Demonstrations of the first `tasks` training tasks, `traces_per_task` of each that was solved so often.

        Raises:
            ComponentFailed: Nobody solved any of them, or nobody is there to demonstrate.
            TopropeError, toprope.sdk.errors.WorkerFailure: The teacher or the environment is gone.
        """
        known: dict[tuple[str, int], Trace] = {}
        if self._section.regenerate:
            self._cache.unlink(missing_ok=True)
        else:
            known = {(trace.task_id, trace.variant): trace for trace in read_traces(self._cache)}
        kept: dict[int, list[Trace]] = defaultdict(list)
        fresh: list[Trace] = []
        done = 0
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(index: int) -> None:
            nonlocal done
            async with limit:
                for variant in range(self._section.traces_per_task):
                    trace, new = await self._demonstrated(index, variant, known)
                    if trace is not None:
                        kept[index].append(trace)
                        if new:
                            fresh.append(trace)
            done += 1
            self._note(bool(kept[index]))
            self._tell("collecting demonstrations", done, tasks)
            if len(fresh) >= _KEEP_EVERY:
                append_traces(self._cache, fresh)
                fresh.clear()

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(tasks):
                    group.create_task(one(index))
        except BaseExceptionGroup as failures:
            cause: BaseException = failures
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise cause from None
        finally:
            if fresh:
                append_traces(self._cache, fresh)
        found = [trace for index in sorted(kept) for trace in kept[index]]
        if not found:
            raise self._nobody()
        return found

    def _note(self, solved: bool) -> None:
        self._solved += solved
        self._failed_in_a_row = 0 if solved else self._failed_in_a_row + 1
        if not self._solved and self._failed_in_a_row >= _GIVE_UP_AFTER:
            raise self._nobody()

    def _nobody(self) -> TopropeError:
        who = "the environment's own solver" if self._teacher is None else f"the model {self._name}"
        return ComponentFailed(
            f"{who[0].upper()}{who[1:]} solved none of the tasks, so there is nothing to learn from.",
            hint="Set sft.teacher to a model that the owner named (test_inference measures models), or write solve() "
            "in the environment.",
        )

    async def _demonstrated(
        self, index: int, variant: int, known: dict[tuple[str, int], Trace]
    ) -> tuple[Trace | None, bool]:
        """A demonstration of a task, and whether it is new; None where nobody succeeded."""
        for attempt in range(self._section.attempts):
            try:
                trace = await self._play(index, variant, known, 1000 * attempt + variant)
            except (WorkerError, Unanswered):
                continue
            if trace is not None:
                return trace, (trace.task_id, variant) not in known
            if self._teacher is None and self._section.temperature == 0:
                break
        return None, False

    async def _play(self, index: int, variant: int, known: dict[tuple[str, int], Trace], draw: int) -> Trace | None:
        link = await self._worker.link()
        start = await link.begin("train", index, 1, timeout=self._timeout)
        [handle], messages = start.rollouts, list(start.messages)
        cached = known.get((start.task_id, variant))
        open_still = True
        try:
            if cached is not None:
                return cached
            while True:
                answer = await self._answer(link, handle, messages, draw)
                if answer is None:
                    return None
                messages.append({"role": "assistant", "content": answer})
                [result] = await link.advance([[handle, answer, False]], timeout=self._timeout)
                if not result.done:
                    messages += result.messages
                    continue
                open_still = False
                outcome = result.outcome
                if outcome is None or not outcome.success:
                    return None
                return Trace(
                    task_id=start.task_id,
                    variant=variant,
                    messages=messages,
                    reward=outcome.reward,
                    parts=outcome.parts,
                    turns=outcome.turns,
                    teacher=self._name,
                )
        finally:
            if open_still and link.alive:
                await link.discard([handle], timeout=self._timeout)

    async def _answer(
        self, link: EnvironmentWorker, handle: int, messages: list[dict[str, Any]], draw: int
    ) -> str | None:
        if self._teacher is None:
            return await link.solve(handle, draw, timeout=self._timeout)
        return (await self._teacher.chat(messages, self._temperature))[0].text
