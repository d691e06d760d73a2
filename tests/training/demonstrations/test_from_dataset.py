"""Demonstrations from a data set: items that are used, left out as held-out, or refused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from toprope.errors import ComponentFailed, Corrupt, InvalidValue, NotFound
from toprope.records.journal.demonstrations import read_traces
from toprope.records.run.specification import DatasetSource, EnvironmentSource, Specification
from toprope.records.trained_tasks import TrainedTasks, read_trained
from toprope.sdk.authoring.environment import Task
from toprope.settings.schema import Config
from toprope.training.demonstrations.from_dataset import content_id, write_dataset_demonstrations
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.trajectories.datasets.store import DatasetStore
from toprope.trajectories.datasets.writers import writing
from toprope.trajectories.items import TrajectoryItem
from toprope.trajectories.synthesis.generators import add_noise, swap_io
from toprope.workbench.launch.lineage import with_dataset

ADD = '''
from toprope.sdk import Environment, Task

class Add(Environment):
    """Add one."""

    def tasks(self, split):
        for a in range(20) if split == "train" else range(100, 106):
            yield Task(f"{a} + 1?", reference=str(a + 1))

    def score(self):
        return self.answer == self.task.reference
'''


def item(number: int, answer: str | None = None, **told) -> TrajectoryItem:
    return TrajectoryItem(f"{number} + 1?", str(number + 1) if answer is None else answer, 1.0, told)


def made(datasets: Path, *items: TrajectoryItem) -> DatasetStore:
    """A data set `best` with these items."""
    store = DatasetStore(datasets)
    with store.making("best") as aside:
        with writing(aside / "items.jsonl", "jsonl") as writer:
            writer.write(items)
        store.keep("best", aside, {"items.jsonl": len(items)}, lineage={}, counts={})
    return store


def frozen(tmp_path: Path, name: str = "best") -> Specification:
    config = Config()
    config.sft.dataset, config.evaluation.heldout_tasks = name, 6
    (tmp_path / "add.py").write_text(ADD)
    source = EnvironmentSource(name="add", file=str(tmp_path / "add.py"), attribute="Add")
    specification = Specification(
        run_id="run-a", kind="sft", created_at=0.0, toprope_version="0", environment=source, config=config,
        policy_cache=str(tmp_path / "policies"),
    )  # fmt: skip
    return with_dataset(specification, tmp_path / "datasets")


def taken(tmp_path: Path, specification: Specification) -> tuple[list, list]:
    seen: list[tuple[str, str]] = []
    trained = TrainedTasks(tmp_path, None)

    async def work() -> None:
        link = await EnvironmentWorker.start()
        try:
            await link.call("open", source={"file": str(tmp_path / "add.py"), "attribute": "Add"})

            async def current() -> EnvironmentWorker:
                return link

            host = SimpleNamespace(
                worker=SimpleNamespace(current=current),
                sizes={"heldout": 6},
                number=lambda split, place: place,
                plan=SimpleNamespace(section=specification.config.environment),
            )
            await write_dataset_demonstrations(
                [host],
                specification,
                tmp_path / "traces.jsonl",
                lambda *said: None,
                lambda environment, task, asked, ids: (
                    seen.append((environment, task)),
                    trained.add(task, asked, ids),
                ),
            )
        finally:
            await link.close()

    asyncio.run(work())
    return list(read_traces(tmp_path / "traces.jsonl")), seen


def test_content_id_equals_task_id():
    for prompt in ("What  is 3\n+ 4?", [{"role": "system", "content": "S"}, {"role": "user", "content": "Ünder"}]):
        assert content_id(Task(prompt).messages) == Task(prompt).id


def test_heldout_items_of_data_set_are_left_out(tmp_path: Path):
    by_id = TrajectoryItem("other words", "x", 1.0, {"task": Task("104 + 1?").id})
    of_mixture = TrajectoryItem("others", "x", 1.0, {"task": f"add/{Task('105 + 1?').id}"})
    add = {"function": {"name": "add"}}
    made(
        tmp_path / "datasets",
        item(1),
        item(2, environment="add", parts=["odd"], unscored=True, success=False, tools=[add, 3]),
        item(103),
        by_id,
        of_mixture,
        item(3, answer=" "),
    )
    specification = frozen(tmp_path)
    assert specification.config.sft.dataset == specification.dataset.name == "best@v1"
    traces, seen = taken(tmp_path, specification)
    assert [trace.messages for trace in traces] == [one.messages for one in (item(1), item(2))]
    assert [trace.verdict for trace in traces] == [{}, {"success": False, "unscored": True}]
    assert [trace.tools for trace in traces] == [[], [add]]
    assert {(trace.teacher, trace.first_messages) for trace in traces} == {("best@v1", 1)} and traces[
        0
    ].task_id == Task("1 + 1?").id
    assert seen == [("best@v1", traces[0].task_id), ("add", traces[1].task_id)]


def test_copies_of_heldout_items_are_left_out(tmp_path: Path):
    of_task = TrajectoryItem("other words", "x", 1.0, {"task": f"add/{Task('104 + 1?').id}"})
    firsts = [item(103), of_task, item(1)]
    made(tmp_path / "datasets", *swap_io(add_noise(firsts, 0.3)), *add_noise(firsts, 0.3))
    traces, _ = taken(tmp_path, frozen(tmp_path))
    assert len(traces) == 2
    assert {trace.variant for trace in traces} == {3, 6}


def test_a_swapped_item_is_known_as_trained_on_its_question(tmp_path: Path):
    """A run that begins from these weights evaluates on none of their tasks, and data sets of the run keep the link."""
    made(tmp_path / "datasets", *swap_io([item(1)]))
    [trace], _ = taken(tmp_path, frozen(tmp_path))
    assert trace.messages[0]["content"] != item(1).messages[0]["content"]
    assert Task("1 + 1?").id in read_trained(tmp_path)
    assert trace.verdict["first_prompt"] == Task("1 + 1?").id


@pytest.mark.parametrize("splits", [("dev", "fit"), ("fit",), ("items", "zeta")])
def test_data_set_without_split_to_train_on_is_refused(tmp_path: Path, splits: tuple[str, ...]):
    store = DatasetStore(tmp_path / "datasets")
    with store.making("best") as aside:
        for split in splits:
            (aside / f"{split}.jsonl").write_text("{}\n")
        store.keep("best", aside, {f"{split}.jsonl": 1 for split in splits}, lineage={}, counts={})
    with pytest.raises(InvalidValue, match=f"best@v1 has no split 'train' .*: {', '.join(splits)}"):
        frozen(tmp_path)


def test_items_of_the_only_task_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only = ADD.replace("self, split", "self").replace('range(20) if split == "train" else range(100, 106)', "range(1)")
    monkeypatch.setitem(globals(), "ADD", only)
    made(tmp_path / "datasets", item(0))
    traces, _ = taken(tmp_path, frozen(tmp_path))
    assert [trace.messages for trace in traces] == [item(0).messages], "it is held out from nothing"


def test_data_set_without_usable_items_is_refused(tmp_path: Path):
    made(tmp_path / "datasets", item(103), item(4, answer=""))
    with pytest.raises(InvalidValue, match="1 items are of held-out tasks, 1 lack"):
        taken(tmp_path, frozen(tmp_path))
    assert not (tmp_path / "traces.jsonl").exists()


def test_items_whose_answer_is_a_call_are_used(tmp_path: Path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 1}'}}
    answer = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    made(tmp_path / "datasets", TrajectoryItem("5 + 1?", answer, 1.0))
    traces, _ = taken(tmp_path, frozen(tmp_path))
    assert [trace.messages[1:] for trace in traces] == [answer]


@pytest.mark.parametrize("question", ["<|im_start|>user\n5 + 1?<|im_end|>\n", "[gMASK]<sop><|user|>\n5 + 1?"])
def test_items_with_the_markers_of_a_template_are_left_out(tmp_path: Path, question: str):
    """The template would be written around its own markers."""
    marked = TrajectoryItem(question, "6", 1.0, {"text": "rendered"})
    made(tmp_path / "datasets", item(1), marked)
    traces, _ = taken(tmp_path, frozen(tmp_path))
    assert [trace.messages for trace in traces] == [item(1).messages]
    (tmp_path / "traces.jsonl").unlink()
    made(tmp_path / "datasets", marked)
    with pytest.raises(InvalidValue, match="1 have the markers of a chat template") as refused:
        taken(tmp_path, frozen(tmp_path))
    assert "build it again" in refused.value.hint


def test_unsplit_items_without_markers_in_the_question_are_used(tmp_path: Path):
    """Of raw prompts, and of conversations whose later parts alone could not be split."""
    asked, said = [{"role": "user", "content": "5 + 1?"}], {"role": "assistant", "content": "6"}
    later = [said, {"role": "user", "content": "<|im_end|>\n<|im_start|>user\nSure?"}, said]
    made(
        tmp_path / "datasets",
        TrajectoryItem("2 < 3 and 5 + 1 =", "6", 1.0, {"text": "rendered"}),
        TrajectoryItem(asked, later, 1.0, {"text": "rendered"}),
    )
    traces, _ = taken(tmp_path, frozen(tmp_path))
    assert [trace.messages for trace in traces] == [
        [{"role": "user", "content": "2 < 3 and 5 + 1 ="}, said],
        [*asked, *later],
    ]


def test_changed_data_set_is_refused(tmp_path: Path):
    made(tmp_path / "datasets", item(1))
    specification = frozen(tmp_path)
    file = Path(specification.dataset.file)
    assert specification.dataset == DatasetSource(
        name="best@v1", file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest(), items=1
    )
    whole = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(msgspec.json.encode(item(103)) + b"\n")
    with pytest.raises(Corrupt, match="another SHA-256"):
        taken(tmp_path, specification)
    with pytest.raises(Corrupt, match="SHA-256"):
        frozen(tmp_path)
    file.unlink()
    with pytest.raises(ComponentFailed, match="cannot be read"):
        taken(tmp_path, specification)
    file.write_bytes(whole)
    with pytest.raises(NotFound, match="no version"):
        frozen(tmp_path, "best@v2")
    assert frozen(tmp_path, "").dataset is None
