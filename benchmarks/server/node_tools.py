"""Where MCP Inspector and the conformance suite lie: `make tools-node` puts them into a cache outside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["MISSING", "command", "folder", "variables"]

MISSING = "'make tools-node' installs MCP Inspector and the conformance suite (needs npm and a network)."


def folder() -> Path:
    """The cache: NODE_TOOLS, else ~/.cache/toprope/inspector."""
    named = os.environ.get("NODE_TOOLS")
    return Path(named) if named else Path.home() / ".cache" / "toprope" / "inspector"


def command(name: str) -> list[str] | None:
    """The argv of a tool, with the Node that was installed beside it; None where it is not installed."""
    programs = folder() / "node_modules" / ".bin"
    node, tool = programs / "node", programs / name
    return [str(node), str(tool.resolve())] if node.exists() and tool.exists() else None


def variables() -> dict[str, str]:
    """This process's environment with that Node first on PATH: the tools start others by name."""
    return {**os.environ, "PATH": f"{folder() / 'node_modules' / '.bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
