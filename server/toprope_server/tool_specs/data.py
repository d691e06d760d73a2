"""Tools of the surface: rollouts as files, and named data sets.

What a model knows of these tools is what stands here. The work is done in `tools`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mcp.types import CallToolResult
from pydantic import BeforeValidator, Field
from toprope_tools.answers import data_answers as answers

from toprope_server.tool_specs.base import Names, Part, listed

__all__ = ["Data"]

_Sources = Annotated[list[str], BeforeValidator(listed)]
_Where = Annotated[
    dict[str, Any] | None,
    Field(description="Filters: success, min_reward, max_reward, task, environment, min_version, per_task (best n)."),
]


class Data(Part):
    """See the module."""

    async def export_trajectories(
        self,
        sources: Annotated[_Sources, Field(description="Ids of runs or seed groups, or data sets (best@v1).")],
        format: Annotated[
            Literal["jsonl", "json", "csv", "parquet", "datasets"],
            Field(description="datasets: a folder for load_from_disk."),
        ] = "jsonl",
        where: _Where = None,
    ) -> Annotated[CallToolResult, answers.Exported]:
        """Writes rollouts as state, action, reward, metadata into a file below the home, and answers path and counts.

        Held-out tasks are sealed. If it answers running, repeat the call.
        """
        return await self._do("data", "export_trajectories", sources=sources, format=format, where=where)

    async def build_dataset(
        self,
        name: Annotated[str, Field(description="Of the data set; each build is its next version.")],
        sources: Annotated[Names, Field(description="As in export_trajectories, and name@inbox.")] = None,
        where: _Where = None,
        recipe: Annotated[
            dict[str, Any] | None,
            Field(
                description="target_size, min_score, dedup_threshold, split {train: 0.9}, steps [{templates, "
                "variables} | {teacher} | {environment} | {noise} | {score} | {filter}]."
            ),
        ] = None,
    ) -> Annotated[CallToolResult, answers.BuiltDataset]:
        """Makes a versioned data set of rollouts and generated items. sft.dataset trains on it. Repeat if running."""
        return await self._do("data", "build_dataset", name=name, sources=sources, where=where, recipe=recipe)
