"""Tools of items from outside, and the calls in their answers."""

from __future__ import annotations

import json

import pytest

from toprope.errors import InvalidValue
from toprope.trajectories.items import TrajectoryItem, item_from

_ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    "tools",
    [[{"type": "function", "function": _ADD}], [_ADD], json.dumps([_ADD])],
    ids=["OpenAI's", "ShareGPT's", "JSON text of a table"],
)
def test_tools_of_an_item_are_kept(tools):
    item = item_from({"prompt": "q", "completion": "a", "tools": tools}, "line 1")
    assert item.metadata["tools"] == [{"type": "function", "function": _ADD}]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_item_without_tools_has_none(tools):
    assert "tools" not in item_from({"prompt": "q", "completion": "a", "tools": tools}, "line 1").metadata


@pytest.mark.parametrize(
    "tools", [{"add": _ADD}, "add", ["add"], [{}], [{"function": "add"}], "\ud800", pytest.param("[" * 9999, id="deep")]
)
def test_tools_without_names_are_refused(tools):
    with pytest.raises(InvalidValue, match="line 1: tools must be a list of functions with a name"):
        item_from({"prompt": "q", "completion": "a", "tools": tools}, "line 1")


def test_answers_of_calls_alone_have_ids_of_their_own():
    calls = [[{"id": "1", "function": {"name": "add", "arguments": one}}] for one in ("{}", '{"a": 1}')]
    found = {TrajectoryItem("q", [{"role": "assistant", "content": "", "tool_calls": one}], 1.0).id for one in calls}
    assert len(found) == 2
    assert TrajectoryItem("q", [{"role": "assistant", "content": "a"}], 1.0).id == TrajectoryItem("q", "a", 1.0).id
