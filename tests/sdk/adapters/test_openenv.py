"""The adapter of OpenEnv, with stand-ins for a server and for websockets."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from toprope.sdk import errors
from toprope.sdk.adapters import openenv
from toprope.sdk.adapters._servers import started
from toprope.sdk.adapters._servers.openenv import Refused
from toprope.sdk.adapters._servers.openenv_serve import _tell_failures
from toprope.sdk.adapters._servers.started import StartedServer
from toprope.sdk.authoring.env_managed import OwnLoop, sample_group
from toprope.sdk.authoring.environment import Environment, Task
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError
from toprope.sdk.rollouts import configure
from toprope.sdk.worker.scripted_policy import scripted_session
from toprope.settings.sections.environment import EnvironmentSection

# A stand-in for websockets: the server side of the OpenEnv protocol, without a socket.


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


def test_openenv_reads_schema_and_waits_for_full_server(server: Served) -> None:
    environment = configure(openenv.make(server), knobs={"action_fields": {"kind": "word"}, "tasks": 6})
    tasks = list(environment.tasks())
    assert [task.messages[0]["content"] for task in tasks] == [f"say {seed}" for seed in range(6)]
    assert [one.reward for one in sample(environment, tasks[4], "4", 5)] == [1.0] * 5 and Episode.refused
    [bad] = sample(environment, tasks[4], "5", 1)
    assert (bad.reward, bad.error, bad.success, bad.turns) == (0.0, None, False, 1)
    [invalid] = sample(environment, tasks[4], "boom", 1)
    assert (invalid.error, invalid.turns, invalid.parts) == (None, 3, {"reward": 0.0, "invalid": 3.0})
    assert Episode.open == 0, "every episode is closed"


def test_server_without_websocket_is_named(server: Served, stand_in: Callable[..., None]) -> None:
    async def rejected(url: str, **options: Any) -> None:
        raise ConnectionClosed("HTTP 403")

    stand_in("websockets.asyncio.client", connect=rejected)
    with pytest.raises(EnvironmentMistake, match=r"no WebSocket at /ws \(HTTP 403\)"):
        list(configure(openenv.make(server), knobs={"tasks": 2}).tasks())


def test_pixels_are_not_shown_to_the_policy(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = {"screen": [[[7, 7, 7]] * 40] * 30, "board": [[0, 1], [1, 0]], "lives": 3}

    def seen(self: Episode, text: str, reward: float, done: bool) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": screen, "reward": reward, "done": done}}

    monkeypatch.setattr(Episode, "seen", seen)
    server.schema["observation"] = {"properties": {name: {} for name in screen}}
    environment = configure(openenv.make(server), knobs={"action_fields": {"kind": "word"}, "tasks": 1})
    [task] = environment.tasks()
    shown = json.loads(task.messages[-1]["content"])
    assert shown == {**screen, "screen": "3600 numbers, not shown"}


def test_openenv_refuses_unknown_field_and_reward_range(server: Served) -> None:
    environment = configure(openenv.make(server), knobs={"observation": "txt", "action": "message"})
    with pytest.raises(EnvironmentMistake, match="Fields: text"):
        next(iter(environment.tasks()))
    with pytest.raises(InvalidRequest, match="reward_low"):
        configure(openenv.make(server), knobs={"reward_low": 2.0, "reward_high": 1.0})


def test_integer_action_is_explained_read_from_text_and_rewarded_within_rounding(server: Served) -> None:
    server.schema["action"] = COLUMN
    environment = configure(openenv.make(server), knobs={"tasks": 4, "turns": 3, "reward_high": 1.0, "reward_low": 0.0})
    task = next(iter(environment.tasks()))
    told = task.messages[0]["content"]
    assert task.messages[0]["role"] == "system" and "Column 0 to 6." in told and '{"column": 0}' in told
    [done] = sample(environment, task, "I choose column 3.", 1)
    assert (done.error, done.turns, done.parts) == (None, 1, {"reward": 0.3333333, "invalid": 0.0})
    [all_three] = sample(environment, task, '<tool_call>{"name": "place", "arguments": {"column": "2"}}</tool_call>', 1)
    assert all_three.turns == 3 and abs(all_three.reward - 0.9999999) < 1e-9 and all_three.success
    [junk] = sample(environment, task, "no idea", 1)
    assert (junk.error, junk.turns, junk.reward, junk.parts["invalid"]) == (None, 3, 0.0, 3.0)
    tight = configure(openenv.make(server), knobs={"turns": 3, "reward_high": 0.9999998, "reward_low": 0.0})
    [rounded] = sample(tight, task, '{"column": 1}', 1)
    assert rounded.error is None and rounded.reward == 0.9999998
    narrow = configure(openenv.make(server), knobs={"turns": 3, "reward_high": 0.5, "reward_low": 0.0})
    [beyond] = sample(narrow, task, '{"column": 1}', 1)
    assert "reward_high" in beyond.error


def test_tools_of_an_environment_are_offered_and_called(server: Served) -> None:
    server.schema["action"] = CALL
    environment = configure(openenv.make(server), knobs={"tasks": 4})
    task = list(environment.tasks())[2]
    assert [message["role"] for message in task.messages] == ["user"]
    call = '<tool_call>{"name": "say", "arguments": {"text": "%s"}}</tool_call>'
    [right] = sample(environment, task, call % 2, 1)
    assert (right.error, right.reward, right.success, right.turns) == (None, 1.0, True, 1)
    [wrong] = sample(environment, task, call % 7, 1)
    assert (wrong.reward, wrong.turns, wrong.parts["invalid"]) == (0.0, 16, 0.0)
    [silent] = sample(environment, task, "I say nothing", 1)
    assert (silent.error, silent.reward, silent.turns) == (None, 0.0, 1)


def test_server_without_schema_tells_the_fields_that_an_action_lacks(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.schema.clear()
    monkeypatch.setattr(sys.modules[__name__], "TOOLS", [])
    monkeypatch.setattr(sys.modules[__name__], "MISSING", ["message", "kind"])
    environment = configure(openenv.make(server), knobs={"action_fields": {"kind": "word"}, "tasks": 6})
    task = list(environment.tasks())[3]
    assert [one.reward for one in sample(environment, task, "3", 2)] == [1.0, 1.0] and Episode.open == 0


def test_server_without_schema_and_tools_needs_a_knob(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    server.schema.clear()
    monkeypatch.setattr(sys.modules[__name__], "TOOLS", [])
    with pytest.raises(InvalidRequest, match=r"needs the knob action \(str: action field.*action_json"):
        configure(openenv.make(server))
    assert configure(openenv.make(server), knobs={"action": "message", "action_fields": {"kind": "word"}})
    with pytest.raises(InvalidRequest, match="LD_PRELOAD"):
        configure(openenv.make(server), knobs={"variables": {"LD_PRELOAD": "x.so"}})


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package as OpenEnv's authors publish it, with a stand-in for uvicorn beside it."""
    server = tmp_path / "maze_env" / "server"
    server.mkdir(parents=True)
    for folder in (server, server.parent):
        (folder / "__init__.py").write_text("")
    (server.parent / "models.py").write_text("A = 1\n")
    (server / "app.py").write_text(
        '"""FastAPI application for the Maze Environment."""\n'
        "from ..models import A\nfrom models import A as B\n"
        "try:\n    from openenv.core.env_server import create_app as make\n"
        "except ImportError:\n    def make(): return A + B\n"
        "def _made():\n    return make()\n"
        "if True:\n    app = _made()\n"
        "def main():\n    return make()\n"
    )
    (tmp_path / "uvicorn.py").write_text(
        "import importlib\n"
        "def run(app, host, port, **options):\n"
        "    module, _, name = app.partition(':')\n"
        "    print(module, getattr(importlib.import_module(module), name), host, port)\n"
    )
    return tmp_path


