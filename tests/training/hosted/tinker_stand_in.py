"""A service that speaks Tinker's interface to the newest client, built from the client's own protobuf schema.

Its model is a table: the logits of a token depend on the token before. So passes and optimizer steps are exact and take
milliseconds, and a policy learns in them what a test rewards. Nothing is simulated in time: a request is done when it
is sent, and its answer waits until it is asked for.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as schema

MODEL, KEY = "test/table", "tml-kept-between-owner-and-service"
PROTOBUF = "application/x-protobuf"


class Table:
    """Trained logits of a (vocabulary, vocabulary) table, with Adam's moments."""

    def __init__(self, size: int) -> None:
        self.logits = np.zeros((size, size))
        self.first, self.second, self.gradient = (np.zeros((size, size)) for _ in range(3))
        self.steps = 0

    def copy(self, *, optimizer: bool = True) -> Table:
        made = Table(len(self.logits))
        made.logits = self.logits.copy()
        if optimizer:
            made.first, made.second, made.steps = self.first.copy(), self.second.copy(), self.steps
        return made

    def logprobs(self, before: np.ndarray) -> np.ndarray:
        logits = self.logits[before]
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def passed(self, before: np.ndarray, inputs: dict[str, np.ndarray], loss: str, low: float, high: float) -> Any:
        """Log-probabilities of the targets; adds the loss's gradient."""
        every, target = self.logprobs(before), inputs["target_tokens"].astype(int)
        chosen = every[np.arange(len(target)), target]
        if loss == "cross_entropy":
            slope = -inputs["weights"]
        else:
            ratio, advantage = np.exp(chosen - inputs["logprobs"]), inputs["advantages"]
            clipped = np.clip(ratio, low, high)
            slope = -ratio * advantage
            if loss == "ppo":
                slope = np.where(ratio * advantage <= clipped * advantage, slope, 0.0)
            elif loss == "cispo":
                slope = -clipped * advantage
        for place, (token, own) in enumerate(zip(before, slope, strict=True)):
            self.gradient[token] -= own * np.exp(every[place])
            self.gradient[token, target[place]] += own
        return chosen

    def step(self, adam: dict[str, float]) -> float:
        self.steps += 1
        norm = float(np.linalg.norm(self.gradient))
        gradient = self.gradient * min(1.0, (adam["grad_clip_norm"] or np.inf) / max(norm, 1e-30))
        self.first = adam["beta1"] * self.first + (1 - adam["beta1"]) * gradient
        self.second = adam["beta2"] * self.second + (1 - adam["beta2"]) * gradient**2
        mean = self.first / (1 - adam["beta1"] ** self.steps)
        spread = np.sqrt(self.second / (1 - adam["beta2"] ** self.steps))
        self.logits -= adam["learning_rate"] * mean / (spread + adam["eps"])
        self.gradient[:] = 0
        return norm


def _message(body: bytes) -> Any:
    """The request of a client before 0.25, which sends JSON, as the newer ones send it."""
    given = json.loads(body)
    asked = given["forward_backward_input"]
    found = schema.ForwardBackwardRequest(model_id=given["model_id"], seq_id=given["seq_id"], loss_fn=asked["loss_fn"])
    found.loss_fn_config.update(asked.get("loss_fn_config") or {})
    for one in asked["data"]:
        datum = found.data.add()
        for chunk in one["model_input"]["chunks"]:
            datum.model_input.add().encoded_text.tokens = np.array(chunk["tokens"], np.int32).tobytes()
        for name, value in one["loss_fn_inputs"].items():
            whole = value["dtype"] == "int64"
            datum.loss_fn_inputs[name].dtype = schema.DTYPE_INT64 if whole else schema.DTYPE_FLOAT32
            datum.loss_fn_inputs[name].dense = np.array(value["data"], value["dtype"]).tobytes()
    return found


