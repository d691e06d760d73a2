"""The adapter of OpenEnv, with stand-ins for a server and for websockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from toprope.sdk.adapters import openenv
from toprope.sdk.authoring.env_managed import OwnLoop, sample_group
from toprope.sdk.authoring.environment import Environment, Task
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest
from toprope.sdk.rollouts import configure
from toprope.sdk.worker.scripted_policy import scripted_session

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
def server(stand_in: Callable[..., None]) -> Iterator[str]:
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

    stand_in("websockets.asyncio.client", connect=connect)
    stand_in("websockets.exceptions", ConnectionClosed=ConnectionClosed, WebSocketException=ConnectionClosed)
    Episode.open = Episode.refused = 0
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()


def sample(environment: Environment, task: Task, answer: str, size: int) -> list[Any]:
    assert isinstance(environment, OwnLoop)
    with scripted_session(answer) as session:
        return asyncio.run(sample_group(environment, task, [session] * size)).outcomes


def test_openenv_reads_schema_and_waits_for_full_server(server: str) -> None:
    environment = configure(openenv.make(server), knobs={"action_fields": {"kind": "word"}, "tasks": 6})
    tasks = list(environment.tasks())
    assert [task.messages[0]["content"] for task in tasks] == [f"say {seed}" for seed in range(6)]
    assert [one.reward for one in sample(environment, tasks[4], "4", 5)] == [1.0] * 5 and Episode.refused
    [bad] = sample(environment, tasks[4], "5", 1)
    assert (bad.reward, bad.error, bad.success, bad.turns) == (0.0, None, False, 1)
    [broken] = sample(environment, tasks[4], "boom", 1)
    assert "it broke" in broken.error and broken.reward == 0.0
    assert Episode.open == 0, "every episode is closed"


def test_openenv_refuses_unknown_field_and_reward_range(server: str) -> None:
    environment = configure(openenv.make(server), knobs={"observation": "txt", "action": "message"})
    with pytest.raises(EnvironmentMistake, match="Fields: text"):
        next(iter(environment.tasks()))
    with pytest.raises(InvalidRequest, match="reward_low"):
        configure(openenv.make(server), knobs={"reward_low": 2.0})