def test_package_without_manifest_is_listed_and_served(package: Path) -> None:
    [found] = openenv.installed(package)
    assert (found.name, found.description) == ("maze_env", "Maze Environment.")
    command = json.loads(found.target)["command"]
    words = [word.replace("{python}", sys.executable).replace("{port}", "81") for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=json.loads(found.target)["folder"])
    assert done.stdout.split() == ["maze_env.server.app", "2", "127.0.0.1", "81"], done.stderr
    (package / "maze_env" / "openenv.yaml").write_text("app: envs.maze_env.server.app:app\n")
    assert json.loads(openenv.installed(package)[0].target)["command"] == command, "its path in the repository"
    file = package / "maze_env" / "server" / "app.py"
    [same] = openenv.declared(file, ast.parse(file.read_text()))
    assert (same.name, same.target) == ("maze_env", f"{file}:app")
    assert openenv.declared(file, ast.parse("def create_app(): ...\napp = create_app()")) == []


def test_server_reads_and_writes_beside_its_code_without_changing_it(package: Path) -> None:
    file = package / "maze_env" / "server" / "app.py"
    (file.parent / "walls.txt").write_text("a wall")
    with file.open("a") as more:
        more.write("from pathlib import Path\nPath('mazes').mkdir()\nprint(Path('walls.txt').read_text())\n")
    [found] = openenv.installed(package)
    words = [word.replace("{python}", sys.executable) for word in json.loads(found.target)["command"]]
    folder = json.loads(found.target)["folder"]
    done = subprocess.run([word.replace("{port}", "81") for word in words], capture_output=True, text=True, cwd=folder)
    assert done.stdout.startswith("a wall\n"), done.stderr
    assert not (file.parent / "mazes").exists()


