"""Items from rollouts: decoded texts, sealed tasks, filters and export formats."""

from __future__ import annotations

import asyncio
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest

from tests.support.trajectory_runs import asked, group, hold_out, journal, make_run, place_tokenizer, row, words_run
from toprope.errors import InvalidValue
from toprope.records.journal.demonstrations import Trace, append_traces
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import MASKED, Outcome
from toprope.records.journal.marks import GroupNote, Snapshot
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import DatasetSource, Specification
from toprope.training.component.time_limit import TemplateTooSlow, render_limit
from toprope.trajectories.capture import templates
from toprope.trajectories.capture.run_reader import RunReader
from toprope.trajectories.capture.selection import Query
from toprope.trajectories.capture.strategy import TrajectoryStrategy
from toprope.trajectories.capture.templates import ChatTemplate
from toprope.trajectories.datasets.dataset import TrajectoryDataset, read_items
from toprope.trajectories.datasets.writers import writing
from toprope.trajectories.items import TrajectoryItem, item_from
from toprope.trajectories.jobs.execute import Work
from toprope.trajectories.jobs.orders import Order
from toprope.trajectories.synthesis.generators import add_noise


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("home")
    place_tokenizer(place / "policies")
    return place


def test_reader_decodes_whole_texts_from_tokens(home: Path):
    folder = make_run(home / "runs", "long")
    question = "Spell: " + "x" * 5000
    talk = asked(question, "first", "second")
    cut = f"{question[:1200]}\n[...]\n{question[-800:]}"
    system = [{"role": "system", "content": "Be brief."}, *asked("Why?", "so")]
    posted = [{"role": "user", "content": "from outside"}, {"role": "assistant", "content": "posted"}]
    journal(
        folder,
        [
            group(1, [talk, asked(question, "other")], [1.0, 0.5], prompt=cut, answers=["first", "other"]),
            group(2, [system], [0.0], prompt="Be brief.\nWhy?"),
            group(3, [asked("q", "a")], [1.0], messages=[posted]),
        ],
    )
    first, second, third, fourth = RunReader(folder)
    assert (first.state, first.action) == (talk[:1], talk[1:])
    assert second.action == [{"role": "assistant", "content": "other"}]
    assert (third.state, third.action) == (system[:2], system[2:])
    assert fourth.messages == posted
    assert [one.metadata["text"] for one in (first, second, third, fourth)] == ["tokens"] * 3 + ["messages"]
    metadata = first.metadata
    assert (metadata["run"], metadata["task"], metadata["group"], metadata["rollout"], metadata["version"]) == (
        "long",
        "task-1",
        1,
        0,
        1,
    )
    assert (metadata["success"], metadata["turns"], metadata["parts"], metadata["split"]) == (
        True,
        2,
        {"exact": 1.0},
        "train",
    )


def test_reader_joins_segments_of_a_rollout(home: Path):
    """If the template rewrites earlier messages, a rollout has several rows, each with its own prompt."""
    folder = make_run(home / "runs", "segments")
    first, second = asked("q", "thought and answer"), asked("q", "answer", "end")
    rows = [row(first), row(second)]
    rows[1] = (rows[1][0], [MASKED] * (len(rows[1][0]) - 4) + rows[1][0][-4:])  # only "end" was sampled in the second
    one = group(1, [first], [1.0], rollouts=[0, 0], versions=[[(4, 3)], [(6, 3)]])
    one.tokens, one.masks, one.scores = [r[0] for r in rows], [r[1] for r in rows], [1.0, 1.0]
    journal(folder, [one])
    [item] = RunReader(folder)
    assert item.messages == [*first, {"role": "user", "content": "go on 1"}, {"role": "assistant", "content": "end"}]
    assert item.metadata["version"] == 4 and item.metadata["text"] == "tokens"


