"""How samples of inspect-ai become tasks and rollouts, with a stand-in for the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.sdk.adapters.inspect.conftest import Sample, sample, session
from toprope.sdk.authoring.env_managed import OwnLoop, Session


def test_rollouts_of_a_sample_keep_its_id(inspect: Callable[..., OwnLoop]) -> None:
    """Scorers and solvers look up what belongs to a sample by its id."""
    played: list[list[tuple[Any, int, str]]] = []

    async def evaluate(asked: list[Sample], sessions: dict[tuple[str, int], Session]) -> None:
        played.append([(one.id, one.epoch, sessions[str(one.id), one.epoch].api_key) for one in asked])

    environment = inspect([sample("a", id="of the author"), sample("b"), sample("c", id=7)], evaluate)
    own, numbered, single = environment.tasks()

    async def both() -> None:
        await asyncio.gather(
            environment.group(own, [session(api_key="1"), session(api_key="2")]),
            environment.group(single, [session(api_key="5")]),
            environment.group(numbered, [session(api_key="3"), session(api_key="4")]),
        )

    asyncio.run(both())
    first, second = played
    assert sorted(first, key=lambda one: one[2]) == [
        ("of the author", 1, "1"), ("of the author", 2, "2"), (2, 1, "3"), (2, 2, "4"),
    ]  # fmt: skip
    assert second == [(7, 1, "5")], "an evaluation has as many epochs of each sample"