def test_server_behind_a_wall_shares_values_without_local_sockets(package: Path) -> None:
    with (package / "maze_env" / "server" / "app.py").open("a") as more:
        more.write("import multiprocessing\nwith multiprocessing.get_context('fork').Manager() as manager:\n")
        more.write("    shared = manager.list([1])\n    print(type(manager.address).__name__, list(shared))\n")
    [found] = openenv.installed(package)
    words = [word.replace("{python}", sys.executable) for word in json.loads(found.target)["command"]]
    words = [word.replace("{port}", "81") for word in words]
    for walled, address in (("", "str [1]\n"), ("1", "tuple [1]\n")):
        surroundings = os.environ | {"TOPROPE_WALLED": walled}
        done = subprocess.run(words, capture_output=True, text=True, cwd=package, env=surroundings, timeout=60)
        assert done.stdout.startswith(address), done.stderr


def test_app_is_imported_from_a_folder_with_its_package_alone(package: Path) -> None:
    file = package / "maze_env" / "server" / "app.py"
    words, folder = openenv.started(file.parent / ".." / "server" / "app.py", "app")
    root = Path(words[5])
    assert words[3] == "maze_env.server.app:app" and [one.name for one in root.iterdir()] == ["maze_env"]
    assert (Path(folder) / "app.py").samefile(file)
    (package / "first").mkdir()
    (package / "uvicorn.py").rename(package / "first" / "uvicorn.py")
    words = (sys.executable, *words[1:4], "81", *words[5:])
    variables = os.environ | {"PYTHONPATH": str(package / "first")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=variables, timeout=60)
    assert done.stdout.split() == ["maze_env.server.app", "2", "127.0.0.1", "81"], done.stderr


def test_server_that_ends_says_why(package: Path, stand_in: Callable[..., None]) -> None:
    stand_in("websockets")
    (package / "pyproject.toml").touch()
    (package / "uvicorn.py").write_text("def run(*a, **k):\n    raise ValueError('no data set:\\nset DATA\\n*****')\n")
    environment = openenv.make(f"{package / 'maze_env' / 'server' / 'app.py'}:app")
    with pytest.raises(LoadError, match="ValueError: no data set: set DATA$"):
        configure(environment)


