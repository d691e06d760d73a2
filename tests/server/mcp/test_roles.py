"""Tools that a server offers by role, and its prompts and completions."""

import json
import os
import subprocess
import sys
import time
from typing import get_args

import anyio
import pytest
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp.types import PromptReference, ResourceTemplateReference
from toprope_server.cli.install import plan
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import SETS, Role, owners_role, role_of_arguments
from toprope_server.mcp.tool_registry import ALL_TOOLS, INSTRUCTIONS
from toprope_tools.planning.environments import select_environment

from tests.support.tools_house import do, make_workshop, start_run
from toprope.errors import InvalidValue
from toprope.records.audit import AuditTrail
from toprope.settings.owner import Home, ServeRole, ToolSet

READS = {"list_environments", "get_config", "check_status", "list_runs", "get_results", "read_logs"}
CHANGES = {"select_environment", "edit_config", "test_inference", "start_training", "stop_training", "ask_checkpoint"}


def ask(shop, work, **options):
    async def main():
        with anyio.fail_after(30):
            async with Client(TopropeServer(lambda: shop, **options)) as client:
                return await work(client)

    return anyio.run(main)


async def offered(client):
    return [tool.name for tool in (await client.list_tools()).tools]


def test_without_a_role_everything_is_offered():
    tools = ask(None, offered)
    assert set(tools) >= READS | CHANGES
    assert Role().preamble == ""


def test_read_only_role_beats_every_set():
    for role in (Role.of(True), Role.of(True, "plan,run")):
        tools = set(ask(None, offered, role=role))
        assert tools >= READS
        assert not tools & CHANGES


@pytest.mark.parametrize(
    ("sets", "there", "missing"),
    [
        ("plan", {"select_environment", "edit_config", "list_environments"}, {"start_training", "list_runs"}),
        ("run", {"start_training", "check_status", "ask_checkpoint"}, {"edit_config", "get_results"}),
        ("read", READS, CHANGES),
        ("plan, read", {"edit_config", "get_results", "check_status"}, {"start_training", "stop_training"}),
        ("plan,run,read", READS | CHANGES, set()),
    ],
)
def test_sets_of_tools_are_offered_in_the_order_of_all(sets, there, missing):
    everything, some = ask(None, offered), ask(None, offered, role=Role.of(sets=sets))
    assert there <= set(some)
    assert not missing & set(some)
    assert some == [name for name in everything if name in some]


def test_excluded_tool_and_instructions_say_so():
    async def work(client):
        refused = await client.call_tool("start_training", {"draft_id": "draft-1"})
        prompts = [prompt.name for prompt in (await client.list_prompts()).prompts]
        return refused, prompts, client.instructions

    refused, prompts, instructions = ask(None, work, role=Role.of(True))
    assert refused.is_error
    assert "not offered here" in refused.content[0].text
    assert "check_status" in refused.content[0].text
    assert prompts == ["diagnose_run"]
    assert instructions.startswith("This server is read-only")
    assert instructions.endswith(INSTRUCTIONS)
    assert len(instructions.encode()) < 2048


def test_the_narrower_role_counts():
    assert Role.of(sets="plan,read").within(Role.of(sets="read,run")).sets == {"read"}
    assert Role().within(Role.of(True)).read_only
    assert Role.of(sets="plan").within(Role()).sets == {"plan"}


def test_server_with_invalid_settings_still_stops_runs():
    invalid = Role(read_only=True, why="settings.yaml: wrong.", stops=True)

    def changing(role):
        return [spec.name for spec in ALL_TOOLS if role.allows(spec) and not spec.reads_only]

    assert changing(Role().within(invalid)) == ["stop_training"] and "only stop runs" in invalid.preamble
    assert changing(Role.of(sets="run").within(invalid)) == ["stop_training"]
    for narrower in (Role.of(True), Role.of(sets="plan")):
        assert changing(narrower.within(invalid)) == changing(invalid.within(narrower)) == []


def test_unknown_set_of_tools_is_refused_with_known_sets():
    with pytest.raises(InvalidValue, match="plan: environments"):
        Role.of(sets="plan,write")
    with pytest.raises(InvalidValue, match="No set"):
        Role.of(sets=" ,")
    assert set(get_args(ToolSet)) == SETS.keys()
    for name in SETS:
        assert ServeRole(tools=[name]).tools == [name]


def test_role_is_parsed_from_serve_arguments():
    assert role_of_arguments([]) == Role()
    assert role_of_arguments(["--read-only", "--tools", "plan,read"]) == Role.of(True, "plan,read")
    assert role_of_arguments(["--tools=run"]) == Role.of(sets="run")
    assert role_of_arguments(["--http"]) is None
    assert role_of_arguments(["--tools"]) is None


