"""Damaged state on disk: the index and run folders.

Nothing is repaired without the owner's order: the answer names the file and the error, and the file stays unchanged.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks.wrong_inputs.calls import read_table, texts
from benchmarks.wrong_inputs.installation import Answer, Case, Expected, Installation
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import Status
from toprope.settings.schema import Config

__all__ = ["CASES", "ended_run"]

_INDEX, _RUN = "the index and drafts", "a run's folder"


def ended_run(site: Installation, run_id: str = "old-run", **fields: Any) -> RunFolder:
    """Write a run that ended, as a keeper would have left it."""
    folder = RunFolder.create(site.home / "runs", run_id)
    now = time.time()
    Specification(
        run_id=run_id,
        kind="train",
        created_at=now,
        toprope_version="0",
        environment=EnvironmentSource(name="sort_letters"),
        config=Config(),
        policy_cache=str(site.home / "policies"),
    ).write(folder)
    Status(
        run_id=run_id,
        kind="train",
        environment="sort_letters",
        **({"state": "completed", "created_at": now, "since": now, "updated_at": now, "ended_at": now} | fields),
    ).write(folder)
    folder.lock.touch()
    folder.log("trainer").write_text("step 1\nstep 2\n")
    return folder


# The index


def _index(
    title: str, spoil: Callable[[Installation, str], None], cause: tuple[str, ...], remedy: tuple[str, ...]
) -> Case:
    async def play(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
        draft_id = await site.draft(changes={"rollout.group_size": 16})
        spoil(site, draft_id)
        site.mark()
        answer = await site.call("get_config", draft_id=draft_id)
        names = ("index.db",) if "row" not in title else (draft_id,)
        yield answer, Expected(names, cause, remedy)

    return Case(_INDEX, title, play, own=True)


def _rewrite(content: bytes) -> Callable[[Installation, str], None]:
    def spoil(site: Installation, _: str) -> None:
        for path in site.home.glob("index.db-*"):
            path.unlink()
        (site.home / "index.db").write_bytes(content)

    return spoil


def _cut(site: Installation, _: str) -> None:
    with sqlite3.connect(site.home / "index.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = (site.home / "index.db").read_bytes()
    _rewrite(content[:5000])(site, _)


def _foreign(site: Installation, _: str) -> None:
    _rewrite(b"")(site, _)
    with sqlite3.connect(site.home / "index.db") as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")


def _newer(site: Installation, _: str) -> None:
    with sqlite3.connect(site.home / "index.db") as db:
        db.execute("PRAGMA user_version = 99")


def _a_folder(site: Installation, _: str) -> None:
    for path in site.home.glob("index.db*"):
        path.unlink()
    (site.home / "index.db").mkdir()


def _row(column: str, value: str, table: str = "drafts") -> Callable[[Installation, str], None]:
    def spoil(site: Installation, draft_id: str) -> None:
        key = "id" if table == "drafts" else "draft_id"
        with sqlite3.connect(site.home / "index.db") as db:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (value, draft_id))

    return spoil


_ASIDE = ("toprope doctor --repair",)
_INDEXES = [
    _index("a file of garbage", _rewrite(b"garbage" * 1000), ("is damaged",), _ASIDE),
    _index("a file that was cut off", _cut, ("is damaged",), _ASIDE),
    _index("somebody else's database", _foreign, ("not an index of Toprope",), _ASIDE),
    _index("the index of a newer version", _newer, ("newer version",), ("Update Toprope",)),
    _index("a folder in its place", _a_folder, ("cannot be used", "is damaged"), ("Check", *_ASIDE)),
    _index("a draft's row that is not JSON", _row("config", "{"), ("cannot be read",), ("select_environment",)),
    _index("a draft's row with other fields", _row("config", '{"a": 1}'), ("cannot be read",), ("select_environment",)),
    _index("a draft's row that is a list", _row("config", "[]"), ("cannot be read",), ("select_environment",)),
    _index("a draft's row with odd knobs", _row("knobs", '[{"x": 1}]'), ("cannot be read",), ("select_environment",)),
    _index("a draft's row with knobs of text", _row("knobs", '"x"'), ("cannot be read",), ("select_environment",)),
    _index(
        "a draft's row without its environment",
        _row("environment", "null"),
        ("cannot be read",),
        ("select_environment",),
    ),
    _index(
        "an invalid row of edits",
        _row("changes", '[{"y": 2}]', "edits"),
        ("cannot be read",),
        ("select_environment",),
    ),
]


async def _index_locked(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    draft_id = await site.draft()
    site.mark()
    db = sqlite3.connect(site.home / "index.db", isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    answer = await site.call("edit_config", draft_id=draft_id, changes={"budget.steps": 7})
    db.execute("ROLLBACK")
    db.close()
    yield answer, Expected(("index.db", "Nothing was changed"), ("stayed locked",), ("Call again",))


async def _index_removed(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    draft_id = await site.draft()
    for path in site.home.glob("index.db*"):
        path.unlink()
    site.mark()
    answer = await site.call("edit_config", draft_id=draft_id, changes={"budget.steps": 7})

    def empty_index(key: str) -> bool:
        return key == "index"

    yield answer, Expected((draft_id,), ("no draft",), ("select_environment",), may=empty_index)


async def _bad_draft_among_good(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    """One unreadable row must not hide the others."""
    bad, good = await site.draft(), await site.draft()
    _row("config", "{")(site, bad)
    site.mark()
    answer = await site.call("get_config")
    yield answer, Expected(("draft_id", good), ("is missing",), (good,))


async def _stamp_spoiled(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    ended_run(site)
    await site.good("check_status", run_ids=["old-run"])
    with sqlite3.connect(site.home / "index.db") as db:
        db.execute("UPDATE stamps SET snapshot = '['")
    site.mark()
    answer = await site.call("check_status", run_ids=["old-run"])
    yield answer, Expected(("index.db",), ("is damaged",), _ASIDE)


async def _two_servers(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    """Two servers edit one draft, one of them wrongly: the valid edits are all kept, the wrong one is refused."""
    from benchmarks.wrong_inputs.installation import ask

    draft_id = await site.draft()
    async with site.another("legacy") as other:
        for number in range(5):
            await ask(other, "edit_config", {"draft_id": draft_id, "changes": {"budget.steps": 100 + number}})
            await site.good("edit_config", draft_id=draft_id, changes={"optimizer.warmup_steps": number})
        site.mark()
        answer = await ask(other, "edit_config", {"draft_id": draft_id, "changes": {"budget.steps": "many"}})
        revision = (await site.good("get_config", draft_id=draft_id))["revision"]
        if revision != 11:
            answer = Answer(f"ten edits by two servers made revision {revision}", True, protocol_error=True)
        yield answer, Expected(("budget.steps", "many", "Nothing was changed"), ("whole number",), ("<= 10000000",))


# Run folders


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "list_runs": {},
    "check_status": {"run_ids": ["old-run"]},
    "read_logs": {"run_id": "old-run", "component": "trainer"},
    "get_results detailed": {"run_id": "old-run", "detail": "detailed"},
}
_LOOK = ("check_status", "read_logs(", "list_runs", "The owner")


def _damage(folder: RunFolder, how: dict[str, Any]) -> None:
    """Damage a run's folder as a row of states.yaml says."""
    for name, content in how.get("write", {}).items():
        (folder.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if "status" in how:
        folder.status.write_text(json.dumps(json.loads(folder.status.read_text()) | how["status"]))
    if "remove" in how:
        (folder.path / how["remove"]).unlink()
    if "place" in how:
        shutil.rmtree(folder.path)
        folder.path.mkdir() if how["place"] == "folder" else folder.path.write_text("not a folder")
    if "log" in how:
        folder.log("trainer").unlink()
        folder.log("trainer").mkdir()


def _run(
    title: str,
    tool: str,
    how: dict[str, Any],
    names: str | list[str],
    cause: str | list[str],
    remedy: str | list[str],
    accepted: str = "",
) -> Case:
    async def play(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
        _damage(ended_run(site), how)
        await site.connect()
        site.mark()
        answer = await site.call(tool.split()[0], **_ARGUMENTS.get(tool, {"run_id": "old-run"}))

        def kept(key: str) -> bool:
            """True for a file or row that a reader keeps, to answer sooner the next time."""
            if tool.startswith("get_results"):
                return key.endswith("/old-run/explanation.json")
            return tool == "check_status" and (key.startswith("row stamps") or key == "index")

        remedies = tuple(part for text in texts(remedy) for part in (_LOOK if text == "$look" else (text,)))
        yield answer, Expected(texts(names), texts(cause), remedies, not accepted, may=kept)

    return Case(_RUN, title, play, own=True)


CASES: list[Case] = [
    *_INDEXES,
    Case(_INDEX, "another process holds it", _index_locked, own=True, slow=True),
    Case(_INDEX, "it is removed under a live server", _index_removed, own=True),
    Case(_INDEX, "one draft that cannot be read among good ones", _bad_draft_among_good, own=True),
    Case(_INDEX, "a status stamp that is not JSON", _stamp_spoiled, own=True),
    Case(_INDEX, "two servers, one draft, one wrong edit", _two_servers, own=True),
    *(_run(*row) for row in read_table("states")),
]
