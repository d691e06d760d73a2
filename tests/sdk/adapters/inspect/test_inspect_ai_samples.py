"""How samples of inspect-ai become tasks and rollouts, with a stand-in for the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace as Thing
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


def test_samples_of_equal_text_are_tasks_by_what_else_they_say(inspect: Callable[..., OwnLoop]) -> None:
    def system(text: str) -> list[Thing]:
        return [Thing(role="system", text=text), Thing(role="user", text="Hi!")]

    samples = [
        sample("Hi!"), sample("hi!", target="y"), sample("Hi!", metadata={"aim": 1, "row_id": 1}),
        sample("Hi!", metadata={"aim": 1, "row_id": 2}), sample("Hi!", files={"a": "1"}), sample("Hi!", setup="ls"),
        sample(system("Be kind.")), sample(system("Be rude.")), sample("", id="one"), sample("", id="two"),
    ]  # fmt: skip
    tasks = list(inspect(samples).tasks())
    [alone] = inspect(samples[:1]).tasks()
    assert len({task.id for task in tasks}) == 9 and tasks[2].id == tasks[3].id, "a number of a row is no difference"
    assert tasks[0].id == alone.id
    assert tasks[8].messages == [{"role": "user", "content": "(the task says)"}]
    games = [sample("Play.", id=f"game {number}") for number in range(3)]
    assert len({task.id for task in inspect(games).tasks()}) == 3, "as a last resort by their ids"
    assert len({task.id for task in inspect([*games, sample("Sing.")]).tasks()}) == 2