def test_failed_export_leaves_no_file(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("before")
    for form in ("jsonl", "json", "csv", "parquet", "datasets"):
        path = tmp_path / ("a" if form == "datasets" else "a.parquet")
        with pytest.raises(RuntimeError), writing(path, form) as writer:
            writer.write([TrajectoryItem("q", "a", 1.0)] * 3000)
            raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    assert (tmp_path / "a.parquet").read_text() == "before"


def test_parquet_keeps_values_that_do_not_fit_a_column(tmp_path: Path):
    with writing(tmp_path / "odd.parquet", "parquet") as writer:
        writer.write([TrajectoryItem("q", "a", 1.0, {"tokens": 10**30, "success": "perhaps", "turns": 2})])
    [row] = pyarrow.parquet.read_table(tmp_path / "odd.parquet").to_pylist()
    assert (row["tokens"], row["success"], row["turns"]) == (None, None, 2)
    assert json.loads(row["more"]) == {"tokens": 10**30, "success": "perhaps"}


def test_export_replaces_only_its_own_folder(tmp_path: Path):
    dataset = TrajectoryDataset()
    dataset.capture(TrajectoryItem("q", "a", 1.0))
    for _ in range(2):
        assert dataset.export(tmp_path / "mine") == 1
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    for form in ("datasets", "jsonl"):
        with pytest.raises(InvalidValue, match="with other files"):
            dataset.export(tmp_path / "mine", form)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and len(_loaded(tmp_path / "mine")) == 1


def test_items_without_tokenizer_say_if_text_was_cut(tmp_path: Path):
    folder = make_run(tmp_path / "runs")
    talk = asked("short", "answer")
    lost = group(3, [talk], [0.0], prompt=None, answers=None)
    journal(folder, [group(1, [talk], [1.0]), group(2, [talk], [1.0], answers=["a\n[...]\nb"]), lost])
    items = list(RunReader(folder))
    assert [(one.state, one.action, one.metadata["text"]) for one in items] == [
        ("short", "answer", "kept"), ("short", "a\n[...]\nb", "cut"), ("", "", "none"),
    ]  # fmt: skip
    assert [one.metadata["group"] for one in Query.of({"whole": True}).select(lambda: RunReader(folder))] == [1]


def test_reader_keeps_failed_rollouts_and_counts_damage(home: Path):
    folder = make_run(home / "runs", "failed")
    outcomes = [Outcome(1.0, success=True), Outcome(0.0, error="it raised")]
    one = group(1, [asked("q", "a")], [1.0], rollouts=[0], outcomes=outcomes, answers=["a", ""])
    journal(folder, [one, group(2, [asked("q", "b")], [0.0]), group(3, [asked("q", "c")], [0.0])])
    path = next(folder.journal.glob("*.journal"))
    whole = bytearray(path.read_bytes())
    at = whole.index(b'"g2"')
    start = whole.rindex(b"\xffTJ1", 0, at)
    whole[start : start + 2] = b"!!"
    path.write_bytes(whole)
    reader = RunReader(folder)
    items = list(reader)
    assert [(one.metadata["group"], one.metadata["error"]) for one in items] == [(1, None), (1, "it raised"), (3, None)]
    assert reader.captured.unreadable == 1 and reader.captured.items == 3


def test_reader_leaves_out_sealed_tasks(home: Path):
    folder = make_run(home / "runs", "sealed")
    journal(folder, [group(1, [asked("q1", "a")], [1.0]), group(2, [asked("q2", "b")], [1.0])])
    hold_out(folder, "task-2")
    reader = RunReader(folder)
    assert [one.metadata["task"] for one in reader] == ["task-1"] and reader.captured.sealed == 1
    with pytest.raises(InvalidValue, match="sealed"):
        Query.of({"split": "heldout"})
    with pytest.raises(InvalidValue, match="sealed"):
        item_from({"state": "a", "action": "b", "metadata": {"split": "heldout"}}, "line 1")
    assert not Query().matches(TrajectoryItem("a", "b", 1.0, {"split": "heldout"}))


def test_reader_includes_teacher_demonstrations(home: Path):
    folder = make_run(home / "runs", "taught", kind="sft")
    append_traces(folder.path / "traces.jsonl", [Trace("t", 0, asked("q", "a", "b"), 1.0, {}, 2, "solver")])
    [item] = RunReader(folder)
    assert item.state == [{"role": "user", "content": "q"}] and len(item.action) == 3
    assert (item.metadata["teacher"], item.metadata["text"]) == ("solver", "messages")
    assert item.metadata["success"] is True and item.metadata["tokens"] is None, "none were sampled"


def test_items_of_a_data_set_keep_their_verdict(home: Path):
    folder = make_run(home / "runs", "learned", kind="sft")
    source = DatasetSource(name="best@v1", file="/nowhere.jsonl", sha256="0", items=4)
    Specification.read(folder).model_copy(update={"dataset": source}).write(folder)
    given = [(1.0, {}), (0.0, {}), (0.0, {"unscored": True}), (0.5, {"success": True})]
    traces = [Trace("t", n, asked("q", "a"), reward, verdict=said) for n, (reward, said) in enumerate(given)]
    append_traces(folder.path / "traces.jsonl", traces)
    found = list(RunReader(folder))
    assert [item.success for item in found] == [True, False, False, True]
    assert [item.metadata.get("unscored") for item in found] == [None, None, True, None]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chat_template_is_parsed_or_refused():
    template = ChatTemplate(CHATML, ["<|im_start|>", "<|im_end|>"], {})
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na\n\nb<|im_end|>\n<|im_start|>assistant\n"
    assert template.before(text) == [{"role": "system", "content": "S"}, {"role": "user", "content": "a\n\nb"}]
    between = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    for end in ("", "<|im_end|>"):
        assert template.between(end + between) == [{"role": "user", "content": "more"}]
    assert template.before("no such thing") is None
    unthinking = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think></think>"
    for variables, found in (({}, None), ({"enable_thinking": False}, [{"role": "user", "content": "a"}])):
        assert ChatTemplate(unthinking, ["<|im_end|>"], variables).before(text) == found
    hostile = ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages }}", [], {})
    assert hostile.before("x") is None


