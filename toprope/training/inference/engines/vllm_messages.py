"""Messages of vLLM's tokens-in-tokens-out endpoint (`/inference/v1/generate`), and the request for answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec

from toprope.training.inference.engine import SamplingRequest, extend_runs
from toprope.training.inference.engines.vllm_process import MOST_ROWS


class Logprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[Logprob]


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[Span]

    def versions(self, adapted: int | None) -> list[tuple[int, int]]:
        """Versions of consecutive tokens as (version, number of tokens); `adapted` is the version of an adapter."""
        if adapted is not None:
            return [(adapted, len(self.token_ids))]
        runs: list[tuple[int, int]] = []
        for span in self.weight_versions:
            if span.end > span.start:
                extend_runs(runs, int(span.version), span.end - span.start)
        return runs


class Generated(msgspec.Struct):
    choices: list[Choice]


class Checked(msgspec.Struct):
    prompt_logprobs: list[dict[str, Logprob] | None]


async def generate(
    http: aiohttp.ClientSession,
    request: SamplingRequest,
    *,
    first: int,
    model: str,
    end_ids: Iterable[int],
    context: int,
) -> list[Choice]:
    """Sample at most `MOST_ROWS` answers of a request, from answer number `first` on.

    Args:
        model: The served model, or an adapter's name.
        end_ids: Tokens that end an answer.
        context: Most tokens of a prompt and its answer together.

    Raises:
        RuntimeError: vLLM refused the request.
        aiohttp.ClientError: The server ended.
    """
    sampling: dict[str, Any] = {
        "n": min(MOST_ROWS, request.n - first) if request.temperature else 1,
        "max_tokens": max(1, min(request.max_new_tokens, context - len(request.prompt_ids))),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": sorted(end_ids),
        "logprobs": 0,
        "skip_special_tokens": True,
    }
    if request.stop:
        sampling["stop"] = request.stop
    if request.seed is not None:
        sampling["seed"] = (request.seed * 1_000_003 + first) % 2**62
    body = {"model": model, "token_ids": request.prompt_ids, "sampling_params": sampling}
    async with http.post("/inference/v1/generate", json=body) as response:
        data = await response.read()
        if response.status != 200:
            raise RuntimeError(f"vLLM refused the request: {data.decode(errors='replace')[:300]}")
    return msgspec.json.decode(data, type=Generated).choices
