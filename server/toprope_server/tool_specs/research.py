"""Tools of the surface: what is learned from runs: comparisons.

What a model knows of these tools is what stands here. The work is done in `tools`.
"""

from __future__ import annotations

from typing import Annotated

from mcp.types import CallToolResult
from pydantic import BeforeValidator, Field
from toprope_tools.answers import research_answers as answers

from toprope_server.tool_specs.base import Part, listed

__all__ = ["Research"]

_Sides = Annotated[list[str], BeforeValidator(listed)]


class Research(Part):
    """See the module."""

    async def compare_runs(
        self,
        a: Annotated[_Sides, Field(description="The baseline: ids of runs, or one id of a seed group.")],
        b: Annotated[_Sides, Field(description="What is held against it, likewise.")],
    ) -> Annotated[CallToolResult, answers.CompareAnswer]:
        """Says whether b is better than a: means with 95 % intervals, a paired test on the same tasks, effect, cost.

        Use it instead of comparing two accuracies yourself. Below the noise floor the answer is "no difference shown";
        the floor is the spread between seeds where a side has several (start_training with seeds), else that of tasks
        and answers. Training runs are compared by their held-out tasks after training, tests by their validation tasks.
        Runs that differ in environment, knobs, tasks or evaluator are refused with what differs. Changes nothing.
        """
        return await self._do("results.compare", "compare_runs", a=a, b=b)