def test_the_owners_role_is_read_from_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPROPE_CONFIG", str(tmp_path))
    assert owners_role() == Role()
    settings = tmp_path / "settings.yaml"
    settings.write_text("preset: cpu-embedded\n")
    assert owners_role() == Role()
    settings.write_text("serve: {read_only: true}\n")
    assert owners_role().read_only
    settings.write_text("serve:\n  tools: [plan, read]\n")
    assert owners_role().sets == {"plan", "read"}
    for written in (
        "{serve: {read_only: true}}", '{"preset": "x", "serve": {"read_only": true}}', '"s\\x65rve": {read_only: true}',
        "preset: x\n? serve\n: {read_only: true}", "\ufeffserve: {read_only: true}",
    ):  # fmt: skip
        settings.write_text(written)
        assert owners_role().read_only and not owners_role().why and not owners_role().stops, written
    settings.write_text("serve: {tools: [Plan, hermes]}\n")
    assert owners_role().sets == {"plan", "hermes"} and not owners_role().read_only
    for wrong in ("serve: {read_only: perhaps}\n", "serve: {tools: [plans]}\n", "serve: {tools: []}\n"):
        settings.write_text(wrong)
        assert owners_role().read_only and owners_role().stops
        assert f"{settings}: serve." in owners_role().why
        with pytest.raises(InvalidValue):
            Home.locate().settings()
    settings.unlink()
    settings.mkdir()
    assert owners_role().read_only and "settings.yaml cannot be read" in owners_role().why
    monkeypatch.setenv("TOPROPE_CONFIG", __file__)
    assert owners_role().read_only and "is not a folder" in owners_role().why


