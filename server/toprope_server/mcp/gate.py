"""Each request to the server passes here: its principal's role is held, and tool calls go to the audit trail.

Over standard input there is one principal, the owner's client; over HTTP each token names its own. The role of the
server holds in both cases, because it decides which tools exist at all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from mcp.server.apps import client_supports_apps
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    TextContent,
)

from toprope.errors import TopropeError
from toprope.records.audit import AuditTrail, shorten
from toprope_server.mcp.page_app import is_of_a_page
from toprope_server.mcp.roles import Role
from toprope_server.tool_specs.base import PRINCIPAL

if TYPE_CHECKING:
    from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
    from toprope_tools.workshop import Workshop

    from toprope_server.http.principals import Principal
    from toprope_server.tool_specs.base import ToolSpec

logger = logging.getLogger("toprope.server")

_CHANGED = ("run_id", "run_ids", "group_id", "draft_id", "revision", "id", "name", "version", "path", "state")
"""Fields of an answer that name what a call made or changed."""
NEEDED_TOOLS = {
    "": "check_status",
    "config": "get_config",
    "metrics": "get_results",
    "logs": "read_logs",
    "plot.png": "get_results",
    "datasets": "browse_rollouts",
}
"""Part of a resource -> the tool that tells the same, and that the role must have."""
_LISTS = (ListToolsResult, ListResourcesResult, ListResourceTemplatesResult)


class Gate:
    """Middleware of the SDK's server.

    Args:
        specs: The tools of the server, by name.
        role: The role of the server.
        workshop: Returns the workshop, for the home and the owner's secrets.
    """

    def __init__(self, specs: Mapping[str, ToolSpec], role: Role, workshop: Callable[[], Workshop]) -> None:
        self._specs, self._role, self._workshop = specs, role, workshop
        self._secrets: tuple[float, list[str]] = (-1.0, [])

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        principal = _principal_of(ctx)
        role = self._role if principal is None else principal.role.within(self._role)
        params = ctx.params or {}
        if ctx.method == "tools/call":
            return await self._call(ctx, call_next, params, principal, role)
        if ctx.method in ("resources/read", "resources/subscribe"):
            self.require_readable(str(params.get("uri", "")), role)
        elif ctx.method == "subscriptions/listen":
            notifications = params.get("notifications")
            uris = notifications.get("resourceSubscriptions") if isinstance(notifications, Mapping) else None
            for uri in uris if isinstance(uris, list) else []:
                self.require_readable(str(uri), role)
        return self._for_role(await call_next(ctx), role, pages=client_supports_apps(ctx))

    def require_readable(self, uri: str, role: Role) -> None:
        """Refuse a resource whose tool the role lacks.

        Raises:
            MCPError: The role does not allow it.
        """
        tool = needed_tool(uri)
        if not self._offers(tool, role):
            raise MCPError(
                INVALID_PARAMS,
                f"{uri[:200]!r} needs the tool {tool}, which is not offered here: the owner decides that.",
                data={"uri": uri[:200]},
            )

    def _for_role(self, result: HandlerResult, role: Role, *, pages: bool) -> HandlerResult:
        """Leave out the tools and resources that the role lacks, and those of the page if the client shows none."""
        listing = (
            result.model_dump(by_alias=True, mode="json", exclude_none=True) if isinstance(result, _LISTS) else result
        )
        if not isinstance(listing, Mapping):
            return result
        filtered = dict(listing)
        for field, tool_of in _LISTED.items():
            if isinstance(filtered.get(field), list):
                filtered[field] = [
                    entry
                    for entry in filtered[field]
                    if self._offers(tool_of(entry), role) and (pages or not is_of_a_page(entry))
                ]
        return filtered

    def _offers(self, tool: str, role: Role) -> bool:
        return not tool or (tool in self._specs and role.allows(self._specs[tool]))

    async def _call(
        self,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
        params: Mapping[str, Any],
        principal: Principal | None,
        role: Role,
    ) -> HandlerResult:
        name, arguments = str(params.get("name", "")), params.get("arguments") or {}
        spec = self._specs.get(name)
        outcome, changed, first_line = "failed", dict[str, Any](), ""
        began, began_at = time.monotonic(), time.time()
        try:
            if principal is not None and spec is not None and not role.allows(spec):
                outcome = "refused"
                specs = [tool_spec for tool_spec in self._specs.values() if not tool_spec.for_pages]
                allowed = ", ".join(tool_spec.name for tool_spec in specs if role.allows(tool_spec))
                text = f"{name} is not offered to this token: the owner gave it fewer tools. Nothing was changed."
                return CallToolResult(
                    content=[TextContent(type="text", text=f"{text}\nThe tools are: {allowed}.")], is_error=True
                )
            result = await call_next(ctx)
            outcome, changed = _outcome(result, spec)
            first_line = _first_line(result)
            return result
        except anyio.get_cancelled_exc_class():
            outcome = "cancelled"
            raise
        finally:
            entry = {
                "by": {**_client(ctx), **({"token": principal.name} if principal else {})},
                "did": name[:80],
                "outcome": outcome,
                **({"changed": changed} if changed else {}),
                "ms": round(1000 * (time.monotonic() - began)),
                **({"said": first_line} if first_line else {}),
            }
            if spec is None or not spec.polled or outcome == "failed":
                with anyio.CancelScope(shield=True):  # a cancelled call may have started something
                    await to_thread.run_sync(self._record, entry, arguments, began_at)

    def _record(self, entry: dict[str, Any], arguments: Any, began_at: float) -> None:
        try:
            home = self._workshop().home
            if entry["outcome"] == "cancelled" and (run_ids := self._started(arguments, began_at)):
                entry["changed"] = {"run_ids": run_ids}
            if entry["outcome"] != "done" and not home.path.exists():
                return  # a refused call makes nothing, not even a home
            secrets = self._known_secrets()
            if "said" in entry:
                entry["said"] = shorten(entry["said"], secrets)
            AuditTrail(home.path).append({**entry, "arguments": shorten(arguments, secrets)})
        except Exception as error:  # the caller must still get the answer
            logger.warning("The audit trail could not be written: %s", error)

    def _started(self, arguments: Any, since: float) -> list[str]:
        """The runs of a call's draft that were started since, for a call whose answer is lost."""
        draft_id = arguments.get("draft_id") if isinstance(arguments, Mapping) else None
        if not isinstance(draft_id, str):
            return []
        with suppress(TopropeError):
            return [start.run_id for start in self._workshop().index.starts(draft_id) if start.at >= since]
        return []

    def _known_secrets(self) -> list[str]:
        from toprope_tools.runs.logs import owners_secrets

        from toprope.text_format import secret_values

        workshop = self._workshop()
        try:
            at = os.stat(workshop.home.settings_file).st_mtime
        except OSError:
            at = 0.0
        if at != self._secrets[0]:
            try:
                secrets = owners_secrets(workshop)
            except TopropeError:  # the last ones that could be read may still appear
                secrets = [*self._secrets[1], *secret_values(os.environ)]
            self._secrets = (at, secrets)
        return self._secrets[1]


