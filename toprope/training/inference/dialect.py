"""The OpenAI dialect: the fields of requests and the layout of answers.

https://platform.openai.com/docs/api-reference/chat. Beyond OpenAI's fields, `return_token_ids` adds `prompt_token_ids`
to the answer and `token_ids`, `token_logprobs` and `versions` (runs of (policy version, count)) to each choice, so that
the rollout driver needs no second request.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, TypeVar

import msgspec

from toprope.training.inference.engine import Sample, SamplingRequest
from toprope.training.inference.sessions import SessionSampling

_encode = msgspec.json.Encoder().encode
_JSON_ONLY = "Answer with JSON only."
_NEUTRAL = {"top_k": -1, "repetition_penalty": 1}
_BY_SCHEMA = " It must be valid by this JSON schema:\n"


class BadRequest(Exception):
    """The request cannot be answered; the text gives the reason."""

    code: int | str = 400


class ContextExceeded(BadRequest):
    """The prompt leaves no room for an answer; text and code are those by which clients know this case."""

    code = "context_length_exceeded"


class LeftOut(msgspec.Struct, kw_only=True):
    """Settings of other servers that requests may name and the policy is not sampled with; see `left_out`."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    min_new_tokens: Any = None
    chat_template_kwargs: Any = None


class _Sampling(LeftOut, kw_only=True):
    model: str = ""
    n: int | None = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False


class ChatRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


AnyRequest = TypeVar("AnyRequest", bound=_Sampling)


def with_settings(body: AnyRequest, settings: SessionSampling | None) -> AnyRequest:
    """A request with its session's settings in place of those that it does not name."""
    if settings is None:
        return body
    keeps = body.temperature is not None and not settings.fixed
    unlimited = body.max_tokens is None and body.max_completion_tokens is None
    return msgspec.structs.replace(
        body,
        temperature=body.temperature if keeps else settings.temperature,
        top_p=settings.top_p if body.top_p is None else body.top_p,
        max_tokens=settings.max_tokens if unlimited else body.max_tokens,
        stop=settings.stop if body.stop is None else body.stop,
    )


def other_temperature(body: _Sampling, settings: SessionSampling) -> str | None:
    """A line for the log if a request names another temperature than its session has; None if it does not."""
    if body.temperature is None or body.temperature == settings.temperature:
        return None
    if settings.fixed:
        return f"a rollout asks for {body.temperature:g} and gets {settings.temperature:g}, as the run samples"
    if body.temperature == 0:  # the key of an outside environment is also that of its evaluations and judges
        return None
    return f"an outside environment asks for {body.temperature:g}; the trainer computes with {settings.temperature:g}"


