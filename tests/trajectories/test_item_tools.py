"""Tools of items from outside, and the calls in their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.trajectory_runs import asked, make_run
from toprope.errors import InvalidValue
from toprope.records.journal.demonstrations import Trace, append_traces
from toprope.trajectories.capture.run_reader import RunReader
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


@pytest.mark.parametrize("many", [False, True])
def test_calls_of_sharegpt_become_calls_of_tools(many: bool):
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        ("human", "q"),
        ("function_call", json.dumps([call] if many else call)),
        ("observation", "2"),
        ("gpt", "2"),
    ]
    talk = [{"from": role, "value": text} for role, text in turns]
    item = item_from({"conversations": talk, "system": "Add.", "tools": json.dumps([_ADD])}, "line 1")
    assert item.state == [{"role": "system", "content": "Add."}, {"role": "user", "content": "q"}]
    assert item.action[0] == {
        "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]
    }  # fmt: skip
    assert [message["role"] for message in item.action] == ["assistant", "tool", "assistant"]
    for wrong in ("add", "3", None):
        talk[1]["value"] = wrong
        with pytest.raises(InvalidValue, match=r"conversations\[1\]: function_call needs the JSON text"):
            item_from({"conversations": talk}, "line 1")


def test_answers_of_calls_alone_have_ids_of_their_own():
    calls = [[{"id": "1", "function": {"name": "add", "arguments": one}}] for one in ("{}", '{"a": 1}')]
    found = {TrajectoryItem("q", [{"role": "assistant", "content": "", "tool_calls": one}], 1.0).id for one in calls}
    assert len(found) == 2
    assert TrajectoryItem("q", [{"role": "assistant", "content": "a"}], 1.0).id == TrajectoryItem("q", "a", 1.0).id


def test_items_of_a_run_that_learned_from_tools_keep_them(tmp_path: Path):
    folder, tools = make_run(tmp_path / "runs", "learned", kind="sft"), [{"type": "function", "function": _ADD}]
    append_traces(folder.path / "traces.jsonl", [Trace("t", n, asked("q", "a"), tools=tools * n) for n in range(2)])
    assert [item.metadata.get("tools") for item in RunReader(folder)] == [None, tools]
