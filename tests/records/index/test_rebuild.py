"""The index: files of every earlier version open, damage is found, and a new one is made without overwriting."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest
from toprope_server.cli.doctor import repair

from tests.support.run_harness import RunHarness
from toprope.errors import Corrupt, NotPossibleNow
from toprope.records.index.database import Index, StartRow
from toprope.records.index.migrations import MIGRATIONS
from toprope.records.index.rebuild import move_aside
from toprope.records.run.folder import RunFolder
from toprope.settings.owner import Home
from toprope.workbench.drafts import Drafts


def made_by(path, version):
    """A file as the version that had so many scripts left it, with a draft in it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for script in MIGRATIONS[:version]:
            db.executescript(script)
        db.execute("INSERT INTO drafts VALUES ('draft-old', 1.0, 2.0, 'p', '{\"name\": \"e\"}', '[]', '{}', 3)")
        db.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_files_of_earlier_versions_open_with_their_content(tmp_path, version):
    made_by(tmp_path / "index.db", version)
    index = Index(tmp_path / "index.db")
    assert index.draft("draft-old").revision == 3
    made = index.create_draft("p", {"name": "e"}, [], {})
    index.record_start(StartRow("run-1", made.id, 1, "train", 5.0), None)
    fresh = Index(tmp_path / "fresh.db")
    fresh.create_draft("p", {}, [], {})

    def shape(path):
        with closing(sqlite3.connect(path)) as db:
            return sorted(db.execute("SELECT type, name, tbl_name FROM sqlite_master")), db.execute(
                "PRAGMA user_version"
            ).fetchone()

    assert shape(index.path) == shape(fresh.path)


def test_file_of_newer_version_is_refused_unchanged(tmp_path):
    made_by(tmp_path / "index.db", len(MIGRATIONS))
    with closing(sqlite3.connect(tmp_path / "index.db")) as db:
        db.execute("PRAGMA user_version = 99")
    before = (tmp_path / "index.db").read_bytes()
    with pytest.raises(NotPossibleNow, match="Update Toprope"):
        Index(tmp_path / "index.db").drafts()
    assert (tmp_path / "index.db").read_bytes() == before


def spoil(path):
    """Makes a leaf of the starts' own index point nowhere: reading drafts does not meet it."""
    with closing(sqlite3.connect(path)) as db:
        page, size = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'starts_by_draft'").fetchone()[0], 4096
        assert db.execute("PRAGMA page_size").fetchone()[0] == size
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(data)


def test_index_is_checked_after_process_died_with_it_open(tmp_path):
    path = tmp_path / "index.db"
    Index(path).create_draft("p", {}, [], {})
    spoil(path)
    assert len(Index(path).drafts()) == 1, "a file that was closed is not looked through"
    (tmp_path / "index.db-wal").write_bytes(b"")
    with pytest.raises(Corrupt, match="doctor --repair"):
        Index(path).drafts()


@pytest.fixture
def home(tmp_path):
    """An index with one draft and its history; two runs came from it, and one from a draft that is not there."""
    home = Home(tmp_path / "home", tmp_path / "config")
    home.ensure()
    house = RunHarness(home.path)
    index = Index(home.index)
    specification = house.specification()
    draft = index.create_draft(
        "cpu-embedded", specification.environment.model_dump(), [], specification.config.model_dump(mode="json")
    )
    index.edit_draft(draft.id, lambda row: (row.config, [{"field": "budget.steps", "before": 1, "after": 2}]))
    for run_id, draft_id, revision, at in (
        ("r-1", draft.id, 1, 1.0),
        ("r-2", draft.id, 2, 2.0),
        ("r-3", "draft-gone", 4, 3.0),
    ):
        config = specification.config.model_copy(deep=True)
        config.environment.knobs = {"size": 3}
        folder = RunFolder.create(home.runs, run_id)
        specification.model_copy(
            update={
                "run_id": run_id,
                "draft_id": draft_id,
                "draft_revision": revision,
                "created_at": at,
                "config": config,
            }
        ).write(folder)
    RunFolder.create(home.runs, "odd").spec.write_text("{")
    return home, draft.id


def test_repair_leaves_sound_index(home, capsys):
    home, _ = home
    before = home.index.read_bytes()
    assert repair.main(home) == 0
    assert "intact" in capsys.readouterr().out and home.index.read_bytes() == before


def test_repair_keeps_damaged_file_and_readable_rows(home, capsys):
    home, draft_id = home
    spoil(home.index)
    damaged = home.index.read_bytes()
    assert repair.main(home) == 0
    (aside,) = (path for path in home.path.glob("index.db.damaged-*") if not path.name.endswith(("-wal", "-shm")))
    assert aside.read_bytes() == damaged
    index = Index(home.index)
    assert index.draft(draft_id).revision == 2 and len(index.edits(draft_id)) == 1
    assert [start.run_id for start in index.starts(draft_id)] == ["r-2", "r-1"]
    remade = Drafts(index).get("draft-gone")
    assert remade.revision == 4 and remade.config.environment.knobs == {"size": 3}
    said = capsys.readouterr().out
    assert (
        "draft-gone, as r-3 was started" in said
        and "Skipped runs with an unreadable specification: odd" in said
        and str(aside) in said
    )
    assert repair.problem_of(home) is None


def test_repair_restores_drafts_from_run_folders(home):
    home, draft_id = home
    home.index.write_bytes(b"nothing of the kind" * 400)
    assert repair.main(home) == 0
    assert len(list(home.path.glob("index.db.damaged-*"))) == 1
    index = Index(home.index)
    assert {row.id: row.revision for row in index.drafts()} == {draft_id: 2, "draft-gone": 4}
    assert json.loads(json.dumps(index.draft(draft_id).knobs)) == [{"name": "size", "default": 3}]


def test_move_aside_never_overwrites(tmp_path, monkeypatch):
    monkeypatch.setattr("toprope.records.index.rebuild.time.strftime", lambda _: "now")
    names = []
    for content in ("one", "two", "three"):
        (tmp_path / "index.db").write_text(content)
        (tmp_path / "index.db-wal").write_text(content)
        names.append(move_aside(tmp_path / "index.db"))
    assert [name.read_text() for name in names] == ["one", "two", "three"]
    assert not (tmp_path / "index.db").exists() and not (tmp_path / "index.db-wal").exists()


def test_repair_leaves_newer_index(home, capsys):
    home, _ = home
    with closing(sqlite3.connect(home.index)) as db:
        db.execute("PRAGMA user_version = 99")
    assert repair.main(home) == 1
    assert "not damaged" in capsys.readouterr().out
    assert not list(home.path.glob("*.damaged-*"))
