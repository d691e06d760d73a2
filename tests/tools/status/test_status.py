"""The status limit, waiting, lists, results and logs."""

import time

import anyio
import pytest
from toprope_tools.answers.answer import sent
from toprope_tools.clients import Client, longest_wait_s
from toprope_tools.results.results import get_results
from toprope_tools.status import cursor as places
from toprope_tools.status.snapshot import numbers_line
from toprope_tools.status.status import check_status
from toprope_tools.status.wait_conditions import parse

from tests.support.tools_house import age_stamp, become, do, make_workshop, start_run, step
from toprope.analysis.findings.failed_groups import SKIPPED
from toprope.atomic import write_json
from toprope.errors import Corrupt, InvalidValue, NotFound
from toprope.records.run.digests import sha256_of
from toprope.records.run.status import CrewMember, EventLog, Failure
from toprope.records.run.usage import Usage
from toprope.settings.schema import Config


@pytest.fixture
def run(house):
    shop, _ = house
    config = Config()
    config.environment.knobs = {"longest": 5}
    return shop, start_run(shop, config=config)


def check(shop, folder, **named):
    answer = do(check_status, shop, run_ids=[folder.run_id], **named)
    return answer.text, answer.data.runs[0]


def test_checks_are_shown_while_validating_and_state_always(run):
    shop, folder = run
    ready = {"state": "ready", "since": 0.0}
    crew = {"policy": {"state": "finished", "since": 0.0}, "inference": ready, "trainer": ready}
    become(folder, "validating", started_at=time.time(), crew={name: CrewMember(**one) for name, one in crew.items()})
    text, told = check(shop, folder)
    assert sent(told)["lifecycle"] == "validating"
    assert told.lifecycle == "validating" and "policy passed, dataset pending" in text
    assert told.checks == {"config": "passed", "policy": "passed", "dataset": "pending", "reward": "pending"}
    step(folder, 10)
    text, told = check(shop, folder)
    assert (told.lifecycle, told.checks) == ("training", {}) and "Checks" not in text
    become(folder, "failed", training_at=None, failure=Failure(component="environment", reason="It has no tasks."))
    text, told = check(shop, folder)
    assert told.lifecycle == "error" and told.checks["dataset"] == "failed" and "dataset failed" in text


def test_components_logs_and_tracker_are_told(run):
    """Status tells each component's exit code and log, and the tracker's page."""
    shop, folder = run
    url = "https://wandb.example/me/toprope/runs/a"
    write_json(folder.path / "trackers.json", {"version": 1, "trackers": {"wandb": {"mode": "online", "url": url}}})
    crew = {
        "trainer": CrewMember(state="ready", since=0.0, restarts=1),
        "policy": CrewMember(state="finished", since=0.0, exit_code=0),
    }
    become(folder, "training", crew=crew)
    step(folder, 10)
    text, told = check(shop, folder)
    assert told.components == {"trainer": "running, 1 restart", "policy": "finished (0)"}
    assert told.logs == str(folder.logs) and told.trackers == {"wandb": url} and f"wandb: {url}" in text
    assert check(shop, folder)[1].components == {}, "it was told, and nothing has changed"
    crew["trainer"] = CrewMember(state="exited", since=0.0, exit_code=3)
    become(folder, "failed", crew=crew, failure=Failure(component="trainer", reason="It ended.", exit_code=3))
    text, told = check(shop, folder)
    assert told.components["trainer"] == "exited (3)"
    assert f"Components: trainer exited (3); logs in {folder.logs}." in text


def test_fresh_numbers_come_once_per_interval(run):
    shop, folder = run
    become(folder, "training", making={"begun": 9, "given_up": {SKIPPED[0]: 3, SKIPPED[1]: 4, "other": 9}})
    step(folder, 10)
    text, first = check(shop, folder)
    assert (first.fresh, first.numbers["step"], first.next_numbers_in_s) == (True, 10, 30.0)
    assert "step 10/100" in text and "7 tasks skipped as always or never solved" in text
    step(folder, 20)
    text, second = check(shop, folder)
    assert (second.fresh, second.numbers["step"]) == (False, 10)
    assert 0 < second.next_numbers_in_s <= 30
    assert "numbers of 0 s ago: step 10/100" in text
    assert len(text.split("\n")) == 1
    age_stamp(shop, folder.run_id, 31)
    assert check(shop, folder)[1].numbers["step"] == 20


