"""All environments of a run as one: evaluations play every one of them, training asks for one by name.

Where there are several their tasks are numbered in turn (the first of each, the second of each, ...), so that any
number of them holds equally many of each that has so many.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from toprope.sdk.errors import WorkerError, WorkerFailure
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient
from toprope.training.rollouts.environment_host import Hosted
from toprope.training.rollouts.group_sampler import Made, RolloutMaker

__all__ = ["Players"]


class Players:
    """The environments with one player, the policy or a model at an endpoint.

    Args:
        hosts: The environments, the selected one first, started and checked.
        player: Who answers.
    """

    def __init__(self, hosts: Sequence[Hosted], player: PolicyClient | EndpointClient) -> None:
        self.hosts = {host.label: host for host in hosts}
        self._makers: dict[str, RolloutMaker] = {host.label: host.maker(player) for host in hosts}
        names = itertools.count()
        for maker in self._makers.values():
            maker.numbers = names
        self._alone = len(hosts) == 1
        self._places: dict[str, list[tuple[str, int]]] = {}

    def count(self, split: str, each: int) -> int:
        """How many tasks there are of a split, at most `each` of each environment."""
        return sum(min(each, host.sizes.get(split, 0)) for host in self.hosts.values())

    def environment_of(self, split: str, index: int) -> str:
        """Whose task number `index` of a split is; empty where there is one environment."""
        return "" if self._alone else self._place(split, index)[0]

    async def make(self, split: str, index: int, size: int, sampling: Sampling) -> Made:
        """Plays task number `index` of all environments' together. Raises: see `RolloutMaker.make`."""
        label, own = (next(iter(self.hosts)), index) if self._alone else self._place(split, index)
        return await self.play(label, split, own, size, sampling)

    async def play(self, label: str, split: str, index: int, size: int, sampling: Sampling, variant: str = "") -> Made:
        """Plays task number `index` of one environment; of one of its levels where `variant` names one.

        Raises: see `RolloutMaker.make`; a worker that failed for good is told by its environment's name.
        """
        try:
            made = await self._makers[label].make(split, index, size, sampling, variant)
        except WorkerError:
            raise
        except WorkerFailure as failure:
            raise self.hosts[label].named(failure) from failure
        return made if self._alone else dataclasses.replace(made, environment=label)

    def weigh(self, label: str, weights: dict[str, float]) -> None:
        """What reward parts of an environment weigh in the rollouts that begin from now on."""
        self._makers[label].weights = weights

    @asynccontextmanager
    async def sealed(self) -> AsyncIterator[None]:
        """Seal the workers of all environments: see `Worker.sealed`."""
        async with AsyncExitStack() as seals:
            for maker in self._makers.values():
                await seals.enter_async_context(maker.sealed())
            yield

    def _place(self, split: str, index: int) -> tuple[str, int]:
        if split not in self._places:
            sizes = {label: host.sizes.get(split, 0) for label, host in self.hosts.items()}
            self._places[split] = [
                (label, own) for own in range(max(sizes.values())) for label in sizes if own < sizes[label]
            ]
        return self._places[split][index]
