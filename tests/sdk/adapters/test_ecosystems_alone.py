"""Adapters of verifiers, OpenEnv, inspect-ai and Atropos, with stand-ins for these packages."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from toprope.sdk.adapters import atropos, inspect_ai, openenv, verifiers
from toprope.sdk.adapters._servers.atropos import GROUP
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session, sample_group
from toprope.sdk.authoring.environment import Environment, Part, Task
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest
from toprope.sdk.rollouts import configure
from toprope.sdk.worker.scripted_policy import scripted_session


def module(monkeypatch: pytest.MonkeyPatch, name: str, **holds: Any) -> None:
    """Install a stand-in module and its parent packages in `sys.modules`."""
    words = name.split(".")
    for place in range(1, len(words) + 1):
        known = ".".join(words[:place])
        if known not in sys.modules:
            made = types.ModuleType(known)
            made.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, known, made)
    for key, value in holds.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


# A stand-in for websockets: the server side of the OpenEnv protocol, without a socket.


class ConnectionClosed(Exception):
    pass


class Episode:
    """An episode that states its seed and rewards repeating it; two may be open at a time."""

    open = refused = 0

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.full = Episode.open >= 2
        Episode.open += not self.full
        Episode.refused += self.full

    async def send(self, text: str) -> None:
        asked = json.loads(text)
        if asked["type"] == "close":
            return
        if self.full:
            self.answers.append({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
        elif asked["type"] == "reset":
            self.seed = asked["data"]["seed"]
            self.answers.append(self.seen(f"say {self.seed}", 0.0, False))
        elif asked["data"] == {"message": "boom", "kind": "word"}:
            self.answers.append({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it broke"}})
        else:
            assert asked["data"].keys() == {"message", "kind"}
            right = asked["data"]["message"] == str(self.seed)
            self.answers.append(self.seen("well", float(right), True))

    def seen(self, text: str, reward: float, done: bool) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}

    async def recv(self) -> str:
        await asyncio.sleep(0)
        return json.dumps(self.answers.pop(0))

    async def close(self) -> None:
        Episode.open -= not self.full


async def connect(url: str, **options: Any) -> Episode:
    assert url.startswith("ws://127.0.0.1:") and url.endswith("/ws")
    return Episode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The HTTP part of an OpenEnv server; `Episode` is the rest."""
    text = {"type": "string"}
    schema = {
        "action": {"properties": {"message": text, "metadata": {}}, "required": ["message"]},
        "observation": {"properties": {"text": text, "done": {}, "reward": {}, "metadata": {}}},
    }

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            data = json.dumps(schema if self.path == "/schema" else {"status": "healthy"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    module(monkeypatch, "websockets.asyncio.client", connect=connect)
    module(monkeypatch, "websockets.exceptions", ConnectionClosed=ConnectionClosed, WebSocketException=ConnectionClosed)
    Episode.open = Episode.refused = 0
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()


def played(environment: Environment, task: Task, answer: str, size: int) -> list[Any]:
    assert isinstance(environment, OwnLoop)
    with scripted_session(answer) as session:
        return asyncio.run(sample_group(environment, task, [session] * size)).outcomes


def test_openenv_reads_schema_and_waits_for_full_server(server: str) -> None:
    environment = configure(openenv.make(server), knobs={"action_fields": {"kind": "word"}, "tasks": 6})
    tasks = list(environment.tasks())
    assert [task.messages[0]["content"] for task in tasks] == [f"say {seed}" for seed in range(6)]
    assert [one.reward for one in played(environment, tasks[4], "4", 5)] == [1.0] * 5 and Episode.refused
    [bad] = played(environment, tasks[4], "5", 1)
    assert (bad.reward, bad.error, bad.success, bad.turns) == (0.0, None, False, 1)
    [broken] = played(environment, tasks[4], "boom", 1)
    assert "it broke" in broken.error and broken.reward == 0.0
    assert Episode.open == 0, "every episode is closed"


def test_openenv_refuses_unknown_field_and_reward_range(server: str) -> None:
    environment = configure(openenv.make(server), knobs={"observation": "txt", "action": "message"})
    with pytest.raises(EnvironmentMistake, match="Fields: text"):
        next(iter(environment.tasks()))
    with pytest.raises(InvalidRequest, match="reward_low"):
        configure(openenv.make(server), knobs={"reward_low": 2.0})


def reward(name: str, weight: float, gives: Any) -> Any:
    def function() -> None:
        """A reward."""

    function.__name__, function._vf_weight = name, weight  # type: ignore[attr-defined]
    function.__annotations__ = {"return": gives} if gives else {}
    return function


class Env:
    async def finalize(self) -> None: ...


def vf(**knobs: Any) -> verifiers.Verifiers:
    environment = object.__new__(verifiers.Verifiers)
    environment.knobs = Thing(**{"reward_low": 0.0, "reward_high": 1.0, "success_reward": None} | knobs)
    environment._env = Env()
    return environment


def trace(rewards: dict[str, tuple[float, float]], trainable: bool = True, **more: Any) -> Thing:
    given = {name: Thing(score=score, weight=weight, value=score * weight) for name, (score, weight) in rewards.items()}
    rest = {"metrics": {"length": 3}, "messages": [], "num_turns": 1, "is_truncated": False, "last_error": None}
    return Thing(agent=Thing(trainable=trainable), rewards=given, **rest | more)


def test_verifiers_declares_parts_and_reads_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "verifiers.v1.dialects.chat", message_to_wire=lambda message: message)
    environment = vf()
    hooks = {
        "reward": [reward("exact", 0.75, float), reward("several", 1.0, None)],
        "metric": [reward("length", 1, int)],
    }
    environment.parts = environment._parts(Thing(hooks=hooks.get, plugged_judges=lambda: []))
    assert {name: part.weight for name, part in environment.parts.items()} == {
        "exact": 0.75, "several": 1.0, "other": 1.0, "length": 0.0,
    }  # fmt: skip
    one = trace({"exact": (1.0, 0.75), "style": (0.5, 2.0)})
    judge = trace({"exact": (0.0, 0.75)}, trainable=False)
    found = environment._played(Thing(ok=True, traces=[one, judge], last_error=None))
    assert found.parts == {"exact": 1.0, "several": 0.0, "other": 1.0, "length": 3.0} and found.turns == 1
    assert environment.success(found.parts, 1.75) and not environment.success(found.parts, 1.5)
    with pytest.raises(EnvironmentMistake, match="reward_low and reward_high"):
        environment._played(Thing(ok=True, traces=[trace({"exact": (7.0, 0.75)})], last_error=None))
    failed = environment._played(Thing(ok=False, traces=[one], last_error=Thing(type="TaskError", message="no file")))
    assert failed.error == "TaskError: no file"


def test_verifiers_refuses_undeclared_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = vf()
    environment.parts = environment._parts(
        Thing(hooks={"reward": [reward("exact", 1.0, float)], "metric": []}.get, plugged_judges=lambda: [])
    )
    assert list(environment.parts) == ["exact"]
    module(monkeypatch, "verifiers.v1.dialects.chat", message_to_wire=lambda message: message)
    with pytest.raises(EnvironmentMistake, match="dict\\[str, float\\]"):
        environment._played(Thing(ok=True, traces=[trace({"style": (1.0, 1.0)})], last_error=None))


def session(**other: Any) -> Session:
    return Session(**{"base_url": "http://x/v1", "api_key": "k", "model": "m"} | other)


def test_inspect_batches_alike_rollouts_into_one_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    running = 0

    async def evaluated(task: Any, asked: list[Any], turns: int) -> list[Any]:
        nonlocal running
        running += 1
        assert running == 1, "inspect allows one evaluation at a time"
        calls.append(len(asked))
        await asyncio.sleep(0.01)
        running -= 1
        if any(sample == "bad" for sample, _ in asked):
            raise ValueError("no such tool")
        return [f"{sample} by {one.api_key}" for sample, one in asked]

    monkeypatch.setattr(inspect_ai, "_evaluated", evaluated)

    async def work() -> None:
        desk = inspect_ai._Desk()

        async def ask(sample: str, **other: Any) -> Any:
            return await desk.played(None, sample, session(**other), 3)

        first = [asyncio.ensure_future(ask("a", api_key=str(number))) for number in range(3)]
        await asyncio.sleep(0.005)
        second = [asyncio.ensure_future(ask("b", api_key=str(number))) for number in range(2)]
        warm = asyncio.ensure_future(ask("c", temperature=0.0))
        assert await asyncio.gather(*first, *second, warm) == [
            *("a by 0", "a by 1", "a by 2", "b by 0", "b by 1", "c by k"),
        ]
        assert calls == [3, 2, 1], "rollouts with other sampling settings run separately"
        with pytest.raises(RuntimeError, match="no such tool"):
            await ask("bad")
        assert await ask("d") == "d by k"

    asyncio.run(work())


def test_inspect_converts_scores_to_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"C": 1.0, "I": 0.0}
    module(monkeypatch, "inspect_ai.scorer", value_to_float=lambda: lambda value: values.get(value, value))
    environment = object.__new__(inspect_ai.Inspect)
    environment.parts = {"exact": Part(0.5), "several": Part(0.5)}
    call = Thing(id="c1", function="add", arguments={"a": 1})
    messages = [Thing(role="user", text="x"), Thing(role="assistant", text="", tool_calls=[call])]
    sample = Thing(
        messages=messages, limit=None, error=None, output=Thing(stop_reason="stop"),
        scores={"exact": Thing(value="C"), "several": Thing(value={"a": "I", "b": 1.0})},
    )  # fmt: skip
    found = environment._read(sample)
    assert found.parts == {"exact": 1.0, "several": 0.5} and found.turns == 1 and not found.truncated
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    sample.limit, sample.error = Thing(type="token"), Thing(message="Traceback\nValueError: it broke")
    assert environment._read(sample).error == "ValueError: it broke" and environment._read(sample).truncated
    sample.error, sample.scores = None, {"exact": Thing(value=3.0)}
    with pytest.raises(EnvironmentMistake, match="reward_low and reward_high"):
        environment._read(sample)


