"""The relay to vLLM: verified updates, repeated requests, restarts, adapters, sleep.

A stand-in takes the place of the server; `test_conformance.py` asks the real one.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.training_api_server import until
from tests.training.inference.conftest import sample
from tests.training.inference.engines.conftest import TOKENIZER, Rig, Server, check
from toprope.errors import ComponentFailed, InvalidValue
from toprope.settings.schema import Config
from toprope.training.inference.engine import Cancelled, SamplingRequest
from toprope.training.inference.engines import vllm_engine
from toprope.training.inference.engines.choice import make_engine
from toprope.training.inference.engines.vllm_api import VllmApi
from toprope.training.inference.engines.vllm_engine import VllmEngine
from toprope.training.inference.engines.vllm_process import VllmProcess, VllmSettings
from toprope.training.policy.publishing import newest_published


def test_update_is_verified_before_its_answers_are_given(make: Callable[..., Rig]) -> None:
    rig = make()
    [server] = rig.servers
    assert sample(rig.engine, SamplingRequest([5], n=2, max_new_tokens=3))[0][1].versions == [(0, 3)]
    server.go_on.clear()
    answered = rig.ask()
    until(lambda: len(server.asked) == 2)
    assert rig.publish() == 1
    until(lambda: rig.engine.version == 1)
    server.go_on.set()
    assert answered.get(timeout=10)[0].versions == [(0, 1), (1, 2)]
    assert server.paths()[-5:] == [
        "/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"
    ]  # fmt: skip
    assert len(rig.servers) == 1


def test_server_that_keeps_old_weights_is_replaced_and_what_it_sampled_is_discarded(make: Callable[..., Rig]) -> None:
    rig = make(keeps_old=(1,))
    rig.servers[0].go_on.clear()
    answered = rig.ask()
    until(lambda: rig.servers[0].asked)
    rig.publish()
    [answer] = answered.get(timeout=30)
    assert answer.token_ids == [2, 2, 2] and answer.versions == [(1, 3)]
    published = newest_published(rig.servers[0].folder)
    assert published is not None and rig.servers[1].model == published.folder
    assert rig.servers[0].ended and rig.engine.version == 1
    rig.publish()
    until(lambda: rig.engine.version == 2)
    assert len(rig.servers) == 2


def test_engine_gives_up_when_no_server_takes_the_weights(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.publisher._write = lambda folder: folder.mkdir()
    answered = rig.ask()
    assert answered.get(timeout=10)

    def refuse(model: Path) -> list[float]:
        return [7.0] * 23

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.training.inference.engines.conftest.check", refuse)
        rig.publish()
        until(lambda: rig.gave_up)
    assert isinstance(rig.gave_up[0], ComponentFailed) and "differ from the trainer's" in rig.gave_up[0].message
    assert len(rig.servers) == 4
    assert isinstance(rig.ask().get(timeout=10), RuntimeError)
    with pytest.raises(ComponentFailed):
        rig.engine.wait_ready(1)


def test_requests_outlive_a_server_that_ends(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.publish()
    until(lambda: rig.engine.version == 1)
    rig.servers[0].go_on.clear()
    answered = rig.ask(n=2)
    until(lambda: rig.servers[0].asked)
    rig.servers[0].end()
    answers = answered.get(timeout=30)
    assert [answer.token_ids for answer in answers] == [[2] * 3] * 2
    assert answers[0].versions == [(1, 3)], "the next server begins with the newest weights"
    assert not rig.gave_up


@pytest.mark.parametrize("updates", [False, True])
def test_server_that_falls_silent_is_replaced(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, updates: bool
) -> None:
    monkeypatch.setattr(vllm_engine, "_PROBE_S", 0.05)
    rig = make(silence_s=0.3)
    assert rig.ask().get(timeout=10)[0].token_ids == [1, 1, 1]
    rig.servers[0].silent = True
    if updates:
        rig.publish()
        until(lambda: rig.engine.version == 1)
    assert rig.ask().get(timeout=30)[0].token_ids == [2, 2, 2]
    assert rig.servers[0].ended and len(rig.servers) == 2 and not rig.gave_up
    until(rig.engine.is_progressing)


def test_engine_is_progressing_while_its_server_keeps_it_waiting(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.servers[0].silent = True
    rig.publish()
    until(lambda: "/pause" not in rig.servers[0].paths() and not rig.engine._sound.is_set())
    for _ in range(3):
        until(rig.engine.is_progressing)
    rig.engine.stop()
    assert not rig.engine.is_progressing()


def test_request_that_is_cancelled_before_it_began_is_answered(make: Callable[..., Rig]) -> None:
    rig, answered = make(), queue.Queue[Any]()
    request = SamplingRequest([5])

    def at_once() -> None:
        rig.engine.submit(request, answered.put)
        rig.engine.cancel(request)

    rig.engine._loop.call_soon_threadsafe(at_once)  # type: ignore[union-attr]
    assert isinstance(answered.get(timeout=10), Cancelled)


def test_request_is_repeated_when_the_server_failed(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_PROBE_S", 0.05)
    rig = make()
    rig.servers[0].failures = 1
    assert rig.ask().get(timeout=10)[0].token_ids == [1, 1, 1]
    rig.servers[0].failures = 3
    with pytest.raises(RuntimeError, match="3 times"):
        raise rig.ask().get(timeout=10)


def test_request_whose_connection_broke_is_repeated(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_PROBE_S", 0.05)
    rig, failures = make(), [aiohttp.ClientConnectionError("reset")]

    async def break_once(api: VllmApi, *args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await generate(api, *args, **options)

    generate = VllmApi.generate
    monkeypatch.setattr(VllmApi, "generate", break_once)
    assert rig.ask().get(timeout=10)[0].token_ids == [1, 1, 1]


def test_output_of_a_server_is_our_own_and_its_errors_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nyes progress | head -n 30000\necho 'ValueError: no such model' >&2\nexit 3\n")
    program.chmod(0o700)
    server = VllmProcess.start(VllmSettings(str(program), tmp_path, "float32", "cpu", 64), tmp_path)
    try:
        until(lambda: server.ended)
        assert server.last_words() == "ValueError: no such model"
        assert len(capsys.readouterr().err) > 200_000 and len(server._output_end) < 100_000
        assert [path.name for path in server.folder.iterdir()] == ["lock"], "no file grows"
    finally:
        server.end()


def test_adapters_get_a_name_for_each_version_and_leave_after_their_last_request(make: Callable[..., Rig]) -> None:
    rig = make(adapters=True, device="cuda")
    [server] = rig.servers
    rig.publish()
    until(lambda: rig.engine.version == 1)
    server.go_on.clear()
    first = rig.ask()
    until(lambda: server.asked)
    rig.publish()
    until(lambda: rig.engine.version == 2)
    second = rig.ask()
    until(lambda: len(server.asked) == 2)
    assert "/pause" not in server.paths()
    assert len(server.weights) == 3, "the base and two adapters"
    server.go_on.set()
    assert first.get(timeout=10)[0].versions == [(1, 3)] and second.get(timeout=10)[0].versions == [(2, 3)]
    names = [body["model"] for body in server.asked]
    assert names[0].startswith("policy-v1-") and names[1].startswith("policy-v2-")
    rig.publish()
    until(lambda: names[0] not in server.weights and names[1] not in server.weights)


def test_adapters_on_a_cpu_are_compared_when_nothing_else_is_asked(make: Callable[..., Rig]) -> None:
    rig = make(adapters=True)
    [server] = rig.servers
    server.go_on.clear()
    running = rig.ask()
    until(lambda: server.asked)
    rig.publish()
    until(lambda: not rig.engine._open.is_set())
    waiting = rig.ask()
    assert "/v1/load_lora_adapter" not in server.paths() and rig.engine.version == 0
    server.go_on.set()
    assert running.get(timeout=10)[0].versions == [(0, 3)] and waiting.get(timeout=10)[0].versions == [(1, 3)]


def test_weights_in_gpu_memory_arrive_as_handles(make: Callable[..., Rig]) -> None:
    rig = make(in_memory=True)
    [server] = rig.servers
    assert ("/init_weight_transfer_engine", {"init_info": {"packed": False}}) in server.calls
    server.weights["policy"] = []
    answers: list[Any] = []
    told: list[dict[str, Any]] = []

    async def take(body: dict[str, Any]) -> web.Response:
        if "prompt_logprobs" in body["sampling_params"]:
            told.append(dict(server.calls)["/update_weights"]["update_info"])
            server.weights["policy"] = check(newest_published(server.folder).folder)  # type: ignore[union-attr]
        return await Server._generate(server, body)

    server._generate = take  # type: ignore[method-assign]
    rig.publish()
    until(lambda: rig.engine.version == 1)
    paths = server.paths()
    steps = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert [path for path in paths if path in steps] == steps
    assert told[0]["names"] == ["table.weight"] and told[0]["dtype_names"] == ["bfloat16"]
    assert told[0]["shapes"] == [[32, 32]] and told[0]["ipc_handles_pickled"]
    rig.engine.submit(SamplingRequest([5], max_new_tokens=3), answers.append)
    until(lambda: answers)


def test_sleep_waits_for_answers_and_holds_back_requests(make: Callable[..., Rig]) -> None:
    rig = make()
    [server] = rig.servers
    server.go_on.clear()
    running = rig.ask()
    until(lambda: server.asked)
    sleeping = threading.Thread(target=rig.engine.sleep)
    sleeping.start()
    waiting = rig.ask()
    assert "/sleep" not in server.paths()
    server.go_on.set()
    assert running.get(timeout=10)
    sleeping.join(10)
    assert server.paths()[-1] == "/sleep" and len(server.asked) == 1 and waiting.empty()
    rig.publish()
    rig.engine.wake()
    assert waiting.get(timeout=10)
    until(lambda: rig.engine.version == 1)
    assert server.paths().index("/wake_up") < server.paths().index("/pause")


def test_sleep_that_was_given_up_does_not_happen_later(make: Callable[..., Rig]) -> None:
    rig = make()
    [server] = rig.servers
    rig.engine.wake()
    assert "/wake_up" not in server.paths(), "it was awake"
    server.go_on.clear()
    running = rig.ask()
    until(lambda: server.asked)
    sleeping = threading.Thread(target=rig.engine.sleep)
    sleeping.start()
    until(lambda: rig.engine._sleeping)
    rig.engine.wake()
    sleeping.join(10)
    assert not sleeping.is_alive() and running.empty()
    server.go_on.set()
    assert running.get(timeout=10) and rig.ask().get(timeout=10)
    assert "/sleep" not in server.paths()


def test_exact_requests_wait_for_the_newest_weights(make: Callable[..., Rig]) -> None:
    for exact in (True, False):
        rig = make(exact=exact)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VllmEngine, "_adopt", _never)
            rig.publish()
            answered = rig.ask()
            if exact:
                with pytest.raises(queue.Empty):
                    answered.get(timeout=0.3)
                assert not rig.servers[0].asked
            else:
                assert answered.get(timeout=10)
    assert VllmSettings.of(_in_step(), "python", Path(), "cpu").exact


async def _never(engine: VllmEngine, found: Any) -> None:
    await asyncio.sleep(3600)


def _in_step() -> Config:
    config = Config()
    config.rollout.max_staleness = 0
    return config


def test_requests_at_once_count_their_time_once(make: Callable[..., Rig]) -> None:
    rig = make()
    [server] = rig.servers
    server.go_on.clear()
    began = time.monotonic()
    answers = [rig.ask() for _ in range(8)]
    until(lambda: len(server.asked) == 8)
    with pytest.raises(queue.Empty):
        answers[0].get(timeout=0.2)
    server.go_on.set()
    assert all(one.get(timeout=10) for one in answers)
    assert 0.2 <= rig.engine.busy_s <= time.monotonic() - began


def test_sockets_of_a_deep_folder_are_short_and_folders_of_killed_servers_disappear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("deep" * 20)))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    settings = VllmSettings(str(program), tmp_path, "float32", "cpu", 64)
    first = VllmProcess.start(settings, tmp_path)
    second = VllmProcess.start(settings, tmp_path)
    try:
        assert len(str(first.folder / "socket")) < 60 and first.folder.stat().st_mode & 0o077 == 0
        assert first.folder.exists(), "its server is alive"
        first.process.kill()
        first.process.wait()
        os.close(first.lock)
        VllmProcess.start(settings, tmp_path).end()
        assert not first.folder.exists() and second.folder.exists()
    finally:
        second.end()
    assert not second.folder.exists()


def test_tied_embeddings_are_refused_on_a_cpu(tiny_policy: Path, tmp_path: Path) -> None:
    config = Config()
    config.inference.engine, config.launcher.device = "vllm", "cpu"
    with pytest.raises(InvalidValue, match="embeddings are tied"):
        make_engine(config, tiny_policy, TOKENIZER, crew=tmp_path, python="/venv/bin/python")
    assert make_engine(config, tiny_policy, TOKENIZER, python="/venv/bin/python").end_ids == {1}, "without training"


def test_adapters_without_their_model_are_refused(tmp_path: Path) -> None:
    config = Config()
    config.inference.engine = "vllm"
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidValue, match="adapters without the model below them"):
        make_engine(config, tmp_path, TOKENIZER, python="/venv/bin/python")


@pytest.mark.parametrize(("field", "value"), [("sleep", True), ("transfer", "gpu")])
def test_what_needs_a_gpu_is_refused_on_a_cpu(tiny_policy: Path, field: str, value: Any) -> None:
    config = Config()
    config.inference.engine, config.launcher.device = "vllm", "cpu"
    setattr(config.inference, field, value)
    with pytest.raises(InvalidValue, match=f"inference.{field} is {value}, and vLLM does that on a GPU only"):
        make_engine(config, tiny_policy, TOKENIZER, python="/venv/bin/python")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inference.engine": "vllm", "algorithm.name": "custom"}, "takes no weights from a trainer of the owner"),
        ({"inference.engine": "transformers", "algorithm.deterministic": True}, "needs inference.engine embedded"),
        ({"inference.engine": "vllm", "launcher.nodes": 2}, "needs launcher.nodes 1"),
        ({"inference.engine": "vllm", "policy.lora": True, "policy.load_in_4bit": True}, "load_in_4bit to false."),
        ({"inference.engine": "vllm", "policy.lora": True, "policy.load_in_8bit": True}, "load_in_8bit to false."),
        (
            {"inference.engine": "vllm", "inference.transfer": "gpu", "launcher.num_processes": 2},
            "inference.transfer gpu needs launcher.num_processes 1",
        ),
        ({"inference.sleep": True}, "inference.sleep needs inference.engine vllm"),
        (
            {"inference.engine": "vllm", "inference.transfer": "gpu", "launcher.inference_gpus": 1},
            "inference.transfer gpu is for one GPU",
        ),
    ],
)
def test_settings_that_an_engine_cannot_keep_are_refused(fields: dict[str, Any], words: str) -> None:
    config = Config()
    for name, value in fields.items():
        section, _, field_name = name.partition(".")
        setattr(getattr(config, section), field_name, value)
    assert any(words in sentence for sentence in config.conflicts())