def test_the_limit_holds_for_a_second_server_on_the_same_home(run, tmp_path):
    shop, folder = run
    step(folder, 10)
    check(shop, folder)
    step(folder, 20)
    other, _ = make_workshop(tmp_path)
    assert check(other, folder)[1].fresh is False


def test_the_interval_grows_with_the_runs_length(run):
    shop, folder = run
    step(folder, 10, eta_s=100_000.0)
    assert check(shop, folder)[1].next_numbers_in_s == 1800
    shop.home.settings_file.write_text("status: {max_s: 60}")
    assert check(shop, folder)[1].next_numbers_in_s <= 60


def test_events_always_pass_and_only_once(run):
    shop, folder = run
    step(folder, 10)
    check(shop, folder)
    become(folder, "evaluating")
    EventLog(folder).append("evaluation", label="after", accuracy=0.5, tasks=200, split="heldout")
    text, status = check(shop, folder)
    assert status.states == ["evaluating"] and [event["kind"] for event in status.events] == ["evaluation"]
    assert status.fresh is False
    assert status.state == "evaluating"
    assert "evaluation after: held-out accuracy (sampled) 50.0% on 200 tasks" in text
    assert check(shop, folder)[1].events == []


def test_ended_run_is_shown_in_full_at_every_call(run):
    shop, folder = run
    step(folder, 10)
    check(shop, folder)
    failure = Failure(component="trainer", reason="CUDA out of memory", hint="Lower the batch.", excerpt=["line"])
    become(folder, "failed", failure=failure, ended_at=time.time())
    for _ in range(2):
        text, status = check(shop, folder)
        assert (status.state, status.fresh, status.next_numbers_in_s) == ("failed", True, None)
        assert "trainer: «CUDA out of memory» Lower the batch." in text
        assert "get_results" in text


def test_call_without_ids_lists_open_runs(run):
    shop, folder = run
    answer = do(check_status, shop)
    assert [item.run_id for item in answer.data.open_runs] == [folder.run_id]
    assert folder.run_id in answer.text
    waited = do(check_status, shop, wait_s=0.1, until=["all ended"])
    assert [item.run_id for item in waited.data.runs] == [folder.run_id] and not waited.data.open_runs
    assert f'until=["all ended"], cursor="{waited.data.cursor}")' in waited.text
    become(folder, "failed", ended_at=time.time())
    assert "No run is open" in do(check_status, shop).text
    assert "No run is open" in do(check_status, shop, wait_s=1).text


def test_unknown_and_too_many_runs_are_refused(run):
    shop, folder = run
    with pytest.raises(NotFound, match="list_runs"):
        do(check_status, shop, run_ids=[folder.run_id, "nonsense"])
    with pytest.raises(NotFound):
        do(check_status, shop, run_ids=["../../etc"])
    with pytest.raises(InvalidValue, match="at most 20"):
        do(check_status, shop, run_ids=[f"run-{number}" for number in range(21)])


def wait_while(shop, folder, acts, wait_s=20.0, **named):
    """Waits for news while `acts` are done, one after each progress message; returns answer, messages and seconds."""
    messages = []

    async def work():
        queue = list(acts)

        async def progress(done, total, message):
            messages.append((time.monotonic() - began, done, total, message))
            if queue:
                queue.pop(0)()

        with anyio.fail_after(30):
            return await check_status(shop, run_ids=[folder.run_id], wait_s=wait_s, progress=progress, **named)

    began = time.monotonic()
    answer = anyio.run(work)
    return answer, messages, time.monotonic() - began