class Collects:
    """An Atropos environment with the members that the adapter uses."""

    tokenizer = Thing(decode=lambda tokens: "".join(map(chr, tokens)))

    def __init__(self, scores: Any) -> None:
        self.scores = scores
        self.config = Thing(group_size=0, model_copy=lambda update: Thing(**update))

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        group = GROUP.get()
        assert group is not None and self.config.group_size == len(group.rollouts) == 3
        taken = group.take(3, item)
        for number, one in enumerate(taken):
            one.said.append(f"answer {number}")
        texts = [f"{item} answer {number}" for number in (2, 0)]  # in another order, and one left out
        found = {"tokens": [list(map(ord, text)) for text in texts], "scores": self.scores}
        return (None if self.scores is None else found), []

    async def postprocess_histories(self, scored: Any) -> Any:
        return scored


@pytest.mark.parametrize(
    ("scores", "parts", "said"),
    [
        ([0.5, -1.0], [{"score": -1.0}, {}, {"score": 0.5}], "scored no sequence"),
        ([7.0, 1.0], [{"score": 1.0}, {}, {}], "reward_low and reward_high"),
        (None, [{}, {}, {}], "dropped the group"),
    ],
)
def test_atropos_assigns_scores_to_rollouts(scores: Any, parts: list[Any], said: str) -> None:
    environment = object.__new__(atropos.Atropos)
    environment.knobs = atropos.AtroposKnobs()
    environment._loop, environment._env = atropos._Loop(), Collects(scores)
    found = asyncio.run(environment.group(Task("x", data={"item": "x"}), [session()] * 3))
    assert all(isinstance(one, Played) for one in found)
    assert [one.parts for one in found if isinstance(one, Played)] == parts
    errors = [one.error for one in found if isinstance(one, Played) and one.error]
    assert any(said in error for error in errors)


def test_atropos_converts_items_to_prompts() -> None:
    message = frozenset({"role": "user", "content": "hi"}.items())
    assert atropos._shown(((message,), "gold")) == [{"role": "user", "content": "hi"}]
    assert atropos._shown({"question": "how many?"}) == "how many?" and atropos._shown(7) == "7"
    assert atropos._reference(((message,), "gold")) == "gold" and atropos._reference({"answer": "3"}) == "3"


def test_verifiers_refuses_tool_server_that_is_not_a_program(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "served.py"
    made = types.ModuleType("served")
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "served", made)
    kind = type("Lookup", (), {"__module__": "served", "_config_cls": classmethod(lambda cls: None)})
    server = kind()
    server.config = Thing(url=None)
    file.write_text("x = 1\n")
    with pytest.raises(InvalidRequest, match=r"Lookup\.run\(\)"):
        verifiers._check_server(server)
    file.write_text('if __name__ == "__main__":\n    Lookup.run()\n')
    verifiers._check_server(server)
