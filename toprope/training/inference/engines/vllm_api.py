"""The interface of a vLLM server: answers to prompts of tokens, signs of life, updates of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec

from toprope.training.inference.engine import SamplingRequest, extend_runs
from toprope.training.inference.engines.vllm_process import MODEL, MOST_ROWS
from toprope.training.policy.publishing import Published

_HEALTH_S = 10.0
_GENERATE = "/inference/v1/generate"


class UpdateFailed(Exception):
    """The server did not take weights; it must not sample any more."""


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


class VllmApi:
    """Requests to one server.

    Args:
        http: A session with it, which `close` ends together with all requests.
    """

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.close = http.close

    async def post(self, path: str, body: Any = None) -> bytes:
        """Post an order.

        Raises:
            UpdateFailed: The server refused it.
            aiohttp.ClientError: The server ended.
        """
        async with self._http.post(path, json={} if body is None else body) as response:
            data = await response.read()
            if response.status != 200:
                text = data.decode(errors="replace")[:300]
                raise UpdateFailed(f"vLLM refused {path} with {response.status}: {text}")
        return data

    async def is_up(self) -> bool:
        """True if the server answers requests."""
        try:
            async with self._http.get("/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def probe(self) -> None:
        """Wait for an answer of all its processes, which they give between two steps."""
        await self.post("/collective_rpc", {"method": "toprope_loaded"})

    async def adopt(self, published: Published, *, waits: bool) -> None:
        """Replace all weights in a pause.

        Args:
            waits: True to let all answers end before, False to go on with them after.
        """
        await self.post(f"/pause?mode={'wait' if waits else 'keep'}")
        if (handles := published.handles) is not None:
            await self.post("/start_weight_update")
            await self.post("/update_weights", {"update_info": handles})
            await self.post("/finish_weight_update")
        else:
            path = {"weights_path": str(published.folder)}
            await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        await self.post("/reset_prefix_cache")
        await self.name_version(published.policy)
        await self.post("/resume")

    async def name_version(self, version: int) -> None:
        """Have answers from now on stamped with a policy version."""
        await self.post("/update_weight_version", {"new_version": str(version)})

    async def compare(self, published: Published, allowed: float, model: str = MODEL) -> None:
        """Compare the server's log-probabilities with those of published weights.

        Args:
            allowed: Largest difference.
            model: The served model, or an adapter's name.

        Raises:
            UpdateFailed: They differ by more.
        """
        check = published.check
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = {"model": model, "token_ids": check.tokens, "sampling_params": sampling}
        entries = msgspec.json.decode(await self.post(_GENERATE, body), type=Checked).prompt_logprobs[1:]
        served_logprobs = [
            entry[str(token)].logprob if entry and str(token) in entry else float("nan")
            for token, entry in zip(check.tokens[1:], entries, strict=True)
        ]
        if not (error := check.largest_error(served_logprobs)) <= allowed:
            raise UpdateFailed(
                f"After the update to version {published.policy} vLLM's log-probabilities differ from the trainer's by "
                f"{error:.3g}, more than {allowed}."
            )

    async def generate(
        self,
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
            aiohttp.ClientError: The server ended or failed.
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
        async with self._http.post(_GENERATE, json=body) as response:
            data = await response.read()
            if response.status >= 500:  # its model has ended, and it follows
                raise aiohttp.ClientError(f"vLLM failed: {data.decode(errors='replace')[:300]}")
            if response.status != 200:
                raise RuntimeError(f"vLLM refused the request: {data.decode(errors='replace')[:300]}")
        return msgspec.json.decode(data, type=Generated).choices
