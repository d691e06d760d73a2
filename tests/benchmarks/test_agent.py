"""The counts of `make bench-agent`: bytes, polls, and the parts of a poll."""

from __future__ import annotations

import time

import anyio
import pytest

from benchmarks.agent.counts import Exchange, Poll, compact, figures, polls_needed
from benchmarks.agent.polls import Poller, full_status
from tests.support.tools_house import become, make_workshop, start_run, step
from toprope.records.run.status import Status


@pytest.fixture
def house(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    yield shop
    launcher.close()


def at_work(shop, ago=0.0):
    """A run that left the queue so many seconds ago."""
    folder = start_run(shop)
    step(folder, 1)
    become(folder, "training", started_at=time.time() - ago)
    return folder


def test_a_call_is_counted_with_its_request_and_both_forms_of_its_answer():
    made = Exchange.of("check_status", {"wait_s": 45}, "grün", {"state": "training"}, wait=True)
    assert made.request == len('{"name":"check_status","arguments":{"wait_s":45}}')
    assert (made.text, made.structure) == (5, len('{"state":"training"}'))
    assert made.all == made.request + made.answer == made.request + 5 + made.structure
    assert Exchange.of("stop_training", {}, "refused", None, wait=False).structure == 0


def test_the_ratios_put_polls_in_the_place_of_waits_and_nothing_else():
    ours = [Exchange("start_training", 40, 400, 360), Exchange("check_status", 40, 300, 260, wait=True)]
    unknown = [Exchange("check_status", 40, 100, 60, wait=True)] * 2
    polls = [Poll("a", 40, {"status": 360, "logs": 2000}, detailed=1160)] * 4
    found = figures(ours, unknown, polls)
    assert (found["calls"], found["polls"], found["waits"]) == (2, 4, 1)
    assert found["calls_ratio"] == 2.5  # (1 + 4) / 2
    assert found["calls_ratio_unknown_client"] == 1.67  # (1 + 4) / (1 + 2)
    assert found["tokens_ratio"] == 7.43  # (800 + 4 * 2400) / 1400
    assert found["tokens_ratio_polls_without_logs"] == 1.71  # (800 + 4 * 400) / 1400
    assert found["tokens_ratio_polls_detailed_results"] == 4.0  # (800 + 4 * 1200) / 1400
    assert found["tokens_ratio_text_only"] == 12.87  # (440 + 4 * 2400) / 780
    assert (found["tokens"], found["tokens_polling"], found["largest_answer_tokens"]) == (350, 2600, 190)
    assert found["poll_tokens_by_part"] == {"status": 360, "logs": 2000}


def test_a_life_needs_a_poll_for_every_interval_that_began():
    assert [polls_needed(seconds) for seconds in (0.5, 30.0, 30.1, 119.0, 121.0)] == [1, 1, 2, 4, 5]


def test_a_poll_is_what_the_folder_holds_at_that_moment(house):
    folder = at_work(house)
    folder.log("trainer").write_text("".join(f"line {number}\n" for number in range(50)))
    folder.metrics.write_text("".join(f'{{"step": {number}, "reward": 0.5}}\n' for number in range(1, 31)))
    found = full_status(folder)
    assert found["status"] == compact(Status.read(folder).model_dump(mode="json"))
    assert found["numbers"] == compact({"step": 30, "reward": 0.5})
    assert found["logs"].count(b"line ") == 20 and b"line 49" in found["logs"]
    assert found["events"].count(b'"seq"') >= 1


def test_runs_at_work_are_polled_every_thirty_seconds_until_one_poll_sees_the_end(house):
    working, queued = at_work(house), start_run(house)
    began = Status.read(working).started_at
    asked = []

    async def detailed(run_id):
        asked.append(run_id)
        return 100

    poller = Poller(house.home.runs, detailed)
    poller.follow(working.run_id, queued.run_id)
    polled = []

    async def follow():
        for at in (1, 29, 31, 45, 61):
            await poller.turn(began + at)
            polled.append(len(poller.polls))
        become(working, "completed", ended_at=began + 70)
        await poller.rest_of([working.run_id])

    anyio.run(follow)
    assert polled == [0, 0, 1, 1, 2]
    assert len(poller.polls) == polls_needed(70) == 3
    assert asked == [working.run_id] * 3
    assert poller.lives == {working.run_id: pytest.approx(70)}


def test_a_run_that_is_stopped_is_polled_to_what_made_its_agent_stop_it(house):
    folder = at_work(house, ago=20)
    poller = Poller(house.home.runs)
    poller.follow(folder.run_id)
    anyio.run(poller.last_of, folder.run_id)
    assert [poll.run_id for poll in poller.polls] == [folder.run_id]
    assert poller.lives[folder.run_id] == pytest.approx(20, abs=15)
    anyio.run(poller.turn, time.time() + 300)
    assert len(poller.polls) == 1