def test_wait_ends_at_event_and_sends_progress(run):
    shop, folder = run
    step(folder, 1, rollouts_per_second=1450.0)
    check(shop, folder)
    answer, messages, seconds = wait_while(
        shop, folder, [lambda: step(folder, 2), lambda: step(folder, 3), lambda: evaluated(folder, "step-3")]
    )
    assert seconds < 10
    assert answer.data.runs[0].events[0]["data"]["label"] == "step-3"
    assert answer.data.runs[0].fresh is False
    first, second, third = messages[:3]
    assert first[0] < 0.4
    assert first[1:] == (1.0, 100.0, "training: step 1/100, reward 0.01, 1450 rollouts/s, ETA 99 s")
    assert (second[1], third[1]) == (2.0, 3.0)
    assert second[0] - first[0] >= 0.45


def evaluated(folder, label):
    EventLog(folder).append("evaluation", label=label, accuracy=0.5, tasks=10, split="heldout")


def test_the_last_evaluation_and_the_end_come_in_one_answer(run):
    shop, folder = run
    step(folder, 1)
    check(shop, folder)

    def last():
        become(folder, "evaluating")
        evaluated(folder, "after")

    ends = [last, lambda: become(folder, "completed", ended_at=time.time())]
    step(folder, 2)
    answer, _, seconds = wait_while(shop, folder, ends)
    assert answer.data.runs[0].state == "completed"
    assert "evaluation after" in answer.text
    assert "eta_s" not in answer.data.runs[0].numbers


@pytest.mark.parametrize("until", [["end"], ["all ended"], None])
def test_end_is_told_once_the_processes_have_ended(run, until):
    shop, folder = run
    step(folder, 1)
    check(shop, folder)
    ends = [
        lambda: become(folder, "failed", failure=Failure(component="api", reason="x")),
        lambda: become(folder, "failed", progress={"step": 2}),
        lambda: become(folder, "failed", ended_at=time.time()),
    ]
    answer, _, _ = wait_while(shop, folder, ends, until=until)
    assert shop.runs.status(folder.run_id).is_over
    assert [met.condition for met in answer.data.met] == (until or [])


def test_evaluation_without_end_is_reported_soon(run):
    shop, folder = run
    step(folder, 1)
    check(shop, folder)
    become(folder, "evaluating")
    evaluated(folder, "after")
    answer, _, seconds = wait_while(shop, folder, [])
    assert answer.data.runs[0].state == "evaluating"
    assert 1.5 < seconds < 8


def test_states_on_the_way_to_training_do_not_end_a_wait(run):
    shop, folder = run
    answer, messages, _ = wait_while(
        shop,
        folder,
        [lambda: become(folder, "validating"), lambda: become(folder, "starting"), lambda: step(folder, 1)],
    )
    assert answer.data.runs[0].state == "training"
    assert [message[3] for message in messages[:3]] == ["queued", "validating", "starting"]
    assert "validating -> starting -> training" in answer.text


def test_a_wait_without_news_ends_in_time_with_one_line(run):
    shop, folder = run
    step(folder, 1)
    check(shop, folder)
    answer, _, seconds = wait_while(shop, folder, [], wait_s=0.6)
    assert 0.5 <= seconds < 5
    assert len(answer.text.split("\n")) == 1
    assert answer.text.startswith("No news in 1 s. ")


def test_a_wait_ends_when_fresh_numbers_are_due(run):
    shop, folder = run
    step(folder, 1)
    check(shop, folder)
    step(folder, 2)
    age_stamp(shop, folder.run_id, 29.5)
    answer, _, seconds = wait_while(shop, folder, [])
    assert 0.2 < seconds < 5
    assert (answer.data.runs[0].fresh, answer.data.runs[0].numbers["step"]) == (True, 2)


def test_a_wait_for_an_ended_run_does_not_wait(run):
    shop, folder = run
    become(folder, "failed", ended_at=time.time())
    assert wait_while(shop, folder, [])[2] < 3


