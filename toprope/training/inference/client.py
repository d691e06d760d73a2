"""The rollout driver's client of the inference server."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from toprope.errors import ComponentFailed, InvalidValue
from toprope.training.component.http_client import HttpAnswer, HttpConnections
from toprope.training.component.peer_addresses import Address, Backoff, resolver
from toprope.training.inference.sessions import LIFE_HEADER, SessionSampling, Turn, session_key

_encode = msgspec.json.Encoder().encode
_LIFE_PROBE = "~life"
"""The session of requests that ask for the server's life."""
_MAX_SERVER_ERRORS = 5
"""Server errors after which a request fails: the request itself may be their cause."""
_SHORTER = "Raise policy.max_context if the policy reads more, or take shorter tasks by the environment's knobs."


class PromptTooLong(InvalidValue):
    """The conversation leaves no room for an answer within the policy's context."""


class SessionLost(ComponentFailed):
    """The server that recorded the session's earlier turns is gone, and another one has replaced it."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; see `settings.schema.RolloutSection`. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Makes answers repeatable; None for different answers every time."""

    def greedy(self) -> Sampling:
        """The same settings, but with the most likely token at each position."""
        return Sampling(0.0, 1.0, self.max_new_tokens, self.stop, self.seed)

    def at(self, *place: object) -> Sampling:
        """The same settings with a seed derived for one request, identified by `place`; unchanged without a seed."""
        if self.seed is None:
            return self
        digest = hashlib.blake2b(repr((self.seed, *place)).encode(), digest_size=4).digest()
        return replace(self, seed=int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Answer:
    """One sampled answer, and the turn that represents it in training."""

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


class _RecordedSession(msgspec.Struct):
    turns: list[Turn]


class _RecordedSessions(msgspec.Struct):
    sessions: dict[str, _RecordedSession]


class _Error(msgspec.Struct):
    error: dict[str, Any]


_MODEL = "policy"
"""Name of the model in requests."""
_LOOK_S = 60.0
"""Seconds for which an answer is awaited between two looks whether the server is still there."""
_ALIVE_S = 600.0
"""Seconds within which it has to answer that it is."""
_LONGEST_S = 30 * 86_400.0

_completion = msgspec.json.Decoder(_Completion)


class PolicyClient:
    """A pool of connections to the inference server. Create and close it within one event loop.

    It finds a restarted server at its new address and repeats the request; sessions that were open raise `SessionLost`.

    Args:
        base_url: The server's address, or a function that returns the present one.
    """

    def __init__(self, base_url: Address, secret: str) -> None:
        self._resolve, self._secret = resolver(base_url), secret
        self._lives: dict[str, str] = {}
        self._connections = HttpConnections({"Content-Type": "application/json"})

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def chat(
        self, messages: list[dict[str, Any]], sampling: Sampling, *, n: int = 1, session: str = ""
    ) -> list[Answer]:
        """Sample n answers to a conversation.

        Args:
            messages: Messages in OpenAI's form.
            sampling: Sampling settings.
            n: Number of answers.
            session: Session under which the server records the turn; empty to record nothing.

        Raises:
            PromptTooLong: The conversation leaves no room for an answer.
            SessionLost: The server that recorded the session's earlier turns is gone.
            ComponentFailed: The server refuses the request; `PeerAway` if it cannot be reached.
        """
        body = {
            "model": _MODEL,
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
        """The server's present address; waits while it is away."""
        backoff = Backoff("Inference")
        while (url := self._resolve()) is None:
            await asyncio.sleep(backoff.after_absence(time.monotonic()))
        return url

    def key(self, session: str) -> str:
        """A key with which other code may ask the policy in a session; see `sessions.session_key`."""
        return session_key(self._secret, session)

    async def recorded(self, session: str, life: str) -> dict[str, list[Turn]]:
        """The turns of a session and its sub-sessions, by key; empty if nothing was recorded.

        Args:
            life: The server's life when the rollouts began, from `open_session`.

        Raises:
            SessionLost: The server that recorded the turns is gone.
            ComponentFailed: See `chat`.
        """
        data = await self._call("GET", f"/v1/sessions/{session}", None, "", life, missing=b'{"sessions": {}}')
        return {
            name: record.turns for name, record in msgspec.json.decode(data, type=_RecordedSessions).sessions.items()
        }

    async def open_session(self, session: str, sampling: Sampling) -> str:
        """Have the server sample by these settings where a request in the session or a sub-session names none.

        Returns:
            The server's life.
        """
        settings = SessionSampling(
            sampling.temperature, sampling.top_p, sampling.max_new_tokens, list(sampling.stop), fixed=True
        )
        await self._call("PUT", f"/v1/sessions/{session}", _encode(settings), _LIFE_PROBE)
        return self._lives.pop(_LIFE_PROBE)

    async def close_session(self, session: str) -> None:
        """Have the server forget a session and its sub-sessions."""
        life = self._lives.pop(session, None)
        if self._resolve() is None:
            return  # the server is away, and its sessions are gone
        try:
            await self._call("DELETE", f"/v1/sessions/{session}", None, "", life)
        except SessionLost:
            pass  # the server has restarted and knows no session

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
        backoff, errors = Backoff("Inference"), 0
        while True:
            if (url := self._resolve()) is None:
                await asyncio.sleep(backoff.after_absence(time.monotonic()))
                continue
            try:
                response = await self._answer(method, url, path, data, headers)
            except OSError as error:
                await asyncio.sleep(backoff.after_error(error, time.monotonic(), url))
                continue
            if response.status == 200:
                if root and (current := response.headers.get(LIFE_HEADER.lower())):
                    self._lives[root] = current
                return response.body
            message = _message(response.body)
            if response.status == 404 and missing is not None:
                return missing
            if response.status == 400 and "no room for an answer" in message:
                raise PromptTooLong(message, hint=_SHORTER)
            if response.status == 409:
                raise SessionLost(message)
            errors += 1
            if response.status < 500 or errors >= _MAX_SERVER_ERRORS:
                verb = "refused" if response.status < 500 else "failed at"
                raise ComponentFailed(f"Inference {verb} {path} with {response.status}: {message}")
            await asyncio.sleep(0.05 * 2**errors)

    async def _answer(
        self, method: str, url: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> HttpAnswer:
        """The answer to a request, however long the policy samples or others come first: an engine that hangs ends by
        its heartbeats, and a server that is gone answers no other request either.

        Raises:
            OSError: The connection broke, or the server is gone.
        """
        errors: list[OSError] = []
        looks: list[asyncio.Task[None]] = []

        async def look(limit: asyncio.Timeout) -> None:
            try:
                while True:
                    await self._connections.request("GET", url, "/health", timeout_s=_ALIVE_S)
                    await asyncio.sleep(_LOOK_S)
            except OSError as error:
                errors.append(error)
                limit.reschedule(loop.time())

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                # Most answers come before the first look, and take no task. A request that is cancelled has closed its
                # connection when this returns: what follows must not overtake it.
                timer = loop.call_later(_LOOK_S, lambda: looks.append(loop.create_task(look(limit))))
                try:
                    return await self._connections.request(
                        method, url, path, body=data, headers=headers, timeout_s=_LONGEST_S
                    )
                finally:
                    timer.cancel()
                    for task in looks:
                        task.cancel()
                        await asyncio.wait({task})
        except TimeoutError:
            if not errors:
                raise
            raise errors[0] from None


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=_Error).error.get("message", ""))
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
