"""The adapter of OpenReward's protocol, against the published package and against a stand-in that speaks it."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_engines import ECOSYSTEMS
from toprope.sdk.adapters.ors import declared, make
from toprope.sdk.errors import LoadError
from toprope.sdk.worker.client import WorkerClient

SUMS = '''
"""Sums."""
from pydantic import BaseModel
from ors import Environment, Server, Split, TextBlock, ToolOutput, tool

class Answer(BaseModel):
    answer: str

class Sums(Environment):
    """Add numbers."""

    @classmethod
    def list_splits(cls):
        return [Split(name="train", type="train"), Split(name="hard", type="test")]

    @classmethod
    def list_tasks(cls, split):
        return [{"a": n, "b": 2 if split == "train" else 50} for n in range(30 if split == "train" else 3)]

    def get_prompt(self):
        return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}?")]

    @tool
    def hint(self, params: Answer) -> ToolOutput:
        """Gives a hint."""
        return ToolOutput(blocks=[TextBlock(text="think")], reward=-0.25)

    @tool
    def submit(self, params: Answer) -> ToolOutput:
        """Takes the answer."""
        right = params.answer == str(self.task_spec["a"] + self.task_spec["b"])
        return ToolOutput(blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True)
'''
STAND_IN = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

Split = lambda name, type: {"name": name, "type": type}
TextBlock = lambda text: {"type": "text", "text": text}
ToolOutput = lambda blocks, reward=None, finished=False: dict(blocks=blocks, reward=reward, finished=finished)

class Environment:
    def __init__(self, spec):
        self.task_spec = spec

def tool(function):
    function.is_tool = True
    return function

class Server:
    def __init__(self, kinds):
        self.kinds = {kind.__name__.lower(): kind for kind in kinds}

    def run(self, host, port):
        kinds, sessions = self.kinds, {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path, sid = self.path.strip("/").split("/"), self.headers["X-Session-ID"]
                if path == ["list_environments"]:
                    self.say(list(kinds))
                elif path == ["health"]:
                    self.say({"status": "ok"})
                elif path[1] == "splits":
                    self.say(kinds[path[0]].list_splits())
                elif path[1] == "prompt":
                    self.say(sessions[sid].get_prompt())
                else:
                    kind = type(sessions[sid])
                    named = [one for one in vars(kind).values() if getattr(one, "is_tool", False)]
                    self.say({"tools": [{"name": one.__name__, "description": one.__doc__} for one in named]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path, sid = self.path.strip("/").split("/"), self.headers["X-Session-ID"]
                if path == ["create"]:
                    sessions[sid] = kinds[body["env_name"]](body["task_spec"])
                    self.say({"sid": sid})
                elif path == ["delete"]:
                    del sessions[sid]
                    self.say({"sid": sid})
                elif path[1] == "num_tasks":
                    self.say({"num_tasks": len(kinds[path[0]].list_tasks(body["split"]))})
                elif path[1] == "task":
                    self.say({"task": kinds[path[0]].list_tasks(body["split"])[body["index"]]})
                else:
                    given = SimpleNamespace(**body["input"])
                    try:
                        found = {"ok": True, "output": getattr(sessions[sid], body["name"])(given)}
                    except AttributeError:
                        found = {"ok": False, "error": "Tool input validation error: answer is missing"}
                    text = json.dumps(found)
                    events = [("task_id", "1"), ("chunk", text[:20]), ("end", text[20:])]
                    said = "".join(f"event: {name}\\r\\ndata: {data}\\r\\n\\r\\n" for name, data in events)
                    self.say(": ping\\r\\n\\r\\n" + said)

            def say(self, value):
                data = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


def played(python: str | None, target: str) -> list[Any]:
    """Return the first messages of two rollouts of a task, and what they are told in two turns."""

    async def work() -> list[Any]:
        async with await WorkerClient.start(python, timeout=60) as link:
            await link.call("open", timeout=60, source={"adapter": "ors", "target": target})
            begun = await link.call("begin", timeout=60, split="train", index=0, count=2)
            first, second = begun["rollouts"]
            right = int(begun["messages"][-1]["content"].split()[2]) + 2
            call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
            moves = [[first, call % ("hint", "answer", "?"), False], [second, call % ("submit", "n", 1), False]]
            one = await link.call("advance", timeout=60, moves=moves)
            moves = [[first, call % ("submit", "answer", right), False], [second, "I give up", False]]
            return [begun["messages"], one, await link.call("advance", timeout=60, moves=moves)]

    return asyncio.run(work())


def expect_right_rollouts(found: list[Any]) -> None:
    messages, one, two = found
    assert '"name": "submit"' in messages[0]["content"] and messages[1]["content"].startswith("What is ")
    assert one[0]["messages"][0]["content"] == "think" and "answer" in one[1]["messages"][0]["content"]
    assert one[1]["messages"][0]["content"].startswith("Error: Tool input validation error")
    assert [each["done"] for each in two] == [True, True]
    assert [each["outcome"]["reward"] for each in two] == [0.75, 0.0]
    assert not any(each["outcome"]["success"] or each["outcome"]["error"] for each in two)


def listed(folder: Path) -> dict[str, Any]:
    file = folder / "sums.py"
    file.write_text(SUMS)
    [found] = declared(file, ast.parse(SUMS))
    assert (found.name, found.description, found.tools) == ("sums", "Add numbers.", True)
    target: dict[str, Any] = json.loads(found.target)
    return target


def test_calls_are_rewarded_until_one_ends_the_episode(tmp_path: Path) -> None:
    (tmp_path / "ors.py").write_text(STAND_IN)
    target = listed(tmp_path)
    expect_right_rollouts(played(None, json.dumps(target)))
    environment = make(json.dumps({**target, "split": "hard"}))
    environment.setup()
    assert len(list(environment.tasks())) == 3
    with pytest.raises(LoadError, match=r"no environment 'others'\. Environments: sums\."):
        make(json.dumps({**target, "environment": "others"})).setup()


@pytest.mark.parametrize(
    ("file", "more", "names"),
    [
        ("server.py", "", ["sums"]),
        ("sums_server.py", "", ["sums_server"]),
        ("app.py", "class Products(Environment): ...", ["sums", "products"]),
        ("maths.py", "class Products(Environment): ...", ["maths-sums", "maths-products"]),
    ],
)
def test_file_with_the_name_of_every_server_is_listed_by_its_class(file: str, more: str, names: list[str]) -> None:
    assert [one.name for one in declared(Path(file), ast.parse(f"{SUMS}\n{more}"))] == names


def test_server_that_cannot_be_loaded_names_the_host_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "ors.py").write_text(STAND_IN)
    target = listed(tmp_path)
    lines = (
        "import contextlib, socket\nwith contextlib.suppress(OSError):\n    socket.getaddrinfo('data.invalid', 80)\n"
    )
    (tmp_path / "sums.py").write_text(f"{lines}raise FileNotFoundError('no rows downloaded')\n{SUMS}")
    why = r"FileNotFoundError: no rows downloaded; besides, data\.invalid could not be reached$"
    with pytest.raises(LoadError, match=why):
        make(json.dumps(target)).setup()


def test_server_by_address_names_its_environment() -> None:
    assert make("http://127.0.0.1:9#sums").name == "sums"
    with pytest.raises(LoadError, match="not a server address"):
        make("127.0.0.1")


@pytest.mark.engines
def test_ors_published_package_runs(tmp_path: Path) -> None:
    python = ECOSYSTEMS / "ors" / "bin" / "python"
    if not python.exists():
        pytest.skip("ors has no interpreter of its own here: `make test-engines` installs one")
    expect_right_rollouts(played(str(python), json.dumps(listed(tmp_path))))