class TinkerStandIn:
    """The service. `url` is its address; close it after use."""

    def __init__(self, vocabulary: int, model: str = MODEL) -> None:
        self._size, self._model, self._numbers = vocabulary, model, itertools.count()
        self.models: dict[str, Table] = {}
        self.saved: dict[str, Table] = {}
        self.samplers: dict[str, Table] = {}
        self.answers: dict[str, tuple[bytes, str]] = {}
        self.seen: list[str] = []
        """Paths of all requests."""
        self.keys: set[str] = set()
        self.deleted: list[str] = []
        self.refusal: tuple[str, int, str] | None = None
        """A part of a path, a status and a text: what requests with that path get."""
        self._lock, self._open = threading.Lock(), False
        routes = [
            Route("/api/v1/{name:path}", self._answer, methods=["GET", "POST", "DELETE"]),
            Route("/files/{name}", lambda request: Response(b"adapters")),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", loop="asyncio")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            threading.Event().wait(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def forget(self) -> None:
        """Lose every session, as a service that was started again; what was saved stays."""
        with self._lock:
            self.models.clear()
            self.samplers.clear()

    async def _answer(self, request: Request) -> Response:
        name, body = request.path_params["name"], await request.body()
        with self._lock:
            self.seen.append(name)
            self.keys.add(request.headers.get("x-api-key", ""))
            self._open = request.headers.get("x-stainless-package-version", "").startswith("0.24.")
            if self.refusal is not None and self.refusal[0] in name:
                return JSONResponse({"detail": self.refusal[2]}, self.refusal[1])
            if request.headers.get("x-api-key") != KEY:
                return JSONResponse({"detail": "unknown key"}, 401)
            if request.method == "DELETE":
                self.deleted.append(name)
                return Response(status_code=204)
            if name.endswith("archive"):
                return JSONResponse({}, 302, {"location": f"{self.url}/files/adapter.tar.gz"})
            if name.endswith("weights_info"):
                return JSONResponse({"base_model": self._model, "is_lora": True, "lora_rank": 32})
            if name.endswith("external_weights_urls"):
                urls = {"adapter_model.safetensors": f"{self.url}/files/adapter_model.safetensors"}
                return JSONResponse({"urls": urls, "expires": "2100-01-01T00:00:00Z"})
            if name == "forward_backward":
                is_message = request.headers.get("content-type") == PROTOBUF
                return self._passed(schema.ForwardBackwardRequest.FromString(body) if is_message else _message(body))
            given = await request.json() if body else {}
            if name.startswith("samplers/"):
                return JSONResponse({"sampler_id": name.partition("/")[2], "base_model": self._model})
            known = getattr(self, f"_{name.replace('/', '_')}", None)
            return JSONResponse({"detail": f"there is no {name}"}, 404) if known is None else known(given)

    def _get_server_capabilities(self, given: Any) -> Response:
        return JSONResponse({"supported_models": [{"model_name": self._model}]})

    def _client_config(self, given: Any) -> Response:
        return JSONResponse({})

    _client_dynamic_config = _session_heartbeat = _client_config

    def _create_session(self, given: Any) -> Response:
        return JSONResponse({"session_id": f"session-{next(self._numbers)}"})

    def _create_model(self, given: Any) -> Response:
        if given["base_model"] != self._model:
            return self._failed(f"base model {given['base_model']} is not served")
        name = f"{given['session_id']}:train:{given['model_seq_id']}"
        self.models[name] = Table(self._size)
        return self._later({"model_id": name, "type": "create_model"})

    def _get_info(self, given: Any) -> Response:
        return JSONResponse({"model_id": given["model_id"], "model_data": {"model_name": self._model}})

    def _load_weights(self, given: Any) -> Response:
        # A client before 0.25 loads a state into a model that it has created.
        name = given.get("model_id") or f"{given['session_id']}:train:{given['model_seq_id']}"
        if given["path"] not in self.saved:
            return JSONResponse({"detail": f"there is no {given['path']}"}, 404)
        self.models[name] = self.saved[given["path"]].copy(optimizer=given["optimizer"])
        return self._later({"path": given["path"], "model_id": name})

    def _save(self, given: Any, kind: str) -> Response:
        if not re.fullmatch("[a-zA-Z0-9_-]+", given["path"]):  # as SkyRL's server does
            return JSONResponse({"detail": f"{given['path']} is no name"}, 422)
        path = "/".join(filter(None, ("tinker:/", given["model_id"], kind, given["path"])))
        if given["model_id"] not in self.models:
            return JSONResponse({"detail": "model not loaded"}, 404)
        self.saved[path] = self.models[given["model_id"]].copy()
        return self._later({"path": path})

    def _save_weights(self, given: Any) -> Response:
        return self._save(given, "weights")

    def _save_weights_for_sampler(self, given: Any) -> Response:
        # Open servers, which speak to that client alone, do not name the kind in a path.
        return self._save(given, "" if self._open else "sampler_weights")

    def _save_weights_external(self, given: Any) -> Response:
        return self._save(given, "external_weights")

    def _create_sampling_session(self, given: Any) -> Response:
        path = given.get("model_path")
        if path is not None and path not in self.saved:
            return JSONResponse({"detail": f"there is no {path}"}, 404)
        name = f"sampling-{next(self._numbers)}"
        self.samplers[name] = self.saved[path] if path else Table(self._size)
        return JSONResponse({"sampling_session_id": name})

    def _optim_step(self, given: Any) -> Response:
        adam = given.get("adam_params") or given["optim_params"]
        if given["model_id"] not in self.models:
            return JSONResponse({"detail": "model not loaded"}, 404)
        return self._later({"metrics": {"grad_norm": self.models[given["model_id"]].step(adam)}})

    def _passed(self, given: Any) -> Response:
        table = self.models.get(given.model_id)
        if table is None:
            return JSONResponse({"detail": f"model {given.model_id} not loaded"}, 404)
        found = []
        for one in given.data:
            before = np.concatenate([np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in one.model_input])
            types = {schema.DTYPE_FLOAT32: np.float32, schema.DTYPE_INT64: np.int64}
            inputs = {
                name: np.frombuffer(value.dense, types[value.dtype]) for name, value in one.loss_fn_inputs.items()
            }
            clip = given.loss_fn_config
            low, high = clip.get("clip_low_threshold", 0.8), clip.get("clip_high_threshold", 1.2)
            found.append(table.passed(before, inputs, given.loss_fn, low, high).astype(np.float32))
        answer = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        record = answer.loss_fn_outputs.add(num_datums=len(found))
        field = record.fields["logprobs"]
        field.data, field.dtype = b"".join(one.tobytes() for one in found), schema.DTYPE_FLOAT32
        field.offsets = np.cumsum([0, *(one.nbytes for one in found)], dtype=np.int64).tobytes()
        return self._later(answer.SerializeToString())

    def _asample(self, given: Any) -> Response:
        table = self.samplers.get(given["sampling_session_id"])
        if table is None:
            return JSONResponse({"detail": "sampling session not found"}, 404)
        asked, answer = given["sampling_params"], schema.SampleResponse()
        draw = np.random.default_rng(asked.get("seed"))
        prompt = [token for chunk in given["prompt"]["chunks"] for token in chunk["tokens"]]
        for _ in range(given["num_samples"]):
            tokens, logprobs, last = [], [], prompt[-1]
            while len(tokens) < asked["max_tokens"]:
                row = table.logprobs(np.array([last]))[0]
                weights = np.exp(row / (asked["temperature"] or 1.0))
                last = int(
                    row.argmax() if not asked["temperature"] else draw.choice(len(row), p=weights / weights.sum())
                )
                tokens.append(last)
                logprobs.append(row[last])
                if last in (asked.get("stop") or ()):
                    break
            reason = schema.STOP_REASON_STOP if last in (asked.get("stop") or ()) else schema.STOP_REASON_LENGTH
            one = answer.sequences.add(stop_reason=reason, tokens=np.array(tokens, np.int32).tobytes())
            one.logprobs = np.array(logprobs, np.float32).tobytes()
        ids = [f"sequence-{next(self._numbers)}" for _ in range(given["num_samples"])]
        return self._later(answer.SerializeToString(), sample_sequence_ids=ids)

    def _retrieve_future(self, given: Any) -> Response:
        content, kind = self.answers.get(given["request_id"], (b'{"detail": "no such future"}', ""))
        return Response(content, 200 if kind else 404, media_type=kind or "application/json")

    def _later(self, answer: Any, **more: Any) -> Response:
        number = str(next(self._numbers))
        is_message = isinstance(answer, bytes)
        content = answer if is_message else JSONResponse(answer).body
        self.answers[number] = content, PROTOBUF if is_message else "application/json"
        return JSONResponse({"request_id": number, **more})

    def _failed(self, text: str) -> Response:
        return self._later({"error": text, "category": "user"})
