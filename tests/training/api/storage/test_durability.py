"""An answered group is on disk, once, also after a kill, a failed disk and the removal of old segments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_api_server import ENVIRONMENT, REGISTRATION, group, marks, served, until
from toprope.errors import NotFound, NotPossibleNow
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.frames import scan
from toprope.records.journal.marks import GroupNote, Keep
from toprope.training.api.http.errors import Refused
from toprope.training.api.storage.store import TrajectoryStore


def body(mark: int, **fields: Any) -> bytes:
    return json.dumps(group(mark, **fields)).encode()


def test_failed_disk_refuses_all_later_posts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with served(tmp_path / "journal") as api:
        api.post("/scored_data", group(1))
        monkeypatch.setattr(os, "fdatasync", broken)
        for _ in range(2):
            status, headers, answer = api.raw("POST", "/scored_data", group(2))
            assert (status, headers["retry-after"]) == (503, "5")
            assert "Input/output error" in json.loads(answer)["error"]["message"]
        monkeypatch.undo()
        for again in (group(3), group(2), group(1)):  # also where nothing new is written
            assert api.refusal("POST", "/scored_data", again)[:2] == (503, "storage"), "the disk is not trusted again"


@pytest.mark.parametrize("sync", ["os", "group", "always"])
def test_journal_sync_policy_decides_when_to_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Any) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), real(descriptor)))
    journal = FileJournal(tmp_path, sync=sync)
    journal.append(b"x", GroupNote(rows=1))
    assert len(synced) == (sync == "always")
    pending = journal.unsynced()
    assert (pending is not None) == (sync == "group")
    if pending is not None:
        pending.flush()
        journal.synced(pending)
        assert len(synced) == 1 and journal.unsynced() is None
    journal.close()


def test_recovery_flushes_records_of_killed_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = FileJournal(tmp_path, sync="group", segment_bytes=1)
    for _ in range(2):
        journal.append(b"x", GroupNote(rows=1))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    FileJournal(tmp_path)
    assert not synced, "a reader does not flush"
    FileJournal(tmp_path, sync="group")
    assert len(synced) == 3, "both segments, and the folder with their names"
    journal.close()


def small_store(folder: Path, recent: bool = False, **options: Any) -> tuple[FileJournal, TrajectoryStore]:
    journal = FileJournal(folder, segment_bytes=1000, recent=recent)
    return journal, TrajectoryStore(journal, **options)


def segments(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.journal"))


@pytest.mark.parametrize(("keep", "recent"), [("all", False), ("all", True), ("none", False), ("sample", False)])
def test_committed_segments_are_kept_or_removed(tmp_path: Path, keep: Keep, recent: bool) -> None:
    journal, store = small_store(tmp_path, keep=keep)
    store.next_batch(0, 16)
    for mark in range(40):
        store.post(body(mark, group_id=f"k{mark}", environment="ab"[mark % 2]))
    cursor = 0
    for _ in range(15):
        formed = store.next_batch(cursor, 16)
        assert formed is not None
        cursor = formed.plan.end
    dropped = formed.plan.groups[0].seq
    store.drop([(dropped, "stale")])
    store.commit(24)
    store.queue.rewind(26)
    before = store.queue.counts(), store.queue.step, store.queue.delivered, store.registry.current_step
    assert ("00000001" in segments(tmp_path)) == (keep == "all")
    journal.close()
    journal, again = small_store(tmp_path, recent, keep=keep)
    again.queue.rewind(26)
    assert (again.queue.counts(), again.queue.step, again.queue.delivered, again.registry.current_step) == before
    assert again.post(body(3, group_id="k3")) == 4, "its key is remembered even if its body is gone"
    if keep == "all":
        assert FileJournal(tmp_path).read(1), "a reader sees all segments"
    if keep == "all" and not recent:
        assert journal.read(1)
    else:
        assert journal.first > 1
        with pytest.raises(NotFound, match="are removed or skipped"):
            journal.read(1)
    rest = []
    while (formed := again.next_batch(again.queue.delivered, 8)) is not None:
        rest += [found.seq for found in formed.plan.groups]
    assert sorted(rest) == sorted(set(range(27, 41)) - {dropped})
    assert again.post(body(99)) == 41
    journal.close()


def kept_history(folder: Path, groups: int) -> tuple[TrajectoryStore, int]:
    """A store of `groups` groups of which all but the last few are committed, and its cursor."""
    journal, store = small_store(folder)
    cursor = 0
    for mark in range(groups):
        store.post(body(mark))
        if mark % 2:
            formed = store.next_batch(cursor, 16)
            assert formed is not None
            cursor = formed.plan.end
            store.commit(cursor - 2)
    journal.close()
    return store, cursor


def test_restart_does_not_read_committed_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cursor = kept_history(tmp_path, 60)
    assert len(segments(tmp_path)) > 30
    counts, read = store.queue.counts(), []

    def counting(path: Path, *arguments: Any) -> Any:
        read.append(path.stem)
        return scan(path, *arguments)

    monkeypatch.setattr("toprope.records.journal.file_journal.scan", counting)
    journal, store = small_store(tmp_path, recent=True)
    assert set(read) <= set(segments(tmp_path)[-6:])
    assert store.queue.counts() == counts and store.queue.delivered == cursor
    assert store.post(body(77)) == 61
    journal.close()


def test_restart_after_every_commit_recovers_all(tmp_path: Path) -> None:
    """Each start begins a new segment, so that snapshots lie in segments that a later one replaces."""
    cursor = 0
    for mark in range(24):
        for keep in ("all", "none"):
            journal, store = small_store(tmp_path / str(keep), recent=True, keep=keep)
            assert store.queue.counts().accepted == mark * 3 and store.queue.delivered == cursor
            for number in range(3):
                store.post(body(mark * 3 + number))
            formed = store.next_batch(cursor, 16)
            assert formed is not None and formed.plan.groups[0].seq == cursor + 1
            store.commit(max(0, cursor - 7))
            journal.close()
        cursor += 2


@pytest.mark.parametrize(
    "harm", ["start is not a number", "start is missing", "start is ahead", "snapshots are damaged"]
)
def test_damaged_start_file_loses_nothing(tmp_path: Path, harm: str) -> None:
    store, cursor = kept_history(tmp_path, 20)
    start = tmp_path / "start"
    if harm == "start is not a number":
        start.write_bytes(b"\xff")
    elif harm == "start is missing":
        start.unlink()
    elif harm == "start is ahead":
        start.write_text("99")
    else:
        for path in tmp_path.glob("*.journal"):
            path.write_bytes(path.read_bytes().replace(b'"type":"snapshot"', b'"type":"snapshut"'))
    journal, again = small_store(tmp_path, recent=True)
    assert again.queue.counts() == store.queue.counts() and again.queue.delivered == cursor
    assert journal.read(1)
    journal.close()


def test_participants_survive_removed_segments(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep": "none", "segment_bytes": 3000}
    with served(tmp_path / "journal", **options) as api:
        api.post("/register", REGISTRATION | {"starting_step": 7})
        api.get("/batch?cursor=0")
        api.post("/register-env", ENVIRONMENT | {"weight": 2.5})
        for mark in range(30):
            api.post("/scored_data", group(mark, env_id=0))
        cursor = 0
        for _ in range(10):
            cursor = api.get(f"/batch?cursor={cursor}")["cursor"]
        api.refusal("POST", "/scored_data", b"{")
        api.post("/commit", {"cursor": cursor})
        assert "00000001" not in segments(tmp_path / "journal")
        status, counts = api.get("/status"), api.get("/counts")
    with served(tmp_path / "journal", **options) as api:
        assert (api.get("/status"), api.get("/counts")) == (status, counts)
        assert api.get("/status")["current_step"] == 17
        assert api.store.queue.scheduler.lane("#0").weight == 2.5
        assert api.refusal("GET", "/batch")[1] == "cursor_needed"
        assert marks(api.get(f"/batch?cursor={cursor}")) == [20, 21]


def test_journal_recovers_from_crash_during_segment_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, store = small_store(tmp_path, keep="none")
    for mark in range(20):
        store.post(body(mark))
    cursor = 0
    for _ in range(8):
        cursor = store.next_batch(cursor, 16).plan.end
    removed: list[Path] = []
    unlink = Path.unlink

    def crash(self: Path, missing_ok: bool = False) -> None:
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(self)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(KeyboardInterrupt):
        store.commit(cursor)
    monkeypatch.undo()
    assert len(removed) == 2 and len(segments(tmp_path)) > 3
    counts = store.queue.counts()
    journal.close()
    journal, store = small_store(tmp_path, keep="none")
    assert store.queue.counts() == counts
    assert [found.seq for found in store.next_batch(cursor, 16).plan.groups] == [17, 18]
    journal.close()


def test_repeated_post_without_key_is_one_group_after_kill(tmp_path: Path) -> None:
    journal, store = small_store(tmp_path)
    posts = [store.validate(body(mark)) for mark in range(4)]
    numbers = [store.accept(post) for post in posts]
    store.mark_answered([numbers[0]])
    store.accept(store.validate(body(9, group_id="keyed")))
    store.drop([])  # leaves a mark between the groups
    store.save_counts()
    journal.close()  # killed before 2, 3 and 4 were answered
    for _ in range(2):
        journal, store = small_store(tmp_path)
        journal.close()
    journal, store = small_store(tmp_path)
    assert [store.post(body(mark)) for mark in (3, 1, 2)] == [4, 2, 3]
    assert store.post(body(0)) == 6, "its first post was answered, so it is another group"
    assert store.queue.counts().duplicates == 3
    journal.close()


def test_repeated_post_is_recognised_by_posted_body(tmp_path: Path) -> None:
    journal, store = small_store(tmp_path)
    posted = body(1, mystery={"deep": 1})
    assert store.post(posted) == 1
    journal.close()
    journal, store = small_store(tmp_path)
    assert b"mystery" not in journal.read(1)
    assert store.post(posted) == 1
    journal.close()


def test_refusal_counts_survive_restart(tmp_path: Path) -> None:
    journal, store = small_store(tmp_path)
    store.post(body(1, group_id="a"))
    store.post(body(1, group_id="a"))
    with pytest.raises(Refused, match="scores"):
        store.post(body(1, scores=[1.0]))
    store.save_counts()
    counts = store.queue.counts()
    assert (counts.duplicates, counts.refused) == (1, {"length_mismatch": 1})
    journal.close()
    journal, store = small_store(tmp_path)
    assert store.queue.counts() == counts
    records = journal.appended
    store.save_counts()
    assert journal.appended == records, "nothing changed"
    journal.close()


def test_stale_groups_are_dropped_before_delivery(tmp_path: Path) -> None:
    with served(tmp_path / "journal", max_staleness=2) as api:
        for mark, version in enumerate([0, 5, 3, 4, None, 6]):
            fields = {} if version is None else {"versions": [[[version, 2]]] * 8}
            api.post("/scored_data", group(mark, **fields))
        assert marks(api.get("/batch?cursor=0&sequences=16&version=6")) == [1, 3]
        assert api.get("/counts")["dropped"] == {"stale": 2}
        answer = api.get("/batch?cursor=2&sequences=16&version=7")
        assert marks(answer) == [4, 5] and "stale" not in answer
        lines = api.raw("GET", "/metrics")[2].decode().splitlines()
        assert 'toprope_api_staleness_versions{bound="max"} 1' in lines and "toprope_api_policy_version 7" in lines
        counts = api.get("/counts")
    with served(tmp_path / "journal") as api:
        assert api.get("/counts") == counts


def test_next_batch_reports_number_of_stale_groups(tmp_path: Path) -> None:
    with served(tmp_path / "journal", max_staleness=0) as api:
        api.post("/scored_data", group(1, versions=[[[0, 2]]] * 8))
        assert api.get("/batch?cursor=0&sequences=8&version=1")["batch"] is None
        api.post("/scored_data", group(2, versions=[[[1, 2]]] * 8))
        assert api.get("/batch?cursor=0&sequences=8&version=1")["stale"] == 1
        assert until(lambda: api.get("/counts")["dropped"]) == {"stale": 1}
        api.post("/scored_data", group(3, versions=[[[1, 2]]] * 8))
        assert "stale" not in api.get("/batch?cursor=1&sequences=8&version=1")
        assert api.get("/batch?cursor=0&sequences=8&version=1")["stale"] == 1, "to a trainer that begins again"
    with served(tmp_path / "journal", max_staleness=0) as api:
        assert api.get("/batch?cursor=0&sequences=8&version=1")["stale"] == 1, "by an API that was started again"


def test_journal_names_reason_after_disk_failure(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, sync="group")
    journal.append(b"x", GroupNote(rows=1))
    assert "gone" in str(journal.fail(OSError(5, "gone")))
    with pytest.raises(NotPossibleNow, match="no more groups are accepted"):
        journal.append(b"y", GroupNote(rows=1))
    journal.close()