def test_query_filters_items_and_refuses_wrong_filters(home: Path):
    folder = words_run(home / "runs", 4, "filtered")

    def tasks(**where):
        return [(one.metadata["group"], one.reward) for one in TrajectoryDataset.of_runs([folder]).query(**where)]

    assert tasks(success=True) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert tasks(max_reward=0, min_version=3) == [(3, 0.0), (4, 0.0)]
    assert tasks(per_task=1, limit=2) == [(1, 1.0), (2, 1.0)]
    assert tasks(task="task-3") == [(3, 1.0), (3, 0.0)] and tasks(run="other") == []
    with pytest.raises(InvalidValue, match="success"):
        Query.of({"sucess": True})
    with pytest.raises(InvalidValue, match="true or false"):
        Query.of({"success": 1})
    with pytest.raises(InvalidValue, match="at least 1"):
        Query.of({"per_task": 0})


class Solved(TrajectoryStrategy):
    def should_capture(self, item):
        return item.reward >= 1

    def process(self, item):
        item.metadata = {"seen": True}
        return item


def test_per_task_filter_takes_best_of_any_task_id():
    def rated(reward, **metadata):
        return TrajectoryItem(f"q{reward}", "a", reward, metadata)

    odd = [rated(0.1, task=["t"]), rated(0.9, task=["t"]), rated(0.2, task="u", group=1), rated(0.3, task="u", group=1)]
    found = list(Query(per_task=1).select(lambda: iter(odd)))
    assert [item.reward for item in found] == [0.9, 0.3]


def exported(target: Path, where: dict, runs: list[RunFolder], files: list[Path] | None = None) -> list[TrajectoryItem]:
    order = Order(
        kind="export", runs=[str(run.path) for run in runs], files=[str(file) for file in files or []],
        where=where, target=str(target / "out.jsonl"),
    )  # fmt: skip
    outcome = asyncio.run(Work(order, target, lambda *_: None).do())
    assert outcome.read == outcome.items + sum(outcome.left_out.values())
    return list(read_items(target / "out.jsonl"))


def test_best_of_a_task_pass_all_filters(tmp_path: Path):
    folder = make_run(tmp_path / "runs")
    talks = [asked("q", answer) for answer in ("long", "short", "wrong")]
    journal(folder, [group(1, talks, [1.0, 0.5, 0.0], answers=["lo\n[...]\nng", "short", "wrong"])])
    [item] = exported(tmp_path, {"whole": True, "per_task": 1}, [folder])
    assert (item.action, item.reward) == ("short", 0.5)


def test_items_tell_the_curriculum_level_of_their_task(home: Path):
    folder = make_run(home / "runs")
    journal(folder, [group(1, [asked("q", "a")], [1.0], variant="level-2"), group(2, [asked("q", "a")], [1.0])])
    assert [item.metadata.get("variant") for item in RunReader(folder)] == ["level-2", None]


def test_items_of_a_limited_export_add_up(tmp_path: Path, home: Path):
    assert len(exported(tmp_path, {"success": True, "limit": 2}, [words_run(home / "runs", 4, "limited")])) == 2


def test_best_of_a_task_come_once(tmp_path: Path, home: Path):
    folder = words_run(home / "runs", 3, "once")
    items = list(RunReader(folder))
    with writing(tmp_path / "set.jsonl", "jsonl") as writer:
        writer.write([*items, *add_noise(items, 0.2), *add_noise(items, 0.3)])
    for runs, count in (([], 1), ([folder], 1), ([folder], 2), ([folder], 5)):
        found = exported(tmp_path, {"per_task": count}, runs, [tmp_path / "set.jsonl"])
        assert found == [item for item in items if count > 1 or item.reward == 1.0]
    noisy = TrajectoryDataset()
    noisy.add_source(lambda: read_items(tmp_path / "set.jsonl"))
    assert noisy.query(per_task=1).items() == items[::2]


def test_dataset_captures_by_strategy():
    dataset = TrajectoryDataset(Solved())
    assert dataset.capture(TrajectoryItem("2+2?", "4", 1.0)) and not dataset.capture(TrajectoryItem("2+2?", "5", 0.0))
    assert len(dataset) == 1 and dataset.items()[0].metadata == {"seen": True}
    assert len(TrajectoryDataset()) == 0


