"""Homes that earlier versions left are read and upgraded; files of a newer version are refused and stay as they are.

`tests/data/homes/make_home.py` made the archives, each named after its commit.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from toprope_server.cli.doctor.upgrade import main as upgrade
from toprope_server.mcp.app import TopropeServer

from toprope.records.index.database import Index
from toprope.records.index.migrations import MIGRATIONS
from toprope.records.run.checkpoints import newest_sound
from toprope.records.run.folder import RUN_ID, RunFolder
from toprope.settings.owner import Home

ARCHIVES = sorted((Path(__file__).parents[1] / "data" / "homes").glob("*.tar.xz"))


def unpacked(archive: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    with tarfile.open(archive) as files:
        files.extractall(path, filter="data")
    home = Home(path / "home" / "data", path / "home" / "config")
    monkeypatch.setenv("TOPROPE_HOME", str(home.path))
    monkeypatch.setenv("TOPROPE_CONFIG", str(home.configuration))
    return home


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return unpacked(request.param, tmp_path, monkeypatch)


@pytest.fixture
def newest_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The home with the most kinds of files."""
    return unpacked(max(ARCHIVES, key=lambda path: path.stat().st_size), tmp_path, monkeypatch)


def digests(home: Home) -> dict[str, str]:
    paths = [
        path for path in home.path.parent.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_tools_read_old_home(home: Home) -> None:
    runs = {path.name for path in home.runs.iterdir() if RUN_ID.fullmatch(path.name)}
    drafts = Index(home.index).drafts()

    async def read() -> None:
        with anyio.fail_after(60):
            async with Client(TopropeServer()) as client:

                async def call(tool: str, **arguments: Any) -> tuple[dict[str, Any], str]:
                    answer = await client.call_tool(tool, arguments)
                    text = " ".join(block.text for block in answer.content)
                    assert not answer.is_error and answer.structured_content is not None, text
                    return answer.structured_content, text

                listed, _ = await call("list_runs")
                shown = {run["run_id"] for run in listed["runs"]}
                assert shown and shown <= runs
                for run in sorted(runs):
                    status, _ = await call("check_status", run_ids=[run])
                    assert status["runs"][0]["state"] == "completed"
                    _, text = await call("get_results", run_id=run)
                    assert "cannot be read" not in text
                    await call("read_logs", run_id=run, component="keeper")
                [trained] = [run for run in runs if run.startswith("first") and "-sweep" not in run]
                metrics = await client.read_resource(f"toprope://runs/{trained}/metrics")
                assert len(metrics.contents[0].text.strip().splitlines()) == 1 + 3
                page, _ = await call("browse_rollouts", run_id=trained)
                assert page["matching"] > 0
                fork, _ = await call("fork_config", run_id=trained)
                difference, _ = await call("diff_config", a=trained, b=fork["draft_id"])
                assert not difference.get("fields")
                for draft in drafts:
                    config, _ = await call("get_config", draft_id=draft.id, section="optimizer")
                    assert config["draft_id"] == draft.id
                _, text = await call("get_handoff")
                if home.ledger.exists():
                    assert "It learns within three steps." in text

    anyio.run(read)
    assert drafts
    [trained] = [path for path in home.runs.glob("first*") if "-sweep" not in path.name]
    checkpoint, damaged = newest_sound(RunFolder(trained))
    assert checkpoint is not None and checkpoint.step == 3 and not damaged


def test_upgrade_migrates_old_home_and_keeps_comments(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(home.index)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
    before = digests(home)
    assert upgrade() == 0
    told = capsys.readouterr().out
    runs = sum(1 for path in home.runs.iterdir() if RUN_ID.fullmatch(path.name))
    assert f"{runs} runs can be read ({runs} by 0.1.0)." in told
    preset = (home.configuration / "presets" / "mine.yaml").read_text()
    assert 'keep_rollouts: "all" # all of them' in preset
    copy = home.path / f"index.db.version-{version}"
    assert copy.exists() == (version < len(MIGRATIONS))
    after = digests(home)
    changed = {Path(path).name for path in before | after if before.get(path) != after.get(path)}
    assert changed <= {"mine.yaml", "index.db", copy.name}
    if copy.exists():
        with closing(sqlite3.connect(copy)) as db:
            assert db.execute("PRAGMA user_version").fetchone()[0] == version
            assert db.execute("SELECT count(*) FROM drafts").fetchone()[0] == len(Index(home.index).drafts())
    assert upgrade() == 0 and digests(home) == after


def test_upgrade_names_owners_mistake(newest_home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    (newest_home.configuration / "settings.yaml").write_text("# mine\nprest: x\n")
    assert upgrade() == 1
    assert "line 2" in capsys.readouterr().out
    assert (newest_home.configuration / "settings.yaml").read_text() == "# mine\nprest: x\n"


def newer_json(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))


def newer_lines(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text().splitlines()[0]) | {"version": 99}) + "\n")


def newer_journal(path: Path) -> None:
    path.write_bytes(b"\xffTJ2" + path.read_bytes()[4:])


def newer_index(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def test_upgrade_refuses_every_newer_file_unchanged(newest_home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home, changes = newest_home, dict[Path, Callable[[Path], None]]()
    changes[home.index] = newer_index
    for path in [*home.path.rglob("*.json"), *home.path.rglob("*.jsonl")]:
        head = json.loads(path.read_text().splitlines()[0]) if path.suffix == ".jsonl" else json.loads(path.read_text())
        if isinstance(head, dict) and isinstance(head.get("version"), int):
            changes[path] = newer_lines if path.suffix == ".jsonl" else newer_json
    changes |= {path: newer_journal for path in home.runs.glob("*/journal/*.journal")}
    names = {path.name for path in changes}
    assert names >= {"spec.json", "status.json", "events.jsonl", "metrics.jsonl", "state.json", "manifest.json"}
    for path, change in changes.items():
        original = path.read_bytes()
        change(path)
        before = digests(home)
        assert upgrade() == 1, path
        told = capsys.readouterr().out
        assert "A newer version of Toprope wrote 1 file here; nothing was changed." in told, path
        assert str(path) in told and "Update Toprope" in told
        assert digests(home) == before, path
        path.write_bytes(original)
