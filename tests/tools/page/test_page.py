"""The page's answers over real records: lists, findings as spans, sweeps, data sets, environments, and sizes."""

from __future__ import annotations

import json
import time
from typing import Any

import anyio
import msgspec
import pytest
from toprope_tools.page import now, rollouts
from toprope_tools.page.actions import act
from toprope_tools.page.findings import as_written
from toprope_tools.page.source import MOST_CHARACTERS, PageSource
from toprope_tools.workshop import Workshop

from tests.support.tools_house import StandInLauncher, become, start_run, step
from toprope.analysis.budget import GB
from toprope.errors import InvalidValue, NotFound
from toprope.records.run.folder import RunFolder
from toprope.records.run.series import SeriesFollower
from toprope.records.run.specification import SweepPlan
from toprope.records.run.status import EventLog, Failure, Finding, Status
from toprope.records.run.usage import Usage
from toprope.records.sweep_journal import (
    Candidate,
    Finalist,
    Generation,
    Measured,
    Scored,
    Started,
    Survivors,
    SweepLog,
)
from toprope.trajectories.datasets.store import DatasetStore
from toprope.workbench.catalog.kept_checks import KeptChecks, KeptFinding

House = tuple[Workshop, StandInLauncher]


def ask(house: House, *, owner: bool = True, **question: Any) -> Any:
    return json.loads(msgspec.json.encode(PageSource(house[0], owner=owner).ask(question)))


def finish(house: House, folder: RunFolder, accuracy: float | None = None, state: str = "completed") -> None:
    evaluations = {}
    if accuracy is not None:
        evaluations = {
            "before": {"accuracy": 0.1, "tasks": 100, "split": "heldout"},
            "after": {"accuracy": accuracy, "tasks": 100, "split": "heldout"},
        }
    become(folder, state, ended_at=9.0, evaluations=evaluations)
    house[1].leave(folder.run_id)


def test_finding_is_a_span_from_its_first_step_to_its_end(house: House) -> None:
    folder = start_run(house[0])
    log = EventLog(folder)
    told = {"what": "It fell.", "observed": {"reward": 0.1, "<b>": "<i>"}, "threshold": "t", "source": "s", "next": "n"}
    log.append("finding", rule="collapse", level="warning", step=10, **told)
    log.append("finding", rule="collapse", level="critical", step=20, **told)
    log.append("finding", rule="entropy", level="note", step=5, **told)
    log.append("finding", rule="entropy", level="over", step=30, **told)
    become(folder, "training", findings=[Finding(rule="collapse", level="critical", what="It fell.", step=20)])
    live = ask(house, what="run", run_id=folder.run_id)["live"]
    first, second = live["findings"]
    assert (first["rule"], first["level"], first["from_step"], first["to_step"]) == ("collapse", "critical", 10, None)
    assert (second["rule"], second["from_step"], second["to_step"], second["open"]) == ("entropy", 5, 30, False)
    assert first["observed"]["<b>"] == {"foreign": "<i>"} and first["source"] == "s" and first["next"] == "n"
    assert live["run"]["finding"] == {"rule": "collapse", "level": "critical"}
    assert [event["level"] for event in live["events"] if event["kind"] == "finding"][-1] == "over"


def test_open_notes_are_findings_though_no_event_tells_them(house: House) -> None:
    folder = start_run(house[0])
    EventLog(folder).append("finding", rule="truncated", level="warning", step=3, what="Cut.", next="n")
    notes = [Finding(rule="truncated", level="warning", what="Cut.", step=3)]
    notes.append(Finding(rule="all_right", level="note", what="All right.", step=5, observed={"share": 0.9}))
    become(folder, "training", findings=notes)
    found = ask(house, what="run", run_id=folder.run_id)["live"]["findings"]
    assert [(one["rule"], one["level"], one["from_step"], one["open"]) for one in found] == [
        ("truncated", "warning", 3, True),
        ("all_right", "note", 5, True),
    ]


