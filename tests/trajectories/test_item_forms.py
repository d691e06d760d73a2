"""Items from outside: their forms, and what is refused."""

from __future__ import annotations

import pytest

from toprope.errors import InvalidValue
from toprope.trajectories.items import item_from


def test_item_from_reads_three_shapes_and_refuses_others():
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    item = item_from({"messages": talk, "reward": 1}, "line 1")
    assert item.state == talk[:1] and item.action[0]["tool_calls"] == [{"id": "1"}] and item.reward == 1.0
    assert item_from({"prompt": "q", "completion": "a"}, "line 1").metadata == {"unscored": True}
    for wrong, said in (
        ({"messages": talk[:1]}, "need a question and an answer"),
        ({"state": "a"}, "no action"),
        ({"state": "a", "action": "b", "reward": float("nan")}, "reward must be a number"),
        ({"state": "a", "action": "b", "reward": 10**400}, "reward must be a number"),
        ({"state": [{"role": "robot", "content": "x"}], "action": "b"}, "role of"),
        ([], "not a JSON object"),
    ):
        with pytest.raises(InvalidValue, match=said):
            item_from(wrong, "line 1")


@pytest.mark.parametrize(
    ("question", "state"),
    [
        ({"input": "cat"}, "cat"),
        ({"input": "cat", "instruction": None}, "cat"),
        ({"instruction": "Translate to French.", "input": "cat"}, "Translate to French.\n\ncat"),
        ({"instruction": "Name a pet.", "input": ""}, "Name a pet."),
        ({"instruction": "Name a pet."}, "Name a pet."),
    ],
)
def test_the_instruction_of_a_row_belongs_to_its_question(question, state):
    item = item_from({**question, "output": "chat"}, "line 1")
    assert (item.state, item.action) == (state, "chat")
    assert item_from({"conversations": 3, "prompt": "P", "completion": "C"}, "line 1").state == "P"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"input": " "}, "no question"),
        ({"input": "", "instruction": ""}, "no question"),
        ({"input": ["a"], "instruction": "Sort."}, "must be texts"),
        ({"instruction": ""}, "has no input"),
    ],
)
def test_a_row_without_a_question_is_refused(question, said):
    with pytest.raises(InvalidValue, match=said) as refused:
        item_from({**question, "output": "chat"}, "line 1")
    assert "instruction and output" in refused.value.hint and "conversations" in refused.value.hint
