"""A teacher model at an OpenAI-compatible endpoint that the owner named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toprope.records.purse import FILE as SPENDING
from toprope.records.purse import LIMITS, Purse
from toprope.records.run.folder import read_json
from toprope.settings.endpoints import Endpoint
from toprope.settings.limits import FrozenLimits
from toprope.training.inference.client import Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient, Unanswered
from toprope.trajectories.synthesis.pipeline import TryAgain


def purse_of(folder: Path) -> Purse:
    """Return the account of a program that calls models. Without its frozen limits, nothing may be spent.

    Raises:
        NotFound, Corrupt: They cannot be read.
    """
    cap = FrozenLimits.model_validate(read_json(folder / LIMITS)).caps.get("cost_usd")
    return Purse(folder / SPENDING, None) if cap is None else Purse(folder / SPENDING, cap.value, cap.limit)


class EndpointTeacher:
    """Answers conversations with a model at an endpoint.

    Args:
        endpoint: Address and model.
        key: The key if the endpoint needs one.
        temperature: Sampling temperature.
        max_new_tokens: Longest answer in tokens.
        purse: Pays the calls.
    """

    def __init__(
        self, endpoint: Endpoint, key: str | None, temperature: float, max_new_tokens: int, purse: Purse
    ) -> None:
        self._client = EndpointClient(endpoint, key, purse, tries=4)
        self._sampling = Sampling(temperature, 1.0, max_new_tokens)

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """Return the model's answer.

        Raises:
            TryAgain: This question was not answered, or the answer was cut off.
            toprope.training.rollouts.endpoint_client.ModelFailed: No question can be answered.
        """
        try:
            [answer] = await self._client.chat(messages, self._sampling)
        except Unanswered as error:
            raise TryAgain(str(error)) from None
        if answer.truncated:
            raise TryAgain(f"The answer was cut off (max_new_tokens is {self._sampling.max_new_tokens}).")
        return answer.text

    async def close(self) -> None:
        await self._client.close()
