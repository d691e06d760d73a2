"""Asks a strategy: one of ours here, the owner's own in a worker; what it answers is looked at either way.

A strategy of a user's own need not have every method: what it lacks is `toprope.sdk.evolution.Evolution`'s.
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
from toprope.sweeps.planning import create_strategy, strategy_arguments
from toprope.training.rollouts.environment_worker import EnvironmentWorker

__all__ = ["StrategyRunner"]

_LOAD_S, _CALL_S = 60.0, 60.0


class StrategyRunner:
    """The strategy of one sweep. Make it with `open`, and `close` it."""

    def __init__(
        self, plan: SweepPlan, link: EnvironmentWorker | None = None, handle: int = 0, methods: Sequence[str] = ()
    ) -> None:
        self._plan, self._ours = plan, create_strategy(plan)
        self._link, self._handle, self._methods = link, handle, frozenset(methods)

    @classmethod
    async def open(cls, plan: SweepPlan) -> StrategyRunner:
        """The strategy of a plan.

        Raises:
            ComponentFailed: A user's own does not load.
        """
        if plan.file is None:
            return cls(plan)
        # By the run's folder whatever the strategy leaves is known as the run's.
        given = {name: value for name, value in os.environ.items() if name == ENV_FOLDER}
        link = await EnvironmentWorker.start(env=worker_environment(given), timeout=_LOAD_S)
        try:
            file, name = plan.file, plan.strategy
            try:
                made = await link.make(file, name, strategy_arguments(plan), timeout=_LOAD_S)
            except WorkerError as error:
                if "is not made with these arguments" not in str(error):
                    raise
                made = await link.make(file, name, {}, timeout=_LOAD_S)
            return cls(plan, link, made.handle, made.methods)
        except WorkerFailure as error:
            await link.close()
            raise ComponentFailed(
                f"The strategy {plan.strategy} of {plan.file} does not load: {error}",
                hint="docs/sweeps.md shows one that does.",
            ) from error
        except BaseException:
            await link.close()
            raise

    async def close(self) -> None:
        """Ends the worker, where there is one."""
        if self._link is not None:
            await self._link.close()

    async def start(self) -> list[dict[str, Any]]:
        """The first population."""
        return await self._ask("start", [])

    async def evaluate(self, candidate: Candidate, measured: Measured) -> float | None:
        """The score of what a candidate came to; None: it has none."""
        score = await self._ask("evaluate", [candidate.model_dump(), measured.model_dump()])
        if score is None:
            return None
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise self._nonsense("evaluate", f"{score!r}, which is no number")
        return float(score)

    async def select(self, population: Sequence[Candidate], scores: Sequence[float | None]) -> list[str]:
        """Ids of those that an epoch leaves, the best first."""
        answer = await self._ask("select", [[one.model_dump() for one in population], list(scores)])
        known = {one.id for one in population}
        ids = [one.get("id") if isinstance(one, dict) else one for one in answer] if isinstance(answer, list) else [0]
        if not all(isinstance(one, str) and one in known for one in ids):
            raise self._nonsense("select", "what is not of the population")
        return list(dict.fromkeys(ids))

    async def advance(
        self, epoch: int, survivors: Sequence[Candidate], history: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The population of an epoch from 2 on."""
        told = [one.model_dump() for one in survivors]
        if self._link is not None and "advance" not in self._methods and "mutate" in self._methods and told:
            many = max(self._plan.population - len(told), 0)
            calls = [[told[number % len(told)]] for number in range(many)]
            children = await self._call("mutate", calls) if calls else []
            for child, (parent,) in zip(children, calls, strict=True):
                if isinstance(child, dict):
                    child.setdefault("parent", parent["id"])
                    child.pop("id", None)
            return [*told, *children]
        return await self._ask("advance", [epoch, told, [dict(one) for one in history]])

    async def _ask(self, method: str, arguments: list[Any]) -> Any:
        if self._link is not None and method in self._methods:
            return (await self._call(method, [arguments]))[0]
        answer = getattr(self._ours, method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    async def _call(self, method: str, calls: list[list[Any]]) -> list[Any]:
        assert self._link is not None
        try:
            return await self._link.invoke(self._handle, method, calls, timeout=_CALL_S)
        except WorkerFailure as error:
            raise ComponentFailed(f"The strategy {self._plan.strategy} failed in {method}: {error}") from error

    def candidates(self, answer: Any, known: Mapping[str, Candidate], most_new: int) -> list[Candidate]:
        """A population as a strategy answered it: those that are known stay, new ones get an id and are looked at.

        Args:
            answer: What the strategy said.
            known: Every candidate so far.
            most_new: So many new ones the plan has room for; more are left out.

        Raises:
            ComponentFailed: It is no population, or a value is out of its space.
        """
        if not isinstance(answer, list):
            raise self._nonsense("advance", "no list of candidates")
        found: list[Candidate] = []
        number = len(known)
        for one in answer:
            if not isinstance(one, dict) or not isinstance(one.get("values"), dict):
                raise self._nonsense("advance", f"{one!r:.120}, which is no candidate")
            same = known.get(str(one.get("id")))
            if same is not None and same.values == one["values"]:
                found.append(same)
                continue
            if number - len(known) >= most_new:
                continue
            number += 1
            for role in ("parent", "continues"):
                if one.get(role) is not None and one[role] not in known:
                    raise self._nonsense("advance", f"{role} {one[role]!r:.40}, which is no candidate")
            steps = one.get("steps") or self._plan.steps
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise self._nonsense("advance", f"steps {steps!r:.40}")
            values = {name: self._value(name, kind, one["values"]) for name, kind in self._plan.space.items()}
            found.append(
                Candidate(
                    id=f"c{number:03d}",
                    values=values,
                    steps=steps,
                    parent=one.get("parent"),
                    continues=one.get("continues") if self._plan.evaluate == "train" else None,
                )
            )
        return found

    def _value(self, name: str, kind: Dimension, values: Mapping[str, Any]) -> Any:
        """A candidate's value of a field, which the space must have."""
        value = values.get(name)
        if kind.choices is not None:
            if value in kind.choices:
                return value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert kind.low is not None and kind.high is not None
            if kind.low <= value <= kind.high and (not kind.integer or float(value).is_integer()):
                return int(value) if kind.integer else float(value)
        raise self._nonsense("advance", f"{value!r:.60} for {name}, which is outside of its space")

    def _nonsense(self, method: str, what: str) -> ComponentFailed:
        return ComponentFailed(f"The strategy {self._plan.strategy} answered {method} with {what}.")
