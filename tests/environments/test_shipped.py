"""The environments that ship with us, played as a policy would."""

from __future__ import annotations

import pytest

from environments.number_guess import NumberGuess
from environments.template import SortLetters
from toprope.sdk import play
from toprope.sdk.errors import InvalidRequest
from toprope.sdk.rollouts import Rollout, configure
from toprope.sdk.worker.splits import SPLITS, TaskSplits


def test_sort_letters_scores_places_and_whole_answer() -> None:
    task = next(iter(configure(SortLetters(), knobs={"shortest": 4, "longest": 4}).tasks()))
    right = task.reference
    assert sorted(task.prompt.rsplit(" ", 1)[1]) == list(right) and len(right) == 4
    settings = {"shortest": 4, "longest": 4}
    assert play(SortLetters, [f" {right}\n"], **settings).success
    half = play(SortLetters, [right[:2]], **settings)
    assert half.reward == pytest.approx(0.25) and half.parts == {"letters": 0.5, "exact": 0.0}
    assert play(SortLetters, [""], **settings).reward == 0.0
    assert play(SortLetters, [right * 2], **settings).parts["letters"] == 0.5


def test_conflicting_knobs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="shortest"):
        configure(SortLetters(), knobs={"shortest": 6})
    with pytest.raises(InvalidRequest, match="widest"):
        configure(NumberGuess(), knobs={"widest": 300})


@pytest.mark.parametrize("environment", [SortLetters, NumberGuess])
def test_every_split_has_200_distinct_tasks(environment: type) -> None:
    splits = TaskSplits(configure(environment()))
    found = {split: {task.content for task in splits.page(split, 0, 200)} for split in SPLITS}
    assert all(len(tasks) == 200 for tasks in found.values())
    again = TaskSplits(configure(environment(), seed=3))
    assert {task.content for task in again.page("heldout", 0, 200)} == found["heldout"]


def halve(index: int) -> int:
    """Turns that halving takes; checks every answer of the game."""
    environment = configure(NumberGuess())
    splits = TaskSplits(environment)
    task = splits.get("heldout", index)[0]
    rollout = Rollout(environment, task)
    rollout.begin()
    low, high = (int(word.strip(".")) for word in task.prompt.split() if word.strip(".").isdigit())
    while True:
        middle = (low + high) // 2
        turn = rollout.advance(f"I say {middle}.")
        if turn.outcome is not None:
            assert turn.outcome.success and middle == task.data["hidden"] == int(task.reference)
            limit = environment.max_turns
            assert turn.outcome.parts["economy"] == pytest.approx((limit - turn.outcome.turns) / limit)
            assert turn.outcome.reward == pytest.approx(1.0 + 0.2 * turn.outcome.parts["economy"])
            return turn.outcome.turns
        [message] = turn.messages
        low, high = (middle + 1, high) if message["content"] == "Higher." else (low, middle - 1)


def test_bisection_always_wins_number_guess() -> None:
    assert all(1 <= halve(index) <= 5 for index in range(100))


def test_unguessed_number_earns_nothing() -> None:
    outcome = play(NumberGuess, ["no number"] * 9)
    assert outcome.turns == 6 and outcome.reward == 0.0 and not outcome.success and not outcome.truncated
    assert play(NumberGuess, ["999"] * 9, spare=0).turns == 5
