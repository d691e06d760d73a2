"""The extension for Claude Desktop and the registry's entry: made, validated, packed, and true to the server."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jsonschema
import pytest
from toprope_server.mcp.tool_registry import ALL_TOOLS

import toprope
from benchmarks.server.conformance import NODE_TOOLS_MISSING, node_tool, node_variables

ROOT = Path(__file__).resolve().parents[2]
MCPB = node_tool("mcpb")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundles")
    command = [sys.executable, "-P", str(ROOT / "bundles" / "make_bundles.py"), str(output), "--owner", "somebody"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return output


def test_manifest_names_every_tool_and_installs_no_torch(made: Path) -> None:
    manifest = json.loads((made / "mcpb" / "manifest.json").read_text())
    assert [tool["name"] for tool in manifest["tools"]] == [tool.name for tool in ALL_TOOLS]
    assert all(tool["description"].endswith(".") and "\n" not in tool["description"] for tool in manifest["tools"])
    assert manifest["server"]["type"] == "uv" and (made / "mcpb" / manifest["server"]["entry_point"]).is_file()
    wanted = tomllib.loads((made / "mcpb" / "pyproject.toml").read_text())["project"]["dependencies"]
    assert wanted == [f"toprope=={toprope.__version__}"]  # without the extra that brings torch
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [one for one in own if one.startswith(("torch", "transformers", "trl"))]


def test_entry_point_starts_the_server(made: Path, tmp_path: Path) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}},
    }
    variables = {**os.environ, "TOPROPE_HOME": str(tmp_path / "home"), "TOPROPE_CONFIG": str(tmp_path / "config")}
    done = subprocess.run(
        [sys.executable, "-P", str(made / "mcpb" / "server" / "main.py")],
        input=json.dumps(hello) + "\n",
        capture_output=True,
        text=True,
        env=variables,
        timeout=60,
    )
    assert json.loads(done.stdout.splitlines()[0])["result"]["serverInfo"]["name"] == "toprope"


def test_extension_has_the_home_of_the_command_line_unless_one_is_chosen(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset value stays a placeholder in the variables that the client passes on."""
    assert "default" not in json.loads((made / "mcpb" / "manifest.json").read_text())["user_config"]["home"]
    monkeypatch.setattr("toprope_server.mcp.app.serve_stdio", lambda: None)
    for given, kept in (("${user_config.home}", None), ("/chosen", "/chosen")):
        monkeypatch.setenv("TOPROPE_HOME", given)
        runpy.run_path(str(made / "mcpb" / "server" / "main.py"))
        assert os.environ.get("TOPROPE_HOME") == kept


def test_registry_entry_keeps_the_rules_of_its_schema(made: Path) -> None:
    """The schema 2025-12-11 for the fields that are used, and all of it if TOPROPE_SERVER_SCHEMA names its file."""
    entry = json.loads((made / "server.json").read_text())
    if schema := os.environ.get("TOPROPE_SERVER_SCHEMA"):
        jsonschema.Draft7Validator(json.loads(Path(schema).read_text())).validate(entry)
    assert re.fullmatch(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+", entry["name"]) and 3 <= len(entry["name"]) <= 200
    assert 1 <= len(entry["description"]) <= 100 and 1 <= len(entry["title"]) <= 100
    assert entry["$schema"].endswith("/schemas/2025-12-11/server.schema.json")
    [package] = entry["packages"]
    assert package["version"] == entry["version"] == toprope.__version__ != "latest"
    assert {"registryType", "identifier", "transport"} <= package.keys() and package["transport"] == {"type": "stdio"}
    assert all(argument["type"] == "positional" and argument["value"] for argument in package["packageArguments"])


@pytest.mark.engines
@pytest.mark.skipif(MCPB is None, reason=NODE_TOOLS_MISSING)
def test_own_tool_of_extensions_validates_and_packs(made: Path, tmp_path: Path) -> None:
    assert MCPB is not None
    variables = node_variables() | {"HOME": str(tmp_path)}
    for arguments in (["validate", "manifest.json"], ["pack", ".", str(tmp_path / "toprope.mcpb")]):
        done = subprocess.run(
            [*MCPB, *arguments], cwd=made / "mcpb", capture_output=True, text=True, timeout=60, env=variables
        )
        assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / "toprope.mcpb") as packed:
        assert {"manifest.json", "pyproject.toml", "server/main.py"} <= set(packed.namelist())
    assert (tmp_path / "toprope.mcpb").stat().st_size < 20_000
