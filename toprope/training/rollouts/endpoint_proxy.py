"""Forwards an environment's requests to a model at an endpoint, without showing it the key.

An environment that runs its rollouts itself gets a loopback address and a key per rollout, as with the run's own
policy. The requests arrive here, in the driver, and are forwarded with the owner's key, which user code never sees. The
answers are counted and recorded, so that the rollouts' turns are known.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec
from aiohttp import web

from toprope.errors import ComponentFailed
from toprope.training.inference.client import Sampling
from toprope.training.inference.dialect import format_events
from toprope.training.inference.sessions import Turn
from toprope.training.rollouts.endpoint_client import EndpointClient, ModelFailed, Unanswered, all_or_none

_BODY_LIMIT = 32 * 2**20
_FORWARDED = ("messages", "tools", "tool_choice", "response_format", "stop", "parallel_tool_calls")
_JUDGE = -1
_encode = msgspec.json.Encoder().encode


class EndpointProxy:
    """A loopback server for the rollouts of one group; use it with `async with`.

    Args:
        client: The model.
        size: Number of rollouts.
        sampling: Defaults for parameters that a request does not set, and the longest answer that it gets.
    """

    def __init__(self, client: EndpointClient, size: int, sampling: Sampling) -> None:
        self._client, self._sampling = client, sampling
        self.keys = [secrets.token_hex(16) for _ in range(size)]
        self.judge_key = secrets.token_hex(16)
        self._places = {key: place for place, key in enumerate(self.keys)} | {self.judge_key: _JUDGE}
        self.turns: list[list[Turn]] = [[] for _ in range(size)]
        """Per rollout the answers as texts; endpoints do not report token ids."""
        self._failure: ComponentFailed | None = None
        app = web.Application(client_max_size=_BODY_LIMIT)
        models = [web.get(path, self._models) for path in ("/v1/models", "/v1/models/{name:.+}")]
        others = [web.post(path, self._refuse) for path in ("/v1/completions", "/v1/responses")]
        app.add_routes([web.post("/v1/chat/completions", self._chat), *others, *models])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        self.url = ""

    async def __aenter__(self) -> EndpointProxy:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    def raise_failure(self) -> None:
        """Raises the failure of a question, even if the environment caught it: the group is not a measurement.

        Raises:
            ModelFailed: The model answers no question.
            Unanswered: The model did not answer a question.
        """
        if self._failure is not None:
            raise self._failure

    def _place(self, request: web.Request) -> int | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._places.get(key) if scheme.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.Response:
        if self._place(request) is None:
            return _error(401, "This server needs the rollout's key as a bearer token.")
        entry = {"id": "policy", "object": "model", "owned_by": "toprope", "created": 0}
        return _json(entry if request.match_info else {"object": "list", "data": [entry]})

    async def _refuse(self, request: web.Request) -> web.Response:
        return _error(
            404, f"A model at an endpoint is asked by chats, not by {request.path}: name a model that runs here."
        )

    async def _chat(self, request: web.Request) -> web.Response:
        place = self._place(request)
        if place is None:
            return _error(401, "This server needs the rollout's key as a bearer token.")
        try:
            request_body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _error(400, f"The body is not a chat request: {error}.")
        if self._failure is not None:  # the group is lost, so spend nothing more on it
            return _error(400, str(self._failure))
        count = request_body.get("n") or 1
        if type(count) is not int or not 1 <= count <= 1024:
            return _error(400, f"n must be between 1 and 1024, not {count!r}.")
        try:
            body = self._body(request_body, is_judge=place == _JUDGE)
        except (TypeError, ValueError):
            return _error(400, "max_tokens, temperature and top_p must be numbers.")
        try:
            answers = await all_or_none(self._client.complete(body) for _ in range(count))
        except (ModelFailed, Unanswered) as failure:
            if self._failure is None or isinstance(failure, ModelFailed):
                self._failure = failure
            return _error(400, str(failure))
        answer = _combine(answers)
        if place != _JUDGE:
            self.turns[place] += [_turn(request_body, choice) for choice in answer["choices"]]
        if request_body.get("stream"):
            stream = format_events(answer, request_body.get("stream_options"))
            return web.Response(body=stream, content_type="text/event-stream")
        return _json(answer)

    def _body(self, request_body: dict[str, Any], *, is_judge: bool) -> dict[str, Any]:
        sampling = self._sampling
        limit = request_body.get("max_completion_tokens") or request_body.get("max_tokens") or sampling.max_new_tokens
        body = {name: request_body[name] for name in _FORWARDED if request_body.get(name) is not None}
        temperature, top_p = request_body.get("temperature"), request_body.get("top_p")
        body["max_tokens"] = min(int(limit), sampling.max_new_tokens)
        requested = sampling.temperature if temperature is None else float(temperature)
        body["temperature"] = requested if is_judge else sampling.temperature  # at which rollouts are measured
        top_p = sampling.top_p if top_p is None else float(top_p)
        if top_p < 1:
            body["top_p"] = top_p
        if sampling.stop and "stop" not in body:
            body["stop"] = list(sampling.stop)
        return body


def _combine(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines answers to the same question into one answer with several choices."""
    first = answers[0]
    usage = [answer.get("usage") or {} for answer in answers]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    tokens = {name: sum(answer_usage.get(name) or 0 for answer_usage in usage) for name in names}
    choices = [answer["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
    for choice in choices:
        choice["message"] = {"role": "assistant", "content": None} | choice["message"]
        choice["finish_reason"] = choice.get("finish_reason") or "stop"
    return {
        "id": str(first.get("id") or "relayed"),
        "object": "chat.completion",
        "created": first.get("created") or 0,
        "model": "policy",
        "choices": choices,
        "usage": tokens,
    }


def _turn(request_body: dict[str, Any], choice: dict[str, Any]) -> Turn:
    messages = request_body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages and isinstance(messages[-1], dict) else {}
    content = choice["message"].get("content")
    text = content if isinstance(content, str) else ""
    # Equal prompts make the second turn a retry of the first one.
    prompt = list(hashlib.blake2b(_encode(messages), digest_size=16).digest())
    return Turn(prompt, [], [], [], choice["finish_reason"], str(last.get("content") or ""), text)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return _json({"error": {"message": message, "type": kind, "code": status}}, status)
