"""Items that lack what most have: a task, a verdict, contents, or the end of their line."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.support.trajectory_runs import asked, group, journal, make_run
from toprope.errors import InvalidValue
from toprope.records.journal.groups import Outcome
from toprope.trajectories.capture.run_reader import RunReader
from toprope.trajectories.capture.selection import Query
from toprope.trajectories.capture.templates import ChatTemplate
from toprope.trajectories.datasets.dataset import TrajectoryDataset, read_items
from toprope.trajectories.datasets.store import DatasetStore
from toprope.trajectories.datasets.trace_inbox import Inbox
from toprope.trajectories.datasets.writers import writing
from toprope.trajectories.items import Message, TrajectoryItem
from toprope.trajectories.jobs.execute import Work
from toprope.trajectories.jobs.jobs import Job
from toprope.trajectories.jobs.orders import Order
from toprope.trajectories.synthesis.pipeline import filter_by_score


def test_answers_without_verdict_of_a_judge_are_unscored(tmp_path: Path):
    folder = make_run(tmp_path / "runs")
    outcomes = [Outcome(0.5), Outcome(0.0, error="JudgeFailed: style: busy"), Outcome(0.0, error="it raised")]
    journal(folder, [group(1, [asked("q", answer) for answer in "abc"], [0.5, 0.0, 0.0], outcomes=outcomes)])
    found = list(RunReader(folder))
    assert [(one.metadata["success"], one.success) for one in found] == [(False, False), (None, False), (False, False)]
    assert filter_by_score(found, -1.0) == [found[0], found[2]]
    assert not TrajectoryItem("q", "a", 1.0, {"success": None, "unscored": True}).success


def test_per_task_filter_tells_items_without_task_apart(tmp_path: Path):
    folder = make_run(tmp_path / "runs")
    talks = [[asked(f"q{number}", "a"), asked(f"q{number}", "b")] for number in (1, 2)]
    journal(folder, [group(number, two, [1.0, 0.5], task_id=None) for number, two in enumerate(talks, 1)])
    posted = [TrajectoryItem(question, answer, len(answer)) for question in ("q3", "q4") for answer in ("a", "bb")]
    found = list(Query(per_task=1).select(lambda: [*RunReader(folder), *posted]))
    assert found == [*list(RunReader(folder))[::2], *posted[1::2]]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"input": "q", "output": "a", "score": 0.5, "messages": []}], indent=2),
        '[\n{"state": "q", "action": "a", "reward": 0.5}\n]\n',  # as our own export in JSON
        '{"items": [{"prompt": "q", "completion": "a", "reward": 0.5}]}',
        '\n{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "reward": 0.5}\n',
    ],
)
def test_file_of_another_system_is_taken(tmp_path: Path, text: str):
    inbox = Inbox(tmp_path / "datasets", "theirs")
    assert inbox.take(text.encode().splitlines(keepends=True), "theirs.json") == 1
    [item] = read_items(inbox.path)
    said = [(message["role"], message["content"]) for message in item.messages]
    assert said == [("user", "q"), ("assistant", "a")] and item.reward == 0.5 and not item.metadata.get("unscored")


def test_file_that_is_no_json_is_refused_by_its_line(tmp_path: Path):
    inbox = Inbox(tmp_path / "datasets", "theirs")
    with pytest.raises(InvalidValue, match="theirs.csv, line 1 is not JSON"):
        inbox.take([b"state,action\n", b"q,a\n"], "theirs.csv")
    with pytest.raises(InvalidValue, match="theirs.jsonl, line 2 has no action"):
        inbox.take([b'{"state": "q", "action": "a"}\n', b'{"state": "q"}\n'], "theirs.jsonl")
    assert not inbox.path.exists()


def test_torn_line_of_an_inbox_costs_no_other_item(tmp_path: Path):
    inbox = Inbox(tmp_path / "datasets", "posted")
    first, second = (TrajectoryItem(state, "a", 1.0) for state in ("first", "second"))
    inbox.keep([first])
    with inbox.path.open("ab") as file:
        file.write(b'{"state": "to')
    inbox.keep([second])
    with pytest.raises(InvalidValue, match="line 2 is not JSON"):
        list(read_items(inbox.path))
    order = Order(
        kind="build", files=[str(inbox.path)], store=str(tmp_path / "datasets"), name="posted", where={"per_task": 1}
    )
    outcome = asyncio.run(Work(order, tmp_path, lambda *_: None).do())
    assert [one.state for one in read_items(Path(outcome.path) / "items.jsonl")] == ["first", "second"]
    assert outcome.left_out == {"unreadable lines": 1} and "1 line of posted items" in outcome.warnings[0]
    own = shutil.copyfile(inbox.path, tmp_path / "own.jsonl")
    with pytest.raises(InvalidValue, match="line 2 is not JSON"):
        asyncio.run(Work(order.model_copy(update={"files": [str(own)]}), tmp_path, lambda *_: None).do())
    with inbox.path.open("ab") as file:
        file.write(b'{"question": "of another form"}\n')
    with pytest.raises(InvalidValue, match="line 4"):
        asyncio.run(Work(order, tmp_path, lambda *_: None).do())


def test_empty_export_says_why(tmp_path: Path):
    runs = {state: make_run(tmp_path / "runs", state) for state in ("validating", "training")}
    for state, folder in runs.items():
        status = {"run_id": state, "kind": "train", "environment": "e", "state": state, "created_at": 1.0}
        folder.status.write_text(json.dumps(status | {"since": 1.0, "updated_at": 1.0}))
    journal(runs["training"], [group(1, [asked("q", "a")], [0.5], outcomes=[Outcome(0.5)])])

    def warnings(state: str, **where: object) -> list[str]:
        target = str(tmp_path / f"{state}.jsonl")
        order = Order(kind="export", runs=[str(runs[state].path)], target=target, where=where)
        return asyncio.run(Work(order, tmp_path, lambda *_: None).do()).warnings

    [why] = warnings("validating", environment="nosuch")
    assert why == "validating, a run of kind train that is validating, has no rollouts to read."
    [why] = warnings("training", environment="nosuch", min_reward=0.9)
    assert why == "No item passes the filters environment='nosuch', min_reward=0.9."
    assert warnings("training", min_reward=0.5) == []


def test_ctrl_c_while_a_job_starts_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(Popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    def interrupted(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        sleep(seconds)  # of another test's thread

    Popen, sleep = subprocess.Popen, time.sleep
    monkeypatch.setattr("toprope.trajectories.jobs.jobs.subprocess.Popen", popen)
    monkeypatch.setattr("toprope.trajectories.jobs.jobs.time.sleep", interrupted)
    target = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Job(tmp_path / "job").begin(Order(kind="export", target=str(target)))
    monkeypatch.undo()
    assert started[0].wait(30) == -signal.SIGTERM and not target.exists()


def test_lineage_tells_two_inboxes_apart(tmp_path: Path):
    inboxes = [Inbox(tmp_path / "datasets", name) for name in ("first", "second")]
    for inbox in inboxes:
        inbox.keep([TrajectoryItem(inbox.name, "a", 1.0)])
    files = [str(inbox.path) for inbox in inboxes]
    order = Order(kind="build", files=files, store=str(tmp_path / "datasets"), name="both")
    asyncio.run(Work(order, tmp_path, lambda *_: None).do())
    lineage = DatasetStore(tmp_path / "datasets").find("both").record.lineage
    assert lineage["files"] == list(lineage["sha256"]) and len(set(lineage["sha256"].values())) == 2
    assert all(name.split("/")[-2] in ("first", "second") for name in lineage["files"])


def test_exports_of_other_items_have_other_fingerprints(tmp_path: Path):
    prints = set()
    for number in range(3):
        with writing(tmp_path / str(number), "datasets") as writer:
            writer.write([TrajectoryItem("q", str(number), 1.0)])
        prints.add(json.loads((tmp_path / str(number) / "state.json").read_text())["_fingerprint"])
    assert len(prints) == 3


def test_empty_contents_are_empty_in_every_format(tmp_path: Path):
    folder = make_run(tmp_path / "runs")
    call: Message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    posted: list[Message] = [
        {"role": "user", "content": "q"},
        call,
        {"role": "tool"},
        {"role": "assistant", "content": "a"},
    ]
    journal(folder, [group(1, [asked("q", "a")], [1.0], messages=[posted])])
    [item] = RunReader(folder)
    assert [one["content"] for one in item.messages] == ["q", "", "", "a"]
    bare = TrajectoryItem(posted[:1], posted[1:], 1.0)
    for form in ("csv", "parquet"):
        with writing(tmp_path / f"a.{form}", form) as writer:
            writer.write([item, bare])
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = [json.loads(one["action"]) for one in csv.DictReader(file)]
    rows += [one["action"] for one in pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()]
    assert [[one["content"] for one in row] for row in rows] == [["", "", "a"]] * 4


@pytest.mark.parametrize("form", ["csv", "datasets"])
def test_export_past_a_missing_folder_deletes_nothing(tmp_path: Path, form):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.tex").write_text("years")
    dataset = TrajectoryDataset()
    dataset.capture(TrajectoryItem("q", "a", 1.0))
    with pytest.raises(InvalidValue, match="with other files"):
        dataset.export(tmp_path / "missing" / ".." / "thesis", form)
    with pytest.raises(InvalidValue, match="with other files"):
        dataset.export(tmp_path / "thesis" / "missing" / "..", form)
    with pytest.raises(InvalidValue, match="is a file"):
        dataset.export(tmp_path / "thesis" / "a.tex", "datasets")
    assert (tmp_path / "thesis" / "a.tex").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    (tmp_path / "link").symlink_to(tmp_path / "thesis" / "a.tex")
    assert dataset.export(tmp_path / "link", "csv") == 1 and not (tmp_path / "link").is_symlink()
    assert (tmp_path / "thesis" / "a.tex").read_text() == "years"


def test_export_replaces_no_device_and_no_folder_of_another_program(tmp_path: Path):
    dataset = TrajectoryDataset()
    dataset.capture(TrajectoryItem("q", "a", 1.0))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "null"):
        with pytest.raises(InvalidValue, match="a device or a pipe"):
            dataset.export(tmp_path / name, "jsonl")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text("years")
    with pytest.raises(InvalidValue, match="with other files"):
        dataset.export(tmp_path / "set", "datasets")
    (tmp_path / "set" / "state.json").unlink()
    dataset.export(tmp_path / "set", "datasets")
    dataset.export(tmp_path / "set", "datasets")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["null", "pipe", "set"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "null").is_symlink()


def test_files_that_come_meanwhile_survive_an_export(tmp_path: Path):
    with pytest.raises(OSError, match="not empty"), writing(tmp_path / "set", "csv") as writer:
        writer.write([TrajectoryItem("q", "a", 1.0)])
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "a.tex").write_text("years")
    assert (tmp_path / "set" / "a.tex").read_text() == "years"


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_export_of_nothing_keeps_what_is_there(tmp_path: Path, form):
    (tmp_path / "a").write_text("before")
    with pytest.raises(InvalidValue, match="No item was left to write"):
        TrajectoryDataset().export(tmp_path / "a", form)
    assert (tmp_path / "a").read_text() == "before"
    for _ in range(2):  # the same again replaces nothing
        assert TrajectoryDataset().export(tmp_path / "b", form) == 0 and (tmp_path / "b").exists()


def test_export_that_somebody_moved_is_not_reported(tmp_path):
    made, job = tmp_path / "export.jsonl", Job(tmp_path / "job")
    made.write_text("{}\n")
    job.folder.mkdir()
    (job.folder / "outcome.json").write_text(json.dumps({"path": str(made)}))
    assert job.is_awaited()
    made.rename(tmp_path / "moved.jsonl")
    assert not job.is_awaited() and job.is_awaited(stored=True)


DATED = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system_message }}"
    "{{- '<|eot_id|>' }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] }}"
    "{{- '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""As Llama 3.2's, which shows the day."""


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("day", ["01 Dec 2026", "26 Jul 2024"])
def test_a_prompt_with_the_day_is_split_into_messages(system: str, day: str):
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    template = ChatTemplate(DATED, special, {"bos_token": "<|begin_of_text|>"})
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "1 + 1?"})
    rendered = template._template.render(
        messages=messages, add_generation_prompt=True, bos_token="<|begin_of_text|>", date_string=day
    )
    assert f"Today Date: {day}\n" in rendered
    assert template.before(rendered) == messages
    more = "<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert template.between("<|eot_id|>" + more) == [{"role": "user", "content": "more"}]
    assert template.before(rendered.replace(day, day * 9)) is None, "more than a day"
