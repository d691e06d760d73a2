"""MCP Inspector's command line and the official conformance suite against the real server, over stdio and HTTP."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from toprope_server.http.token import TokenFile

from benchmarks.server import conformance

INSPECTOR = conformance.node_tool("mcp-inspector")
SERVER = [sys.executable, "-P", "-m", "toprope_server.cli", "serve"]
pytestmark = pytest.mark.engines
needs_inspector = pytest.mark.skipif(INSPECTOR is None, reason=conformance.NODE_TOOLS_MISSING)
needs_suite = pytest.mark.skipif(conformance.node_tool("conformance") is None, reason=conformance.NODE_TOOLS_MISSING)


def places(home):
    return {"TOPROPE_HOME": str(home / "home"), "TOPROPE_CONFIG": str(home / "config")}


@contextmanager
def over_http(home):
    process = subprocess.Popen(
        [*SERVER, "--http", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | places(home),
    )
    try:
        url = re.search(r"http://\S+/mcp", process.stdout.readline())[0]
        token = TokenFile(home / "config").read()
        yield {"type": "streamable-http", "url": url, "headers": {"Authorization": f"Bearer {token}"}}
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


@pytest.fixture(scope="module", params=["stdio", "http"])
def inspect(request, tmp_path_factory):
    """Calls the Inspector with a configuration file, so that the token is in no argument."""
    home = tmp_path_factory.mktemp(request.param)
    config = home / "inspector.json"

    def call(*arguments):
        done = subprocess.run(
            [*INSPECTOR, "--cli", "--config", str(config), "--server", "toprope", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=conformance.node_variables() | {"HOME": str(home)},
        )
        return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr

    if request.param == "stdio":
        entry = {"type": "stdio", "command": SERVER[0], "args": SERVER[1:], "env": places(home)}
        config.write_text(json.dumps({"mcpServers": {"toprope": entry}}))
        yield call
    else:
        with over_http(home) as entry:
            config.write_text(json.dumps({"mcpServers": {"toprope": entry}}))
            yield call


@needs_inspector
def test_inspector_lists_tools_with_valid_schemas(inspect):
    code, listed, said = inspect("--method", "tools/list", "--strict")
    assert code == 0, said
    assert [tool["name"] for tool in listed["tools"]][:2] == ["list_environments", "describe_environment"]


@needs_inspector
@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_inspector_makes_and_edits_draft(inspect, era):
    call = ("--protocol-era", era, "--method", "tools/call", "--tool-name")
    code, made, said = inspect(*call, "select_environment", "--tool-args-json", '{"name": "sort_letters"}')
    assert code == 0, said
    draft = made["structuredContent"]["draft_id"]
    arguments = json.dumps({"draft_id": draft, "changes": {"budget.steps": "30"}})
    code, edited, said = inspect(*call, "edit_config", "--tool-args-json", arguments)
    assert code == 0, said
    assert edited["structuredContent"]["changed"][0]["after"] == 30


@needs_inspector
def test_inspector_shows_tool_failure_with_reason(inspect):
    code, answer, _ = inspect(
        "--method", "tools/call", "--tool-name", "stop_training", "--tool-args-json", '{"run_id": "no-run"}'
    )
    assert code == 5
    assert answer["isError"]
    assert "no run 'no-run'" in answer["content"][0]["text"]


@needs_suite
def test_the_server_conforms_to_the_protocol():
    rows, others = conformance.measure()
    assert others
    assert len(rows) == sum(map(len, conformance.SCENARIOS.values())) == 20
    assert [row for row in rows if row[3]] == []