def test_client_can_start_read_only_server(tmp_path):
    program = [sys.executable, "-P", "-m", "toprope_server.cli", "serve", "--tools", "nothing"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "There is no set of tools nothing" in done.stderr


def test_install_passes_the_role_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    entry = plan("claude-code", role=Role.of(True, "read,plan")).entry
    assert entry["args"][-4:] == ["serve", "--read-only", "--tools", "plan,read"]
    assert plan("claude-code").entry["args"][-1] == "serve"


def test_prompts_name_what_they_are_about():
    async def work(client):
        diagnose = await client.get_prompt("diagnose_run", {"run_id": "run-7", "question": "reward fell"})
        improve = await client.get_prompt("improve_a_run", {"run_id": "run-7", "goal": "shorter answers"})
        train = await client.get_prompt("train_an_environment", {"environment": "gsm8k", "preset": "single-gpu"})
        return [prompt.messages[0].content.text for prompt in (diagnose, improve, train)]

    diagnose, improve, train = ask(None, work)
    assert 'cursor="run-7:0"' in diagnose
    assert "reward fell" in diagnose
    assert "'run-7': shorter answers. Start at most 3 runs" in improve
    assert "preset 'single-gpu'" in train


def test_names_and_ids_are_completed(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    folder = start_run(shop)
    folder.log("trainer").write_text("x\n")
    draft = shop.index.create_draft("cpu-embedded", {}, [], {}).id if shop.home.ensure() else ""
    run_template = ResourceTemplateReference(type="ref/resource", uri="toprope://runs/{run_id}")
    log_template = ResourceTemplateReference(type="ref/resource", uri="toprope://runs/{run_id}/logs/{component}")
    prompt = PromptReference(type="ref/prompt", name="diagnose_run")

    async def work(client):
        async def values(ref, name, value, **given):
            found = await client.complete(ref, {"name": name, "value": value}, context_arguments=given or None)
            return found.completion.values

        return [
            await values(prompt, "run_id", "sort"),
            await values(run_template, "run_id", ""),
            await values(run_template, "draft_id", "draft"),
            await values(PromptReference(type="ref/prompt", name="train_an_environment"), "preset", "cpu"),
            await values(log_template, "component", "", run_id=folder.run_id),
            await values(log_template, "component", "tra"),
            await values(prompt, "question", ""),
            await values(ResourceTemplateReference(type="ref/resource", uri="file:///{run_id}"), "run_id", ""),
        ]

    found = ask(shop, work)
    assert found[:3] == [[folder.run_id], [folder.run_id], [draft]]
    assert "cpu-embedded" in found[3]
    assert found[4:] == [["trainer"], ["trainer", "tracker"], [], []]
    launcher.close()


def test_resources_need_the_tool_that_tells_the_same(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    folder = start_run(shop)
    folder.log("trainer").parent.mkdir(exist_ok=True)
    folder.log("trainer").write_text("secret plans\n")
    base = f"toprope://runs/{folder.run_id}"

    async def read(client):
        found = {}
        docs = "toprope://docs", "toprope://docs/environments"
        for uri in (*docs, "toprope://runs", base, f"{base}/config", f"{base}/metrics", f"{base}/logs/trainer"):
            try:
                found[uri.removeprefix(base)] = (await client.read_resource(uri)).contents[0].text
            except MCPError as error:
                found[uri.removeprefix(base)] = error
        listed = [str(one.uri) for one in (await client.list_resources()).resources]
        return found, listed, [one.uri_template for one in (await client.list_resource_templates()).resource_templates]

    try:
        found, listed, templates = ask(shop, read, role=Role.of(sets="plan"))
        refused = {uri for uri, text in found.items() if isinstance(text, MCPError)}
        assert refused == {"toprope://runs", "", "/metrics", "/logs/trainer"}
        assert "read_logs, which is not offered here" in str(found["/logs/trainer"])
        assert listed == ["toprope://docs"] and "toprope://docs/{page}" in templates
        assert all("/logs/" not in one for one in templates)
        found, listed, templates = ask(shop, read, role=Role.of(True))
        assert "| secret plans" in found["/logs/trainer"] and base in listed and len(templates) > 5
    finally:
        launcher.close()


def test_every_call_is_in_the_audit_trail(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    shop.home.ensure()
    shop.home.settings_file.parent.mkdir(exist_ok=True)
    shop.home.settings_file.write_text("tools: {shop: {command: [shop], variables: {SHOP_KEY: canary-of-a-tool}}}")

    async def work(client):
        await client.call_tool("list_runs", {})
        await client.call_tool("stop_training", {"run_id": "canary-of-a-tool", "api_key": "0123456789"})
        await client.call_tool("no_such_tool", {})

    try:
        ask(shop, work)
        lines = list(AuditTrail(shop.home.path).lines())
    finally:
        launcher.close()
    assert [(line["did"], line["outcome"]) for line in lines] == [
        ("list_runs", "done"), ("stop_training", "refused"), ("no_such_tool", "refused"),
    ]  # fmt: skip
    assert lines[1]["arguments"] == {"run_id": "[secret]", "api_key": "[secret]"}
    assert lines[0]["by"]["client"]
    assert not AuditTrail(shop.home.path).verify().problems


def test_invalid_settings_neither_end_the_audit_trail_nor_its_masks(tmp_path, monkeypatch):
    home = Home(tmp_path / "home", tmp_path / "config").ensure()
    monkeypatch.setenv("TOPROPE_HOME", str(home.path))
    monkeypatch.setenv("TOPROPE_CONFIG", str(home.configuration))
    home.configuration.mkdir()
    settings = "variables: {policy: {HF_TOKEN: hf_hidden_value}}\n"

    async def work():
        async with Client(TopropeServer()) as client:
            for written in (settings, f"{settings}machine: {{thread: 4}}\n"):
                home.settings_file.write_text(written)
                os.utime(home.settings_file, (len(written), len(written)))
                await client.call_tool("list_runs", {"query": "hf_hidden_value"})

    anyio.run(work)
    calls = list(AuditTrail(home.path).lines())
    assert [call["did"] for call in calls] == ["list_runs"] * 2
    assert "hidden" not in json.dumps(calls)


def test_a_cancelled_start_is_in_the_audit_trail_with_its_run(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    draft = do(select_environment, shop, name="sort_letters").data.draft_id
    began, submit = anyio.Event(), launcher.submit

    def slowly(folder, variables, lock=None):
        anyio.from_thread.run_sync(began.set)
        time.sleep(0.2)
        submit(folder, variables, lock)

    launcher.submit = slowly

    async def work(client):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "start_training", {"draft_id": draft})
            await began.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            while not (lines := list(AuditTrail(shop.home.path).lines())):
                await anyio.sleep(0.02)
        return lines

    try:
        [line] = ask(shop, work)
        [run] = shop.statuses()
    finally:
        launcher.close()
    assert (line["did"], line["outcome"]) == ("start_training", "cancelled")
    assert line["changed"] == {"run_ids": [run.run_id]}


@pytest.mark.parametrize(
    "arguments", [{"query": "x" * 20_001}, {"query": "x" * 10_000_000}, {"cursor": ["y"] * 30_000}]
)
def test_texts_have_a_bound_and_are_not_echoed(tmp_path, arguments):
    shop, launcher = make_workshop(tmp_path)

    async def work(client):
        return await client.call_tool("list_runs", arguments)

    try:
        answer = ask(shop, work)
    finally:
        launcher.close()
    assert answer.is_error and len(answer.content[0].text) < 500
    assert "at most 20000" in answer.content[0].text or "more than 400000" in answer.content[0].text