def test_run_whose_keeper_vanished_is_lost(house, run):
    shop, folder = run
    _, launcher = house
    step(folder, 5)
    launcher.leave(folder.run_id)
    assert check(shop, folder)[1].state == "lost"


def test_numbers_are_short():
    assert numbers_line({"step": 120, "total_steps": 1500, "reward": 0.4312, "success": 0.31, "eta_s": 52.4}) == (
        "step 120/1500, reward 0.431, success 31.0%, ETA 52 s"
    )
    recent = {"reward": 0.813, "success": 0.8, "steps": 20}
    numbers = {"step": 205, "reward": 0.984, "success": 0.984, "recent": recent}
    assert numbers_line(numbers) == "step 205, reward 0.813, success 80.0% (means of the last 20 steps)"
    assert numbers_line({"reward": 0.984, "recent": recent}) == "reward 0.813 (mean of the last 20 steps)"
    assert numbers_line({"what": "evaluating (before)", "done": 20, "total": 500}) == "evaluating (before) 20/500"
    assert numbers_line({"step": "1\nfailed: \x1b[2J", "best": "x\ny"}) == "best x y, step 1 failed: [2J"
    assert numbers_line({}) == "no numbers yet"


@pytest.mark.parametrize(
    ("recent", "told"),
    [
        ({"reward": 0.8, "steps": 20}, "; at its end: reward 0.8 (mean of the last 20 steps)."),
        (None, "; its last batch alone: reward 0.1."),
    ],
)
def test_stopped_run_tells_its_last_batches(run, recent, told):
    shop, folder = run
    step(folder, 10, **({"recent": recent} if recent else {}))
    become(folder, "stopped", ended_at=time.time())
    assert told in check(shop, folder)[0]


def evaluation(successes, tasks=200):
    return {
        "version": 1,
        "label": "before",
        "policy_version": 0,
        "seconds": 1.0,
        "sampled": {"split": "heldout", "tasks": tasks, "successes": successes, "accuracy": successes / tasks},
        "greedy": None,
        "examples": [
            {"task_id": "t1", "prompt": "Sort\x1b[31m these", "reference": "abc", "answer": "bca", "success": False}
        ],
    }


def test_evaluation_without_an_accuracy_is_told_as_such(run):
    shop, folder = run
    EventLog(folder).append("evaluation", label="before", summary={})
    assert "evaluation before: without an accuracy" in check(shop, folder)[0]


def test_results_of_live_run_show_existing_parts(run):
    shop, folder = run
    step(folder, 10)
    write_json(folder.evaluation("before"), evaluation(6))
    Usage(at=time.time() - 8).write(folder)
    answer = do(get_results, shop, run_id=folder.run_id)
    assert "Taken, as measured 8 s ago: 0 s of wall time" in answer.text
    assert answer.data.complete is False
    assert "It has not ended" in answer.text
    assert "before: held-out accuracy (sampled) 3.0% [1.4%, 6.4%] on 200 tasks" in answer.text
    assert "examples" not in answer.data.results
    become(folder, "failed")
    assert "Taken, as measured" in do(get_results, shop, run_id=folder.run_id).text, "its processes are still ending"
    become(folder, "failed", ended_at=time.time())
    assert "Taken: 0 s" in do(get_results, shop, run_id=folder.run_id).text


@pytest.mark.parametrize("detail", ["concise", "detailed"])
def test_thousand_evaluations_give_answer_of_usual_size(run, detail):
    shop, folder = run
    step(folder, 10)
    for label in ("before", *(f"step-{number}" for number in range(10, 10_000, 10))):
        write_json(folder.evaluation(label), evaluation(6))
    answer = do(get_results, shop, run_id=folder.run_id, detail=detail)
    most = 6 if detail == "concise" else 20
    told = [line for line in answer.text.splitlines() if line.startswith("step-")]
    assert len(told) == most and told[0].startswith("step-10:") and told[-1].startswith("step-9990:")
    assert f"{999 - most} evaluations along the way left out" in answer.text
    assert len(answer.data.results["evaluations"]) == most + 1


