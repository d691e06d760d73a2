"""The native dialects of sglang and vLLM, which Atropos's server types `sglang` and `vllm` use.

Both are POST /generate; the fields of the body distinguish them.

    sglang  {"input_ids" | "text", "sampling_params": {max_new_tokens, n, temperature, top_p, stop}, "return_logprob"}
            -> {"text", "output_ids", "meta_info": {"output_token_logprobs": [[logprob, id, text]], "finish_reason"}},
            a list of these for n > 1
    vllm    {"prompt": {"prompt_token_ids"} | text, "logprobs": 0, max_tokens, n, temperature, top_p, stop}
            -> {"text": [...], "logprobs": [[[{id: logprob}]]], "finish_reasons": [...]}

Their clients strip /v1 from a base URL, so the endpoint is at the root.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from toprope.training.inference.dialect import BadRequest, CompletionRequest, LeftOut, to_request
from toprope.training.inference.engine import Sample, SamplingRequest


class _SglangSampling(LeftOut):
    max_new_tokens: int = 128
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None


class GenerateRequest(msgspec.Struct):
    """POST /generate in the dialect of sglang (`sglang` is True) or vLLM."""

    sglang: bool
    prompt: str | list[int]
    sampling: CompletionRequest


class _Body(LeftOut):
    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: _SglangSampling | None = None
    prompt: Any = None
    prompt_logprobs: int | None = None
    n: int = 1
    max_tokens: int = 16
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False


def parse_generate(body: bytes) -> GenerateRequest:
    """Parse a request.

    Raises:
        BadRequest: The body fits neither dialect, or uses an unsupported feature.
        msgspec.DecodeError: A field has the wrong type.
    """
    request = msgspec.json.decode(body, type=_Body)
    if request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs is not supported; log-probabilities of sampled tokens are")
    if request.prompt is None:
        params = request.sampling_params or _SglangSampling()
        prompt: Any = request.text if request.input_ids is None else request.input_ids
        if prompt is None:
            raise BadRequest("either input_ids or text (sglang) or prompt (vllm) is needed")
        return GenerateRequest(True, prompt, _sampling(params, params.max_new_tokens, request.stream))
    prompt = request.prompt
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise BadRequest("prompt must be a text or {'prompt_token_ids': [...]}")
    return GenerateRequest(False, prompt, _sampling(request, request.max_tokens, request.stream))


def _sampling(params: _SglangSampling | _Body, max_tokens: int, stream: bool) -> CompletionRequest:
    return CompletionRequest(
        prompt=None,
        n=params.n,
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        stop=params.stop,
        seed=params.seed,
        stream=stream,
        **{name: getattr(params, name) for name in LeftOut.__struct_fields__},
    )


def generate_request(body: GenerateRequest, prompt_ids: list[int], max_context: int) -> SamplingRequest:
    """The engine's request for a client's request.

    Raises:
        BadRequest: A value is out of its range, or the prompt leaves no room for an answer.
    """
    if body.sampling.stream:
        raise BadRequest("stream is not supported here; the whole answer comes at once")
    return to_request(body.sampling, prompt_ids, max_context)


def generate_answer(
    body: GenerateRequest, prompt_ids: list[int], samples: list[Sample]
) -> dict[str, Any] | list[dict[str, Any]]:
    """The answer in the dialect of the request."""
    if not body.sglang:
        return {
            "text": [sample.text for sample in samples],
            "logprobs": [
                [[{token: value}] for token, value in zip(sample.token_ids, sample.logprobs, strict=True)]
                for sample in samples
            ],
            "finish_reasons": [sample.finish_reason for sample in samples],
            "prompt_token_ids": prompt_ids,
            "token_ids": [sample.token_ids for sample in samples],
            "versions": [sample.version for sample in samples],
        }
    answers: list[dict[str, Any]] = [
        {
            "text": sample.text,
            "output_ids": sample.token_ids,
            "meta_info": {
                "id": uuid.uuid4().hex,
                "finish_reason": {"type": sample.finish_reason}
                | ({"length": len(sample.token_ids)} if sample.finish_reason == "length" else {}),
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(sample.token_ids),
                "output_token_logprobs": [
                    (value, token, None) for token, value in zip(sample.token_ids, sample.logprobs, strict=True)
                ],
                "weight_version": str(sample.version),
            },
        }
        for sample in samples
    ]
    return answers[0] if len(answers) == 1 else answers
