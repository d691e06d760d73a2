"""The MCP clients that Toprope can enter itself into: where their files are, and how an entry looks.

Places and forms are those that the clients' own documentation gives (2026-11).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue
from toprope_server.cli.clients.formats import JSON, JSONC, TOML, YAML_FORMAT, Format

OTHER = "other"
"""Stands for a client that is not known: `toprope install other` prints the usual form."""


@dataclass(frozen=True)
class Server:
    """A server as a client starts it."""

    command: str
    arguments: list[str]
    variables: dict[str, str]

    def entry(self, **more: Any) -> dict[str, Any]:
        """The usual form of an entry, with more fields first."""
        form = {**more, "command": self.command, "args": self.arguments}
        return form | {"env": self.variables} if self.variables else form


@dataclass(frozen=True)
class Places:
    """Folders of a user on one platform."""

    platform: str
    environ: Mapping[str, str]

    @property
    def home(self) -> Path:
        return Path(self.environ.get("HOME") or Path.home())

    @property
    def applications(self) -> Path:
        """Where applications keep their settings."""
        if self.platform == "darwin":
            return self.home / "Library" / "Application Support"
        return self.configuration

    @property
    def configuration(self) -> Path:
        """~/.config, also on macOS."""
        return Path(self.environ.get("XDG_CONFIG_HOME") or self.home / ".config")

    def named(self, variable: str, default: Path) -> Path:
        """The path in a variable, else the default."""
        folder = self.environ.get(variable)
        return Path(folder) if folder else default


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        title: For people.
        file: Its file, among the places of a user.
        section: The key that holds its servers.
        after: The next step for the person.
        format: Of its file.
        entry: Our entry.
        project: Its file in a project's folder; empty if it has none.
        http: Our entry for `serve --http` at a URL, with the token in a variable, if the client can read it there.
        program: The program on PATH that shows that it is installed; otherwise the folder of its file does.
    """

    title: str
    file: Callable[[Places], Path]
    section: str
    after: str
    format: Format = JSON
    entry: Callable[[Server], dict[str, Any]] = Server.entry
    project: str = ""
    http: Callable[[str, str], dict[str, Any]] | None = None
    program: str = ""


def _stdio(server: Server) -> dict[str, Any]:
    return server.entry(type="stdio")


def _goose(server: Server) -> dict[str, Any]:
    return {
        "enabled": True,
        "type": "stdio",
        "name": "toprope",
        "description": "Reinforcement learning of language models",
        "cmd": server.command,
        "args": server.arguments,
        "envs": server.variables,
        "timeout": 300,
    }


KNOWN: dict[str, Client] = {
    "claude-desktop": Client(
        "Claude Desktop",
        lambda at: at.applications / "Claude" / "claude_desktop_config.json",
        "mcpServers",
        "Restart Claude Desktop.",
    ),
    "claude-code": Client(
        "Claude Code",
        lambda at: at.named("CLAUDE_CONFIG_DIR", at.home) / ".claude.json",
        "mcpServers",
        "Restart Claude Code; /mcp shows the server.",
        entry=_stdio,
        project=".mcp.json",
        http=lambda url, token: {"type": "http", "url": url, "headers": {"Authorization": f"Bearer ${{{token}}}"}},
        program="claude",
    ),
    "cursor": Client(
        "Cursor",
        lambda at: at.home / ".cursor" / "mcp.json",
        "mcpServers",
        "Restart Cursor; Settings, Tools & MCP shows the server.",
        entry=_stdio,
        project=".cursor/mcp.json",
        http=lambda url, token: {"url": url, "headers": {"Authorization": f"Bearer ${{env:{token}}}"}},
    ),
    "vscode": Client(
        "VS Code",
        lambda at: at.applications / "Code" / "User" / "mcp.json",
        "servers",
        "Start the server with the command 'MCP: List Servers'.",
        format=JSONC,
        entry=_stdio,
        project=".vscode/mcp.json",
    ),
    "codex": Client(
        "Codex",
        lambda at: at.named("CODEX_HOME", at.home / ".codex") / "config.toml",
        "mcp_servers",
        "Restart Codex; /mcp shows the server.",
        format=TOML,
        project=".codex/config.toml",
        http=lambda url, token: {"url": url, "bearer_token_env_var": token},
    ),
    "gemini": Client(
        "Gemini CLI",
        lambda at: at.home / ".gemini" / "settings.json",
        "mcpServers",
        "Restart Gemini CLI; /mcp shows the server.",
        format=JSONC,
        project=".gemini/settings.json",
    ),
    "goose": Client(
        "Goose",
        lambda at: at.configuration / "goose" / "config.yaml",
        "extensions",
        "Start a new session of Goose.",
        format=YAML_FORMAT,
        entry=_goose,
    ),
    "windsurf": Client(
        "Windsurf",
        lambda at: at.home / ".codeium" / "windsurf" / "mcp_config.json",
        "mcpServers",
        "Refresh the servers in Windsurf's settings.",
    ),
    "zed": Client(
        "Zed",
        lambda at: at.configuration / "zed" / "settings.json",
        "context_servers",
        "Zed starts the server; its agent settings show it.",
        format=JSONC,
        project=".zed/settings.json",
    ),
    "inspector": Client(
        "MCP Inspector",
        lambda at: at.named("MCP_CATALOG_PATH", at.home / ".mcp-inspector" / "mcp.json"),
        "mcpServers",
        "Run: npx @modelcontextprotocol/inspector --catalog {path} --server toprope",
        program="npx",
    ),
}


def find_client(name: str) -> Client:
    """The client of that name.

    Raises:
        InvalidValue: It is not known; the message names the nearest.
    """
    if name in KNOWN:
        return KNOWN[name]
    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.4)
    raise InvalidValue(
        f"There is no client {name!r}.",
        hint=(f"Did you mean {near[0]}?" if near else f"The clients are: {', '.join(KNOWN)}.")
        + f" 'toprope install {OTHER}' prints what other clients need.",
    )