def test_advice_fits_the_run_and_the_reader(house: House) -> None:
    folder = start_run(house[0])
    advice = "stop_training, then edit_config optimizer.learning_rate to 0.1, and start_training again"
    finding = Finding(rule="learning_rate_low", level="warning", what="Slow.", step=1, next=advice)
    failure = Failure(component="trainer", reason="x", hint="read_logs shows more.", kind="unknown")

    def live(worded: Any = as_written) -> Any:
        source = PageSource(house[0], owner=True, worded=worded)
        answer = source.ask({"what": "run", "run_id": folder.run_id})
        return json.loads(msgspec.json.encode(answer))["live"]

    become(folder, "training", findings=[finding])
    assert live()["findings"][0]["next"] == advice
    become(folder, "failed", ended_at=9.0, failure=failure)
    house[1].leave(folder.run_id)
    assert live()["findings"][0]["next"] == advice.removeprefix("stop_training, then ")
    shown = live(lambda text, run_id: f"{run_id}: {text.upper()}")
    assert shown["findings"][0]["next"].startswith(f"{folder.run_id}: EDIT_CONFIG")
    assert shown["failure"]["hint"] == f"{folder.run_id}: READ_LOGS SHOWS MORE." and shown["failure"]["kind"] == ""
    others = [start_run(house[0]).run_id for _ in range(2)]
    source = PageSource(house[0], owner=True, worded=lambda text, _: text.upper())
    compared = msgspec.to_builtins(source.ask({"what": "compare", "a": others[:1], "b": others[1:]}))
    assert "CHECK_STATUS" in compared["problem"]["hint"]


def test_damaged_records_are_named(house: House) -> None:
    folder = start_run(house[0])
    folder.metrics.write_bytes(b'{"step": 1, "reward": 0.5}\n' + b"\xff\x00 no row\n" * 3)
    finish(house, folder)
    assert ask(house, what="run", run_id=folder.run_id)["live"]["damage"] == [
        "Curves and counts of steps lack 3 lines of metrics.jsonl, which cannot be read."
    ]
    folder.metrics.unlink()
    folder.results.write_text("{")
    [damage] = ask(house, what="run", run_id=folder.run_id)["live"]["damage"]
    assert "results.json" in damage
    folder.status.write_text("{broken")
    [listed] = ask(house, what="runs")["runs"]
    assert listed["title"] == folder.run_id and listed["detail"].startswith("Its status cannot be read")


def test_stopped_run_shows_what_it_measured_before(house: House) -> None:
    folder = start_run(house[0])
    before = {"before": {"accuracy": 0.1, "tasks": 100, "split": "heldout"}}
    for state, told in (("training", "measured again at the end"), ("stopped", "ended before its last evaluation")):
        become(folder, state, evaluations=before, ended_at=9.0 if state == "stopped" else None)
        verdict = ask(house, what="run", run_id=folder.run_id)["live"]["verdict"]
        assert verdict["before"]["value"] == 0.1 and verdict["after"] is None
        assert verdict["sentence"].startswith("held-out accuracy, 100 sealed tasks · ") and told in verdict["sentence"]


def test_verdict_has_its_interval_first(house: House) -> None:
    folder = start_run(house[0])
    finish(house, folder, 0.8)
    verdict = ask(house, what="run", run_id=folder.run_id)["live"]["verdict"]
    assert "100 sealed tasks" in verdict["sentence"]
    assert verdict["after"]["low"] < 0.8 < verdict["after"]["high"] and verdict["before"]["value"] == 0.1
    for accuracy, told in ((0.8, "· rose ("), (0.12, "a rise is not shown"), (0.0, "· fell (")):
        finish(house, folder := start_run(house[0]), accuracy)
        assert told in ask(house, what="run", run_id=folder.run_id)["live"]["verdict"]["sentence"]
    status = Status.read(folder)
    measured = {label: one | {"split": "train"} for label, one in status.evaluations.items()}
    status.model_copy(update={"evaluations": measured}).write(folder)
    verdict = ask(house, what="run", run_id=folder.run_id)["live"]["verdict"]
    assert verdict["sentence"].startswith("training accuracy (sampled) · ")


