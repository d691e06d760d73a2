"""Waiting for what one asked for, with a place of one's own in the events: conditions, cursors, clients' patience."""

import time

import anyio
import pytest
from mcp.client import Client as McpClient
from mcp.types import Implementation
from toprope_server.cli.runs.prune import main as prune
from toprope_server.mcp.app import TopropeServer
from toprope_tools.answers.answer import TOKEN_BUDGET, sent, tokens
from toprope_tools.clients import Client
from toprope_tools.status.run_list import list_runs
from toprope_tools.status.status import check_status

from tests.support.tools_house import age_stamp, become, do, make_workshop, start_run, step
from toprope.errors import InvalidValue
from toprope.records.index.stamps import read_stamps
from toprope.records.run.status import EventLog, Failure, Finding

PATIENT = Client("claude-code")


@pytest.fixture
def house(house):
    shop, _ = house
    return shop, lambda: start_run(shop)


def check(shop, *folders, acts=(), **named):
    """One call of check_status; `acts` are done one after the other meanwhile."""
    left = list(acts)

    async def act():
        while left:
            await anyio.sleep(0.6)  # a look or two between them
            left.pop(0)()

    async def work():
        ids = [folder.run_id for folder in folders] or None
        with anyio.fail_after(60):
            if not left:
                return await check_status(shop, run_ids=ids, **named)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(act)
                answer = await check_status(shop, run_ids=ids, **named)
                assert not left
        return answer

    answer = anyio.run(work)
    assert tokens(answer) <= TOKEN_BUDGET
    return answer


def event(folder, kind, **data):
    return lambda: EventLog(folder).append(kind, **data)


def kinds(answer, number=0):
    run = answer.data.runs[number]
    return ["state" for _ in run.states] + [one["kind"] for one in run.events]


def met(answer):
    return [(one.run_id, one.condition) for one in answer.data.met]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("evalution", ["Did you mean 'evaluation'?", "'step N'", "paused"]),
        ("step", ["'step 200'"]),
        ("step -3", ["end, evaluation, finding, stall"]),
        ("", ["training"]),
        ("reward > 0.5", ["omit until"]),
    ],
)
def test_unknown_condition_is_refused_with_valid_ones(house, word, parts):
    with pytest.raises(InvalidValue) as refused:
        check(house[0], until=[word])
    for part in parts:
        assert part in str(refused.value)


def test_wait_for_step_keeps_the_limit_on_fresh_numbers(house):
    shop, start = house
    folder = start()
    step(folder, 1)
    check(shop, folder)
    answer = check(
        shop,
        folder,
        wait_s=30,
        until=["step 40", "failed"],
        acts=[event(folder, "evaluation", label="step-3", summary={"accuracy": 0.5}), lambda: step(folder, 41)],
    )
    assert met(answer) == [(folder.run_id, "step 40")]
    assert f"Met: step 40 by {folder.run_id}." in answer.text
    assert kinds(answer) == ["evaluation"]
    assert answer.data.runs[0].numbers["step"] == 1
    assert "step 41" not in answer.text


@pytest.mark.parametrize("word", ["evaluation", "finding", "stall", "paused", "end"])
def test_each_condition_is_met_by_its_own_event_only(house, word):
    shop, start = house
    folder = start()
    step(folder, 1)
    check(shop, folder)
    found = Finding(rule="collapse", level="critical", what="The reward fell.", next="Lower the learning rate.")
    over = found.model_copy(update={"level": "over"})
    acts = {
        "evaluation": event(folder, "evaluation", label="step-1", summary={"accuracy": 0.25, "tasks": 8}),
        "finding": event(folder, "finding", **found.model_dump(mode="json")),
        "stall": event(folder, "stall", what="No step for 310 s.", component="trainer"),
        "paused": lambda: become(folder, "paused"),
        "end": lambda: become(folder, "failed", failure=Failure(component="api", reason="x"), ended_at=time.time()),
    }
    own = acts.pop(word)
    acts.pop("end", None)  # the end ends every wait
    event(folder, "finding", **over.model_dump(mode="json"))()
    answer = check(shop, folder, wait_s=30, until=[word], acts=[lambda: [act() for act in acts.values()], own])
    assert met(answer) == [(folder.run_id, word)]
    assert f"Met: {word} by" in answer.text
    if word == "finding":
        assert "new: finding collapse (critical): The reward fell. Next: Lower the learning rate." in answer.text
        assert "collapse is over" not in answer.text  # replaced by the newer event


def test_any_of_several_runs_ends_the_wait(house):
    shop, start = house
    first, second = start(), start()
    for folder in (first, second):
        step(folder, 1)
    check(shop, first, second)
    answer = check(shop, first, second, wait_s=30, until=["step 5"], acts=[lambda: step(second, 5)])
    assert met(answer) == [(second.run_id, "step 5")]


