"""The OpenAI dialect: what requests may hold and how answers are laid out.

Beyond OpenAI's fields: `return_token_ids` adds `prompt_token_ids` to the answer and `token_ids`, `token_logprobs` and
`versions` (runs of (policy version, count)) to each choice, so that who owns the loop needs no second request.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from toprope.training.inference.engine import Request, Sample

__all__ = ["BadRequest", "ChatRequest", "CompletionRequest", "choice", "completion_prompts", "response", "to_request"]


class BadRequest(Exception):
    """The request cannot be answered; the text says why."""


class _Sampling(msgspec.Struct, kw_only=True):
    model: str = ""
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    return_token_ids: bool = False


class ChatRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions. `prompt`: a text, token ids, or a list of either."""

    prompt: Any
    logprobs: int | None = None


def to_request(body: _Sampling, prompt_ids: list[int], max_context: int) -> Request:
    """What the engine is asked, from what the client asked.

    Raises:
        BadRequest: A value is out of its range, or the prompt leaves no room for an answer.
    """
    if body.stream:
        raise BadRequest("stream is not supported: ask without it, the whole answer comes at once")
    if not 1 <= body.n <= 1024:
        raise BadRequest(f"n must be between 1 and 1024, not {body.n}")
    temperature = 1.0 if body.temperature is None else body.temperature
    if not 0 <= temperature <= 5:
        raise BadRequest(f"temperature must be between 0 and 5, not {temperature}")
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p must be above 0 and at most 1, not {top_p}")
    if not prompt_ids:
        raise BadRequest("the prompt is empty")
    room = max_context - len(prompt_ids)
    if room < 1:
        raise BadRequest(
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer within the context of "
            f"{max_context} tokens (policy.max_context)"
        )
    wanted = body.max_completion_tokens or body.max_tokens or room
    if wanted < 1:
        raise BadRequest(f"max_tokens must be at least 1, not {wanted}")
    stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    return Request(
        prompt_ids=prompt_ids,
        n=body.n,
        max_new_tokens=min(wanted, room),
        temperature=temperature,
        top_p=top_p,
        stop=[word for word in stop if word],
        seed=body.seed,
    )


def completion_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request, one by one.

    Raises:
        BadRequest: It is neither a text, nor token ids, nor a list of either.
    """
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise BadRequest("prompt must be a text, a list of token ids, or a list of either")
    return prompts


def choice(index: int, sample: Sample, *, chat: bool, with_ids: bool, tokens: list[str] | None) -> dict[str, Any]:
    """One entry of `choices`. `tokens`: the text of each token, where logprobs were asked for."""
    entry: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason}
    if chat:
        entry["message"] = {"role": "assistant", "content": sample.text}
    else:
        entry["text"] = sample.text
    if tokens is not None and chat:
        entry["logprobs"] = {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(tokens, sample.logprobs, strict=True)
            ]
        }
    elif tokens is not None:
        entry["logprobs"] = {"tokens": tokens, "token_logprobs": sample.logprobs, "top_logprobs": None}
    if with_ids:
        entry["token_ids"] = sample.token_ids
        entry["token_logprobs"] = sample.logprobs
        entry["versions"] = [(sample.version, len(sample.token_ids))]
    return entry


def response(
    kind: str, model: str, version: int, choices: list[dict[str, Any]], prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """The body of an answer; `kind` is `chat.completion` or `text_completion`."""
    return {
        "id": f"cmpl-{uuid.uuid4().hex[:20]}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"policy-v{version}",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