def test_reason_of_an_environment_that_cannot_be_created_is_told(server: Served, stand_in: Callable[..., None]) -> None:
    environment = configure(openenv.make(server), knobs={"reset": {"broken": True}, "action": "message"})
    with pytest.raises(EnvironmentMistake, match=r"refuses reset \(FACTORY_ERROR\): not made$"):
        next(iter(environment.tasks()))
    stand_in("openenv.core.env_server.http_server", WSErrorResponse=dict)
    http_server = importlib.import_module("openenv.core.env_server.http_server")
    _tell_failures(errors)
    try:
        try:
            raise OSError("cannot connect to https://data.example.org")
        except OSError as cause:
            raise RuntimeError("a toolkit is required") from cause
    except RuntimeError as error:
        told = http_server.WSErrorResponse(data={"message": str(error), "code": "EXECUTION_ERROR"})
        plain = http_server.WSErrorResponse(data={"message": "Invalid message"})
    reason = "a toolkit is required (from OSError: cannot connect to https://data.example.org)"
    assert told["data"] == {"message": reason, "code": "EXECUTION_ERROR"}
    assert plain["data"] == {"message": "Invalid message"}


@pytest.mark.parametrize(
    ("code", "refusal", "reason"),
    [
        ("import no_such_module", False, "(ENVIRONMENT_FAILED): ModuleNotFoundError: No module named 'no_such_"),
        ("raise ConnectionRefusedError('none')", False, "(ENVIRONMENT_FAILED): ConnectionRefusedError: none"),
        ("import no_pandas", True, "No module named 'no_pandas'"),  # the action asks for it
        ("raise LookupError('Resource words not found')", True, "besides, data.example.org could not be reached"),
    ],
)
def test_what_an_environment_lacks_is_no_refusal_of_an_action(
    server: Served,
    stand_in: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    refusal: bool,
    reason: str,
) -> None:
    monkeypatch.setattr(errors, "_unreached", ["data.example.org"])
    stand_in("openenv.core.env_server.http_server", WSErrorResponse=dict)
    http_server = importlib.import_module("openenv.core.env_server.http_server")
    _tell_failures(errors)

    async def stepped() -> None:
        async with openenv.Connection(f"ws{server.removeprefix('http')}/ws") as episode:
            await episode.reset({"seed": 0})
            try:
                exec(code, {})
            except Exception as error:
                told = http_server.WSErrorResponse(data={"message": str(error), "code": "EXECUTION_ERROR"})
            Episode.next_answer = {"type": "error", **told}
            await episode.step({"message": "import no_pandas", "kind": "word"})

    with pytest.raises(Refused if refusal else EnvironmentMistake, match=re.escape(reason)):
        asyncio.run(stepped())


def test_server_that_starts_here_has_as_long_as_the_owner_may_allow() -> None:
    limits = EnvironmentSection.model_fields["load_timeout_s"].metadata
    assert [one.le for one in limits if hasattr(one, "le")] == [started._START_S]


def test_server_whose_program_reached_no_host_is_told_with_the_host() -> None:
    code = "print('fatal: Could not resolve host: git.example.org', file=__import__('sys').stderr)\n"
    code += "raise SystemExit('CalledProcessError: git clone failed.')"
    with pytest.raises(LoadError, match=r"git clone failed; git\.example\.org could not be reached$"):
        StartedServer("server", "", ["{python}", "-c", code], "", {})


def test_server_whose_program_failed_is_told_with_what_that_printed() -> None:
    code = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'raise SystemExit(\"no Python 3.10 here\")'])\n"
    )
    code += "raise SystemExit('CalledProcessError: Command venv returned 2.')"
    with pytest.raises(LoadError, match=r"CalledProcessError: .* returned 2\. It had printed: no Python 3\.10 here$"):
        StartedServer("server", "", ["{python}", "-c", code], "", {})


def test_server_finds_the_programs_of_its_interpreter_first() -> None:
    code = (
        "import os, sys; raise LookupError(os.environ['PATH'].split(os.pathsep)[0] == os.path.dirname(sys.executable))"
    )
    with pytest.raises(LoadError, match="LookupError: True"):
        StartedServer("server", "", ["{python}", "-c", code], "", {})


def test_server_that_ends_with_a_long_error_is_told_with_its_end() -> None:
    code = "raise LookupError('words are missing; ' + 'x' * 900 + '; far.example could not be reached')"
    with pytest.raises(LoadError, match=r"exit code 1 .*: LookupError: words are missing; x+ … x+; far.ex") as told:
        StartedServer("server", "", ["{python}", "-c", code], "", {})
    assert len(str(told.value)) < 600 and str(told.value).endswith("could not be reached")