def test_wait_for_all_continues_after_one_end(house):
    shop, start = house
    first, second = start(), start()
    for folder in (first, second):
        step(folder, 1)

    def end(folder, state):
        return lambda: become(folder, state, ended_at=time.time())

    answer = check(shop, first, second, wait_s=1, until=["all ended"], acts=[end(first, "completed")])
    assert met(answer) == [] and "Until: not met" in answer.text
    answer = check(shop, first, second, wait_s=30, until=["all ended"], acts=[end(second, "failed")])
    assert met(answer) == [(second.run_id, "all ended")]


def test_wait_for_all_ends_at_failure_if_asked(house):
    shop, start = house
    first, second = start(), start()
    for folder in (first, second):
        step(folder, 1)
    failed = [lambda: become(first, "failed", ended_at=time.time())]
    answer = check(shop, first, second, wait_s=30, until=["all ended", "failed"], acts=failed)
    assert met(answer) == [(first.run_id, "failed")]


@pytest.mark.parametrize("until", [["end"], ["all ended", "failed"], ["step 1"]])
def test_reported_end_is_not_met_again_while_others_live(house, until):
    shop, start = house
    first, second = start(), start()
    step(first, 1)
    become(first, "failed", ended_at=time.time())
    told = check(shop, first, second, wait_s=30, until=until)
    assert first.run_id in {run_id for run_id, _ in met(told)}
    event(first, "end", state="failed")()
    again = check(shop, first, second, wait_s=0.5, until=until, cursor=told.data.cursor)
    assert met(again) == [] and "Until: not met" in again.text
    ends = [lambda: become(second, "completed", ended_at=time.time())]
    last = check(shop, first, second, wait_s=30, until=["end"], cursor=again.data.cursor, acts=ends)
    assert second.run_id in {run_id for run_id, _ in met(last)}


def test_state_passed_on_the_way_is_met(house):
    shop, start = house
    folder = start()
    step(folder, 1)
    become(folder, "evaluating")
    assert met(check(shop, folder, wait_s=20, until=["training"])) == [(folder.run_id, "training")]


def test_end_of_run_ends_wait_and_names_unmet_conditions(house):
    shop, start = house
    folder = start()
    step(folder, 1)
    answer = check(shop, folder, wait_s=0.3, until=["step 50"])
    assert answer.data.met == []
    assert "Until: not met in 0 s." in answer.text
    assert 'until=["step 50"], cursor=' in answer.text.splitlines()[-1]
    ended = check(
        shop, folder, wait_s=30, until=["step 50"], acts=[lambda: become(folder, "stopped", ended_at=time.time())]
    )
    assert ended.data.met == []
    assert ended.data.runs[0].state == "stopped"


def test_unmet_condition_of_ended_run_is_not_told_as_long_wait(house):
    shop, start = house
    folder = start()
    become(folder, "stopped", ended_at=time.time())
    answer = check(shop, folder, wait_s=45, until=["step 200"])
    assert "Until: not met before the end." in answer.text and "45 s" not in answer.text


def test_next_wait_leaves_out_conditions_that_stay_met(house):
    shop, start = house
    folder = start()
    step(folder, 60)
    event(folder, "evaluation", label="a", summary={"accuracy": 0.1})()
    answer = check(shop, folder, wait_s=20, until=["training", "step 50", "step 90", "evaluation"])
    assert {name for _, name in met(answer)} == {"training", "step 50", "evaluation"}
    assert 'until=["step 90", "evaluation"]' in answer.text.splitlines()[-1]
    following = check(shop, folder, wait_s=0.3, until=["step 90", "evaluation"], cursor=answer.data.cursor)
    assert met(following) == []
    alone = check(shop, folder, wait_s=20, until=["training"])
    assert "until" not in alone.text.splitlines()[-1]


def test_two_callers_with_cursors_each_get_every_event_once(house, tmp_path):
    shop, start = house
    folder = start()
    step(folder, 1)
    one = check(shop, folder).data.cursor
    two = one
    event(folder, "evaluation", label="a", summary={"accuracy": 0.1})()
    answer = check(shop, cursor=one)
    assert kinds(answer) == ["evaluation"]
    one = answer.data.cursor
    assert kinds(check(shop, folder)) == []  # without a cursor: told already, to somebody
    event(folder, "warning", what="hot")()
    other, launcher = make_workshop(tmp_path)  # another server, later
    assert kinds(check(other, folder, cursor=two)) == ["evaluation", "warning"]
    assert kinds(check(other, folder, cursor=one)) == ["warning"]
    assert kinds(check(other, folder, cursor=f"{folder.run_id}:0"))[0] == "state"
    launcher.close()


