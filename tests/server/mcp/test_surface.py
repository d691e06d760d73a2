"""The surface for clients: the list of tools, in both eras of the protocol, and what it may cost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp.client import Client
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role
from toprope_server.mcp.tool_registry import INSTRUCTIONS

from toprope.settings.schema import SECTIONS

SNAPSHOT = Path(__file__).parents[2] / "snapshots" / "tools.json"
UPDATE = "TOPROPE_UPDATE_SNAPSHOTS"
ORDER = [
    "list_environments", "describe_environment", "check_environment",
    "select_environment", "get_config", "edit_config", "undo_edit",
    "diff_config", "fork_config", "test_inference", "start_training", "start_sweep",
    "stop_training", "resume_training",
    "reproduce_run", "check_status", "list_runs", "get_results", "compare_runs", "browse_rollouts",
    "export_trajectories", "export_policy", "build_dataset", "ask_checkpoint",
    "evaluate_policy", "serve_policy", "read_logs", "note_experiment", "get_handoff",
]  # fmt: skip
ERAS = ["auto", "legacy"]
DEFAULTS = {"read_only_hint": False, "destructive_hint": True, "idempotent_hint": False, "open_world_hint": True}


def listed(mode):
    async def work():
        with anyio.fail_after(20):
            async with Client(TopropeServer(), mode=mode) as client:
                return (await client.list_tools()).tools

    return anyio.run(work)


@pytest.fixture(scope="module")
def tools():
    return listed("auto")


@pytest.mark.parametrize("mode", ERAS)
def test_tools_are_listed_in_fixed_order(mode):
    assert [tool.name for tool in listed(mode)] == ORDER


def test_tool_definitions_match_snapshot(tools):
    now = [
        {
            "name": tool.name,
            "title": tool.title,
            "description": tool.description,
            "annotations": tool.annotations.model_dump(mode="json", exclude_none=True, by_alias=True),
            "inputSchema": tool.input_schema,
        }
        for tool in tools
    ]
    if os.environ.get(UPDATE):
        SNAPSHOT.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
    known = json.loads(SNAPSHOT.read_text())
    changed = [new["name"] for new, old in zip(now, known, strict=False) if new != old]
    assert now == known, (
        f"The tools' definitions changed ({', '.join(changed) or 'their number'}). If agents are to see that, run "
        f"{UPDATE}=1 python -m pytest {Path(__file__).name} and commit {SNAPSHOT.name}."
    )


def test_get_config_explains_every_section(tools):
    schema = next(tool.input_schema for tool in tools if tool.name == "get_config")
    assert set(schema["properties"]["section"]["enum"]) - {None} == set(SECTIONS)


def test_every_tool_is_described_annotated_and_strict(tools):
    for tool in tools:
        assert tool.title, tool.name
        assert 100 < len(tool.description.encode()) < 2048, tool.name
        hints = tool.annotations.model_dump(exclude_none=True)
        assert hints and not hints.items() & DEFAULTS.items(), tool.name
        assert tool.output_schema is None, tool.name
        assert tool.input_schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False, tool.name
        assert not {"anyOf", "oneOf", "allOf", "$ref"} & set(tool.input_schema), tool.name
        for name, schema in tool.input_schema["properties"].items():
            assert len(schema.get("description", "")) > 20, f"{tool.name}.{name}"
            assert "type" in schema, f"{tool.name}.{name}"
    changing = [tool for tool in tools if not tool.annotations.read_only_hint]
    assert [tool.name for tool in changing if tool.annotations.destructive_hint is None] == ["stop_training"]


def test_tool_list_fits_into_agents_context():
    """Counts the whole result of tools/list, with the tools that only some owners allow."""

    async def work():
        async with Client(TopropeServer(role=Role(permits=frozenset({"installs", "saves"})))) as client:
            return await client.list_tools()

    result = anyio.run(work).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert len(result["tools"]) > len(ORDER)
    assert len(json.dumps(result, separators=(",", ":"), ensure_ascii=False).encode()) / 4 <= 6200
    assert len(INSTRUCTIONS.encode()) < 2048


def test_listing_and_calls_load_no_heavy_modules():
    program = """
import sys
from toprope_server.mcp.app import TopropeServer
TopropeServer()
lazy = [m for m in ("sqlite3", "yaml", "platformdirs", "typer", "toprope_tools.status.status",
                    "toprope.settings.schema", "toprope.supervisor.runs.manager") if m in sys.modules]
import toprope_tools.planning.config, toprope_tools.planning.environments, toprope_tools.runs.inference
import toprope_tools.runs.logs, toprope_tools.results.results, toprope_tools.status.status
import toprope_tools.runs.training
import toprope_tools.workshop
heavy = [m for m in ("torch", "transformers", "trl", "wandb", "numpy", "matplotlib", "datasets", "peft",
                     "reasoning_gym") if m in sys.modules]
print(lazy, heavy)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] []", done.stderr


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("toprope_server.dashboard.serve, toprope_tools.page.source", "mcp"),  # half of the dashboard's start
        ("toprope.training.driver.program", "aiohttp, starlette, openai"),
    ],
)
def test_programs_load_no_libraries_that_others_need(program, unwanted):
    code = f"import sys, {program}; print([one for one in '{unwanted}'.split(', ') if one in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
