"""The turns of a rollout that its conversation rests on."""

from __future__ import annotations

import random
from typing import Any

from toprope.training.inference.sessions import Turn, join_turns
from toprope.training.inference.tool_calls import answer_id
from toprope.training.rollouts.env_managed_sampler import outcome_turns


def turn(prompt: str, answer: str) -> Turn:
    ids = [[ord(letter) for letter in text] for text in (prompt, f"{answer}$")]
    return Turn(*ids, [-0.1] * len(ids[1]), [(0, len(ids[1]))], "stop", prompt, f"{answer}$")


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}] + [{"role": "assistant", "content": text} for text in texts]


def talk(*answers: str) -> list[Turn]:
    """The turns of a conversation in which each prompt continues the turn before."""
    prompt, turns = "a", []
    for number, answer in enumerate(answers):
        turns.append(turn(prompt, answer))
        prompt += f"{answer}$ then {number}:"
    return turns


def test_outcome_turns_follow_the_conversation() -> None:
    first, again, branch, second = turn("a", "one"), turn("a", "uno"), turn("ab", "lost"), turn("abc", "two")
    turns = [first, again, branch, second]
    assert outcome_turns(turns, said("one", "two")) == [first, second]
    assert outcome_turns(turns, said("uno", "two")) == [again, second]
    assert outcome_turns(turns, []) == [again, branch, second], "without a conversation only retries are known"
    assert outcome_turns(turns, said("something else")) == [again, branch, second]


def test_repeated_answers_keep_their_order() -> None:
    chooser = random.Random(5)
    for _ in range(300):
        answers = [chooser.choice(["1", "2", "12", "look"]) for _ in range(chooser.randint(1, 5))]
        turns = talk(*answers)
        assert outcome_turns(turns, said(*answers)) == turns
        assert len(join_turns(outcome_turns(turns, said(*answers)))) == 1
    rewritten = [turn(f"state {number}", "look") for number in range(4)]
    assert outcome_turns(rewritten, said(*["look"] * 4)) == rewritten, "prompts need not continue each other"


def test_abandoned_branch_with_the_same_answer_is_left_out() -> None:
    first, second, third = talk("look", "go", "look")
    lost = turn(f"{first.prompt_text}look$ else:", "look")
    conversation = said("look", "go", "look")
    for turns in ([first, lost, second, third], [lost, first, second, third], [first, second, lost, third]):
        assert outcome_turns(turns, conversation) == [first, second, third]


def test_turns_of_other_sub_sessions_may_be_out_of_order() -> None:
    first, second, third = talk("look", "go", "on")
    assert outcome_turns([third, first, second], said("look", "go", "on")) == [first, second, third]


def test_an_answer_within_the_text_of_a_later_turn_is_its_own_turn() -> None:
    for answer, later in (("4", "14"), ("Paris", "Yes, Paris is right.")):
        chosen, other = turn("a", answer), turn("b", later)
        assert outcome_turns([chosen, other], said(answer)) == [chosen]
        assert outcome_turns([other, chosen], said(answer)) == [chosen]


def test_neither_white_space_nor_a_stop_token_decides() -> None:
    for texts in ("look<|im_end|>", " look<|im_end|>"), ("look", "look</s>"), ("look </s>", "\nlook"):
        turns = [Turn([place], [9], [-0.1], [(0, 1)], "stop", "", text) for place, text in enumerate(texts)]
        assert outcome_turns(turns, said("look", "look")) == turns
        assert outcome_turns(turns, said(" look")) == turns[1:]


def test_thoughts_that_a_conversation_leaves_out_do_not_decide() -> None:
    short, long = turn("state 0", "Go.</think>look"), turn("state 1", "Where to go now?</think>look")
    assert outcome_turns([short, long], said("look", "look")) == [short, long]
    whole = said("Go.</think>look", "Where to go now?</think>look")
    assert outcome_turns([short, long], whole) == [short, long]


def test_calls_of_tools_name_their_turn_whatever_else_it_says() -> None:
    calling, talking = turn("a", "I look.<call>"), turn("a", "I look.")
    call = {"id": f"{answer_id(calling.prompt_ids, calling.completion_ids)}0"}
    conversation = [{"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    assert outcome_turns([calling, talking], conversation) == [calling]