def to_request(body: _Sampling, prompt_ids: list[int], max_context: int) -> SamplingRequest:
    """The engine's request for a client's request.

    Raises:
        BadRequest: A value is out of its range.
        ContextExceeded: The prompt leaves no room for an answer.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= 1024:
        raise BadRequest(f"n must be between 1 and 1024, not {n}")
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
        raise ContextExceeded(
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer within this model's maximum "
            f"context length of {max_context} tokens (policy.max_context)"
        )
    max_tokens = next((limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None), room)
    if max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, not {max_tokens}")
    stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    return SamplingRequest(
        prompt_ids=prompt_ids,
        n=n,
        max_new_tokens=min(max_tokens, room),
        # Smaller values leave the range of float32, which would fail all requests that are decoded together.
        temperature=temperature if temperature >= 1e-4 else 0.0,
        top_p=max(top_p, 1e-6),
        stop=[word for word in stop if word],
        seed=body.seed,
    )


def left_out(body: ChatRequest | CompletionRequest, *, in_rollout: bool) -> list[str]:
    """The settings of a request that sampling leaves out, but for values that change nothing.

    In a rollout, which is sampled as the trainer computes, a penalty is no error: agents of others always send some.
    Settings beyond OpenAI's never are: every client of other servers may have some as a default.

    Raises:
        BadRequest: The answer would lack what the request asks for, or other requests than those of rollouts penalise.
    """
    if isinstance(body, ChatRequest):
        asked: dict[str, Any] = {"top_logprobs": body.top_logprobs}
    else:
        best_of = None if body.best_of == (1 if body.n is None else body.n) else body.best_of
        more = body.logprobs is not None and body.logprobs > 1
        asked = {"echo": body.echo, "suffix": body.suffix, "best_of": best_of, "logprobs above 1": more}
    penalties = {name: getattr(body, name) for name in ("frequency_penalty", "presence_penalty", "logit_bias")}
    for name, value in asked.items() if in_rollout else (asked | penalties).items():
        if value:
            known = "; logprobs of the sampled tokens are" if "logprobs" in name else ""
            raise BadRequest(f"{name} is not supported{known}")
    values = {name: getattr(body, name) for name in LeftOut.__struct_fields__}
    return [name for name, value in values.items() if value and value != _NEUTRAL.get(name)]


def allowed_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools to offer the policy; None if it must not call any. A call that is required is offered only.

    Raises:
        BadRequest: `tool_choice` is unknown, or requires a tool that the request does not have.
    """
    choice, tools = body.tool_choice, body.tools or None
    if choice in (None, "auto") or (choice == "required" and tools):
        return tools
    if choice == "none":
        return None
    name = _name(choice)
    chosen = [tool for tool in tools or () if name is not None and _name(tool) == name]
    if not chosen:
        raise BadRequest(
            f"tool_choice {choice!r} is not supported with these tools: choose auto, none, required, or the function "
            "of one of `tools`"
        )
    return chosen


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def instructed_messages(body: ChatRequest) -> list[dict[str, Any]]:
    """The messages, with a `response_format` as text in the user's last one, because sampling is not constrained.

    That message stays the same in a loop of tool calls, so that each prompt begins with the one before.

    Raises:
        BadRequest: The format is unknown.
    """
    form = body.response_format or {}
    kind = form.get("type", "text")
    if kind == "text" or not body.messages:
        return body.messages
    if kind not in ("json_object", "json_schema"):
        raise BadRequest(f"response_format {kind!r} is not supported: choose text, json_object or json_schema")
    text = _JSON_ONLY
    if kind == "json_schema":
        schema_field = form.get("json_schema")
        schema = schema_field.get("schema", {}) if isinstance(schema_field, dict) else {}
        text += _BY_SCHEMA + _encode(schema).decode()
    messages = list(body.messages)
    place = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
    if place is None:
        return [*messages, {"role": "user", "content": text}]
    content = messages[place].get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n{text}"}]
    elif content is None or isinstance(content, str):
        content = f"{content}\n\n{text}" if content else text
    messages[place] = {**messages[place], "content": content}
    return messages


def unpromised(body: ChatRequest) -> str | None:
    """The field of a request that the policy is asked for but need not keep; None if there is no such field."""
    if (body.response_format or {}).get("type", "text") != "text":
        return "response_format"
    return None if body.tool_choice in (None, "auto", "none") else "tool_choice"


def completion_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request, one by one.

    Raises:
        BadRequest: `prompt` is neither a text, nor token ids, nor a list of either.
    """
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    for item in prompts:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise BadRequest("prompt must be a text, a list of token ids, or a list of either")
    return prompts


def format_choice(
    index: int, sample: Sample, *, chat: bool, with_ids: bool, tokens: list[str] | None
) -> dict[str, Any]:
    """One entry of `choices`. `tokens` holds the text of each token if logprobs were requested."""
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
        entry["versions"] = sample.versions
    return entry


def format_response(
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


def format_events(body: dict[str, Any], options: dict[str, Any] | None) -> bytes:
    """An answer as the server-sent events of `stream`, with each choice whole in one event.

    Args:
        body: The answer without streaming.
        options: `stream_options`; `include_usage` adds an event with the usage.
    """
    head = {name: value for name, value in body.items() if name not in ("choices", "usage")}
    chat = body["object"] == "chat.completion"
    head["object"] = "chat.completion.chunk" if chat else body["object"]
    pieces: list[dict[str, Any]] = []
    for choice in body["choices"]:
        if not chat:
            pieces.append(head | {"choices": [choice]})
            continue
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        fields = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
        pieces.append(head | {"choices": [fields | {"delta": delta, "finish_reason": None}]})
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        pieces.append(head | {"choices": [last]})
    if (options or {}).get("include_usage"):
        pieces.append(head | {"choices": [], "usage": body["usage"]})
    return b"".join(b"data: " + _encode(piece) + b"\n\n" for piece in pieces) + b"data: [DONE]\n\n"
