"""Files of clients in their own formats: entries are set and removed, and everything else stays as it was."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml
from toprope_server.cli.clients import jsonc
from toprope_server.cli.clients.formats import TOML
from toprope_server.cli.clients.known import KNOWN, Places, find_client
from toprope_server.cli.install import configuration_file, installed_entry, main, plan, server_command, write

from toprope.errors import InvalidValue

PLACES = [
    ("cursor", "linux", {}, ".cursor/mcp.json"),
    ("vscode", "linux", {}, ".config/Code/User/mcp.json"),
    ("vscode", "darwin", {}, "Library/Application Support/Code/User/mcp.json"),
    ("codex", "linux", {}, ".codex/config.toml"),
    ("codex", "linux", {"CODEX_HOME": "/h/c"}, "c/config.toml"),
    ("gemini", "darwin", {}, ".gemini/settings.json"),
    ("goose", "darwin", {}, ".config/goose/config.yaml"),
    ("windsurf", "linux", {}, ".codeium/windsurf/mcp_config.json"),
    ("zed", "linux", {"XDG_CONFIG_HOME": "/h/x"}, "x/zed/settings.json"),
    ("zed", "darwin", {}, ".config/zed/settings.json"),
]
WRITTEN = {
    "claude-desktop": '{"theme": "dark", "mcpServers": {"other": {"command": "x"}}}',
    "claude-code": '{\n  "projects": {"/a": {}},\n  "mcpServers": {}\n}\n',
    "cursor": '{\n\t"mcpServers": {\n\t\t"other": {"command": "x"}\n\t}\n}\n',
    "vscode": '{\n  // mine\n  "inputs": [],\n  "servers": {\n    "other": {"command": "x"}, // kept, too\n  },\n}\n',
    "codex": 'model = "o" # best\n\n[mcp_servers.other]\ncommand = "x"  # mine\n',
    "gemini": '{"theme": "GitHub" /* light */}',
    "goose": "# mine\nGOOSE_MODEL: m  # good\nextensions:\n  other:\n    cmd: x\n    args: [a]\n",
    "windsurf": "{}",
    "zed": '// Zed settings\n{\n  "theme": "One", // dark\n  "context_servers": {}\n}\n',
    "inspector": "",
}
COMMENTS = ("// mine", "// kept, too", "# best", "# mine", "/* light */", "# good", "// Zed settings", "// dark")


def load(client: str, text: str):
    return KNOWN[client].format.loads(text)


@pytest.mark.parametrize(("client", "platform", "environ", "expected"), PLACES)
def test_each_client_has_its_file_on_each_platform(client, platform, environ, expected):
    places = Places(platform, {"HOME": "/h", **environ})
    assert KNOWN[client].file(places).as_posix() == f"/h/{expected}"


@pytest.mark.parametrize("client", KNOWN)
def test_entry_is_added_renewed_and_removed_and_the_rest_stays(client, tmp_path, monkeypatch):
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "MCP_CATALOG_PATH", "TOPROPE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOPROPE_CONFIG", "/o w/config")
    path, before = configuration_file(client), WRITTEN[client]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before)
    known, planned = KNOWN[client], plan(client)
    assert write(planned)[0]
    text = path.read_text()
    entry = installed_entry(client)
    assert entry == planned.entry
    argv = [entry.get("command") or entry["cmd"], *entry["args"]]
    assert argv == server_command()
    assert (entry.get("env") or entry["envs"])["TOPROPE_CONFIG"] == "/o w/config"
    found = load(client, text)
    del found[known.section]["toprope"]
    wanted = load(client, before)
    assert found == {**wanted, known.section: wanted.get(known.section, {})}
    for comment in COMMENTS:
        assert (comment in before) == (comment in text)
    assert write(planned) == (False, None)
    changed = plan(client).__class__(client, path, {**planned.entry, "args": ["new"]}, "")
    assert write(changed)[0] and installed_entry(client)["args"] == ["new"]
    assert write(planned, remove=True)[0] and installed_entry(client) is None
    after = path.read_text()
    assert load(client, after) == {**wanted, known.section: wanted.get(known.section) or {}}
    for comment in COMMENTS:
        assert (comment in before) == (comment in after)
    assert write(planned, remove=True) == (False, None)
    assert len(list(path.parent.glob("*.bak"))) == 3


@pytest.mark.parametrize("client", KNOWN)
def test_printed_entry_is_valid_in_the_clients_format(client, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    head, text = main(client, show=True, http=False, project=None, variables=[])
    assert head.startswith("# ")
    reader = {"TOML": tomllib.loads, "YAML": yaml.safe_load}.get(KNOWN[client].format.name, json.loads)
    assert reader(text)[KNOWN[client].section]["toprope"] == plan(client).entry
    assert list(tmp_path.iterdir()) == []


def test_other_clients_get_the_usual_form_and_wrong_names_the_nearest(tmp_path, monkeypatch):
    _, text = main("other", show=False, http=False, project=None, variables=[])
    entry = json.loads(text)["mcpServers"]["toprope"]
    assert [entry["command"], *entry["args"]] == server_command()
    monkeypatch.setenv("TOPROPE_CONFIG", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    stored, _, _ = main("other", show=False, http=False, project=None, variables=["HF_TOKEN"])
    assert "HF_TOKEN is now in" in stored and "hf_x" in (tmp_path / "settings.yaml").read_text()
    with pytest.raises(InvalidValue, match="do not apply"):
        main("other", show=False, http=True, project=None, variables=[])
    with pytest.raises(InvalidValue, match=r"Did you mean cursor\?.*install other"):
        find_client("curser")


@pytest.mark.parametrize("client", [name for name, known in KNOWN.items() if known.http])
def test_http_entries_name_the_variable_and_hold_no_token(client, tmp_path, monkeypatch):
    monkeypatch.setenv("TOPROPE_CONFIG", str(tmp_path))
    entry = plan(client, http=True).entry
    assert entry["url"] == "http://127.0.0.1:8765/mcp" and "TOPROPE_TOKEN" in str(entry)


@pytest.mark.parametrize("client", [name for name, known in KNOWN.items() if known.project])
def test_project_files_are_within_the_project(client, tmp_path):
    assert write(plan(client, project=tmp_path))[0]
    assert (tmp_path / KNOWN[client].project).is_file()


@pytest.mark.parametrize("client", ["zed", "codex", "goose", "cursor"])
def test_broken_file_is_left_alone(client, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    path = configuration_file(client)
    path.parent.mkdir(parents=True)
    path.write_text('{"a": [1, }\n=')
    with pytest.raises(InvalidValue, match="left as it is"):
        write(plan(client))
    assert path.read_text() == '{"a": [1, }\n=' and len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "{ // nothing yet\n}",
        '{"a": {"b": 1}}',
        '{"a": {"b": 1,},}',
        '{\n  "a": {\n    "b": [1, 2], // "}" is text\n    "c": "\\"}, //"\n  }\n}',
        '{\n    "x": null,\n    /* a: { */\n    "a": {"new": 0, "b": 1 /* one */, "c": {}}\n}\n',
        '{"x": 1 // one\n}',
    ],
)
def test_members_are_set_and_removed_in_the_text(text):
    before = jsonc.loads(text)
    edited = jsonc.set_member(text, ["a", "new"], {"k": ["v", 1]})
    assert jsonc.loads(edited) == {**before, "a": {**before.get("a", {}), "new": {"k": ["v", 1]}}}
    removed = jsonc.remove_member(edited, ["a", "new"])
    others = {key: value for key, value in before.get("a", {}).items() if key != "new"}
    assert jsonc.loads(removed) == {**before, "a": others}
    for comment in ("// nothing yet", '// "}" is text', "/* a: { */", "/* one */", "// one"):
        assert (comment in text) == (comment in edited) == (comment in removed)


@pytest.mark.parametrize("text", ["{", '{"a" 1}', "[1 2]", '{"a": }', '{"a": 1} x', '{"a": nope}'])
def test_text_that_is_not_json_with_comments_is_refused(text):
    with pytest.raises(ValueError):
        jsonc.loads(text)


@pytest.fixture(params=["claude-code", "zed", "codex", "goose"])
def client(request, tmp_path, monkeypatch):
    """A client whose folder is there and whose file is not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    configuration_file(request.param).parent.mkdir(parents=True, exist_ok=True)
    return request.param


