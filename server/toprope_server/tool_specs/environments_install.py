"""The tool of the surface that is offered only where the owner lets agents install (`installs: allow`)."""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic import Field
from toprope_tools.answers import installing_answers

from toprope_server.tool_specs.base import Part, client_of

__all__ = ["Installing"]


class Installing(Part):
    """See the module."""

    async def add_environment(
        self,
        ctx: Context,
        what: Annotated[str, Field(description="An ecosystem that needs install, or a requirement: 'textarena'.")],
    ) -> Annotated[CallToolResult, installing_answers.Installed]:
        """Installs an ecosystem or package of environments into an interpreter of its own.

        For entries of list_environments that need it. May take minutes: call again with the same argument to go on
        waiting. A failure leaves nothing behind and names the requirement. Next: list_environments.
        """
        return await self._do(
            "planning.installation", "add_environment", what=what, progress=ctx.report_progress, client=client_of(ctx)
        )
