"""What a server offers by role, and its prompts and completions."""

import subprocess
import sys

import anyio
import pytest
from mcp.client import Client
from mcp.types import PromptReference, ResourceTemplateReference
from toprope_server.cli.install import plan
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role, owners_role, role_of_arguments
from toprope_server.mcp.tool_registry import INSTRUCTIONS

from tests.support.tools_house import make_workshop, start_run
from toprope.errors import InvalidValue

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


def test_unknown_set_of_tools_is_refused_with_known_sets():
    with pytest.raises(InvalidValue, match="plan: environments"):
        Role.of(sets="plan,write")
    with pytest.raises(InvalidValue, match="No set"):
        Role.of(sets=" ,")


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
    for wrong in ("serve: {read_only: perhaps}\n", "serve: {tools: [all]}\n"):
        settings.write_text(wrong)
        assert owners_role().read_only
        assert owners_role().why
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
    assert found[4:] == [["trainer"], ["trainer"], [], []]
    launcher.close()