def test_first_look_is_short_and_the_next_ones_read_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page shows a sample of a long run at once; fewer, longer looks then read the rest sooner."""
    folder, limits = start_run(house[0]), []
    folder.metrics.write_text('{"step": 1, "reward": 0.5}\n')
    read = SeriesFollower.read
    monkeypatch.setattr(SeriesFollower, "read", lambda self, most: limits.append(most) or read(self, most))
    first = ask(house, what="run", run_id=folder.run_id)["live"]
    ask(house, what="run", run_id=folder.run_id, after=first["cursor"])
    assert 0 < limits[0] < limits[1] <= 1


def test_best_are_held_out_figures_in_order(house: House) -> None:
    for accuracy in (0.3, 0.9, None, 0.6):
        finish(house, start_run(house[0]), accuracy)
    now = ask(house, what="now")
    assert [one["accuracy"]["value"] for one in now["best"]] == [0.9, 0.6, 0.3]
    assert now["counts"] == {"runs": 4, "live": 0, "sweeps": 0} and now["last_end"] == 9.0


def test_rope_shows_what_is_used_and_the_files(house: House) -> None:
    home = house[0].home
    (home.configuration / "limits.yaml").write_text(
        "concurrent_runs: {max: 3, reason: '<b>few</b>'}\nper_day: {runs: 9}"
    )
    start_run(house[0])
    rope = ask(house, what="now")["rope"]
    limits = {one["name"]: one for one in rope["limits"]}
    assert limits["concurrent_runs"]["max"] == 3 and limits["concurrent_runs"]["used"] == 1
    assert limits["concurrent_runs"]["reason"] == {"foreign": "<b>few</b>"} and limits["per_day.runs"]["used"] == 1
    assert rope["limits_file"] == str(home.configuration / "limits.yaml") and rope["confirm_by"]
    assert rope["limits_file"].startswith(rope["folder"]) and not rope["locks_file"].startswith(rope["folder"])
    (home.configuration / "limits.yaml").write_text("nonsense: [")
    broken = ask(house, what="now")["rope"]
    assert "limits.yaml" in broken["confirm"] and not broken["confirm_by"]  # the owner sees why nothing starts


def test_accounts_of_ended_runs_are_read_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(now, "_ACCOUNTS_S", 1e-9)  # else the sums of one look serve the next ones
    pages, (ended, live) = PageSource(house[0], owner=True), (start_run(house[0]) for _ in range(2))
    finish(house, ended)

    def disk() -> float:
        rope = json.loads(msgspec.json.encode(pages.ask({"what": "now"})))["rope"]
        return next(one["used"] for one in rope["limits"] if one["name"] == "disk_gb") * GB

    for folder, size in ((ended, 3), (live, 5)):
        Usage(disk_bytes=size).write(folder)
    assert disk() == pytest.approx(8)
    for folder, size in ((ended, 30), (live, 50)):
        Usage(disk_bytes=size).write(folder)
    assert disk() == pytest.approx(53)
    become(ended, "completed", ended_at=10.0)  # it had been resumed
    assert disk() == pytest.approx(80)


def test_time_of_a_resumed_run_counts_all_attempts(house: House) -> None:
    folder, now_s = start_run(house[0]), time.time()

    def total_s() -> float:
        seconds: float = ask(house, what="run", run_id=folder.run_id)["live"]["facts"]["total_s"]
        return seconds

    become(folder, "training", created_at=now_s - 500, started_at=now_s - 20)
    assert total_s() == pytest.approx(20, abs=5)
    Usage(at=now_s - 400, wall_s=100.0).write(folder)
    assert total_s() == pytest.approx(120, abs=5)
    Usage(at=now_s - 4, wall_s=116.0).write(folder)
    assert total_s() == pytest.approx(120, abs=5)
    become(folder, "queued", started_at=None)
    assert total_s() == 116.0, "a resume that waits"
    become(folder, "stopped", started_at=now_s - 20, ended_at=now_s + 50)
    assert total_s() == 116.0, "the time between a keeper's death and its discovery is no time of the run"


def test_list_of_runs_has_pages(house: House) -> None:
    made = [start_run(house[0]).run_id for _ in range(55)]
    first = ask(house, what="runs")
    rest = ask(house, what="runs", cursor=first["next_cursor"])
    assert len(first["runs"]) == 50 and len(rest["runs"]) == 5 and rest["next_cursor"] is None
    assert {one["run_id"] for one in first["runs"] + rest["runs"]} == set(made)
    assert ask(house, what="runs", query=made[3])["total"] == 1
    assert ask(house, what="runs", state="ended")["runs"] == []
    for wrong in ({"cursor": "x"}, {"cursor": "run@nan"}, {"state": "odd"}, {"query": "x" * 500}):
        with pytest.raises(InvalidValue):
            ask(house, what="runs", **wrong)


def test_sweep_shows_candidates_lineage_and_the_best(house: House) -> None:
    plan = SweepPlan(
        space={"optimizer.learning_rate": {"low": 0.001, "high": 0.1, "log": True}},
        strategy="evolution",
        population=2,
        epochs=2,
        selection_ratio=0.5,
        mutation_rate=0.3,
        steps=5,
        runs=5,
        total_steps=20,
    )
    folder = start_run(house[0], kind="sweep", sweep=plan)
    log = SweepLog(folder)
    log.append(
        Generation(epoch=1, candidates=[Candidate(id="c001", values={"optimizer.learning_rate": 0.01}, steps=5)])
    )
    log.append(Started(candidate="c001", epoch=1, run_id=f"{folder.run_id}-m01"))
    log.append(Scored(candidate="c001", score=0.5, measured=Measured(accuracy=0.5, tasks=10, steps=5)))
    log.append(Survivors(epoch=1, ids=["c001"]))
    child = Candidate(id="c002", values={"optimizer.learning_rate": 0.02}, steps=5, parent="c001")
    log.append(Generation(epoch=2, candidates=[child]))
    log.append(Scored(candidate="c002", score=0.9, measured=Measured(accuracy=0.9, tasks=10, steps=5)))
    log.append(Finalist(candidate="c002", run_id="final", measured=Measured(accuracy=0.8, tasks=50, successes=40)))
    found = ask(house, what="sweep", run_id=folder.run_id)
    assert found["best"] == "c002" and [one["id"] for one in found["candidates"]] == ["c002", "c001"]
    assert found["candidates"][0]["parent"] == "c001" and found["candidates"][1]["survived"]
    assert found["heldout"]["accuracy"]["value"] == 0.8 and found["heldout"]["accuracy"]["low"] < 0.8
    assert found["rivals"].startswith("Not told apart from c001: ")
    assert found["space"] == [{"field": "optimizer.learning_rate", "says": "0.001 to 0.1, on a logarithmic scale"}]
    assert found["run"]["spark"] == [0.5, 0.9]
    [listed] = ask(house, what="sweeps")["sweeps"]
    assert listed["best"] == {"id": "c002", "score": 0.9} and listed["measured"] == 2
    with pytest.raises(InvalidValue, match="no sweep"):
        ask(house, what="sweep", run_id=start_run(house[0]).run_id)


def test_runs_that_cannot_be_compared_are_drawn_all_the_same(house: House) -> None:
    folders = [start_run(house[0]) for _ in range(2)]
    for folder in folders:
        folder.metrics.write_text('{"step": 1, "reward": 0.25}\n')
    found = ask(house, what="compare", a=[folders[0].run_id], b=[folders[1].run_id])
    assert "not ended" in found["problem"]["message"] and found["sampled"] is None
    assert [one["series"]["reward"] for one in found["runs"]] == [[0.25], [0.25]] and found["measure"] == "Reward"
    with pytest.raises(InvalidValue):
        ask(house, what="compare", a=[], b=[folders[0].run_id])


def test_empty_answers_are_part_of_a_conversation() -> None:
    said = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Go on."},
    ]
    shown = [(message.role.foreign, message.text.foreign) for message in rollouts._messages(said, 100)]
    assert shown == [("assistant", ""), ("user", "Go on.")]


def test_losses_are_drawn_beside_losses_alone(house: House) -> None:
    run_ids = []
    for kind in ("train", "sft", "sft"):
        folder = start_run(house[0], kind=kind)
        folder.metrics.write_text('{"step": 1, "reward": 0.25, "loss": 3.5}\n')
        run_ids.append(folder.run_id)
    mixed = ask(house, what="compare", a=run_ids[:1], b=run_ids[1:2])
    assert mixed["measure"] == "Reward" and [one["series"] is None for one in mixed["runs"]] == [False, True]
    losses = ask(house, what="compare", a=run_ids[1:2], b=run_ids[2:])
    assert losses["measure"] == "Loss" and [one["series"]["reward"] for one in losses["runs"]] == [[3.5], [3.5]]


def test_data_set_shows_its_lineage_and_none_of_its_items(house: House) -> None:
    store = DatasetStore(house[0].home.ensure().datasets)
    with store.making("good") as aside:
        (aside / "items.jsonl").write_text('{"state": "secret item"}\n')
        lineage = {"runs": {"run-a": {"items": 3}}, "files": ["<b>.jsonl"], "recipe": {"steps": [{"kind": "noise"}]}}
        store.keep("good", aside, {"items.jsonl": 1}, lineage=lineage, counts={"read": 4}, card=lambda record: "# card")
    found = ask(house, what="dataset", name="good")
    assert [(one["kind"], one["name"]["foreign"], one["count"]) for one in found["made_of"]] == [
        ("run", "run-a", 3),
        ("file", "<b>.jsonl", None),
        ("step", "noise", None),
    ]
    assert found["items"] == 1 and found["card"] == {"foreign": "# card"} and "secret item" not in json.dumps(found)
    assert ask(house, what="datasets")["datasets"][0]["versions"][0]["version"] == "v1"
    with pytest.raises(NotFound):
        ask(house, what="dataset", name="nothing")


def test_environment_shows_its_last_check(house: House) -> None:
    name = "sort_letters"
    assert ask(house, what="environment", name=name)["checks"] is None
    house[0].home.ensure()
    KeptChecks(house[0].home.path).keep(
        name, "warning", [KeptFinding(rule="slow", level="note", what="<b>It</b> is slow.")], full=False
    )
    found = ask(house, what="environment", name=name)
    assert found["verdict"] == "warning" and found["checked_at"] > 0
    assert found["checks"] == [{"name": "slow", "state": "note", "what": {"foreign": "<b>It</b> is slow."}}]
    assert name in [one["name"] for one in ask(house, what="environments", query="sort letters")["environments"]]


def test_clients_get_less_and_owners_everything(house: House) -> None:
    folder = start_run(house[0])
    become(folder, "training", started_at=1.0)
    step(folder, 5000, total=5000, reward=0.5)
    row = {name: 0.123456 for name in ("reward", "loss", "entropy", "kl", "grad_norm", "success", "reward_std")}
    with folder.metrics.open("w") as file:
        file.writelines(json.dumps({"step": number, **row}) + "\n" for number in range(1, 5001))
    owners = ask(house, what="run", run_id=folder.run_id)
    clients = ask(house, owner=False, what="run", run_id=folder.run_id)
    assert len(owners["live"]["series"]["x"]) > 200 and len(clients["live"]["series"]["x"]) <= 120
    assert len(json.dumps(clients)) <= MOST_CHARACTERS
    with pytest.raises(InvalidValue, match="no question"):
        ask(house, owner=False, what="ledger")


def test_keys_of_lent_tools_are_masked_in_logs_and_in_the_trail(house: House) -> None:
    shop, folder = house[0], start_run(house[0])
    shop.home.settings_file.parent.mkdir(exist_ok=True)
    shop.home.settings_file.write_text("tools: {shop: {command: [shop], variables: {SHOP_KEY: canary-of-a-tool}}}")
    folder.log("trainer").parent.mkdir(exist_ok=True)
    folder.log("trainer").write_text("sent canary-of-a-tool\n")
    with pytest.raises(NotFound):
        anyio.run(act, shop, "stop", "canary-of-a-tool", {})
    shown = str(ask(house, what="log", run_id=folder.run_id, component="trainer"))
    assert "[secret]" in shown and "canary" not in shown
    trail = "".join(path.read_text() for path in shop.home.path.glob("audit*"))
    assert "[secret]" in trail and "canary" not in trail
