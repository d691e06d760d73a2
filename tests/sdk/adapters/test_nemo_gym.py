"""The adapter of NeMo Gym, against a small resources server that speaks its protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.openai_stand_in import OpenAiStandIn
from toprope.sdk.adapters import nemo_gym
from toprope.sdk.discovery import parse
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.worker.service import Service

RESPONSE = {"id", "created_at", "object", "model", "output", "parallel_tool_calls", "tool_choice", "tools"}
"""Required fields of an OpenAI response."""


class Gym(ThreadingHTTPServer):
    """A counter per session; the reward is 1 if the count equals the `target` of the row."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        """Answers by path that replace the normal ones."""
        self.open = threading.Event()
        """Verification waits until this is set."""
        self.open.set()
        self.together = threading.Barrier(1)
        """Verifications that must be in progress at once."""
        self.steps = False
        """If it is played by steps."""
        self.mcp = False
        """If `increment` is served over MCP as `add`."""
        self.closed: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Gym
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        paths = ("/reset", "/step") if self.server.steps else ("/seed_session", "/verify")
        data = json.dumps({"paths": dict.fromkeys(paths, {})}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sent = SimpleCookie(self.headers.get("Cookie", ""))
        session = sent["session"].value if "session" in sent else ""
        status, value, cookie = self.answer(self.path, body, session)
        data = json.dumps(value).encode() if not isinstance(value, str) else value.encode()
        self.send_response(status)
        if cookie:
            self.send_header("Set-Cookie", f"session={cookie}; path=/; Max-Age=1209600; httponly; samesite=lax")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, path: str, body: dict[str, Any], session: str) -> tuple[int, Any, str]:
        if path in self.server.answers:
            return *self.server.answers[path], ""
        if path == "/seed_session":
            with self.server.lock:
                session = f"s{len(self.server.counts)}"
                self.server.counts[session] = body["start"]
            access = {"url_path": "/tools", "headers": {"X-Rollout": session}}
            return 200, {"mcp": access} if self.server.mcp else {}, session
        if path == "/tools":
            return self.over_mcp(body, self.headers["X-Rollout"])
        if path == "/reset":
            session = f"s{len(self.server.counts)}"
            self.server.counts[session] = body["start"]
            info = {"supports_explicit_close": True, "supports_step_idempotency": True}
            return 200, {"observation": f"At {body['start']}", "info": info}, session
        if path == "/step":
            return self.stepped(body, session)
        if path == "/close":
            self.server.closed.append(session)
            return 200, {}, ""
        if path == "/increment":
            if not isinstance(body.get("by"), int):
                return 422, {"detail": "by must be a number"}, ""
            self.server.counts[session] += body["by"]
            return 200, {"count": self.server.counts[session]}, ""
        if path == "/verify":
            self.server.open.wait(60)
            self.server.together.wait(30)
            missing = RESPONSE - body["response"].keys()
            if missing or body["response"]["object"] != "response":
                return 422, {"detail": f"missing {missing}"}, ""
            self.server.verified.append(body)
            count = self.server.counts[session]
            return 200, {**body, "reward": float(count == body["target"]), "score": count}, ""
        return 404, {"detail": "Not Found"}, ""

    def stepped(self, body: dict[str, Any], session: str) -> tuple[int, Any, str]:
        assert len(body["_ng_step_request_id"]) == 32 and not RESPONSE - body["response"].keys()
        outputs, calls = body["response"]["output"], []
        for one in outputs:
            if one["type"] == "function_call":
                self.server.counts[session] += json.loads(one["arguments"])["by"]
                calls.append({"call_id": one["call_id"], "output": str(self.server.counts[session])})
        said = [one["content"][0]["text"] for one in outputs if one["type"] == "message"]
        info = {"tool_outputs": calls} if calls else {}
        seen = None if calls else f"Said {said[0]}"
        return 200, {"observation": seen, "reward": -0.5, "terminated": "stop" in said, "info": info}, ""

    def over_mcp(self, body: dict[str, Any], session: str) -> tuple[int, Any, str]:
        if body["method"] == "tools/list":
            result: dict[str, Any] = {"tools": [{"name": "add", "description": "Add.", "inputSchema": BY}]}
        elif body["method"] == "tools/call":
            failed = body["params"]["arguments"].get("by") is None
            if not failed:
                self.server.counts[session] += body["params"]["arguments"]["by"]
            text = "by is missing" if failed else str(self.server.counts[session])
            result = {"content": [{"type": "text", "text": text}], "isError": failed}
        elif body["method"] == "initialize":
            result = {"protocolVersion": "2025-06-18"}
        else:
            assert body["method"] == "notifications/initialized" and "id" not in body
            return 202, "", ""
        return 200, {"jsonrpc": "2.0", "id": body["id"], "result": result}, ""


@pytest.fixture
def gym() -> Iterator[Gym]:
    server = Gym()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


BY = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
TOOL = {"type": "function", "name": "increment", "description": "Adds to the counter.", "strict": True,
        "parameters": BY}  # fmt: skip


def row(number: int, **more: Any) -> dict[str, Any]:
    asked = [{"type": "input_text", "text": f"From {number} to {number + 3}"}]
    given = [{"role": "developer", "content": "Count."}, {"role": "user", "content": asked}]
    return {"responses_create_params": {"input": given, "tools": [TOOL], "parallel_tool_calls": False},
            "start": number, "target": number + 3, "expected_answer": str(number + 3), **more}  # fmt: skip


def opened(gym: Gym, tmp_path: Path, made: list[dict[str, Any]] | None = None, **target: Any) -> Service:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in made or [row(number) for number in range(20)]))
    service = Service()
    values = {"url": gym.url, "rows": str(file), "timeout_s": 10, **target}
    service.answer("open", {"source": {"adapter": "nemo_gym", "target": json.dumps(values)}})
    return service


def begun(service: Service, count: int) -> tuple[list[int], list[dict[str, Any]]]:
    answer = service.answer("begin", {"split": "train", "index": 0, "count": count})
    return answer["rollouts"], answer["messages"]


def say(service: Service, *moves: list[Any]) -> list[dict[str, Any]]:
    return service.answer("advance", {"moves": [list(move) for move in moves]})


CALL = '<tool_call>{"name": "increment", "arguments": {"by": %s}}</tool_call>'


def test_nemo_gym_rollouts_have_own_session_tools_and_reward(gym: Gym, tmp_path: Path) -> None:
    service = opened(gym, tmp_path, shown=["score", "nothing"])
    (a, b), first = begun(service, 2)
    assert first[0]["content"].startswith("Count.\n\n# Tools") and '"increment"' in first[0]["content"]
    assert first[1]["content"].startswith("From ") and first[1]["role"] == "user"
    start = int(first[1]["content"].split()[1])
    one, two = say(service, [a, "Adding. " + CALL % 3], [b, CALL % '"x"'])
    assert json.loads(one["messages"][0]["content"]) == {"count": start + 3}
    assert "by must be a number" in two["messages"][0]["content"]  # the policy sees the refusal
    say(service, [b, "I give up"])
    [last] = say(service, [a, "Done"])
    [early] = service.answer("settle", {"rollouts": [b]})
    assert (last["outcome"]["reward"], early["reward"]) == (1.0, 0.0)
    assert last["outcome"]["success"] and last["outcome"]["parts"]["score"] == start + 3
    assert last["outcome"]["parts"]["tool_calls"] == 1 and last["outcome"]["parts"]["nothing"] == 0.0
    [body] = [one for one in gym.verified if len(one["response"]["output"]) == 4]
    message, called, answered, said = body["response"]["output"]
    assert message["content"][0]["text"] == "Adding." and called["call_id"] == answered["call_id"]
    assert json.loads(called["arguments"]) == {"by": 3} and said["content"][0]["text"] == "Done"
    assert body["target"] == start + 3 and body["response"]["tools"] == [TOOL]


def test_nemo_gym_verifies_group_concurrently(gym: Gym, tmp_path: Path) -> None:
    gym.together = threading.Barrier(2)
    service = opened(gym, tmp_path, timeout_s=60)
    handles, _ = begun(service, 6)
    turns = say(service, *([handle, "3"] for handle in handles))
    assert all(turn["outcome"]["error"] is None for turn in turns)


def test_nemo_gym_marks_truncated_answer_incomplete(gym: Gym, tmp_path: Path) -> None:
    service = opened(gym, tmp_path)
    (a,), _ = begun(service, 1)
    service.answer("advance", {"moves": [[a, "half a", True]]})
    [body] = gym.verified
    assert body["response"]["status"] == "incomplete"
    assert body["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/verify", (500, "boom"), "/verify answered 500: boom"),
        ("/verify", (200, "<html>"), "/verify did not answer with JSON"),
        ("/verify", (200, {"score": 1}), "/verify returned no reward"),
        ("/verify", (200, {"reward": 3}), "/verify gave 3, beyond 0 to 1"),
        ("/verify", (200, {"reward": 0, "mask_sample": True, "failure_reason": "judge is out"}), "judge is out"),
    ],
)
def test_nemo_gym_reports_failed_verification(
    gym: Gym, tmp_path: Path, path: str, answer: tuple[int, Any], said: str
) -> None:
    service = opened(gym, tmp_path)
    gym.answers[path] = answer
    (a,), _ = begun(service, 1)
    [turn] = say(service, [a, "x"])
    assert said in turn["outcome"]["error"] and turn["outcome"]["reward"] == 0.0


def test_nemo_gym_names_missing_or_slow_server(gym: Gym, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="Nothing answers at http://127.0.0.1:9: .* Start the resources server first"):
        opened(gym, tmp_path, url="http://127.0.0.1:9")
    service = opened(gym, tmp_path, timeout_s=0.2)
    (a,), _ = begun(service, 1)
    gym.open.clear()
    [turn] = say(service, [a, "x"])
    gym.open.set()
    assert "/verify did not answer within 0.2 s" in turn["outcome"]["error"]
    gym.answers["/seed_session"] = (422, {"detail": "no start"})
    with pytest.raises(Exception, match="/seed_session answered 422"):
        begun(service, 1)
    gym.answers["/seed_session"] = (404, {})
    assert begun(service, 1)  # a server without state has no such path


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"url": "ftp://x"}, "not a server address"),
        ({"url": "http://x:y"}, "not a server address"),
        ({"rows": "absent.jsonl"}, "no file 'absent.jsonl'"),
        ({"timeout_s": 0}, "timeout_s must be"),
        ({"colour": 1}, "The target of nemo_gym has no 'colour'"),
    ],
)
def test_nemo_gym_refuses_invalid_target(gym: Gym, tmp_path: Path, target: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        opened(gym, tmp_path, **target)


def test_nemo_gym_converts_inputs_or_explains(gym: Gym, tmp_path: Path) -> None:
    given = [
        {"role": "user", "content": "Go on"}, {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "increment", "arguments": '{"by": 1}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "1"}, {"role": "user", "content": "More"},
    ]  # fmt: skip
    rows = [
        row(
            n,
            responses_create_params={"instructions": "Quick.", "input": [*given, {"role": "user", "content": str(n)}]},
        )
        for n in range(9)
    ]
    service = opened(gym, tmp_path, rows)
    (a,), first = begun(service, 1)
    assert [one["role"] for one in first] == ["system", "user", "assistant", "tool", "user", "user"]
    assert '"name": "increment", "arguments": {"by": 1}' in first[2]["content"]
    assert say(service, [a, "x"])[0]["outcome"]["error"] is None
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
    for bad, said in (({"input": image}, "other than text"), ({}, "has no responses_create_params with an input")):
        with pytest.raises(Exception, match=said):
            begun(opened(gym, tmp_path, [row(1, responses_create_params=bad)]), 1)


def test_server_with_steps_is_played_by_steps(gym: Gym, tmp_path: Path) -> None:
    gym.steps = True
    rows = [row(number, responses_create_params={"input": [], "tools": [TOOL]}) for number in range(20)]
    service = opened(gym, tmp_path, rows)
    (a, b), first = begun(service, 2)
    start = int(first[-1]["content"].removeprefix("At "))
    assert [one["role"] for one in first] == ["system", "user"] and '"increment"' in first[0]["content"]
    one, two = say(service, [a, CALL % 2], [b, "hm"])
    assert one["messages"] == [{"role": "tool", "content": str(start + 2)}]
    assert two["messages"] == [{"role": "user", "content": "Said hm"}]
    say(service, [b, "stop"])
    [last] = say(service, [a, "stop"])
    assert gym.closed == ["s1", "s0"], "each episode is closed once"
    assert (last["outcome"]["error"], last["outcome"]["reward"], last["outcome"]["turns"]) == (None, -1.0, 2)
    assert last["outcome"]["parts"]["tool_calls"] == 1 and not last["outcome"]["success"]


def test_equal_rows_of_a_server_with_steps_are_tasks_of_their_own(gym: Gym, tmp_path: Path) -> None:
    gym.steps = True
    service = opened(gym, tmp_path, [row(1)] * 5)
    found = [service.answer("tasks", {"split": split, "start": 0, "count": 9}) for split in ("train", "heldout")]
    assert [len(one["tasks"]) for one in found] == [3, 1]


def test_episode_that_reaches_the_limit_is_closed_and_bounded(gym: Gym, tmp_path: Path) -> None:
    gym.steps = True
    service = opened(gym, tmp_path, max_turns=2, range=[-0.7, 0])
    (a,), first = begun(service, 1)
    assert first[-2]["content"].startswith("From ") and first[-1]["content"].startswith("At ")
    say(service, [a, "x"])
    [last] = say(service, [a, "x"])
    assert gym.closed == ["s0"] and "the sum of steps gave -1, beyond -0.7 to 0" in last["outcome"]["error"]


def test_tools_over_mcp_act_on_the_session_of_their_rollout(gym: Gym, tmp_path: Path) -> None:
    gym.mcp = True
    rows = [row(n, responses_create_params={"input": f"From {n}", "tools": []}) for n in range(20)]
    service = opened(gym, tmp_path, rows)
    (a, b), first = begun(service, 2)
    assert '"add"' in first[0]["content"]
    add = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
    one, two = say(service, [a, add % '{"by": 3}'], [b, add % "{}"])
    assert one["messages"][0]["content"] == str(int(first[1]["content"].split()[1]) + 3)
    assert "by is missing" in two["messages"][0]["content"]
    say(service, [b, "Done"])
    [last] = say(service, [a, "Done"])
    [early] = service.answer("settle", {"rollouts": [b]})
    assert (last["outcome"]["reward"], early["reward"]) == (1.0, 0.0)


def test_rows_choose_among_several_servers(gym: Gym, tmp_path: Path) -> None:
    other = Gym()
    thread = threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        names = ("first_agent", "second_agent")
        files = []
        for place, name in enumerate(names):
            files.append(tmp_path / f"{name}.jsonl")
            reference = {"type": "responses_api_agents", "name": name}
            lines = [json.dumps(row(100 * place + number, agent_ref=reference)) for number in range(12)]
            files[-1].write_text("\n".join(lines))
        both = {"url": {names[0]: gym.url, names[1]: other.url}, "rows": list(map(str, files))}
        service = opened(gym, tmp_path, **both)
        for index in range(12):
            service.answer("begin", {"split": "train", "index": index, "count": 1})
        assert gym.counts and other.counts and max(gym.counts.values()) < 100 <= min(other.counts.values())
        with pytest.raises(EnvironmentMistake, match=r"Row 1 of rows.jsonl has the agent_ref 'None'.* first_agent"):
            begun(opened(gym, tmp_path, url=both["url"]), 1)
    finally:
        other.shutdown()
        other.server_close()
        thread.join(10)


def test_bare_reference_of_another_form_does_not_refuse_a_server(gym: Gym, tmp_path: Path) -> None:
    service = opened(gym, tmp_path)  # expected_answer is a number, but the server wants calls
    assert service.answer("open", {"source": {"adapter": "nemo_gym", "target": json.dumps(
        {"url": gym.url, "rows": str(tmp_path / "rows.jsonl")})}})["guessed_reference"]  # fmt: skip


APP = """
import json
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from nemo_gym.base_resources_server import SimpleResourcesServer
from resources_servers.judged.words import RIGHT

