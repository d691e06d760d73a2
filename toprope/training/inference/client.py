"""Asks the inference server: the rollout driver's side of the OpenAI dialect."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from toprope.errors import ComponentFailed, InvalidValue
from toprope.training.inference.sessions import Turn

__all__ = ["Answer", "PolicyClient", "PromptTooLong", "Sampling"]

_encode = msgspec.json.Encoder().encode
_TRIES = 4


class PromptTooLong(InvalidValue):
    """The conversation leaves no room for an answer within the policy's context."""


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


class _Error(msgspec.Struct):
    error: dict[str, Any]


_completion = msgspec.json.Decoder(_Completion)


class PolicyClient:
    """One keep-alive connection pool to the inference server. Make it within an event loop; close it there."""

    def __init__(self, base_url: str, secret: str, *, model: str = "policy", timeout_s: float = 600.0) -> None:
        self._url, self._secret, self._model = base_url.rstrip("/"), secret, model
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
            ComponentFailed: The server refuses the request or cannot be reached.
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

    async def close_session(self, session: str) -> None:
        """Lets the server forget a session and its sub-sessions."""
        await self._call("DELETE", f"/v1/sessions/{session}", None, "")

    async def _call(self, method: str, path: str, data: bytes | None, session: str) -> bytes:
        key = f"{self._secret}.{session}" if session else self._secret
        for attempt in range(_TRIES):
            try:
                async with self._session.request(
                    method, self._url + path, data=data, headers={"Authorization": f"Bearer {key}"}
                ) as response:
                    body = await response.read()
                    if response.status == 200:
                        return body
                    message = _message(body)
                    if response.status == 400 and "no room for an answer" in message:
                        raise PromptTooLong(message)
                    raise ComponentFailed(f"Inference refused {path} with {response.status}: {message}")
            except (aiohttp.ClientConnectionError, aiohttp.ServerDisconnectedError) as error:
                if attempt == _TRIES - 1:
                    raise ComponentFailed(f"Inference at {self._url} cannot be reached: {error}.") from error
                await asyncio.sleep(0.05 * 2**attempt)
            except TimeoutError:
                raise ComponentFailed(f"Inference did not answer {path} in time.") from None
        raise AssertionError("unreachable")


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=_Error).error.get("message", ""))
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
