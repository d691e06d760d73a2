"""Lets an environment that plays its rollouts itself talk to a model at somebody else's endpoint, without its key.

The environment's code runs in a worker and gets what it always gets: a loopback address and a key of the rollout's own.
Here, in the driver, the requests arrive and go on under the owner's key, which user code never sees; what comes back is
counted and kept, so that the rollout's answers are known.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import Any

import msgspec
from aiohttp import web

from toprope.errors import ComponentFailed
from toprope.training.inference.client import Sampling
from toprope.training.inference.dialect import format_events
from toprope.training.inference.sessions import Turn
from toprope.training.rollouts.endpoint_client import EndpointClient, ModelFailed, Unanswered

__all__ = ["Relay"]

_BODY_LIMIT = 32 * 2**20
_PASSED_ON = ("messages", "tools", "tool_choice", "response_format", "stop", "parallel_tool_calls")
_JUDGE = -1
_encode = msgspec.json.Encoder().encode


class Relay:
    """A loopback server for the rollouts of one group; use it with `async with`.

    Args:
        client: The model.
        size: Rollouts.
        sampling: How answers are sampled, where a request does not say; its length is the most a request gets.
    """

    def __init__(self, client: EndpointClient, size: int, sampling: Sampling) -> None:
        self._client, self._sampling = client, sampling
        self.keys = [secrets.token_hex(16) for _ in range(size)]
        self.judge_key = secrets.token_hex(16)
        self._places = {key: place for place, key in enumerate(self.keys)} | {self.judge_key: _JUDGE}
        self.turns: list[list[Turn]] = [[] for _ in range(size)]
        """Per rollout what was answered, as texts: an endpoint does not tell its tokens."""
        self._failure: ComponentFailed | None = None
        app = web.Application(client_max_size=_BODY_LIMIT)
        app.add_routes(
            [web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)],
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        self.url = ""

    async def __aenter__(self) -> Relay:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    def raise_failure(self) -> None:
        """Whatever the environment made of it: a question that was not answered makes the group no measurement.

        Raises:
            ModelFailed: The model answers nothing.
            Unanswered: It did not answer a question.
        """
        if self._failure is not None:
            raise self._failure

    def _place(self, request: web.Request) -> int | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._places.get(key) if scheme.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.Response:
        if self._place(request) is None:
            return _error(401, "This server needs the rollout's key as a bearer token.")
        return _json({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "toprope"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        place = self._place(request)
        if place is None:
            return _error(401, "This server needs the rollout's key as a bearer token.")
        try:
            asked = msgspec.json.decode(await request.read(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _error(400, f"The body is not what this endpoint takes: {error}.")
        if self._failure is not None:  # the group is lost; nothing more is spent on it
            return _error(400, str(self._failure))
        count = asked.get("n") or 1
        if type(count) is not int or not 1 <= count <= 1024:
            return _error(400, f"n must be between 1 and 1024, not {count!r}.")
        try:
            body = self._body(asked)
        except (TypeError, ValueError):
            return _error(400, "max_tokens, temperature and top_p must be numbers.")
        try:
            answers = await asyncio.gather(*(self._client.complete(body) for _ in range(count)))
        except (ModelFailed, Unanswered) as failure:
            if self._failure is None or isinstance(failure, ModelFailed):
                self._failure = failure
            return _error(400, str(failure))
        answer = _joined(answers)
        if place != _JUDGE:
            self.turns[place] += [_turn(asked, choice) for choice in answer["choices"]]
        if asked.get("stream"):
            return web.Response(
                body=format_events(answer, asked.get("stream_options")), content_type="text/event-stream"
            )
        return _json(answer)

    def _body(self, asked: dict[str, Any]) -> dict[str, Any]:
        sampling = self._sampling
        wanted = asked.get("max_completion_tokens") or asked.get("max_tokens") or sampling.max_new_tokens
        body = {name: asked[name] for name in _PASSED_ON if asked.get(name) is not None}
        temperature, top_p = asked.get("temperature"), asked.get("top_p")
        body["max_tokens"] = min(int(wanted), sampling.max_new_tokens)
        body["temperature"] = sampling.temperature if temperature is None else float(temperature)
        top_p = sampling.top_p if top_p is None else float(top_p)
        if top_p < 1:
            body["top_p"] = top_p
        if sampling.stop and "stop" not in body:
            body["stop"] = list(sampling.stop)
        return body


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers to the same question as the one answer with several choices that was asked for."""
    first = answers[0]
    usage = [answer.get("usage") or {} for answer in answers]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    spent = {name: sum(one.get(name) or 0 for one in usage) for name in names}
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
        "usage": spent,
    }


def _turn(asked: dict[str, Any], choice: dict[str, Any]) -> Turn:
    messages = asked.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages and isinstance(messages[-1], dict) else {}
    content = choice["message"].get("content")
    said = content if isinstance(content, str) else ""
    # Equal prompts make the second turn a retry of the first one.
    prompt = list(hashlib.blake2b(_encode(messages), digest_size=16).digest())
    return Turn(prompt, [], [], [], choice["finish_reason"], str(last.get("content") or ""), said)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return _json({"error": {"message": message, "type": kind, "code": status}}, status)
