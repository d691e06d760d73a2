"""Asks the inference server: the rollout driver's side of the OpenAI dialect."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from toprope.errors import ComponentFailed, InvalidValue
from toprope.training.component.peer_addresses import Address, Backoff, resolver
from toprope.training.inference.keys import session_key
from toprope.training.inference.sessions import LIFE_HEADER, Turn

__all__ = ["Answer", "PolicyClient", "PromptTooLong", "Sampling", "SessionLost"]

_encode = msgspec.json.Encoder().encode
_LIFE = "~life"
"""A session of no rollout, under which the server is asked which life it is in."""
_REFUSALS = 5
"""Server errors in a row after which a request is given up: what the server trips over may be the request."""


class PromptTooLong(InvalidValue):
    """The conversation leaves no room for an answer within the policy's context."""


class SessionLost(ComponentFailed):
    """The server that had recorded the session's earlier turns is gone; another one has taken its place."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; see settings.schema.RolloutSection. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Makes what is sampled repeatable; None: every time something else."""

    def greedy(self) -> Sampling:
        """The same with the most likely token at each position."""
        return Sampling(0.0, 1.0, self.max_new_tokens, self.stop, self.seed)

    def at(self, *place: object) -> Sampling:
        """The same with a seed of its own for one request, by what it is for; without a seed, itself."""
        if self.seed is None:
            return self
        digest = hashlib.blake2b(repr((self.seed, *place)).encode(), digest_size=4).digest()
        return replace(self, seed=int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Answer:
    """One sampled answer and the turn that it is for training."""

    text: str
    truncated: bool
    turn: Turn


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str
    token_ids: list[int]
    token_logprobs: list[float]
    versions: list[tuple[int, int]]


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int]


class _Kept(msgspec.Struct):
    turns: list[Turn]


class _Recorded(msgspec.Struct):
    sessions: dict[str, _Kept]


class _Error(msgspec.Struct):
    error: dict[str, Any]


_completion = msgspec.json.Decoder(_Completion)


class PolicyClient:
    """One keep-alive connection pool to the inference server. Make it within an event loop; close it there.

    A server that was started again is found where it is then, and asked again; only sessions that were open have gone
    with the former one, and say so.

    Args:
        base_url: The server's address, or what gives the present one.
        secret: The run's secret.
        model: What the requests call it.
        timeout_s: Seconds for one answer.
    """

    def __init__(self, base_url: Address, secret: str, *, model: str = "policy", timeout_s: float = 600.0) -> None:
        self._where, self._secret, self._model = resolver(base_url), secret, model
        self._lives: dict[str, str] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Content-Type": "application/json"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def chat(
        self, messages: list[dict[str, Any]], sampling: Sampling, *, n: int = 1, session: str = ""
    ) -> list[Answer]:
        """Samples n answers to a conversation.

        Args:
            messages: OpenAI-style messages.
            session: Name under which the server records them; empty: it records nothing.

        Raises:
            PromptTooLong: There is no room for an answer.
            SessionLost: The session's earlier turns went with a server that is gone.
            ComponentFailed: The server refuses the request; PeerAway where it cannot be reached.
        """
        body = {
            "model": self._model,
            "messages": messages,
            "n": n,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        data = await self._call("POST", "/v1/chat/completions", _encode(body), session)
        completion = _completion.decode(data)
        return [
            Answer(
                text=choice.message["content"],
                truncated=choice.finish_reason == "length",
                turn=Turn(
                    prompt_ids=completion.prompt_token_ids,
                    completion_ids=choice.token_ids,
                    logprobs=choice.token_logprobs,
                    versions=choice.versions,
                    finish_reason=choice.finish_reason,
                ),
            )
            for choice in completion.choices
        ]

    async def url(self) -> str:
        """The server's present address, waited for while it is away."""
        backoff = Backoff("Inference")
        while (url := self._where()) is None:
            await asyncio.sleep(backoff.after_absence(time.monotonic()))
        return url

    def key(self, session: str) -> str:
        """The key under which somebody else may ask the policy in a session; see keys.py."""
        return session_key(self._secret, session)

    async def recorded(self, session: str, life: str) -> dict[str, list[Turn]]:
        """The turns of a session and its sub-sessions, by key; empty where nothing was recorded.

        Args:
            session: The session.
            life: Of the server that its rollouts were begun with: from `life()`.

        Raises:
            SessionLost: The server that recorded them is gone.
            ComponentFailed: See `chat`.
        """
        data = await self._call("GET", f"/v1/sessions/{session}", None, "", life, missing=b'{"sessions": {}}')
        return {name: kept.turns for name, kept in msgspec.json.decode(data, type=_Recorded).sessions.items()}

    async def life(self) -> str:
        """Names the present life of the server."""
        await self._call("GET", "/v1/models", None, _LIFE)
        return self._lives.pop(_LIFE)

    async def close_session(self, session: str) -> None:
        """Lets the server forget a session and its sub-sessions."""
        life = self._lives.pop(session, None)
        if self._where() is None:
            return  # gone with the server
        try:
            await self._call("DELETE", f"/v1/sessions/{session}", None, "", life)
        except SessionLost:
            pass  # forgotten already, with everything else

    async def _call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        session: str,
        life: str | None = None,
        *,
        missing: bytes | None = None,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {self._secret}.{session}" if session else f"Bearer {self._secret}"}
        root = session.partition("/")[0]
        if life := life or self._lives.get(root):
            headers[LIFE_HEADER] = life
        backoff, refusals = Backoff("Inference"), 0
        while True:
            if (url := self._where()) is None:
                await asyncio.sleep(backoff.after_absence(time.monotonic()))
                continue
            try:
                async with self._session.request(method, url + path, data=data, headers=headers) as response:
                    body = await response.read()
                    if response.status == 200:
                        if root and (serves := response.headers.get(LIFE_HEADER)):
                            self._lives[root] = serves
                        return body
                    message = _message(body)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                await asyncio.sleep(backoff.after_error(error, time.monotonic(), url))
                continue
            except TimeoutError:
                raise ComponentFailed(f"Inference did not answer {path} in time.") from None
            if response.status == 404 and missing is not None:
                return missing
            if response.status == 400 and "no room for an answer" in message:
                raise PromptTooLong(message)
            if response.status == 409:
                raise SessionLost(message)
            refusals += 1
            if response.status < 500 or refusals >= _REFUSALS:
                raise ComponentFailed(f"Inference refused {path} with {response.status}: {message}")
            await asyncio.sleep(0.05 * 2**refusals)


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=_Error).error.get("message", ""))
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
