"""Rewards of a group that are computed together, when its last rollout is done; token ids for those that want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toprope.sdk import Environment, Part, Task, play
from toprope.sdk.worker.service import Service

SOURCE = '''
from toprope.sdk import Environment, Task


class Rank(Environment):
    """Longest answer wins; rollouts say "go on" to stay."""

    max_turns = 3
    wants_tokens = True
    seen = []

    def tasks(self):
        for number in range(30):
            yield Task(f"Say {number}")

    def step(self, text):
        if text == "raise":
            raise ValueError("in step")
        return ("and?", False) if text == "go on" else (None, True)

    def score_group(self, rollouts):
        type(self).seen.append([one.answer for one in rollouts])
        if any(one.answer == "all" for one in rollouts):
            raise RuntimeError("the group is lost")
        longest = max(len(one.answer) for one in rollouts)
        return [
            KeyError("just me") if one.answer == "me" else float(len(one.answer) == longest and len(one.tokens) != 1)
            for one in rollouts
        ]
'''


@pytest.fixture
def service(tmp_path: Path) -> Service:
    (tmp_path / "rank.py").write_text(SOURCE)
    made = Service()
    made.answer("open", {"source": {"file": str(tmp_path / "rank.py")}})
    return made


def begun(service: Service, count: int) -> list[int]:
    answer = service.answer("begin", {"split": "train", "index": 0, "count": count})
    assert answer["tokens"] is True
    return answer["rollouts"]


def advance(service: Service, *moves: list[Any]) -> list[dict[str, Any] | None]:
    return [one["outcome"] for one in service.answer("advance", {"moves": [list(move) for move in moves]})]


def seen(service: Service) -> list[list[str]]:
    return type(service._opened().environment).seen


def test_a_group_that_is_done_at_once_is_scored_at_once_and_together(service: Service) -> None:
    a, b, c = begun(service, 3)
    outcomes = advance(service, [a, "long answer"], [b, "short"], [c, "long answer", False, [7]])
    assert [one["reward"] for one in outcomes] == [1.0, 0.0, 0.0]  # the last has one token
    assert seen(service) == [["long answer", "short", "long answer"]]
    assert service.answer("settle", {"rollouts": [a, b]}) == [None, None]


def test_who_is_done_early_waits_for_the_others(service: Service) -> None:
    a, b, c = begun(service, 3)
    assert advance(service, [a, "longest of all"], [b, "go on"], [c, "raise"]) == [None, None, None]
    assert seen(service) == []
    [last] = advance(service, [b, "short"])
    first, failed = service.answer("settle", {"rollouts": [a, c]})
    assert (first["reward"], last["reward"], last["turns"]) == (1.0, 0.0, 2)
    assert failed["error"].startswith("ValueError: in step") and failed["reward"] == 0.0
    assert seen(service) == [["longest of all", "short"]]  # the failed one is not among them


def test_a_rollout_that_is_given_up_holds_up_nobody(service: Service) -> None:
    a, b = begun(service, 2)
    assert advance(service, [a, "x"], [b, "go on"]) == [None, None]
    assert service.answer("discard", {"rollouts": [b]}) == 1
    assert service.answer("settle", {"rollouts": [a]})[0]["reward"] == 1.0
    assert service.answer("discard", {"rollouts": [a, b]}) == 0


def test_an_error_is_of_one_or_of_all(service: Service) -> None:
    a, b = begun(service, 2)
    mine, others = advance(service, [a, "me"], [b, "other"])
    assert "KeyError" in mine["error"] and others["error"] is None and others["reward"] == 1.0
    a, b = begun(service, 2)
    assert all("RuntimeError: the group is lost" in one["error"] for one in advance(service, [a, "all"], [b, "other"]))


def test_one_alone_and_one_answer_tried_are_groups_of_one(service: Service) -> None:
    assert service.answer("score", {"split": "train", "index": 0, "answer": "x"})["reward"] == 1.0
    assert seen(service) == [["x"]]


class Short(Environment):
    """Returns too few scores."""

    def tasks(self):
        yield Task("x")

    def score_group(self, rollouts):
        return []


class Spent(Environment):
    """Has a part that is measured."""

    parts = {"right": Part(), "spent": Part(0.0, 0.0, 10.0)}

    def tasks(self):
        yield Task("x")

    def measured(self):
        return {"spent": 3.0}

    def score(self):
        return self.answer == "x"


def test_too_few_scores_are_an_error() -> None:
    assert "score_group() must return a list of 1" in (play(Short, ["a"]).error or "")


def test_what_is_measured_is_left_out_of_score() -> None:
    outcome = play(Spent, ["x"])
    assert outcome.parts == {"right": 1.0, "spent": 3.0} and outcome.reward == 1.0
