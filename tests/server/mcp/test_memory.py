"""The tools of memory through a client: their arguments arrive, their answers are typed, their failures help."""

import anyio
import msgspec
import pytest
from mcp.client import Client
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role

from tests.support.journal_rollouts import group
from tests.support.tools_house import make_workshop
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.marks import GroupNote


@pytest.fixture
def shop(tmp_path):
    made, launcher = make_workshop(tmp_path)
    yield made
    launcher.close()


def played(shop, play):
    async def work():
        with anyio.fail_after(120):
            async with Client(TopropeServer(lambda: shop)) as client:

                async def call(tool, **arguments):
                    answer = await client.call_tool(tool, arguments)
                    return answer.content[0].text, answer.structured_content, bool(answer.is_error)

                return await play(call)

    return anyio.run(work)


def test_experiment_from_fork_to_handoff(shop):
    async def play(call):
        draft = (await call("select_environment", name="sort_letters"))[1]["draft_id"]
        await call("edit_config", draft_id=draft, changes={"budget.steps": 30})
        run = (await call("start_training", draft_id=draft))[1]["run_id"]
        journal = FileJournal(shop.runs.folder(run).journal)
        journal.append(msgspec.json.encode(group(1, [0.0, 1.0], "abc", answers=["no", "yes"])), GroupNote(rows=2))
        journal.close()

        text, page, _ = await call("browse_rollouts", run_id=run, order="best", part="exact")
        assert page["groups"][0]["rollouts"][0]["reward"] == 1.0 and "«yes»" in text and "«no»" not in text
        text, forked, _ = await call("fork_config", run_id=run)
        text, _, _ = await call("get_config", draft_id=forked["draft_id"])
        assert f"It began with the configuration of {run}." in text
        text, found, _ = await call("diff_config", a=forked["draft_id"], b=f"{draft}@1")
        assert found["fields"] == [{"field": "budget.steps", "a": 30, "b": 2400}]
        text, undone, _ = await call("undo_edit", draft_id=draft, revision="1")
        assert undone["changed"] == [{"field": "budget.steps", "a": 30, "b": 2400}]
        text, noted, _ = await call("note_experiment", hypothesis="thirty steps do", run_ids=run, goal="0.9")
        assert noted["experiment"]["runs"] == [run]
        text, handed, _ = await call("get_handoff")
        assert handed["live_runs"] == [run] and "thirty steps do" in text

    played(shop, play)


def test_wrong_calls_name_value_and_next_step(shop):
    async def play(call):
        for tool, arguments, words in (
            ("browse_rollouts", {"run_id": "../etc"}, ("../etc", "list_runs", "no run")),
            ("browse_rollouts", {"run_id": "x", "order": "fastest"}, ("fastest", "most_changed")),
            ("fork_config", {"run_id": "run-none"}, ("run-none", "list_runs", "Nothing was changed")),
            ("diff_config", {"a": "preset ../../locks"}, ("../../locks", "preset")),
            ("undo_edit", {"draft_id": "draft-none", "revision": 1}, ("draft-none", "Nothing was changed")),
            ("undo_edit", {"draft_id": "draft-none", "revision": 0}, ("0", "at least 1")),
            ("reproduce_run", {"run_id": "run-none"}, ("run-none", "Nothing was changed")),
            ("note_experiment", {"hypothesis": "h"}, ("run_ids", "Nothing was changed")),
            ("note_experiment", {"experiment_id": "exp-none"}, ("exp-none", "Nothing was changed")),
            ("get_handoff", {"run_id": "x"}, ("run_id", "no argument")),
        ):
            text, _, failed = await call(tool, **arguments)
            assert failed and all(word in text for word in words), (tool, text)
            assert "unexpectedly" not in text and "Traceback" not in text

    played(shop, play)


def test_reproduce_run_needs_run_toolset(shop):
    async def listed(sets):
        async with Client(TopropeServer(lambda: shop, role=Role.of(sets=sets))) as client:
            return {tool.name for tool in (await client.list_tools()).tools}

    plan, run, read = (anyio.run(listed, sets) for sets in ("plan", "run", "read"))
    assert "reproduce_run" in run and "reproduce_run" not in plan | read
    assert {"fork_config", "undo_edit", "note_experiment"} <= plan - run - read
    assert {"browse_rollouts", "diff_config", "get_handoff"} <= read
