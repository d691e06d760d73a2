"""A stand-in for the vLLM server, and an engine beside it."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from toprope.errors import TopropeError
from toprope.training.inference.engine import SamplingRequest
from toprope.training.inference.engines.vllm_engine import VllmEngine
from toprope.training.inference.engines.vllm_process import VllmSettings
from toprope.training.policy.publishing import WeightFolder, WeightHandles

TOKENIZER: Any = SimpleNamespace(
    eos_token_id=1,
    batch_decode=lambda rows, **options: ["".join(chr(97 + token % 26) for token in row) for row in rows],
)


@dataclass
class Server:
    """A stand-in for one vLLM server. Its weights are the `check.json` of the folder that it has loaded."""

    number: int
    folder: Path
    model: Path
    keeps_old: bool = False
    failures: int = 0
    """Requests that it answers with status 500."""
    silent: bool = False
    """True: it accepts connections and answers nothing."""
    process: Any = field(default_factory=lambda: SimpleNamespace(returncode=9))
    ended: bool = False
    version: str = "default"
    calls: list[tuple[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    """Set: generation ends at once. Clear: it waits."""

    def __post_init__(self) -> None:
        self.go_on.set()
        self.weights = {"policy": check(self.model)}
        self._started, self._loop = threading.Event(), asyncio.new_event_loop()
        self._ending = asyncio.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._started.wait(10)

    def connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            "http://vllm", connector=aiohttp.UnixConnector(str(self.folder / f"{self.number}")), headers={"x": "y"}
        )

    def end(self) -> None:
        self.ended = True
        self._loop.call_soon_threadsafe(self._ending.set)

    def last_words(self) -> str:
        return "out of memory"

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(self.folder / f"{self.number}")).start()
        self._started.set()
        await self._ending.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        path, body = request.path, json.loads(await request.read() or b"{}")
        if self.silent:
            await self._ending.wait()
        if path == "/inference/v1/generate":
            return await self._generate(body)
        self.calls.append((path, body))
        if path == "/collective_rpc" and body["method"] == "reload_weights" and not self.keeps_old:
            self.weights["policy"] = check(Path(body["kwargs"]["weights_path"]))
        elif path == "/update_weights" and not self.keeps_old:
            self.weights["policy"] = body["update_info"]["names"]
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            self.weights[body["lora_name"]] = check(Path(body["lora_path"]))
        elif path == "/v1/unload_lora_adapter":
            del self.weights[body["lora_name"]]
        return web.json_response({})

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        sampling = body["sampling_params"]
        if "prompt_logprobs" in sampling:
            found = self.weights[body["model"]]
            entries = [
                {str(token): {"logprob": value}} for token, value in zip(body["token_ids"][1:], found, strict=True)
            ]
            return web.json_response({"choices": [], "prompt_logprobs": [None, *entries]})
        self.asked.append(body)
        if self.failures:
            self.failures -= 1
            return web.json_response({"error": {"message": "EngineCore encountered an issue"}}, status=500)
        version = self.version
        while not self.go_on.is_set():
            await asyncio.sleep(0.005)
        spans = [{"version": version, "start": 0, "end": 1}, {"version": self.version, "start": 1, "end": 3}]
        choice = {
            "finish_reason": "stop",
            "token_ids": [self.number] * 3,
            "logprobs": {"content": [{"logprob": -0.5}] * 3},
            "weight_versions": spans,
        }
        return web.json_response({"choices": [choice] * sampling["n"]})


def check(model: Path) -> list[float]:
    path = model / "check.json"
    return json.loads(path.read_bytes())["logprobs"] if path.exists() else [0.0] * 23


@dataclass
class Rig:
    engine: VllmEngine
    servers: list[Server]
    publisher: Any
    model: torch.nn.Module
    gave_up: list[TopropeError]

    def publish(self) -> int:
        with torch.no_grad():
            for value in self.model.parameters():
                value.add_(torch.randn_like(value))
        return int(self.publisher.publish())

    def ask(self, n: int = 1) -> queue.Queue[Any]:
        answered: queue.Queue[Any] = queue.Queue()
        self.engine.submit(SamplingRequest([5], n=n, max_new_tokens=3), answered.put)
        return answered


class Tiny(torch.nn.Module):
    """Looks like a model of transformers: one table of logits."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 32)

    def get_input_embeddings(self) -> Any:
        return self.table

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return SimpleNamespace(logits=self.table(input_ids))

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        folder.mkdir()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def rig(*, keeps_old: tuple[int, ...] = (), adapters: bool = False, in_memory: bool = False, **options: Any) -> Rig:
        servers: list[Server] = []
        gave_up: list[TopropeError] = []
        torch.manual_seed(0)
        model = Tiny()
        if adapters:
            model.peft_config = {}  # type: ignore[assignment]

        def start(settings: VllmSettings, place: Path) -> Any:
            number = len(servers) + 1
            servers.append(Server(number, tmp_path, place, number in keeps_old))
            return servers[-1]

        given: dict[str, Any] = {"device": "cpu", "in_memory": in_memory} | options
        settings = VllmSettings("python", tmp_path, "float32", max_context=64, **given)
        engine = VllmEngine(
            settings, TOKENIZER, frozenset({1}), crew=tmp_path, gave_up=gave_up.append, start_process=start
        )
        engine.start()
        assert engine.wait_ready(30)
        publisher: Any = WeightFolder(tmp_path, model)
        if in_memory:
            publisher = WeightHandles(tmp_path, model, share=lambda copy: ("handle", tuple(copy.shape)), device_id="G")
        rigs.append(Rig(engine, servers, publisher, model, gave_up))
        return rigs[-1]

    yield rig
    for one in rigs:
        one.engine.stop()
