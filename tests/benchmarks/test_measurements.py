"""Benchmarks count what they measured: nothing measured, nothing answered or nothing attacked meets no goal."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import anyio
import pytest
from aiohttp import ClientResponseError, web

from benchmarks.hosted import tinker
from benchmarks.hostile import authority, connections, environments, http_requests, victim
from benchmarks.models import models
from benchmarks.page import pages
from benchmarks.performance import decode, train
from benchmarks.report import REFUSED
from benchmarks.server import load
from benchmarks.trajectory_api import trajectory_api


@pytest.mark.parametrize("said", ["MemoryError: ", "", "daemon ", "OSError: [Errno 1] no daemon toprope-daemon-1"])
def test_attack_that_names_no_daemon_ends_no_process(said, monkeypatch):
    def looked(*_):
        raise AssertionError("it looked for processes to end")

    monkeypatch.setattr(environments.psutil, "process_iter", looked)
    assert environments.end_daemon(said) == environments.Result(False, said)


def test_daemon_is_ended_by_its_whole_name():
    program = "name = 'toprope-daemon-{}'; print(name, flush=True); import time; time.sleep(60)"
    made = {
        number: subprocess.Popen([sys.executable, "-I", "-S", "-c", program.format(number)], stdout=subprocess.PIPE)
        for number in (987650001, 9876500011)
    }
    try:
        for process in made.values():
            assert process.stdout is not None and process.stdout.readline()
        assert environments.end_daemon("daemon toprope-daemon-987650001").succeeded
        assert made[987650001].wait(10) and made[9876500011].poll() is None
        assert not environments.end_daemon("daemon toprope-daemon-987650001").succeeded
    finally:
        for process in made.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("statuses", "crashes"), [(["200"] * 5, 0), (["200", "200", "", "200", "200"], 1), (["200"] * 4 + ["401"], 1)]
)
def test_http_request_without_an_answer_is_a_crash(statuses, crashes, tmp_path, monkeypatch):
    def serve():
        for status in statuses:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(f"HTTP/1.1 {status} x\r\n\r\n".encode() if status else b"")

    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "http-token").write_text("token")
    monkeypatch.setattr(http_requests, "_request", lambda *_: (b"GET / HTTP/1.1\r\n\r\n", True))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = f"at http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        server = SimpleNamespace(
            stdout=SimpleNamespace(readline=lambda: line, close=lambda: None),
            **dict.fromkeys(("poll", "kill", "wait"), lambda: None),
        )
        monkeypatch.setattr(http_requests.subprocess, "Popen", lambda *_, **__: server)
        thread = threading.Thread(target=serve)
        thread.start()
        found = victim.Found()
        http_requests.attack_over_http(SimpleNamespace(folder=tmp_path, environ={}), found, random.Random(0), 3)
        thread.join()
    assert (found.inputs, found.crashes) == (3, crashes)


def test_internal_error_of_a_resource_is_masked():
    found = victim.Found()
    for message in ("No run a.", "Internal error"):
        asked = SimpleNamespace(ask=lambda *_, message=message: {"error": {"message": message}})
        victim.give(asked, found, "resource", "resources/read", {}, watch=False)
    assert (found.inputs, found.masked) == (2, 1)


def test_run_that_a_reader_refuses_undamaged_is_not_attacked():
    def ask(_, params):
        return {"result": {"content": [{"text": "run-a"}], "isError": params["name"] == "get_results"}}

    with pytest.raises(RuntimeError, match="get_results does not read the undamaged run"):
        victim.read_undamaged(SimpleNamespace(ask=ask), "run-a", "run-b")


REFUSING = """
import itertools, socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    for number in itertools.count():
        with listener.accept()[0] as peer:
            peer.recv(100)
            peer.sendall(b"HTTP/1.1 503 x\\r\\n\\r\\n" if number else b"HTTP/1.1 200 x\\r\\n\\r\\n")
