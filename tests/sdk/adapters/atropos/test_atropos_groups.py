"""Which rollout of a group a scored text of Atropos belongs to, and which of its conversations."""

from __future__ import annotations

from types import SimpleNamespace as Thing

import pytest

from toprope.sdk.adapters._servers.atropos import Group, Request
from toprope.sdk.authoring.env_managed import Session


def _group(*said: list[str]) -> Group:
    group = Group([Session("http://x/v1", "k", "m")] * len(said))
    for rollout, answers in zip(group.rollouts, said, strict=True):
        rollout.said += answers
    return group


@pytest.mark.parametrize(
    ("said", "texts", "owners"),
    [
        ([["a"], ["b"], ["c"]], ["reworded", "2: c"], [None, 2]),
        ([["a"], ["b"]], ["reworded", "2: a"], [1, 0]),
        ([["<think>no, b</think> a"], ["b"], ["c"]], ["2: a", "2: b"], [0, 1]),
        ([["no, b</think> a"], ["b"], ["c"]], ["2: b", "2: a"], [1, 0]),
        ([["a", "a verdict"], ["b"], ["c"]], ["2: a", "2: b"], [0, 1]),
        ([[""], ["b"], ["c"]], ["reworded", "2: c"], [None, 2]),
    ],
)
def test_scored_texts_belong_to_the_rollouts_whose_answers_they_hold(
    said: list[list[str]], texts: list[str], owners: list[int | None]
) -> None:
    assert _group(*said).whose(texts) == owners


def test_trained_conversation_is_that_of_the_scored_answer_not_of_a_judge() -> None:
    [rollout] = _group([]).rollouts

    def asked(request: Request, text: str) -> None:
        rollout.hear(Thing(message=Thing(content=text), text=text, finish_reason="stop"), request)

    asked([{"role": "user", "content": "2+2"}], "It is 4.")
    own = rollout.messages
    asked([{"role": "user", "content": "Is 4 right? Say 1 or 0."}], "4 is right: 1")
    assert rollout.talk_in("<user>2+2<assistant>It is 4.</s>") == own != rollout.messages
    assert rollout.talk_in("reworded") == rollout.messages, "the last one if none is told"
    asked("2+3=", "5")
    assert [one["content"] for one in rollout.talk_in("2+3=5")] == ["2+3=", "5"] and rollout.prompt == "2+3="


def test_completions_are_a_conversation_too() -> None:
    """Only the answers that a score rests on are trained, so they have to be told apart from others."""
    group = Group([Session("http://x/v1", "k", "m")])
    [one] = group.rollouts
    for request, answer in (("Go:", " left "), ("Go:left. Next:", "right"), ("Is it right?", "yes")):
        one.hear(Thing(text=answer, finish_reason="stop"), request)
    assert one.talks[1] == [
        {"role": "user", "content": "Go:"}, {"role": "assistant", "content": " left "},
        {"role": "user", "content": ". Next:"}, {"role": "assistant", "content": "right"},
    ]  # fmt: skip
    assert one.messages == [{"role": "user", "content": "Is it right?"}, {"role": "assistant", "content": "yes"}]
    assert one.talk_in("Go:left. Next:right") == one.talks[1]
