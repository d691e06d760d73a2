"""A teacher at an OpenAI-compatible endpoint that the owner named."""

from __future__ import annotations

from typing import Any

from toprope.settings.endpoints import Endpoint
from toprope.training.inference.client import Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient, Unanswered
from toprope.trajectories.synthesis.pipeline import TryAgain

__all__ = ["EndpointTeacher"]


class EndpointTeacher:
    """Answers by a model.

    Args:
        endpoint: Where and what.
        key: The key itself, where the endpoint needs one.
        temperature: Of sampling.
        max_new_tokens: Of an answer.
    """

    def __init__(self, endpoint: Endpoint, key: str | None, temperature: float, max_new_tokens: int) -> None:
        self._client = EndpointClient(endpoint, key, tries=4)
        self._sampling = Sampling(temperature, 1.0, max_new_tokens)

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """The model's answer.

        Raises:
            TryAgain: This question was not answered.
            toprope.training.rollouts.endpoint_client.ModelFailed: No question will be.
        """
        try:
            return (await self._client.chat(messages, self._sampling))[0].text
        except Unanswered as error:
            raise TryAgain(str(error)) from None

    async def close(self) -> None:
        await self._client.close()