"""


def test_door_that_refuses_what_it_took_before_is_down(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "CONNECTIONS", 5)
    found = connections.besieged(REFUSING, tmp_path, "/", seconds=0.5)
    assert found["answered"] == 0 < found["down"]


def test_wrong_call_without_an_answer_is_an_error_of_the_server():
    async def call_tool(*_):
        raise ConnectionError("the server closed the connection")

    tally = load.Tally()
    agent = load.Agent(0, "", "", ["run-a"], tally, 0)
    anyio.run(agent._call, SimpleNamespace(call_tool=call_tool), agent._wrong())
    assert len(tally.unexpected) == 1 and "closed the connection" in tally.unexpected[0]


def test_error_of_logprobs_needs_steps_that_tell_one():
    told = {"sampling/sampling_logp_difference/max": 2e-6}
    assert tinker.logprob_error([told, {}, {**told, "loss": 1.0}]) == 2e-6
    assert tinker.logprob_error([told, {}, {}]) is tinker.logprob_error([]) is None


def test_engine_that_is_not_installed_is_not_left_out_of_all(monkeypatch, capsys):
    monkeypatch.setattr(models, "is_absent", lambda name: name == "vllm")
    monkeypatch.setattr(models, "try_architecture", lambda name, folder, engine: models.Row(name, engine, refusal="no"))
    monkeypatch.setattr("sys.argv", ["models"])
    assert models.main() == REFUSED and "vllm is not installed" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["models", "--engine", "embedded", "--only", "Qwen3"])
    assert models.main() == 2 and "the control was not run" in capsys.readouterr().out


def test_posts_that_fail_in_a_thread_and_batches_that_do_not_come_are_raised():
    empty = SimpleNamespace(
        request=lambda *words: words, send=lambda request: (503 if request[0] == "POST" else 200, b'{"batch":null}'),
        json=lambda *_: {"accepted": 3}, close=lambda: None,
    )  # fmt: skip
    server = SimpleNamespace(client=lambda: empty)
    with pytest.raises(RuntimeError, match="a post was answered 503"):
        trajectory_api.parallel(server, [b"{}"] * 4, 8)
    with pytest.raises(RuntimeError, match="no batch came"):
        trajectory_api.Reader(server, cursor=True).read_full(1)
    with pytest.raises(RuntimeError, match="of 4 posts 3 were accepted"):
        trajectory_api.require_accepted(server, 4)


@pytest.mark.parametrize(("fault", "error"), [("now", ClientResponseError), ("events", ConnectionError), ("", None)])
def test_page_that_dies_is_no_page_that_costs_nothing(fault, error):
    async def answer(request):
        if request.path.endswith("now") and fault == "now":
            raise web.HTTPInternalServerError
        return web.json_response({"token": "t", "live": {"series": None, "cursor": 1}})

    async def events(request):
        stream = web.StreamResponse()
        await stream.prepare(request)
        for _ in range(0 if fault == "events" else 40):
            await stream.write(b'data: {"runs": {"run-a": ["status"]}}\n')
            await anyio.sleep(0.1)
        return stream

    async def work():
        app = web.Application()
        app.router.add_get("/api/events", events)
        app.router.add_route("*", "/{rest:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return await pages.watch(f"http://127.0.0.1:{runner.addresses[0][1]}/#key=k", "run-a", 2, 1.0)
        finally:
            await runner.cleanup()

    if error is None:
        assert anyio.run(work)["requests"] > 0
    else:
        with pytest.raises(error):
            anyio.run(work)


def test_processor_time_is_compared_with_the_side_of_trl_that_takes_least(monkeypatch, capsys):
    def run_reference(side, policy, steps, warm, threads=0, seed=0):
        trl = {1: {"wall_s": 2.0, "cpu_s": 2.0}, 2: {"wall_s": 1.5, "cpu_s": 3.0}}
        return trl[threads] if side == "trl" else {"train_s": 0.5, "decode_s": 0.5}

    ours = SimpleNamespace(
        policy="", train=lambda steps, seed, **twice: {"wall_s": 2.0 if twice else 1.0, "cpu_s": 1.0}
    )
    monkeypatch.setattr(train, "Runs", lambda home: ours)
    monkeypatch.setattr(train, "run_reference", run_reference)
    train.main(["--rounds", "1", "--no-learning"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["step_cpu_ratio_to_trl"], found["trl_step_cpu_ms"], found["trl_threads"]) == (0.5, 2000, 2)


def test_control_of_growth_is_compared_with_the_model_that_it_ran_on():
    figures = {"embedded_growth_1024_over_256": 5.8, "control_growth_1024_over_256": 6.5}
    figures["control_conversation_ratio"] = 1.0
    assert decode.control_failed(figures) == decode.control_failed(figures | {"growth_1024_over_256": 5.7}) == ""
    assert "no more than the engine" in decode.control_failed(figures | {"growth_1024_over_256": 6.6})
    assert "no more" in decode.control_failed({**figures, "control_growth_1024_over_256": 4.8})
    assert "as fast" in decode.control_failed({**figures, "control_conversation_ratio": 0.6})


def test_edits_past_locks_open_their_environment():
    edits = [way for way in authority.WAYS if way.tool.__name__ == "edit_config"]
    with authority._house() as house:
        assert [authority._passes(house, way, locked=False) for way in edits] == [True] * 3
        assert [authority._passes(house, way, locked=True) for way in edits] == [False] * 3
