"""Write what stores of MCP servers take: an extension for Claude Desktop (.mcpb) and a server.json for registries.

    python -P bundles/make_bundles.py OUTPUT [--owner NAME]

OUTPUT/mcpb gets the folder that `mcpb pack` packs, OUTPUT/server.json the entry of a registry. The extension is of the
kind uv: it names the package and carries none. It installs the server without PyTorch; the first training names the
command that adds it, which the owner runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from toprope_server.mcp.tool_registry import ALL_TOOLS

import toprope

SERVER_SCHEMA = "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json"
_LONGEST_DESCRIPTION = 100
DESCRIPTION = "Reinforcement learning of language models, planned by an agent, held by its owner."
_MAIN = '''"""Start the server that the package brings."""

import os

from toprope_server.mcp.app import serve_stdio

if "${" in os.environ.get("TOPROPE_HOME", ""):  # nobody chose a folder
    del os.environ["TOPROPE_HOME"]
serve_stdio()
'''


def manifest() -> dict[str, Any]:
    """Return the manifest of the extension, version 0.4 of its form."""
    return {
        "manifest_version": "0.4",
        "name": "toprope",
        "display_name": "Toprope",
        "version": toprope.__version__,
        "description": DESCRIPTION,
        "author": {"name": "Toprope"},
        "license": "Apache-2.0",
        "keywords": ["reinforcement-learning", "language-models", "training"],
        "server": {
            "type": "uv",
            "entry_point": "server/main.py",
            "mcp_config": {
                "command": "uv",
                "args": ["run", "--directory", "${__dirname}", "server/main.py"],
                "env": {"TOPROPE_HOME": "${user_config.home}"},
            },
        },
        "tools": [
            {"name": tool.name, "description": _first_sentence(tool.function.__doc__ or "")} for tool in ALL_TOOLS
        ],
        "tools_generated": True,
        "user_config": {
            "home": {
                "type": "directory",
                "title": "Home",
                "description": "The folder for runs and drafts; without one, that of `toprope` on the command line.",
                "required": False,
            }
        },
        "compatibility": {"platforms": ["linux", "darwin"], "runtimes": {"python": ">=3.11"}},
    }


def project() -> str:
    """Return the pyproject.toml of the extension: the server alone, at this version."""
    return (
        f'[project]\nname = "toprope-extension"\nversion = "{toprope.__version__}"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["toprope=={toprope.__version__}"]\n'
    )


def server_json(owner: str) -> dict[str, Any]:
    """Return the entry of a registry.

    Args:
        owner: The account that publishes it; the package's README must name it, too.
    """
    return {
        "$schema": SERVER_SCHEMA,
        "name": f"io.github.{owner}/toprope",
        "title": "Toprope",
        "description": DESCRIPTION[:_LONGEST_DESCRIPTION],
        "version": toprope.__version__,
        "packages": [
            {
                "registryType": "pypi",
                "identifier": "toprope",
                "version": toprope.__version__,
                "runtimeHint": "uvx",
                "transport": {"type": "stdio"},
                "packageArguments": [{"type": "positional", "value": "serve"}],
            }
        ],
    }


def write_bundles(output: Path, owner: str) -> None:
    """Write both below a folder."""
    folder = output / "mcpb"
    (folder / "server").mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest(), indent=2) + "\n")
    (folder / "pyproject.toml").write_text(project())
    (folder / "server" / "main.py").write_text(_MAIN)
    (output / "server.json").write_text(json.dumps(server_json(owner), indent=2) + "\n")


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def main() -> None:
    """Write the bundles that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write toprope's .mcpb folder and server.json.")
    parser.add_argument("output", type=Path, help="a folder")
    parser.add_argument("--owner", default="OWNER", help="the account at GitHub that publishes")
    given = parser.parse_args()
    write_bundles(given.output, given.owner)
    print(f"Wrote {given.output}/server.json and {given.output}/mcpb; pack it with: npx @anthropic-ai/mcpb pack")


if __name__ == "__main__":
    main()
