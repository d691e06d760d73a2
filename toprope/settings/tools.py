"""Tools that the owner lends to policies, as declared in settings.yaml. Nobody else can declare one.

tools:
  web_search: {corpus: notes/}                      # or {provider: brave}, with its key among the variables
  weather:    {command: [uvx, weather-server], tool: get_weather, usd: 0.001}
  wiki:       {url: "http://127.0.0.1:9000/mcp", tool: search}
  convert:    {python: "tools/units.py:convert"}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, model_validator

TOOL_VARIABLE = "TOPROPE_TOOL_SECRET_"
"""Prefix of the variables that carry those of lent tools to the process that starts workers, and to no other."""

_KINDS = ("corpus", "provider", "python", "command", "url")


class LentTool(BaseModel, extra="forbid"):
    """One tool. Exactly one of corpus, provider, python, command and url is its kind."""

    corpus: str | None = None
    """Folder or file to search offline."""
    provider: str | None = Field(None, pattern="^(brave|tavily)$")
    """Search of the web; its key is a variable of `environment`: BRAVE_API_KEY, TAVILY_API_KEY."""
    python: str | None = Field(None, pattern=r"^.+\.py:[A-Za-z_]\w*$")
    """A function in a file: `tools/units.py:convert`."""
    command: list[str] | None = Field(None, min_length=1)
    """Command that starts an MCP server over stdio."""
    url: str | None = None
    """An MCP server over HTTP; together with `provider`, another address of that provider."""
    tool: str | None = None
    """A tool of the MCP server; by default the one with the same name."""
    variables: dict[str, str] = {}
    """Environment variables for the MCP server that `command` starts."""
    description: str | None = None
    """Shown to the policy instead of the tool's own."""
    usd: float | None = Field(None, ge=0)
    """Cost of a call. Costs that are not declared are measured, or estimated and marked as estimates."""
    seconds: float | None = Field(None, ge=0)
    joules: float | None = Field(None, ge=0)
    watts: float | None = Field(None, ge=0)
    timeout_s: float = Field(30.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _require_one_kind(self) -> LentTool:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if self.provider is not None and "url" in kinds:
            kinds.remove("url")
        if len(kinds) != 1:
            raise ValueError(f"name one of {', '.join(_KINDS)}")
        return self

    def declaration(self, folder: Path) -> dict[str, Any]:
        """The tool as specifications hold it: with the names of its variables, without their values.

        Args:
            folder: The owner's configuration; relative paths start there.
        """
        sent = self.model_dump(exclude_none=True)
        sent["variables"] = dict.fromkeys(self.variables)
        if self.corpus is not None:
            sent["corpus"] = str(folder / Path(self.corpus).expanduser())
        if self.python is not None:
            sent["python"] = str(folder / Path(self.python).expanduser())
        return sent


def tool_variable(tool: str, name: str) -> str:
    """The variable that carries a variable of a lent tool."""
    return f"{TOOL_VARIABLE}{tool}:{name}"


def with_values(target: str, values: Mapping[str, str], used: Collection[str] = ()) -> str:
    """A target of the environment `orchestrator` with the values of the used tools' variables.

    Args:
        values: Values by `tool_variable`.
        used: Names of tools; the variables of all others get null, as do those without a value.
    """
    if '"variables"' not in target:
        return target
    content = json.loads(target)
    for tool, declared in content.get("tools", {}).items():
        for name in declared.get("variables") or ():
            declared["variables"][name] = values.get(tool_variable(tool, name)) if tool in used else None
    return json.dumps(content, sort_keys=True)
