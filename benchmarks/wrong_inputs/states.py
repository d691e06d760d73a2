"""What lies on disk is not what was written there: the index and run folders.

Nothing of it is mended behind the owner's back: the answer names the file and what is wrong with it, and the file stays
as it is.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks.wrong_inputs.house import Case, Expected, House, Told
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import Status
from toprope.settings.schema import Config

__all__ = ["CASES", "ended_run"]

_INDEX, _RUN = "the index and drafts", "a run's folder"


def ended_run(house: House, run_id: str = "old-run", **fields: Any) -> RunFolder:
    """A run that ended, as a keeper would have left it."""
    folder = RunFolder.create(house.home / "runs", run_id)
    now = time.time()
    Specification(
        run_id=run_id,
        kind="train",
        created_at=now,
        toprope_version="0",
        environment=EnvironmentSource(name="sort_letters"),
        config=Config(),
        policy_cache=str(house.home / "policies"),
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


def _index(title: str, spoil: Callable[[House, str], None], cause: tuple[str, ...], remedy: tuple[str, ...]) -> Case:
    async def play(house: House) -> AsyncIterator[tuple[Told, Expected]]:
        draft_id = await house.draft(rollout__group_size=16)
        spoil(house, draft_id)
        house.mark()
        told = await house.call("get_config", draft_id=draft_id)
        names = ("index.db",) if "row" not in title else (draft_id,)
        yield told, Expected(names, cause, remedy)

    return Case(_INDEX, title, play, own=True)


def _rewrite(content: bytes) -> Callable[[House, str], None]:
    def spoil(house: House, _: str) -> None:
        for path in house.home.glob("index.db-*"):
            path.unlink()
        (house.home / "index.db").write_bytes(content)

    return spoil


def _cut(house: House, _: str) -> None:
    with sqlite3.connect(house.home / "index.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = (house.home / "index.db").read_bytes()
    _rewrite(content[:5000])(house, _)


def _somebody_elses(house: House, _: str) -> None:
    _rewrite(b"")(house, _)
    with sqlite3.connect(house.home / "index.db") as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")


def _newer(house: House, _: str) -> None:
    with sqlite3.connect(house.home / "index.db") as db:
        db.execute("PRAGMA user_version = 99")


def _a_folder(house: House, _: str) -> None:
    for path in house.home.glob("index.db*"):
        path.unlink()
    (house.home / "index.db").mkdir()


def _row(column: str, value: str, table: str = "drafts") -> Callable[[House, str], None]:
    def spoil(house: House, draft_id: str) -> None:
        key = "id" if table == "drafts" else "draft_id"
        with sqlite3.connect(house.home / "index.db") as db:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (value, draft_id))

    return spoil


_ASIDE = ("toprope doctor --repair",)
_INDEXES = [
    _index("a file of garbage", _rewrite(b"garbage" * 1000), ("is damaged",), _ASIDE),
    _index("a file that was cut off", _cut, ("is damaged",), _ASIDE),
    _index("somebody else's database", _somebody_elses, ("not an index of Toprope",), _ASIDE),
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
        "a row of edits that is none",
        _row("changes", '[{"y": 2}]', "edits"),
        ("cannot be read",),
        ("select_environment",),
    ),
]


async def _index_locked(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    draft_id = await house.draft()
    house.mark()
    db = sqlite3.connect(house.home / "index.db", isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    told = await house.call("edit_config", draft_id=draft_id, changes={"budget.steps": 7})
    db.execute("ROLLBACK")
    db.close()
    yield told, Expected(("index.db", "Nothing was changed"), ("stayed locked",), ("Call again",))


async def _index_removed(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    draft_id = await house.draft()
    for path in house.home.glob("index.db*"):
        path.unlink()
    house.mark()
    told = await house.call("edit_config", draft_id=draft_id, changes={"budget.steps": 7})

    def empty_index(key: str) -> bool:
        return key == "index"

    yield told, Expected((draft_id,), ("no draft",), ("select_environment",), may=empty_index)


async def _bad_draft_among_good(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    """One row that cannot be read must not keep the others from being found."""
    bad, good = await house.draft(), await house.draft()
    _row("config", "{")(house, bad)
    house.mark()
    told = await house.call("get_config")
    yield told, Expected(("draft_id", good), ("is missing",), (good,))


async def _stamp_spoiled(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    ended_run(house)
    await house.good("check_status", run_ids=["old-run"])
    with sqlite3.connect(house.home / "index.db") as db:
        db.execute("UPDATE stamps SET snapshot = '['")
    house.mark()
    told = await house.call("check_status", run_ids=["old-run"])
    yield told, Expected(("index.db",), ("is damaged",), _ASIDE)


async def _two_servers(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    """Two servers edit one draft, one of them wrongly: the good edits are all kept, the wrong one is refused."""
    from benchmarks.wrong_inputs.house import ask

    draft_id = await house.draft()
    async with house.another("legacy") as other:
        for number in range(5):
            await ask(other, "edit_config", {"draft_id": draft_id, "changes": {"budget.steps": 100 + number}})
            await house.good("edit_config", draft_id=draft_id, changes={"optimizer.warmup_steps": number})
        house.mark()
        told = await ask(other, "edit_config", {"draft_id": draft_id, "changes": {"budget.steps": "many"}})
        revision = (await house.good("get_config", draft_id=draft_id))["revision"]
        if revision != 11:
            told = Told(f"ten edits by two servers made revision {revision}", True, protocol_error=True)
        yield told, Expected(("budget.steps", "many", "Nothing was changed"), ("owner",), ("at most 20000",))


# Run folders


def _run(
    title: str,
    tool: str,
    arguments: dict[str, Any],
    spoil: Callable[[RunFolder], None],
    names: tuple[str, ...],
    cause: tuple[str, ...],
    remedy: tuple[str, ...],
    refused: bool = True,
) -> Case:
    async def play(house: House) -> AsyncIterator[tuple[Told, Expected]]:
        folder = ended_run(house)
        spoil(folder)
        await house.connect()
        house.mark()
        told = await house.call(tool, **arguments)

        def stamp(key: str) -> bool:
            return key.startswith("row stamps") or key == "index"

        yield told, Expected(names, cause, remedy, refused, may=stamp if tool == "check_status" else lambda _: False)

    return Case(_RUN, title, play, own=True)


def _write(name: str, content: str | bytes) -> Callable[[RunFolder], None]:
    def spoil(folder: RunFolder) -> None:
        (folder.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def _status(**fields: Any) -> Callable[[RunFolder], None]:
    def spoil(folder: RunFolder) -> None:
        folder.status.write_text(json.dumps(json.loads(folder.status.read_text()) | fields))

    return spoil


def _without(name: str) -> Callable[[RunFolder], None]:
    return lambda folder: (folder.path / name).unlink()


def _file_in_place(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)
    folder.path.write_text("no folder")


def _empty(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)
    folder.path.mkdir()


def _log_is_a_folder(folder: RunFolder) -> None:
    folder.log("trainer").unlink()
    folder.log("trainer").mkdir()


_ONE: dict[str, Any] = {"run_id": "old-run"}
_MANY: dict[str, Any] = {"run_ids": ["old-run"]}
_LOG: dict[str, Any] = {"run_id": "old-run", "component": "trainer"}
_AS_IT_IS = ("left as it is",)
_LOOK = ("check_status", "read_logs(", "list_runs", "The owner")
_RUNS = [
    _run("status.json is garbage", "get_results", _ONE, _write("status.json", "{"), ("status.json",), _AS_IT_IS, _LOOK),
    _run(
        "status.json is a list", "stop_training", _ONE, _write("status.json", "[]"), ("status.json",), _AS_IT_IS, _LOOK
    ),
    _run(
        "status.json is no UTF-8",
        "check_status",
        _MANY,
        _write("status.json", b"\xff\xfe{"),
        ("status.json",),
        _AS_IT_IS,
        _LOOK,
    ),
    _run(
        "status.json in a list of runs",
        "list_runs",
        {},
        _write("status.json", "{"),
        ("old-run",),
        ("lost",),
        ("old-run",),
        refused=False,
    ),
    _run(
        "a status whose numbers are texts",
        "check_status",
        _MANY,
        _status(progress={"step": "many", "total_steps": [], "reward": "high"}),
        ("old-run",),
        ("completed", "left as it is"),
        ("get_results", *_LOOK),
        refused=False,
    ),
    _run(
        "a status whose evaluation is odd",
        "list_runs",
        {},
        _status(evaluations={"after": {"accuracy": "high"}, "before": {}}),
        ("old-run",),
        ("completed", "left as it is"),
        ("old-run",),
        refused=False,
    ),
    _run(
        "a status whose checkpoint is odd",
        "get_results",
        _ONE,
        _status(checkpoint={"at": 1}),
        ("old-run",),
        ("completed", "left as it is"),
        ("get_results", *_LOOK),
        refused=False,
    ),
    _run("spec.json is garbage", "get_results", _ONE, _write("spec.json", "{"), ("spec.json",), _AS_IT_IS, _LOOK),
    _run(
        "spec.json is missing", "get_results", _ONE, _without("spec.json"), ("spec.json",), ("does not exist",), _LOOK
    ),
    _run(
        "results.json is garbage", "get_results", _ONE, _write("results.json", "{"), ("results.json",), _AS_IT_IS, _LOOK
    ),
    _run(
        "results.json of something else",
        "get_results",
        _ONE,
        _write("results.json", '{"a": 1}'),
        ("results.json",),
        _AS_IT_IS,
        _LOOK,
    ),
    _run(
        "an evaluation that is none",
        "get_results",
        _ONE,
        _write("evaluations/after.json", '{"sampled": {"accuracy": "x"}}'),
        ("after",),
        _AS_IT_IS,
        _LOOK,
    ),
    _run(
        "events and metrics of garbage",
        "get_results",
        _ONE | {"detail": "detailed"},
        lambda folder: (folder.events.write_bytes(b"\xff\n[1]\n"), folder.metrics.write_bytes(b"{\n\xfe\n[]\n"))[0],
        ("old-run",),
        ("completed",),
        ("Next:",),
        refused=False,
    ),
    _run(
        "metrics of other types",
        "get_results",
        _ONE | {"detail": "detailed"},
        _write("metrics.jsonl", '{"step": 1, "reward": "high", "rollouts": {}}\n{"step": 1e400}\n'),
        ("old-run",),
        ("left as it is",),
        _LOOK,
    ),
    _run(
        "a log that is a folder", "read_logs", _LOG, _log_is_a_folder, ("trainer",), ("no log", "cannot be read"), _LOOK
    ),
    _run(
        "a component without a log", "read_logs", _LOG, _without("logs/trainer.log"), ("trainer",), ("no log",), _LOOK
    ),
    _run("a file in a run's place", "get_results", _ONE, _file_in_place, ("old-run",), ("no run",), _LOOK),
    _run(
        "an empty run folder",
        "check_status",
        _MANY,
        _empty,
        ("status.json",),
        ("does not exist",),
        _LOOK,
    ),
    _run(
        "a log of escape sequences and a binary",
        "read_logs",
        _LOG,
        _write("logs/trainer.log", b"\x1b[2J\x1b]0;title\x07plain \x00\xff\xe2\x80\xae words\n" * 50),
        ("plain",),
        ("untrusted",),
        ("Older lines", "<<<"),
        refused=False,
    ),
    _run(
        "a log of one endless line",
        "read_logs",
        _LOG,
        _write("logs/trainer.log", b"z" * 3_000_000),
        ("zzz",),
        ("untrusted",),
        ("Older lines",),
        refused=False,
    ),
]

CASES: list[Case] = [
    *_INDEXES,
    Case(_INDEX, "another process holds it", _index_locked, own=True, slow=True),
    Case(_INDEX, "it is removed under a live server", _index_removed, own=True),
    Case(_INDEX, "one draft that cannot be read among good ones", _bad_draft_among_good, own=True),
    Case(_INDEX, "a status stamp that is not JSON", _stamp_spoiled, own=True),
    Case(_INDEX, "two servers, one draft, one wrong edit", _two_servers, own=True),
    *_RUNS,
]