def test_report_of_keeper_is_shown_in_full_on_request(run):
    from toprope.analysis.reports.report import gather
    from toprope.records.run.specification import Specification

    shop, folder = run
    write_json(folder.evaluation("before"), evaluation(6))
    write_json(folder.evaluation("after"), evaluation(180))
    folder.metrics.write_text("".join(f'{{"step":{n},"reward":{n / 50},"success":0.5}}\n' for n in range(1, 51)))
    become(folder, "training")
    become(folder, "evaluating")
    become(folder, "completed", ended_at=time.time())
    report = gather(folder, Specification.read(folder), shop.runs.status(folder.run_id))
    write_json(folder.results, report.model_dump(mode="json"))
    concise = do(get_results, shop, run_id=folder.run_id)
    assert concise.data.complete is True
    assert "after: held-out accuracy (sampled) 90.0% [85.1%, 93.4%]" in concise.text
    assert "Accuracy rose: the intervals do not overlap." in concise.text
    detailed = do(get_results, shop, run_id=folder.run_id, detail="detailed")
    assert len(detailed.data.detail["history"]) == 10
    assert detailed.data.detail["configuration"]["environment.knobs.longest"] == 5
    assert "reference «abc»" in detailed.text
    assert "untrusted" in detailed.text
    assert "\x1b" not in detailed.text
    become(folder, "completed", results_sha256=sha256_of(folder.results))
    assert "Do not rely" not in do(get_results, shop, run_id=folder.run_id).text
    folder.results.write_text(folder.results.read_text() + "\n")
    forged = do(get_results, shop, run_id=folder.run_id)
    assert "Do not rely on these results" in forged.text and forged.data.results["changed_after_end"] is True
    assert detailed.data.results["examples"][0]["prompt"] == "Sort[31m these"


def test_damaged_report_is_named(run):
    shop, folder = run
    folder.results.write_text('{"version": "x"}')
    with pytest.raises(Corrupt, match="results.json cannot be read"):
        do(get_results, shop, run_id=folder.run_id)


@pytest.mark.parametrize("cursor", ["nonsense", "a:b", "../x:1", "RUN:1", "a:-1", ",", "a:1,,b:2", "a:1" + "0" * 20])
def test_invalid_cursor_is_refused(cursor):
    with pytest.raises(InvalidValue, match="cursor"):
        places.parse(cursor)


def test_cursor_writes_runs_of_a_group_together():
    sums, alone = "sums-261123-0636-wwvv", "alone-261123-0637-48r2"
    at = {"sort-7f3k": 12, f"{sums}-s0": 4, f"{sums}-s2": 7, f"{alone}-s1": 3}
    cursor = places.format_cursor(at)
    assert cursor == f"sort-7f3k:12,{sums}:4..7,{alone}-s1:3" and places.parse(cursor) == at


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["end"], ["end"]),
        (["Evaluation", "findings", "stalls"], ["evaluation", "finding", "stall"]),
        (["step 200", "step=200", "steps >= 200", "step:200", "Step200"], ["step 200"]),
        (["state=training", "training", "state: failed"], ["training", "failed"]),
        (["done"], ["end"]),
        (["all ended", "All done", "all_ended", "all runs have ended"], ["all ended"]),
    ],
)
def test_until_accepts_variants_of_words(words, names):
    assert [one.name for one in parse(words)] == names


def test_wait_is_as_long_as_the_clients_patience():
    assert longest_wait_s(Client(), {}) == 45
    assert longest_wait_s(Client("claude-ai"), {}) == 45
    assert longest_wait_s(Client("claude-code"), {}) == 900
    assert longest_wait_s(Client("claude-code", over_http=True), {}) == 240
    assert longest_wait_s(Client("mine"), {"mine": 600.0}) == 600
    assert longest_wait_s(Client("claude-code"), {"claude-code": 30.0}) == 30