def test_line_ends_of_windows_stay(client):
    path = configuration_file(client)
    before = WRITTEN[client].replace("\n", "\r\n").encode()
    path.write_bytes(before)
    _, backup = write(plan(client))
    text = path.read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n") > before.count(b"\n")
    assert backup is not None and backup.read_bytes() == before
    write(plan(client), remove=True)
    assert load(client, path.read_text()) == load(client, WRITTEN[client])
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")


def test_removal_leaves_the_comments_before_it_unchanged():
    text = '{"a": {"x": 1} /* one, two */, "toprope": {}}'
    assert jsonc.remove_member(text, ["toprope"]) == '{"a": {"x": 1} /* one, two */}'


def test_a_file_nested_too_deeply_is_refused_in_words(client):
    path = configuration_file(client)
    text = ("a = " if client == "codex" else '{"a": ') + "[" * 5000 + "]" * 5000 + ("" if client == "codex" else "}")
    path.write_text(text)
    with pytest.raises(InvalidValue, match="nested too deeply.*left as it is"):
        write(plan(client))
    assert path.read_text() == text


def test_strict_json_stays_strict_after_removal():
    text = '{"mcpServers": {"other": {"command": "x"}}}'
    edited = jsonc.set_member(text, ["mcpServers", "toprope"], {"command": "y"})
    assert json.loads(jsonc.remove_member(edited, ["mcpServers", "toprope"])) == json.loads(text)


def test_inline_tables_are_edited_or_refused_but_never_lost(tmp_path: Path):
    text = 'mcp_servers = {other = {command = "x"}}\n'
    edited = TOML.edited(text, ("mcp_servers", "toprope"), {"command": "y", "args": []})
    assert tomllib.loads(edited)["mcp_servers"] == {"other": {"command": "x"}, "toprope": {"command": "y", "args": []}}