def test_every_format_holds_same_items(home: Path, tmp_path: Path):
    dataset = TrajectoryDataset.of_runs([words_run(home / "runs", 5, "formats")])
    items = dataset.items()
    for form in ("jsonl", "json", "csv", "parquet"):
        assert dataset.export(tmp_path / f"other_{form}", form) == 10, form
        (tmp_path / f"other_{form}").unlink()
        assert dataset.export(tmp_path / f"a.{form}") == 10, "the suffix gives the format"
    dataset.export(tmp_path / "folder")
    assert [item_from(one, "") for one in json.loads((tmp_path / "a.json").read_text())] == items
    assert list(read_items(tmp_path / "a.jsonl")) == items
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [json.loads(one["state"]) for one in rows] == [item.state for item in items]
    assert [float(one["reward"]) for one in rows] == [item.reward for item in items]
    for table in (pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist(), _loaded(tmp_path / "folder")):
        assert [(one["state"], one["action"], one["reward"]) for one in table] == [
            (item.state, item.action, item.reward) for item in items
        ]
        assert [one["group"] for one in table] == [item.metadata["group"] for item in items]
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "a.json", "a.csv", "a.parquet", "folder"}
    with pytest.raises(InvalidValue, match="parquet"):
        dataset.export(tmp_path / "a.xlsx")


def _loaded(folder: Path) -> list[dict]:
    import datasets

    return list(datasets.load_from_disk(str(folder)))


def test_trajectories_import_no_heavy_package():
    program = """
import sys
import toprope.trajectories.datasets.dataset, toprope.trajectories.jobs.execute
import toprope.trajectories.jobs.jobs, toprope.trajectories.synthesis.teacher
heavy = ("torch", "transformers", "numpy", "pyarrow", "datasets", "tokenizers", "rensa", "trl")
print([m for m in heavy if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("keep", ["all", "sample", "none"])
def test_reader_reads_compressed_segments_and_what_was_kept(home: Path, tmp_path: Path, keep):
    folder = make_run(tmp_path / "runs", f"kept-{keep}", policies=home / "policies")
    written = FileJournal(folder.journal, segment_bytes=3000)
    for number in range(1, 41):
        one = group(number, [asked(f"question {number}", f"answer {number}")], [1.0])
        written.append(msgspec.json.encode(one), GroupNote(rows=1))
    whole = [item.messages for item in RunReader(folder)]
    assert len(whole) == 40
    left = written.compressible()
    assert len(left) > 2
    assert written.compress(left[0])
    written.leave(41, Snapshot(), keep=keep)
    written.close()
    for ordinal in written.compressible():
        assert written.compress(ordinal)
    reader = RunReader(folder)
    read = {item.metadata["group"]: item.messages for item in reader}
    assert all(messages == whole[seq - 1] for seq, messages in read.items())
    assert reader.captured.removed == (keep != "all")
    assert not reader.captured.unreadable
    if keep == "all":
        assert len(read) == 40
    else:
        assert 0 < len(read) < 40 and 40 in read
        assert ({1, 17} <= read.keys()) == (keep == "sample")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


def test_loops_within_loops_are_interrupted(monkeypatch):
    monkeypatch.setattr(templates, "_RENDER_S", 0.1)
    monkeypatch.setattr(templates, "_FIRST", (("user",),))
    monkeypatch.setattr(templates, "_BETWEEN", ())
    began = time.monotonic()
    assert ChatTemplate(ENDLESS, [], {}).before("question") is None
    assert time.monotonic() - began < 5


def test_a_limit_ends_with_its_block():
    with pytest.raises(TemplateTooSlow, match="did not end within"), render_limit(0.05):
        while True:
            pass
    with render_limit(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.parametrize("told", ["false", "true", 2, [], {}])
def test_verdict_that_is_no_boolean_does_not_count(told):
    assert not TrajectoryItem("q", "a", 0.0, {"success": told}).success
    assert TrajectoryItem("q", "a", 1.0, {"success": told}).success
    for solved in (True, 1, 1.0):
        assert TrajectoryItem("q", "a", 0.0, {"success": solved}).success
        assert not TrajectoryItem("q", "a", 1.0, {"success": 0 * solved}).success


@pytest.mark.parametrize("told", ["v2", True, None, 2.5])
def test_version_that_is_no_integer_is_unknown(told):
    item = TrajectoryItem("q", "a", 1.0, {"version": told})
    assert not Query(min_version=1).matches(item) and not Query(max_version=9).matches(item) and Query().matches(item)
    assert Query(min_version=2).matches(TrajectoryItem("q", "a", 1.0, {"version": 2}))
