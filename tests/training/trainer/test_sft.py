"""Supervised fine-tuning: labels, demonstrations of a teacher, and resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.services.openai_stand_in import OpenAiStandIn
from tests.support.trainer_stand_ins import StandInMember, small_run_config
from toprope.errors import ComponentFailed, Corrupt
from toprope.records.journal.demonstrations import Trace, append_traces, read_traces
from toprope.records.messages import Checkpointed, Finished, Stepped
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.endpoints import Endpoint
from toprope.settings.schema import Config
from toprope.training.demonstrations.from_teacher import DemonstrationCollector, cache_path
from toprope.training.policy.tiny_model import RECIPES, make_tokenizer
from toprope.training.rollouts.endpoint_client import EndpointClient, ModelFailed
from toprope.training.rollouts.environment_host import EnvironmentHost, environment_plans
from toprope.training.trainer.demonstration_run import row_order, tokenize_traces, training_config
from toprope.training.trainer.sft import SftRun

KEY = "sk-very-secret-0123456789"
TALK = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "THOUGHT: I compute it.\nTOOL: calculator\nINPUT: 3 + 4"},
    {"role": "user", "content": "OBSERVATION: 7"},
    {"role": "assistant", "content": "FINAL_ANSWER: 7"},
]


def test_labels_cover_assistant_tokens_only():
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    [row], too_long = tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 100)
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
    assert tokenizer.decode(learned) == "".join(f"{one['content']}<|end|>" for one in TALK[1::2])
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == whole and too_long == 0
    assert tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 10) == ([], 1)


def test_words_of_the_tools_are_tokens():
    """Spelled out byte by byte, calls are too long to be learned within minutes."""
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    counted = {
        text: len(tokenizer(text)["input_ids"])
        for text in (
            "THOUGHT: I compute it.\nTOOL: small\nINPUT: 417 * 38",
            "How many grams does part SK695 weigh?",
            "THOUGHT: I look it up.\nTOOL: web_search\nINPUT: part SK695",
            "OBSERVATION: [part SK695] Part SK695 weighs 9116 g\n\n[part QN926] Part QN926 weighs 8395 g",
        )
    }
    assert list(counted.values()) == [9, 8, 9, 39]


def test_rewriting_template_splits_sequences():
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('TOOL')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows, _ = tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 100)
    learned = [
        tokenizer.decode([t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0])
        for row in rows
    ]
    assert learned == [f"{TALK[1]['content']}<|end|>", "FINAL_ANSWER: 7<|end|>"]


def test_row_order_depends_on_seed_alone():
    order = row_order(10, 4, 3, seed=1)
    assert len(order) == 32 and sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order == row_order(10, 4, 3, seed=1) != row_order(10, 4, 3, seed=2) and order[:10] != order[10:20]
    assert order[30:] == order[:2]


def test_training_config_uses_sft_section():
    config = Config()
    config.sft.learning_rate, config.sft.warmup_ratio, config.sft.save_epochs = 0.5, 0.1, 2
    made = training_config(config, 50, 10)
    assert (made.optimizer.learning_rate, made.optimizer.warmup_steps, made.optimizer.lr_scheduler_type) == (
        0.5, 5, "linear",
    )  # fmt: skip
    assert (made.budget.steps, made.logging.save_steps) == (50, 20) and config.optimizer.learning_rate == 1e-6


def test_torn_trace_line_is_skipped_and_newer_version_refused(tmp_path: Path):
    file = tmp_path / "some" / "traces.jsonl"
    append_traces(file, [Trace("a", 0, TALK, 1.0, {"accuracy": 1.0}, 2, "solver")])
    with file.open("ab") as torn:
        torn.write(b'{"task_id": "b", "var')
    append_traces(file, [Trace("c", 1, TALK)])
    assert [(trace.task_id, trace.variant) for trace in read_traces(file)] == [("a", 0), ("c", 1)]
    assert next(iter(read_traces(file))).parts == {"accuracy": 1.0} and list(read_traces(tmp_path / "none")) == []
    file.write_text('{"version": 99}\n')
    with pytest.raises(Corrupt, match="newer"):
        list(read_traces(file))


ADD = '''
from toprope.sdk import Environment, Task

class Add(Environment):
    """Add two numbers."""

    def tasks(self):
        for a in range(100):
            yield Task(f"{a} + 1?", reference=str(a + 1))

    def score(self):
        return self.answer == self.task.reference

    def solve(self, variant=0):
        if SILENT:
            return None
        return self.task.reference if (variant // 1000 + int(self.task.prompt.split()[0])) % 3 else "no idea"
'''


def collected(
    tmp_path: Path, tasks: int, silent: bool = False, asks: tuple[OpenAiStandIn, str] | None = None, **section: Any
) -> list[Trace]:
    file = tmp_path / "add.py"
    file.write_text(ADD.replace("SILENT", str(silent)))
    config = Config()
    for name, value in section.items():
        setattr(config.sft, name, value)
    source = EnvironmentSource(name="add", file=str(file), attribute="Add")
    spec = Specification(
        run_id="run-a", kind="sft", created_at=0.0, toprope_version="0", environment=source, config=config,
        policy_cache=str(tmp_path / "home" / "policies"),
    )  # fmt: skip

    async def work() -> list[Trace]:
        told: list[tuple[str, int, int]] = []
        asked = None
        if asks is not None:
            asked = EndpointClient(Endpoint(base_url=asks[0].url, model=asks[1], key="API_KEY"), KEY, None)
        [(plan, source)] = environment_plans(spec)
        host = await EnvironmentHost.start(spec, plan, source, lambda report: None)
        cache = cache_path(spec, host)
        assert cache.parent == tmp_path / "home" / "traces"
        collector = DemonstrationCollector(host.worker, spec, cache, asked, lambda *said: told.append(said), 30.0)
        try:
            found = await collector.collect(tasks)
        finally:
            await host.close()
            if asked is not None:
                await asked.close()
        assert told[-1][1:] == (tasks, tasks)
        return found

    return asyncio.run(work())


def test_solved_tasks_are_kept_and_cached(tmp_path: Path):
    once = collected(tmp_path, 12, attempts=1)
    assert 0 < len(once) < 24 and all(trace.messages[-1]["role"] == "assistant" for trace in once)
    assert all(trace.reward == 1 and trace.teacher == "solver" for trace in once)
    more = collected(tmp_path, 12, attempts=3)
    assert len(more) == 24 and {(trace.task_id, trace.variant) for trace in once} <= {
        (trace.task_id, trace.variant) for trace in more
    }
    [cache] = (tmp_path / "home" / "traces").iterdir()
    lines = cache.read_text().count("\n")
    assert len(collected(tmp_path, 12)) == 24 and cache.read_text().count("\n") == lines
    assert len(collected(tmp_path, 3, regenerate=True)) == 6 and cache.read_text().count("\n") == 7


def test_teacher_without_solutions_is_an_error(tmp_path: Path):
    with pytest.raises(ComponentFailed, match="solved none"):
        collected(tmp_path, 5, silent=True)


@pytest.fixture
def endpoint():
    """A model that adds, and is wrong the first time about each even number."""
    asked: set[str] = set()

    def answer(question: str) -> str:
        first = question not in asked
        asked.add(question)
        wrong = first and int(question.split()[0]) % 2 == 0
        return str(int(question.split()[0]) + 1 + wrong)

    server = OpenAiStandIn(answer)
    yield server
    server.close()


def test_right_answers_of_model_are_cached(tmp_path: Path, endpoint: OpenAiStandIn):
    section = {"teacher": "limited", "traces_per_task": 1, "attempts": 2, "temperature": 0.3, "max_new_tokens": 99}
    found = collected(tmp_path, 6, asks=(endpoint, "limited"), **section)
    assert len(found) == 6 and {trace.teacher for trace in found} == {"limited"}
    for trace in found:
        question, answer = (message["content"] for message in trace.messages)
        assert int(question.split()[0]) + 1 == int(answer) and trace.reward == 1
    assert all(key == f"Bearer {KEY}" for _, key, _ in endpoint.seen)
    assert all((body["temperature"], body["max_tokens"]) == (0.3, 99) for _, _, body in endpoint.seen)
    wrong = sum(int(trace.messages[0]["content"].split()[0]) % 2 == 0 for trace in found)
    asked = len(endpoint.seen)
    assert asked == 2 * 6 + wrong, "each is rate-limited once and retried, and the wrong ones are asked once more"
    assert collected(tmp_path, 6, asks=(endpoint, "limited"), **section) == found and len(endpoint.seen) == asked
    collected(tmp_path, 6, asks=(endpoint, "limited"), regenerate=True, **section)
    assert len(endpoint.seen) > asked
    assert KEY not in "".join(path.read_text() for path in (tmp_path / "home" / "traces").iterdir())


def test_refused_key_ends_collection(tmp_path: Path, endpoint: OpenAiStandIn):
    with pytest.raises(ModelFailed, match="401") as failed:
        collected(tmp_path, 5, asks=(endpoint, "forbidden"))
    assert KEY not in str(failed.value)


class _Member(StandInMember):
    """A member whose environment has written the demonstrations."""

    def address(self, peer: str) -> str:
        return str(self.folder.path / "traces.jsonl") if peer == "environment" else super().address(peer)


def test_stopped_fine_tuning_resumes(tmp_path: Path, tiny_policy: Path):
    traces = [
        Trace(
            str(number), 0, [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": "ab" * 3}]
        )
        for number in range(9)
    ]
    config = small_run_config(sft__epochs=2, sft__batch_size=4, sft__learning_rate=1e-2, sft__max_length=64)

    def run(name: str, stop_after: int = 0) -> tuple[_Member, RunFolder]:
        folder = RunFolder(tmp_path / "runs" / name)
        if not folder.path.exists():
            folder = RunFolder.create(tmp_path / "runs", name)
            append_traces(folder.path / "traces.jsonl", traces)
        folder.crew.mkdir(exist_ok=True)
        member = _Member(folder, tiny_policy, config, stop_after)
        member.spec = SimpleNamespace(config=config, kind="sft", continued_run=None)
        SftRun(member).run(folder.newest_checkpoint())
        return member, folder

    whole, folder = run("whole")
    losses = [report.values["loss"] for report in whole.of(Stepped)]
    assert len(losses) == 5 and losses[-1] < losses[0] and whole.of(Stepped)[0].total == 5
    assert whole.of(Finished)[0].detail["step"] == 5
    first, broken = run("broken", stop_after=2)
    assert [report.step for report in first.of(Checkpointed)] == [2]
    second, _ = run("broken")
    assert [report.step for report in second.of(Stepped)] == [3, 4, 5]
    together = [report.values["loss"] for report in [*first.of(Stepped), *second.of(Stepped)]]
    assert together == pytest.approx(losses, rel=1e-4)
    rows = [json.loads(line) for line in broken.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5]
    assert (folder.checkpoints / "step-000005" / "model" / "model.safetensors").is_file()
