"""The owner's models that take part in a run's rollouts: judges, and the opponent in games for several players."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from toprope.records.purse import Purse
from toprope.records.run.specification import ModelUnderTest
from toprope.training.judges.judging import FILE, Verdicts
from toprope.training.rollouts.endpoint_client import EndpointClient


@dataclass(frozen=True)
class Helpers:
    """Clients of the models by name, and the verdicts that were paid for. Close it in the event loop that opened it."""

    verdicts: Verdicts
    clients: Mapping[str, EndpointClient] = field(default_factory=dict)

    @classmethod
    def open(
        cls, models: Mapping[str, ModelUnderTest], keys: Mapping[str, str], purse: Callable[[], Purse], folder: Path
    ) -> Self:
        """Create a client for each model; all pay from one account.

        Args:
            models: Of the run.
            keys: API keys by the names that endpoints have for them.
            purse: Opens the run's account.
            folder: Of the run.
        """
        clients = {
            name: EndpointClient(model.endpoint, keys.get(model.endpoint.key or ""), purse())
            for name, model in models.items()
            if model.endpoint is not None
        }
        return cls(Verdicts(folder / FILE), clients)

    async def close(self) -> None:
        """Close all clients."""
        await asyncio.gather(*(client.close() for client in self.clients.values()))