def needed_tool(uri: str) -> str:
    """The tool that tells the same as a resource; empty for the documentation, which every role may read."""
    if uri.startswith("ui://"):
        return "show"
    words = uri.removeprefix("toprope://").split("/")
    if words[0] == "docs":
        return ""
    if words[0] == "datasets":
        return NEEDED_TOOLS["datasets"]
    if len(words) < 2:
        return "list_runs"
    return NEEDED_TOOLS.get(words[2] if len(words) > 2 else "", "check_status")


_LISTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tools": lambda tool: str(tool["name"]),
    "resources": lambda resource: needed_tool(str(resource["uri"])),
    "resourceTemplates": lambda template: needed_tool(str(template["uriTemplate"])),
}
"""Fields of lists -> the tool that an entry needs."""


def _principal_of(ctx: ServerRequestContext[Any, Any]) -> Principal | None:
    scope = getattr(ctx.request, "scope", None)
    principal: Principal | None = scope.get("state", {}).get(PRINCIPAL) if scope is not None else None
    return principal


def _client(ctx: ServerRequestContext[Any, Any]) -> dict[str, str]:
    params = ctx.session.client_params
    return {"client": params.client_info.name[:80]} if params is not None else {}


def _first_line(result: HandlerResult) -> str:
    """The beginning of an answer's text, for the diary of calls."""
    parts = result.get("content") if isinstance(result, Mapping) else getattr(result, "content", None)
    for part in parts or ():
        text = part.get("text") if isinstance(part, Mapping) else getattr(part, "text", None)
        if isinstance(text, str):
            return text.partition("\n")[0]
    return ""


def _outcome(result: HandlerResult, spec: ToolSpec | None) -> tuple[str, dict[str, Any]]:
    """`done`, `refused` or `asked`, and the names of what was changed."""
    if isinstance(result, Mapping):
        is_error, structure = bool(result.get("isError")), result.get("structuredContent")
    elif isinstance(result, CallToolResult):
        is_error, structure = bool(result.is_error), result.structured_content
    else:
        return "asked", {}  # a person is asked first
    if is_error:
        return "refused", {}
    if spec is None or spec.reads_only or not isinstance(structure, Mapping):
        return "done", {}
    names = {name: structure[name] for name in _CHANGED if structure.get(name) not in (None, "", [])}
    return "done", shorten(names)
