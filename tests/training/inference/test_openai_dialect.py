"""Requests of real OpenAI clients: tools, streams, content parts, unknown fields; sampled ids stay unchanged."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from starlette.testclient import TestClient

from tests.training.inference.conftest import SECRET
from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB
from toprope.settings.schema import Config
from toprope.training.inference import app
from toprope.training.inference.app import InferenceServer
from toprope.training.inference.engine import Done, Sample, SamplingRequest
from toprope.training.inference.sessions import OPPONENT, UNRECORDED, SessionStore, Turn, join_turns, session_key
from toprope.training.inference.tool_calls import MessageRenderer, answer_id
from toprope.training.policy.loading import load_tokenizer
from toprope.training.rollouts.env_managed_sampler import outcome_turns

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = 'I add.\n<tool_call>\n{"name": "add",  "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
"""Has two spaces, so rendering it from its parts would give other tokens."""
SERVED = {"authorization": f"Bearer {session_key(SECRET, UNRECORDED)}"}


class ScriptedEngine:
    """An engine that answers with the given texts, in tokens of the policy's tokenizer."""

    max_context, version, end_ids = 2000, 3, frozenset({1})
    batches = rows = tokens = 0
    busy_s = 0.0

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []
        self.prompts: list[str] = []

    def start(self) -> None: ...

    def stop(self, timeout_s: float = 60.0) -> None: ...

    def is_progressing(self) -> bool:
        return True

    def submit(self, request: SamplingRequest, done: Done) -> None:
        self.prompts.append(self.tokenizer.decode(request.prompt_ids))
        text = self.texts.pop(0)
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], 1]
        done([Sample(ids, [-0.5] * len(ids), [(self.version, len(ids))], text, "stop")] * request.n)


@pytest.fixture
def engine(tiny_policy: Path) -> ScriptedEngine:
    return ScriptedEngine(load_tokenizer(tiny_policy))


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[TestClient]:
    server = InferenceServer(engine, engine.tokenizer, model_name="tiny", secret=SECRET)
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


def test_tool_call_continues_with_sampled_tokens(http: TestClient, engine: ScriptedEngine) -> None:
    engine.texts += [CALL, "It is 3."]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
    first = ask(http, messages, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)["choices"][0]
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == "I add."
    [call] = first["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": "\u00e9"}
    assert '"name": "add"' in engine.prompts[0], "tools are introduced if the template does not"
    # Some clients change the messages they send back.
    again = {**first["message"], "content": None}
    messages += [again, {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "3"}]}]
    second = ask(http, messages, tools=TOOLS)["choices"][0]
    assert second["message"] == {"role": "assistant", "content": "It is 3."} and second["finish_reason"] == "stop"
    recorded = turns(http)
    before = recorded[0]["prompt_ids"] + recorded[0]["completion_ids"]
    assert recorded[1]["prompt_ids"][: len(before)] == before, "sampled ids are not tokenised again"
    talk = [*messages, second["message"]]
    known = [Turn(**one) for one in recorded]
    assert (
        outcome_turns([*known, Turn([9], [9], [-1.0], [(0, 1)], "stop", "x", "lost<eos>")], as_worker_text(talk))
        == known
    )


