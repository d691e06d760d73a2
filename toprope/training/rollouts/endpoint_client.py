"""Asks models at OpenAI-compatible endpoints: the same questions that the policy gets, over somebody else's server.

Such a server refuses, limits rates, hangs and answers nonsense. What may pass is tried again with growing pauses, and
as late as the server itself asks for; what will not pass (a wrong key, an unknown model) ends the model's test at once;
a single question that cannot be answered is left out and counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from toprope.errors import ComponentFailed
from toprope.settings.endpoints import Endpoint
from toprope.training.inference.client import Answer, Sampling
from toprope.training.inference.sessions import Turn

__all__ = ["EndpointClient", "ModelFailed", "Unanswered", "Usage"]

_FATAL = {401, 402, 403, 404, 405}
_REFUSED = {400, 413, 422}
_BODY_LIMIT = 8 * 2**20
_LONGEST_TEXT = 200_000
_LONGEST_PAUSE_S = 60.0
_NONSENSE_TRIES = 2
_encode = msgspec.json.Encoder().encode


class ModelFailed(ComponentFailed):
    """No question will be answered: the key, the model's name or the address is wrong."""


class Unanswered(ComponentFailed):
    """One question was not answered after all tries."""


@dataclass
class Usage:
    """What answers took so far. Tokens and `cost_usd` are None until an answer told them."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None

    def add(self, told: _Told | None) -> None:
        """Counts one answer in."""
        self.requests += 1
        if told is None:
            return
        self.prompt_tokens = (self.prompt_tokens or 0) + (told.prompt_tokens or 0)
        self.completion_tokens = (self.completion_tokens or 0) + (told.completion_tokens or 0)
        if told.cost is not None:
            self.cost_usd = (self.cost_usd or 0.0) + told.cost

    def cost(self, endpoint: Endpoint) -> float | None:
        """US dollars, as the endpoint told or by the owner's prices; None where neither is known."""
        if self.cost_usd is not None:
            return self.cost_usd
        if self.prompt_tokens is None or endpoint.prompt_usd is None or endpoint.completion_usd is None:
            return None
        spent = self.prompt_tokens * endpoint.prompt_usd + (self.completion_tokens or 0) * endpoint.completion_usd
        return spent / 1e6


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Told(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Told | None = None
    error: dict[str, Any] | None = None


_completion = msgspec.json.Decoder(_Completion)


class EndpointClient:
    """One model at one endpoint. Make it within an event loop; close it there.

    Args:
        endpoint: Where and what.
        key: The key itself, where the endpoint needs one.
        concurrency: Requests in flight at most.
        timeout_s: Seconds for one request.
        tries: How often a question is asked before it counts as unanswered.
        pause_s: The first pause; it doubles.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        key: str | None,
        *,
        concurrency: int = 16,
        timeout_s: float = 180.0,
        tries: int = 6,
        pause_s: float = 0.5,
    ) -> None:
        self._endpoint, self._key = endpoint, key
        self._tries, self._pause_s = tries, pause_s
        self._timeout_s = timeout_s
        self._limit = asyncio.Semaphore(concurrency)
        self._resume_at = 0.0
        self.usage = Usage()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def close(self) -> None:
        await self._session.close()

    async def chat(
        self, messages: list[dict[str, Any]], sampling: Sampling, *, n: int = 1, session: str = ""
    ) -> list[Answer]:
        """Samples n answers, one a request: not every endpoint takes `n`. Their tokens are unknown here.

        Raises:
            ModelFailed: Nothing will be answered.
            Unanswered: This was not, after all tries.
        """
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            "messages": messages,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        data = _encode(body)
        tasks = [asyncio.create_task(self._one(data)) for _ in range(n)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Passes a chat request on, for the endpoint's own model, and its one answer back as it came.

        Raises:
            ModelFailed, Unanswered: See `chat`.
        """
        answer: dict[str, Any] = await self._one(_encode(body | {"model": self._endpoint.model}), self._whole)
        return answer

    async def close_session(self, session: str) -> None:
        """Nothing: an endpoint keeps no sessions."""

    async def _one(self, data: bytes, read: Callable[[bytes], tuple[Any, str]] | None = None) -> Any:
        read = read or self._read
        why, nonsense = "", 0
        async with self._limit:
            for attempt in range(self._tries):
                if attempt:
                    self.usage.retries += 1
                    await asyncio.sleep(self._pause_s * 2 ** (attempt - 1) * random.uniform(1.0, 1.5))
                await asyncio.sleep(max(0.0, self._resume_at - time.monotonic()))
                try:
                    status, body, retry_after = await self._post(data)
                except TimeoutError:
                    why = f"no answer within {self._timeout_s:g} s"
                    continue
                except aiohttp.ClientError as error:
                    why = f"{self._endpoint.base_url} cannot be reached: {self._clean(error)}"
                    continue
                if status == 200:
                    answer, why = read(body)
                    if answer is not None:
                        return answer
                    nonsense += 1
                    if nonsense >= _NONSENSE_TRIES:
                        raise Unanswered(f"{nonsense} times {why}")
                    continue
                why = f"HTTP {status}: {self._clean(_message(body))}"
                if status in _FATAL or 300 <= status < 400:
                    raise ModelFailed(f"{self._endpoint.base_url} refuses: {why}", hint=_hint(status, self._endpoint))
                if status in _REFUSED:
                    raise Unanswered(f"The question was refused: {why}")
                if retry_after is not None:  # whoever asks next waits as well
                    self._resume_at = max(self._resume_at, time.monotonic() + min(retry_after, _LONGEST_PAUSE_S))
        raise Unanswered(f"Not answered in {self._tries} tries; the last: {why}")

    async def _post(self, data: bytes) -> tuple[int, bytes, float | None]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url = f"{self._endpoint.base_url}/chat/completions"
        # A redirect could carry the key elsewhere: it is a refusal.
        async with self._session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            body = b""
            async for chunk in response.content.iter_chunked(65536):
                body += chunk
                if len(body) > _BODY_LIMIT:
                    raise aiohttp.ClientPayloadError(f"an answer of more than {_BODY_LIMIT} bytes")
            return response.status, body, _seconds(response.headers.get("Retry-After"))

    def _read(self, body: bytes) -> tuple[Answer | None, str]:
        """The answer in a body, or why there is none."""
        try:
            completion = _completion.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, f"what came is no chat completion: {self._clean(body[:200].decode(errors='replace'))}"
        if not completion.choices:
            said = self._clean(str((completion.error or {}).get("message", "it has no choices")))
            return None, f"what came is no chat completion: {said}"
        self.usage.add(completion.usage)
        choice = completion.choices[0]
        reason = choice.finish_reason or "stop"
        return Answer(_text(choice.message.content), reason == "length", Turn([], [], [], [], reason)), ""

    def _whole(self, body: bytes) -> tuple[dict[str, Any] | None, str]:
        """The whole of a body that `_read` finds an answer in."""
        answer, why = self._read(body)
        return (None if answer is None else msgspec.json.decode(body)), why

    def _clean(self, text: object) -> str:
        """What somebody else's server said, on one line, without the key, which some repeat."""
        line = " ".join(str(text).split())
        return (line.replace(self._key, "***") if self._key else line)[:300]


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message; models that think may spend all their tokens and have none."""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    return (content or "")[:_LONGEST_TEXT]


def _message(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body)
        error = said.get("error", said) if isinstance(said, dict) else said
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:300].decode(errors="replace")


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After: seconds, or a date (RFC 9110, 10.2.3)."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _hint(status: int, endpoint: Endpoint) -> str:
    if status in (401, 403):
        return f"The owner looks whether {endpoint.key or 'a key'} is right and may use {endpoint.model}."
    if status == 402:
        return "The account behind the key has no credit left."
    return f"The owner looks whether base_url and the model's name {endpoint.model!r} are right."
