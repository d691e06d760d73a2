"""A stand-in for websockets, the server side of the OpenEnv protocol, without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from toprope.sdk.authoring.env_managed import OwnLoop, sample_group
from toprope.sdk.authoring.environment import Environment, Task
from toprope.sdk.worker.scripted_policy import scripted_session

TEXT = {"type": "string"}
OBSERVATION = {"properties": {"text": TEXT, "done": {}, "reward": {}, "metadata": {}}}
TOOLS = [{"name": "say", "description": "Say it.", "inputSchema": {"properties": {"text": TEXT}}}]
MISSING: list[str] = []
MESSAGE = {"properties": {"message": TEXT, "metadata": {}}, "required": ["message"]}
COLUMN = {"properties": {"column": {"type": "integer"}}, "required": ["column"], "description": "Column 0 to 6."}
CALL = {"properties": {"type": {"const": "call_tool"}, "tool_name": TEXT, "arguments": {"type": "object"}}}


class ConnectionClosed(Exception):
    pass


class Episode:
    """An episode that states its seed and rewards repeating it; two may be open at a time."""

    open = refused = 0
    next_answer: ClassVar[dict[str, Any]] = {}
    """Answers the next action, once."""

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
        elif asked["type"] == "mcp":
            assert asked["data"]["method"] == "tools/list"
            self.answers.append({"type": "mcp", "data": {"result": {"tools": TOOLS}}})
        elif asked["type"] == "reset" and asked["data"].get("broken"):
            self.answers.append({"type": "error", "data": {"code": "FACTORY_ERROR", "message": "not made"}})
        elif asked["type"] == "reset":
            self.seed = asked["data"]["seed"]
            self.answers.append(self.seen(f"say {self.seed}", 0.0, False))
        elif asked["data"] == {}:
            errors = [{"type": "missing", "loc": [name], "msg": "Field required"} for name in MISSING]
            told = {"code": "VALIDATION_ERROR", "message": "Invalid action", "errors": errors}
            self.answers.append({"type": "error", "data": told})
        elif Episode.next_answer:
            self.answers.append(Episode.next_answer)
            Episode.next_answer = {}
        elif asked["data"] == {"message": "boom", "kind": "word"}:
            self.answers.append({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it broke"}})
        elif "column" in asked["data"]:
            self.answers.append(self.seen("placed", 0.3333333, asked["data"]["column"] == 3))
        elif asked["data"].get("type") == "call_tool":
            said = asked["data"]["arguments"]["text"]
            right = asked["data"]["tool_name"] == "say" and said == str(self.seed)
            self.answers.append(self.seen(f"said {said}", float(right), right))
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


class Served(str):
    """The address of a server, and the schema that it gives."""

    schema: dict[str, Any]

    def __new__(cls, url: str, schema: dict[str, Any]) -> Served:
        made = super().__new__(cls, url)
        made.schema = schema
        return made


@pytest.fixture
def server(stand_in: Callable[..., None]) -> Iterator[Served]:
    """The HTTP part of an OpenEnv server; `Episode` is the rest."""
    schema = {"action": MESSAGE, "observation": OBSERVATION}

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
    yield Served(f"http://127.0.0.1:{http.server_address[1]}", schema)
    http.shutdown()
    http.server_close()


def sample(environment: Environment, task: Task, answer: str, size: int) -> list[Any]:
    assert isinstance(environment, OwnLoop)
    with scripted_session(answer) as session:
        return asyncio.run(sample_group(environment, task, [session] * size)).outcomes