def test_more_events_than_an_answer_holds_come_page_by_page(house):
    shop, start = house
    folder = start()
    step(folder, 1)
    seen, cursor = [], check(shop, folder).data.cursor
    for number in range(45):
        event(folder, "evaluation", label=f"step-{number}", summary={"accuracy": 0.5})()
    become(folder, "completed", ended_at=time.time())
    for _ in range(5):
        answer = check(shop, cursor=cursor, wait_s=5)
        seen += [one["data"]["label"] for one in answer.data.runs[0].events]
        if not answer.data.runs[0].events_left:
            break
        cursor = answer.text.partition('after these: cursor="')[2].partition('"')[0]
    assert seen == [f"step-{number}" for number in range(45)]


def test_large_events_stay_within_budget_and_none_is_lost(house):
    shop, start = house
    folders = [start() for _ in range(6)]
    for folder in folders:
        step(folder, 1)
    cursor = check(shop, *folders).data.cursor
    for folder in folders:
        for number in range(30):
            event(folder, "warning", what=f"{number} " + "x" * 700)()
    first = check(shop, cursor=cursor)
    kept = len(first.data.runs[0].events)
    assert 0 < kept < 30
    again = check(shop, cursor=first.data.cursor)
    assert again.data.runs[0].events[0]["data"]["what"].startswith(f"{kept} ")


def test_reported_end_does_not_end_next_wait(house):
    shop, start = house
    ended, live = start(), start()
    step(live, 1)
    become(ended, "failed", failure=Failure(component="api", reason="x"), ended_at=time.time())
    first = check(shop, ended, live, wait_s=20)
    assert first.data.runs[0].state == "failed"
    event(ended, "end", state="failed")()  # the last event comes a little after the state
    began = time.monotonic()
    second = check(shop, ended, live, wait_s=1.0, cursor=first.data.cursor)
    assert time.monotonic() - began >= 0.9
    assert second.data.runs[0].state == "failed"
    only = check(shop, ended, wait_s=20, cursor=first.data.cursor)
    assert only.data.runs[0].state == "failed"


def test_findings_that_follow_from_another_are_one_line(house):
    shop, start = house
    folder = start()
    step(folder, 1)
    cursor = check(shop, folder).data.cursor
    cause = {"rule": "learning_rate_high", "what": "Too high.", "next": "lower it", "changes": {"optimizer.lr": 1}}
    event(folder, "finding", **cause, level="warning", step=4)()
    event(folder, "finding", **cause, level="critical", step=5)()
    for rule in ("collapse", "all_wrong"):
        event(folder, "finding", rule=rule, level="critical", what="Long.", follows="learning_rate_high", step=6)()
    answer = check(shop, cursor=cursor, wait_s=5)
    assert "from learning_rate_high follow collapse (critical), all_wrong (critical)" in answer.text
    assert "Long." not in answer.text and answer.text.count("Too high.") == 1
    events = sent(answer.data)["runs"][0]["events"]
    assert [one["data"]["rule"] for one in events] == ["learning_rate_high", "collapse", "all_wrong"]
    assert events[0]["data"] == {
        "rule": "learning_rate_high", "level": "critical", "step": 5, "changes": {"optimizer.lr": 1}
    }  # fmt: skip


def test_cursor_ahead_of_run_is_refused(house):
    shop, start = house
    folder = start()
    become(folder, "validating")
    with pytest.raises(InvalidValue, match="has 1 events so far, not 7"):
        check(shop, cursor=f"{folder.run_id}:7")


def test_places_of_other_runs_stay_in_the_cursor(house):
    shop, start = house
    folder = start()
    become(folder, "validating")
    answer = check(shop, folder, cursor="elsewhere:3")
    assert answer.data.cursor == f"elsewhere:3,{folder.run_id}:1"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(("name", "wait_s"), [("claude-code", 900), ("claude-ai", 45), ("my-agent", 600)])
def test_client_is_known_by_its_name_in_both_eras(house, mode, name, wait_s):
    shop, start = house
    folder = start()
    step(folder, 1)
    shop.home.settings_file.write_text("status: {waits: {my-agent: 600}}")

    async def main():
        info = Implementation(name=name, version="2.1.0")
        with anyio.fail_after(30):
            async with McpClient(TopropeServer(lambda: shop), mode=mode, client_info=info) as client:
                return await client.call_tool("check_status", {"run_ids": [folder.run_id]})

    assert f"check_status(wait_s={wait_s}, cursor=" in anyio.run(main).content[0].text


def test_longer_wait_is_cut_and_the_answer_says_so(house):
    shop, start = house
    folder = start()
    step(folder, 1)
    check(shop, folder)
    shop.home.settings_file.write_text("status: {waits: {hasty: 0.4}}")
    began = time.monotonic()
    answer = check(shop, folder, wait_s=3000, client=Client("hasty"))
    assert time.monotonic() - began < 20
    assert "the client's limit" in answer.text
    assert "wait_s=900" in check(shop, folder, client=PATIENT).text