def test_no_nul_reaches_an_environment(http: TestClient, engine: ScriptedEngine) -> None:
    engine.texts += ["go\0north", "look"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    said = ask(http, messages)["choices"][0]["message"]
    assert said["content"] == "go\ufffdnorth"
    ask(http, [*messages, said, {"role": "user", "content": "y"}])
    first, second = turns(http)
    before = first["prompt_ids"] + first["completion_ids"]
    assert second["prompt_ids"][: len(before)] == before, "the conversation goes on with the sampled ids"


def as_worker_text(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in the form in which a worker passes it to the driver."""
    from toprope.sdk.authoring.env_managed import _sayable

    kept = _sayable(talk)
    assert '"arguments": {"a": 1' in kept[1]["content"], "the call is readable"
    return kept


def test_foreign_tool_call_is_rendered_as_text(http: TestClient, engine: ScriptedEngine) -> None:
    engine.texts += ["fine"]
    call = {"id": "call_x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ask(http, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so", "tool_calls": [call]}])
    assert 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in engine.prompts[0]
    renderer = MessageRenderer("{{ tools }} {{ message.tool_calls }}", (), lambda messages, tools: "")
    [kept] = renderer.prepare([{"role": "assistant", "content": None, "tool_calls": [call]}], TOOLS, ())
    assert kept["tool_calls"][0]["function"]["arguments"] == {"a": 1} and kept["content"] == ""


def test_answer_is_text_without_allowed_tools(http: TestClient, engine: ScriptedEngine) -> None:
    engine.texts += [CALL, CALL]
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = ask(http, [{"role": "user", "content": "x"}], **more)["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"
        assert '"name": "add"' not in engine.prompts[-1]


def test_required_calls_and_formats_are_asked_of_the_policy(
    http: TestClient, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampling is not constrained, so they are not promised."""
    engine.texts += [CALL, CALL, *["{}"] * 4]
    asked = [{"role": "user", "content": "x"}]
    tools = [*TOOLS, {"type": "function", "function": {"name": "subtract"}}]
    for choice, offered in (("required", True), ({"type": "function", "function": {"name": "add"}}, False)):
        [entry] = ask(http, asked, tools=tools, tool_choice=choice)["choices"]
        assert entry["finish_reason"] == "tool_calls" and '"name": "add"' in engine.prompts[-1]
        assert ('"name": "subtract"' in engine.prompts[-1]) == offered
    refused = {"messages": asked, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}
    assert "of one of `tools`" in http.post("/v1/chat/completions", json=refused).json()["error"]["message"]
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}
    ask(http, [{"role": "user", "content": "first"}, *asked], response_format={"type": "json_object"})
    assert "x\n\nAnswer with JSON only." in engine.prompts[-1] and engine.prompts[-1].count("JSON") == 1
    parts = [{"type": "text", "text": "x"}]
    ask(http, [{"role": "user", "content": parts}, {"role": "assistant", "content": "y"}], response_format=schema)
    said = 'x\n\nAnswer with JSON only. It must be valid by this JSON schema:\n{"type":"object"}'
    assert said in engine.prompts[-1] and engine.prompts[-1].index(said) < engine.prompts[-1].index("y<eos>")
    for asked in ({"role": "system", "content": "z"}, {"role": "user", "content": None}):
        ask(http, [asked], response_format=schema)
        assert "Answer with JSON only." in engine.prompts[-1]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["tool_choice", "response_format"], "once each"


def test_marks_that_are_special_tokens_are_seen(tiny_policy: Path) -> None:
    tokenizer = load_tokenizer(tiny_policy)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    engine = ScriptedEngine(tokenizer)
    engine.texts.append('[TOOL_CALLS]add[ARGS]{"a": 1}')
    server = InferenceServer(engine, tokenizer, model_name="tiny", secret=SECRET)
    with TestClient(server.app) as client:
        client.headers["authorization"] = f"Bearer {SECRET}.g0/0"
        [choice] = ask(client, [{"role": "user", "content": "x"}], tools=TOOLS)["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


_MISTRAL = """{# tools #}{%- set ns = namespace(turns=0) -%}
{%- for m in messages -%}
{%- if m.role != 'tool' and not m.tool_calls -%}
{%- if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{%- set ns.turns = ns.turns + 1 -%}
{%- endif -%}
{%- if m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif -%}
[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}
{%- elif m.tool_calls -%}
[TOOL_CALLS][{%- for call in m.tool_calls %}{{ call.function | tojson }}{{ call.id }}{% endfor %}]<eos>
{%- else -%}
<{{ m.role }}>{{ m.content }}<eos>
{%- endif -%}
{%- endfor -%}"""


def test_conversation_with_calls_goes_on_where_the_template_is_strict(http: TestClient, engine: ScriptedEngine) -> None:
    """Mistral's templates want ids of nine characters, and turns that alternate but for calls and their results."""
    engine.tokenizer.chat_template = _MISTRAL
    server = InferenceServer(engine, engine.tokenizer, model_name="tiny", secret=SECRET)
    engine.texts += ['[TOOL_CALLS][{"name": "add", "arguments": {}}]', "It is 3.", "Bye."]
    talk: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
    with TestClient(server.app) as client:
        client.headers["authorization"] = f"Bearer {SECRET}.g0/0"
        talk.append(ask(client, talk, tools=TOOLS)["choices"][0]["message"])
        [call] = talk[-1]["tool_calls"]
        talk.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        talk.append(ask(client, talk, tools=TOOLS)["choices"][0]["message"])
        assert talk[-1]["content"] == "It is 3."
        assert engine.prompts[-1].startswith(engine.prompts[0] + "<assistant>" + '[TOOL_CALLS][{"name": "add"')
        talk.append({"role": "user", "content": "Thanks."})
        ask(client, talk, tools=TOOLS)
    [(asked, answered)] = re.findall(
        r"\[TOOL_CALLS\]\[\{.*?\}\}(\w+)\]<eos>\[TOOL_RESULTS\](\w{9})3", engine.prompts[-1]
    )
    assert asked == answered, "the template's own form"


def test_refused_messages_are_rendered_once_without_a_session(engine: ScriptedEngine) -> None:
    render = engine.tokenizer.apply_chat_template = mock.Mock(side_effect=KeyError("refused"))
    server = InferenceServer(engine, engine.tokenizer, model_name="tiny", secret=SECRET)
    render.reset_mock()  # the probes are rendered too
    with TestClient(server.app) as client:
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {SECRET}"})
    assert answer.status_code == 400 and "rejects these messages" in answer.text and render.call_count == 1


def test_stream_contains_the_whole_answer(http: TestClient, engine: ScriptedEngine) -> None:
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
    assert len(turns(http)) == 3, "streams are recorded as turns"


def test_unknown_and_null_fields_are_ignored(http: TestClient, engine: ScriptedEngine) -> None:
    engine.texts += ["fine"]
    more = {"n": None, "stream": None, "user": "me", "frequency_penalty": 0, "response_format": {"type": "text"}}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ask(http, messages, **more)["choices"][0]["message"]["content"] == "fine"
    assert "a\nb" in engine.prompts[0]


@pytest.mark.parametrize("calls", [5, {"id": "1"}, ["add"], [{"function": {"name": 3}}]])
def test_calls_of_another_form_are_refused(http: TestClient, calls: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400 and "tool_calls must be a list" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"echo": True}, "echo is not supported"), ({"suffix": "end"}, "suffix is not supported"),
        ({"logprobs": 2}, "logprobs above 1 is not supported; logprobs of the sampled tokens are"),
        ({"best_of": 3}, "best_of is"), ({"frequency_penalty": 0.5}, "frequency_penalty is"),
        ({"presence_penalty": -0.5}, "presence_penalty is"), ({"logit_bias": {"5": -100}}, "logit_bias is"),
    ],
)  # fmt: skip
def test_completion_that_would_lack_what_is_asked_is_refused(http: TestClient, body: dict[str, Any], why: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x"} | body, headers=SERVED)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]


def test_penalties_of_rollouts_are_left_out(http: TestClient, engine: ScriptedEngine, capfd: Any) -> None:
    engine.texts += ["one", "two"]
    neutral = {"echo": False, "suffix": "", "best_of": 1, "logprobs": 1, "logit_bias": {}, "top_k": -1, "min_p": 0}
    assert http.post("/v1/completions", json={"prompt": "x"} | neutral).status_code == 200
    ask(http, [{"role": "user", "content": "x"}], presence_penalty=0.5, top_k=5, chat_template_kwargs={})
    assert {line.split(":")[0] for line in capfd.readouterr().err.splitlines()} == {"presence_penalty", "top_k"}


def test_key_of_served_policy_takes_several_prompts(http: TestClient, engine: ScriptedEngine) -> None:
    engine.texts += ["one", "two"]
    body = {"prompt": ["a", "b"], "n": 2}
    answer = http.post("/v1/completions", json=body, headers=SERVED).json()
    assert [entry["text"] for entry in answer["choices"]] == ["one", "one", "two", "two"]
    assert "one prompt at a time" in http.post("/v1/completions", json=body).json()["error"]["message"]


def test_answer_ids_distinguish_equal_texts() -> None:
    assert answer_id([1], [2, 3]) != answer_id([1, 2], [2, 3]) and answer_id([1], [2]) == answer_id([1], [2])


def test_opponent_answers_unrecorded_requests_for_it_only(engine: ScriptedEngine, tiny_policy: Path) -> None:
    fixed = ScriptedEngine(load_tokenizer(tiny_policy))
    server = InferenceServer(engine, engine.tokenizer, model_name="tiny", secret=SECRET)
    server.opponent = InferenceServer(fixed, fixed.tokenizer, model_name="base", secret=SECRET)
    fixed.texts, engine.texts = ["their move"], ["own move", "own words", "not theirs"]
    message = {"model": OPPONENT, "messages": [{"role": "user", "content": "Your move."}]}
    with TestClient(server.app) as http:

        def said(session: str, body: dict[str, Any]) -> str:
            head = {"authorization": f"Bearer {session_key(SECRET, session)}"}
            return str(http.post("/v1/chat/completions", json=body, headers=head).json()["choices"][0]["message"])

        assert "their move" in said(UNRECORDED, message)
        assert "own move" in said(UNRECORDED, message | {"model": "policy"})
        assert "own words" in said("g0/0", message)  # a rollout's own key is always the policy's
        assert len(server.sessions) == 1 and not len(server.opponent.sessions)


def turn(prompt: list[int], completion: list[int], version: int = 0) -> Turn:
    return Turn(prompt, completion, [-0.5] * len(completion), [(version, len(completion))], "stop")


def test_join_turns_extends_or_starts_segments() -> None:
    first, second = turn([1, 2], [3, 4], 1), turn([1, 2, 3, 4, 9], [5], 2)
    other = turn([1, 2, 8], [6], 3)
    joined, alone = join_turns([first, second, other])
    assert joined.tokens == [1, 2, 3, 4, 9, 5]
    assert joined.masks == [MASKED, MASKED, 3, 4, MASKED, 5]
    assert joined.logprobs == [PROMPT_LOGPROB, PROMPT_LOGPROB, -0.5, -0.5, PROMPT_LOGPROB, -0.5]
    assert joined.versions == [(1, 2), (2, 1)]
    assert alone.tokens == [1, 2, 8, 6]


def test_sessions_have_room_for_all_rollouts_of_a_run(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.rollout.concurrency, config.rollout.group_size, config.launcher.drivers = 1100, 4, 2
    member: Any = mock.Mock(spec_set=["spec", "ending", "report"])
    member.spec.config = config
    server = InferenceServer(engine, engine.tokenizer, model_name="tiny", secret=SECRET)
    monkeypatch.setattr(app, "serve", mock.AsyncMock())
    asyncio.run(app.serve_engine(member, server, engine))
    for number in range(2 * 1100 * 4):
        server.sessions.record(str(number), turn([1], [2]))
    assert len(server.sessions) == 8800


def test_session_store_is_bounded_and_closes_sub_sessions() -> None:
    store = SessionStore(limit=3)
    for index in range(3):
        store.record(f"g/{index}", turn([1], [2]))
    assert sorted(store.matching("g")) == ["g/0", "g/1", "g/2"]
    store.record("h", turn([1], [2]))
    assert sorted(store.matching("g")) == ["g/1", "g/2"]
    assert store.close("h") == 1
    assert store.get("h") is None
    assert store.close("g") == 2  # g/0 was forgotten already
    assert len(store) == 0
