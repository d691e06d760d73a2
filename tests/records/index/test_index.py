import multiprocessing
import sqlite3
import stat
import time

import pytest

from toprope.errors import Corrupt, NotFound, NotPossibleNow
from toprope.records.index.database import Index, StartRow
from toprope.records.index.migrations import MIGRATIONS
from toprope.records.index.stamps import Stamp, read_stamps, write_stamps


def make(index, **config):
    return index.create_draft("preset", {"name": "e"}, [], {"n": 0, **config})


def test_reading_creates_no_file(tmp_path):
    index = Index(tmp_path / "index.db")
    assert index.drafts() == []
    assert read_stamps(index, ["r"]) == {}
    assert index.starts("d") == []
    with pytest.raises(NotFound, match="select_environment"):
        index.draft("draft-none")
    assert list(tmp_path.iterdir()) == []


def test_file_is_private_and_in_wal_mode(tmp_path):
    index = Index(tmp_path / "index.db")
    make(index)
    assert stat.S_IMODE(index.path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["index.db"]
    with sqlite3.connect(index.path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    db.close()


def test_edit_is_stored_unless_it_raises(tmp_path):
    index = Index(tmp_path / "index.db")
    draft = make(index)
    change = {"field": "n", "before": 0, "after": 1}
    edited = index.edit_draft(draft.id, lambda row: ({"n": row.config["n"] + 1}, [change]))
    assert (edited.revision, edited.config) == (2, {"n": 1})

    def fails(row):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        index.edit_draft(draft.id, fails)
    same = index.edit_draft(draft.id, lambda row: (row.config, []))
    assert same == index.draft(draft.id) == edited
    assert [(edit.revision, edit.changes) for edit in index.edits(draft.id)] == [(2, [change])]
    with pytest.raises(NotFound):
        index.edit_draft("draft-none", lambda row: (row.config, [change]))


def test_second_start_of_live_run_is_not_recorded(tmp_path):
    index = Index(tmp_path / "index.db")
    first, second = StartRow("run-1", "d", 1, "train", 1.0), StartRow("run-2", "d", 1, "train", 2.0)
    assert index.record_start(first, lambda _: True) is None
    assert index.record_start(second, lambda earlier: earlier.run_id == "run-1") == first
    assert index.record_start(StartRow("run-3", "d", 1, "test", 3.0), lambda _: True) is None
    assert index.record_start(StartRow("run-4", "d", 2, "train", 4.0), lambda _: True) is None
    assert index.record_start(second, lambda _: False) is None
    index.forget_start("run-1")
    assert [start.run_id for start in index.starts("d")] == ["run-4", "run-3", "run-2"]


def test_older_stamp_never_replaces_newer(tmp_path):
    index = Index(tmp_path / "index.db")
    write_stamps(index, {"run": Stamp(10.0, 5, {"step": 2})})
    write_stamps(index, {"run": Stamp(9.0, 9, {"step": 1})})
    assert read_stamps(index, ["run"]) == {"run": Stamp(10.0, 5, {"step": 2})}
    write_stamps(index, {"run": Stamp(10.0, 7, {"step": 2})})
    assert read_stamps(index, ["run"])["run"].seq == 7
    write_stamps(index, {"run": Stamp(time.time() + 3600, 8, {"step": 3})})  # the clock was ahead
    write_stamps(index, {"run": Stamp(11.0, 9, {"step": 4})})
    assert read_stamps(index, ["run"]) == {"run": Stamp(11.0, 9, {"step": 4})}


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to have a header of its own" * 4, b"{}"])
def test_file_that_is_not_a_database_is_left_unchanged(tmp_path, content):
    path = tmp_path / "index.db"
    path.write_bytes(content)
    for use in (lambda: Index(path).drafts(), lambda: make(Index(path))):
        with pytest.raises(Corrupt, match="doctor --repair"):
            use()
    assert path.read_bytes() == content


def test_foreign_database_is_left_unchanged(tmp_path):
    path = tmp_path / "index.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(Corrupt, match="tables of another program"):
        make(Index(path))
    assert path.read_bytes() == before


def test_damaged_page_is_reported(tmp_path):
    index = Index(tmp_path / "index.db")
    for number in range(50):
        make(index, filler="x" * 500, number=number)
    data = bytearray(index.path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    index.path.write_bytes(bytes(data))
    with pytest.raises(Corrupt, match="was left as it is"):
        index.drafts()
    assert index.path.read_bytes() == bytes(data)


def test_damaged_row_is_corrupt(tmp_path):
    index = Index(tmp_path / "index.db")
    draft = make(index)
    with sqlite3.connect(index.path) as db:
        db.execute("UPDATE drafts SET config = '{'")
    db.close()
    with pytest.raises(Corrupt, match=draft.id):
        index.draft(draft.id)


def test_newer_database_is_left_unchanged(tmp_path):
    index = Index(tmp_path / "index.db")
    make(index)
    with sqlite3.connect(index.path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(NotPossibleNow, match="newer version"):
        index.drafts()


def _edit_many(path, draft_id, times, gate):
    index = Index(path)
    gate.wait()
    if draft_id is None:
        for _ in range(times):
            make(index)
        return
    for _ in range(times):
        index.edit_draft(draft_id, lambda row: ({"n": row.config["n"] + 1}, [{"field": "n"}]))


def test_two_processes_on_one_index_lose_nothing(tmp_path):
    path = tmp_path / "index.db"
    draft_id = None
    # Round one races for the making of the file, round two for one draft.
    for _ in range(2):
        context = multiprocessing.get_context("spawn")
        gate = context.Barrier(3)
        servers = [context.Process(target=_edit_many, args=(path, draft_id, 30, gate)) for _ in range(2)]
        for server in servers:
            server.start()
        gate.wait(timeout=30)
        for server in servers:
            server.join(timeout=30)
            assert server.exitcode == 0
        draft_id = draft_id or make(Index(path)).id
    index = Index(path)
    assert len(index.drafts(limit=100)) == 61
    assert index.draft(draft_id).config == {"n": 60}
    assert [edit.revision for edit in index.edits(draft_id)] == list(range(2, 62))