def test_unchanged_numbers_are_no_news(house):
    shop, start = house
    folder = start()
    step(folder, 4)
    check(shop, folder)
    age_stamp(shop, folder.run_id, 60)
    answer = check(shop, folder, wait_s=0.3)
    assert answer.text.startswith("No news in 0 s.")
    assert len(answer.text.split("\n")) == 1


def test_progress_grows_with_every_message(house):
    shop, start = house
    folder = start()
    told = []

    async def progress(done, total, message):
        told.append(done)
        state = ["validating", "starting", "stopped"][min(len(told) - 1, 2)]
        become(folder, state, ended_at=time.time())  # it counts once the state is an ended one

    async def work():
        with anyio.fail_after(40):
            await check_status(shop, run_ids=[folder.run_id], wait_s=20, progress=progress)

    anyio.run(work)
    assert len(told) >= 3 and told == sorted(set(told))


def test_list_continues_after_last_run_of_page_ended(house):
    shop, start = house
    for _ in range(22):
        start()
    first = anyio.run(lambda: list_runs(shop, state="live"))
    assert len(first.data.runs) == 20
    last = shop.runs.folder(first.data.runs[-1].run_id)
    become(last, "failed", ended_at=time.time())
    second = anyio.run(lambda: list_runs(shop, state="live", cursor=first.data.next_cursor))
    known = {run.run_id for run in first.data.runs}
    assert len(second.data.runs) == 2
    assert known.isdisjoint(run.run_id for run in second.data.runs)


def test_stamps_belong_to_existing_runs(house):
    shop, start = house
    folder = start()
    with pytest.raises(Exception, match="no run"):
        anyio.run(lambda: check_status(shop, run_ids=["no-such-run"]))
    check(shop, folder)
    assert set(read_stamps(shop.index, ["no-such-run", folder.run_id])) == {folder.run_id}
    other = start()
    check(shop, other)
    become(folder, "failed", ended_at=time.time())
    shop.runs.launcher.leave(folder.run_id)
    prune(shop, older_than="0m", keep=None, delete=True)
    assert set(read_stamps(shop.index, [folder.run_id, other.run_id])) == {other.run_id}


def test_runs_without_news_are_named_in_one_line(house):
    shop, start = house
    folders = [start() for _ in range(5)]
    ids = [folder.run_id for folder in folders]
    first = do(check_status, shop, run_ids=ids)
    assert f"{ids[0]}: queued" in first.text and "Without news: 4 queued." in first.text
    step(folders[0], 3)
    answer = do(check_status, shop, run_ids=ids, cursor=first.data.cursor)
    assert f"{ids[0]}: training" in answer.text and "Without news: 4 queued." in answer.text
    told = sent(answer.data)
    assert "step 3/" in answer.text and [run["run_id"] for run in told["runs"]] == ids[:1]
    assert told["unchanged"] == {"queued": 4}
    assert "environment" not in told["runs"][0] and "kind" not in told["runs"][0]  # told before
    event(folders[0], "finding", rule="low", level="warning", what="x" * 300, changes={"optimizer.learning_rate": 1})()
    answer = do(check_status, shop, run_ids=ids, cursor=answer.data.cursor)
    assert "new: low (warning: optimizer.learning_rate to 1)" in answer.text and "xxx" not in answer.text
    event(folders[0], "finding", rule="fall", level="critical", what="x", follows="low")()
    event(folders[0], "finding", rule="low", level="over", what="x")()
    answer = do(check_status, shop, run_ids=ids, cursor=answer.data.cursor)
    assert "new: fall (critical, from low); low (over)" in answer.text
    assert " ago)." in answer.text and "Next: check_status(wait_s=45, cursor=" in answer.text  # it did not wait
    answer = do(check_status, shop, cursor=answer.data.cursor, wait_s=0.1)
    assert f'same call, cursor="{answer.data.cursor}"' in answer.text
    again = do(check_status, shop, run_ids=ids, cursor=answer.data.cursor, wait_s=0.1)
    assert "Next: check_status(wait_s=45, cursor=" in again.text  # the cursor names the runs
    event(folders[0], "finding", rule="low", level="warning", what="x")()
    two = ",".join(again.data.cursor.split(",")[:2])
    few = do(check_status, shop, cursor=two, wait_s=0.1)
    assert "queued" not in few.text and sent(few.data)["unchanged"] == {"queued": 1}, "it was told before"
    become(folders[0], "completed")
    assert "Ended: get_results(" in do(check_status, shop, cursor=two, wait_s=0.1).text
    waits_on = do(check_status, shop, cursor=two, wait_s=0.1, until=["all ended"])
    assert f"{ids[0]}: completed" in waits_on.text and "get_results" not in waits_on.text