class Judged(SimpleResourcesServer):
    def setup_webserver(self):
        async def seed(request):
            return JSONResponse({})

        async def verify(request):
            said = (await request.json())["response"]["output"][0]["content"][0]["text"]
            asked = {"input": [{"role": "user", "content": f"Is {said} {RIGHT}?"}], "max_output_tokens": 5}
            answer = await self.server_client.post(server_name="grader", url_path="/v1/responses", json=asked)
            verdict = (await answer.json())["output"][0]["content"][0]["text"]
            return JSONResponse({"reward": self.config.points * ("yes" in verdict)})

        return Starlette(routes=[Route("/seed_session", seed, methods=["POST"]),
                                 Route("/verify", verify, methods=["POST"])])
"""
PACKAGE = {
    "base_resources_server": """
from pydantic import BaseModel, ConfigDict
class Config(BaseModel):
    model_config = ConfigDict(extra="allow")
    points: float = 0.0
class SimpleResourcesServer(BaseModel):
    config: Config
    server_client: object
""",
    "config_types": "BaseServerConfig = dict\n",
    "server_utils": "class ServerClient:\n    def __init__(self, **given): pass\n",
}


def published(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a checkout with one resources server, and stand-ins for what NeMo Gym brings."""
    place = folder / "resources_servers" / "judged"
    files = {
        place / "app.py": APP,
        place / "words.py": "RIGHT = 'right'\n",
        place / "configs" / "judged.yaml": "judged:\n  resources_servers:\n    judged:\n      points: 0.5\n"
        "      description: Judged answers\n",
        place / "data" / "example.jsonl": "".join(json.dumps(one) + "\n" for one in rows),
        place / "data" / "example_rollouts.jsonl": "{}",
        folder / "omegaconf" / "__init__.py": "DictConfig = dict\n",
        **{folder / "nemo_gym" / f"{name}.py": text for name, text in PACKAGE.items()},
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return place / "app.py"


def test_server_of_a_folder_is_listed_started_and_judged_by_a_named_endpoint(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": f"Question {number}"}} for number in range(30)]
    file = published(tmp_path, rows)
    [listed] = nemo_gym.declared(file, parse(file))
    assert (listed.name, listed.description, listed.problem) == ("judged", "Judged answers", "")
    target = json.loads(listed.target)
    assert [Path(one).name for one in target["rows"]] == ["example.jsonl"]
    target["packages"].append(str(tmp_path / "omegaconf"))

    def played(**knobs: Any) -> dict[str, Any]:
        service = Service()
        source = {"adapter": "nemo_gym", "target": json.dumps({**target, "timeout_s": 10})}
        service.answer("open", {"source": source, "knobs": knobs})
        [handle], _ = begun(service, 1)
        outcome: dict[str, Any] = say(service, [handle, "fine"])[0]["outcome"]
        return outcome

    with closing(OpenAiStandIn(lambda asked: "yes")) as judge:
        assert played(judge_url=judge.url, judge_model="j")["reward"] == 0.5
        assert [one["content"] for one in judge.seen[-1][2]["messages"]] == ["Is fine right?"]
    assert "'grader': name an endpoint by the knob judge_url" in played()["error"]


def test_server_whose_rows_have_images_is_listed_with_the_reason(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,"}]}]
    file = published(tmp_path, [{"responses_create_params": {"input": image}}])
    assert nemo_gym.declared(file, parse(file))[0].problem.startswith("Its rows have images or sound")
