"""Real OpenAI clients' needs: tools, streams, parts, fields that we do not know; sampled ids stay as sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from toprope.training.inference.app import InferenceServer
from toprope.training.inference.engine import Request, Sample
from toprope.training.inference.sessions import Turn
from toprope.training.inference.tool_calls import Templates, answer_id, parse
from toprope.training.policy.loading import load_tokenizer
from toprope.training.rollouts.env_managed_sampler import chain_of

SECRET = "s3cret"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = 'I add.\n<tool_call>\n{"name": "add",  "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
"""With two spaces: rendered from its parts it would be other tokens."""


class Scripted:
    """An engine that says what it is told to, in the tokens of the policy's tokenizer."""

    max_context, version, endings = 2000, 3, frozenset({1})

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts, self.prompts = tokenizer, [], []

    def submit(self, request: Request, done: Callable[[Any], None]) -> None:
        self.prompts.append(self._tokenizer.decode(request.prompt_ids))
        text = self.texts.pop(0)
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], 1]
        done([Sample(ids, [-0.5] * len(ids), self.version, text, "stop")] * request.n)


@pytest.fixture
def engine(tiny_policy: Path) -> Scripted:
    return Scripted(load_tokenizer(tiny_policy))


@pytest.fixture
def http(engine: Scripted) -> Iterator[TestClient]:
    server = InferenceServer(engine, engine._tokenizer, model_name="tiny", secret=SECRET)  # type: ignore[arg-type]
    with TestClient(server.app) as client:
        client.headers["authorization"] = f"Bearer {SECRET}.g0/0"
        yield client


def ask(http: TestClient, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"messages": messages} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def turns(http: TestClient) -> list[dict[str, Any]]:
    found = http.get("/v1/sessions/g0/0", headers={"authorization": f"Bearer {SECRET}"}).json()
    return found["sessions"]["g0/0"]["turns"]


def test_a_call_becomes_a_call_and_goes_on_in_the_tokens_that_were_sampled(http: TestClient, engine: Scripted) -> None:
    engine.texts += [CALL, "It is 3."]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
    first = ask(http, messages, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)["choices"][0]
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == "I add."
    [call] = first["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": "\u00e9"}
    assert '"name": "add"' in engine.prompts[0], "a template that knows no tools is told of them"
    # Some clients reword what they send back.
    again = {**first["message"], "content": None}
    messages += [again, {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "3"}]}]
    second = ask(http, messages, tools=TOOLS)["choices"][0]
    assert second["message"] == {"role": "assistant", "content": "It is 3."} and second["finish_reason"] == "stop"
    recorded = turns(http)
    before = recorded[0]["prompt_ids"] + recorded[0]["completion_ids"]
    assert recorded[1]["prompt_ids"][: len(before)] == before, "sampled ids are not tokenised anew"
    talk = [*messages, second["message"]]
    known = [Turn(**one) for one in recorded]
    assert chain_of([*known, Turn([9], [9], [-1.0], [(0, 1)], "stop", "x", "lost<eos>")], said(talk)) == known


def said(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as a worker hands it to the driver."""
    from toprope.sdk.authoring.env_managed import _sayable

    kept = _sayable(talk)
    assert '"arguments": {"a": 1' in kept[1]["content"], "people read the call"
    return kept


def test_a_call_of_somebody_elses_is_put_into_the_templates_words(http: TestClient, engine: Scripted) -> None:
    engine.texts += ["fine"]
    call = {"id": "call_x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ask(http, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so", "tool_calls": [call]}])
    assert 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in engine.prompts[0]
    templates = Templates("{{ tools }} {{ message.tool_calls }}", ())
    [kept] = templates.prepared([{"role": "assistant", "content": None, "tool_calls": [call]}], TOOLS, ())
    assert kept["tool_calls"][0]["function"]["arguments"] == {"a": 1} and kept["content"] == ""


def test_without_tools_or_with_none_to_choose_an_answer_is_text(http: TestClient, engine: Scripted) -> None:
    engine.texts += [CALL, CALL]
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = ask(http, [{"role": "user", "content": "x"}], **more)["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"
        assert '"name": "add"' not in engine.prompts[-1]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<tool_call>{broken", 0),
        ('<tool_call>{"name": 3}</tool_call>', 0),
        ("<tool_call>[1]</tool_call>", 0),
        ('<tool_call>{"name": "a"}', 1),
        ('<tool_call>{"name": "a", "arguments": "{}"}</tool_call> <tool_call>{"name": "b"}</tool_call>', 2),
    ],
)
def test_a_call_that_cannot_be_read_is_text(text: str, calls: int) -> None:
    content, found = parse(text)
    assert len(found) == calls and content == ("" if calls else text)


def test_a_stream_brings_the_whole_answer(http: TestClient, engine: Scripted) -> None:
    engine.texts += [CALL, "done", "abc"]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post("/v1/chat/completions", json=body | {"tools": TOOLS})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    first, last, usage = (json.loads(line) for line in lines[:-1])
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["completion_tokens"] > 0
    answer = http.post("/v1/chat/completions", json=body | {"stream_options": None})
    assert json.loads(answer.text.split("\n\n")[0][6:])["choices"][0]["delta"]["content"] == "done"
    answer = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert json.loads(answer.text.split("\n\n")[0][6:])["choices"][0]["text"] == "abc"
    assert len(turns(http)) == 3, "streams are recorded like everything else"


def test_what_clients_send_beside_is_not_minded(http: TestClient, engine: Scripted) -> None:
    engine.texts += ["fine"]
    more = {"n": None, "stream": None, "user": "me", "frequency_penalty": 0, "response_format": {"type": "text"}}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ask(http, messages, **more)["choices"][0]["message"]["content"] == "fine"
    assert "a\nb" in engine.prompts[0]


def test_ids_tell_equal_answers_apart() -> None:
    assert answer_id([1], [2, 3]) != answer_id([1, 2], [2, 3]) and answer_id([1], [2]) == answer_id([1], [2])
