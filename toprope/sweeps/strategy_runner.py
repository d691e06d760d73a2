"""Calls a strategy: a built-in one in this process, the owner's own in a worker. Checks its answers in both cases.

A strategy of the owner's own may lack methods; `toprope.sdk.evolution.Evolution` provides the missing ones.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from toprope.errors import ComponentFailed
from toprope.records.messages import ENV_FOLDER
from toprope.records.run.specification import Dimension, SweepPlan
from toprope.records.sweep_journal import Candidate, Measured
from toprope.sdk.errors import WorkerError, WorkerFailure
from toprope.sdk.worker.client import worker_environment
from toprope.sweeps.planning import STRATEGY_METHODS, create_strategy, strategy_arguments
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.walls import code_wall, passed_on

_LOAD_S, _CALL_S = 60.0, 60.0


class StrategyRunner:
    """The strategy of one sweep. Create it by `open` and end it by `close`."""

    def __init__(
        self, plan: SweepPlan, worker: EnvironmentWorker | None = None, handle: int = 0, methods: Sequence[str] = ()
    ) -> None:
        self._plan, self._built_in = plan, create_strategy(plan)
        self._worker, self._handle, self._methods = worker, handle, frozenset(methods)

    @classmethod
    async def open(cls, plan: SweepPlan) -> StrategyRunner:
        """Load the strategy of a plan.

        Raises:
            ComponentFailed: The owner's own strategy does not load.
        """
        if plan.file is None:
            return cls(plan)
        # Processes that the strategy leaves are recognized by the run's folder in their environment.
        variables = {name: value for name, value in os.environ.items() if name == ENV_FOLDER}
        wall = code_wall(passed_on(), [plan.file])
        worker = await EnvironmentWorker.behind(wall, env=worker_environment(variables), timeout=_LOAD_S)
        try:
            file, name = plan.file, plan.strategy
            try:
                strategy = await worker.make(
                    file, name, strategy_arguments(plan), wanted=STRATEGY_METHODS, timeout=_LOAD_S
                )
            except WorkerError as error:
                if "is not made with these arguments" not in str(error):
                    raise
                strategy = await worker.make(file, name, {}, wanted=STRATEGY_METHODS, timeout=_LOAD_S)
            return cls(plan, worker, strategy.handle, strategy.methods)
        except WorkerFailure as error:
            await worker.close()
            raise ComponentFailed(
                f"The strategy {plan.strategy} of {plan.file} does not load: {error}",
                hint="docs/sweeps.md shows a strategy that loads.",
            ) from error
        except BaseException:
            await worker.close()
            raise

    async def close(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            await self._worker.close()

    async def start(self) -> list[Any]:
        """Return the first population."""
        return self._check_list(await self._ask("start", []))

    async def evaluate(self, candidate: Candidate, measured: Measured) -> float | None:
        """Return the score of a measured candidate; None if it has no score."""
        score = await self._ask("evaluate", [candidate.model_dump(), measured.model_dump()])
        if score is None:
            return None
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise self._invalid("evaluate", f"{score!r}, which is not a number")
        return float(score)

    async def select(self, population: Sequence[Candidate], scores: Sequence[float | None]) -> list[str]:
        """Return the ids of the candidates that survive an epoch, best first."""
        answer = await self._ask("select", [[candidate.model_dump() for candidate in population], list(scores)])
        known_ids = {candidate.id for candidate in population}
        ids = (
            [entry.get("id") if isinstance(entry, dict) else entry for entry in answer]
            if isinstance(answer, list)
            else [None]
        )
        survivors = [entry for entry in ids if isinstance(entry, str) and entry in known_ids]
        if len(survivors) < len(ids):
            raise self._invalid("select", "a candidate that is not in the population")
        return list(dict.fromkeys(survivors))

    async def advance(
        self, epoch: int, survivors: Sequence[Candidate], history: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Return the population of an epoch after the first."""
        parents = [candidate.model_dump() for candidate in survivors]
        if self._worker is not None and "advance" not in self._methods and "mutate" in self._methods and parents:
            missing = max(self._plan.population - len(parents), 0)
            calls = [[parents[number % len(parents)]] for number in range(missing)]
            children = await self._call("mutate", calls) if calls else []
            for child, (parent,) in zip(children, calls, strict=True):
                if isinstance(child, dict):
                    child.setdefault("parent", parent["id"])
                    child.pop("id", None)
            return [*parents, *children]
        return self._check_list(await self._ask("advance", [epoch, parents, [dict(record) for record in history]]))

    async def _ask(self, method: str, arguments: list[Any]) -> Any:
        if self._worker is not None and method in self._methods:
            return (await self._call(method, [arguments]))[0]
        answer = getattr(self._built_in, method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    async def _call(self, method: str, calls: list[list[Any]]) -> list[Any]:
        assert self._worker is not None
        try:
            return await self._worker.invoke(self._handle, method, calls, timeout=_CALL_S)
        except WorkerFailure as error:
            raise ComponentFailed(f"The strategy {self._plan.strategy} failed in {method}: {error}") from error

    def candidates(self, answer: Sequence[Any], known: Mapping[str, Candidate], most_new: int) -> list[Candidate]:
        """Validate a population that a strategy returned, and assign ids to new candidates.

        Args:
            answer: The answer of `start` or `advance`.
            known: Every candidate so far, by id.
            most_new: The number of new candidates that the plan has room for; more are left out.

        Raises:
            ComponentFailed: An element is not a candidate, or a value is outside its space.
        """
        candidates: list[Candidate] = []
        number = len(known)
        for entry in answer:
            if not isinstance(entry, dict) or not isinstance(entry.get("values"), dict):
                raise self._invalid("advance", f"{entry!r:.120}, which is not a candidate")
            former = known.get(str(entry.get("id")))
            if former is not None and former.values == entry["values"]:
                candidates.append(former)
                continue
            if number - len(known) >= most_new:
                continue
            number += 1
            for role in ("parent", "continues"):
                if entry.get(role) is not None and entry[role] not in known:
                    raise self._invalid("advance", f"{role} {entry[role]!r:.40}, which is not a known candidate")
            steps = entry.get("steps") or self._plan.steps
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise self._invalid("advance", f"steps {steps!r:.40}")
            values = {name: self._value(name, kind, entry["values"]) for name, kind in self._plan.space.items()}
            candidates.append(
                Candidate(
                    id=f"c{number:03d}",
                    values=values,
                    steps=steps,
                    parent=entry.get("parent"),
                    continues=entry.get("continues") if self._plan.evaluate == "train" else None,
                )
            )
        return candidates

    def _value(self, name: str, kind: Dimension, values: Mapping[str, Any]) -> Any:
        """Return a candidate's value of a field.

        Raises:
            ComponentFailed: The value is outside the space of the field.
        """
        value = values.get(name)
        if kind.choices is not None:
            if value in kind.choices:
                return value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert kind.low is not None and kind.high is not None
            if kind.low <= value <= kind.high and (not kind.integer or float(value).is_integer()):
                return int(value) if kind.integer else float(value)
        raise self._invalid("advance", f"{value!r:.60} for {name}, which is outside its space")

    def _check_list(self, answer: Any) -> list[Any]:
        if not isinstance(answer, list):
            raise self._invalid("advance", "something that is not a list of candidates")
        return answer

    def _invalid(self, method: str, text: str) -> ComponentFailed:
        return ComponentFailed(f"The strategy {self._plan.strategy} answered {method} with {text}.")
