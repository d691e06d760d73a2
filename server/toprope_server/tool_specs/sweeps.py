"""Tools of the surface: searching over settings.

What a model knows of these tools is what stands here. The work is done in `tools`.
"""

from __future__ import annotations

from typing import Annotated, Any

from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import base as answers

from toprope_server.tool_specs.base import Part

__all__ = ["Sweeping"]


class Sweeping(Part):
    """See the module."""

    async def start_sweep(
        self,
        draft_id: Annotated[str, Field(description="The draft's id, as given.")],
        space: Annotated[
            dict[str, Any],
            Field(description='By field: {"min": 1e-5, "max": 0.01, "log": true} or {"choices": [4, 8]}.'),
        ],
        strategy: Annotated[
            str, Field(description="evolution, pbt, halving, random, optuna or the owner's file:Class.")
        ] = "evolution",
        population: Annotated[int, Field(description="Candidates of an epoch.")] = 8,
        epochs: Annotated[int, Field(description="Epochs of the search.")] = 3,
        options: Annotated[
            dict[str, Any],
            Field(
                description="steps (of a run), evaluate (train, test), selection_ratio, mutation_rate; key, preview, "
                "confirm as of start_training."
            ),
        ] = {},  # noqa: B006 - never changed
    ) -> Annotated[CallToolResult, answers.Started]:
        """Searches settings: runs measure candidates on validation tasks, the best once on held-out ones.

        Next: check_status, get_results, fork_config for the best.
        """
        return await self._do(
            "runs.sweeps",
            "start_sweep",
            draft_id=draft_id,
            space=space,
            strategy=strategy,
            population=population,
            epochs=epochs,
            options=options,
        )
