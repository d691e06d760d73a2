"""Supervised fine-tuning: labels, stored demonstrations, and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.sft_trainer import SFTTrainer

from tests.support.trainer_stand_ins import StandInMember, small_run_config
from toprope.errors import Corrupt, InvalidValue
from toprope.records.journal.demonstrations import Trace, append_traces, read_traces
from toprope.records.messages import Checkpointed, Finished, Stepped, Warned
from toprope.records.run.folder import RunFolder
from toprope.settings.schema import Config
from toprope.training.policy.tiny_model import RECIPES, make_tokenizer
from toprope.training.trainer import demonstration_run
from toprope.training.trainer.batch_source import EndOfTraining
from toprope.training.trainer.demonstration_run import TokenizedTraces, row_order, tokenize_traces, training_config
from toprope.training.trainer.sft import SftRun
from toprope.training.trainer.step import learner

TALK = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "THOUGHT: I compute it.\nTOOL: calculator\nINPUT: 3 + 4"},
    {"role": "user", "content": "OBSERVATION: 7"},
    {"role": "assistant", "content": "FINAL_ANSWER: 7"},
]


def learned_text(tokenizer: Any, row: dict[str, list[int]]) -> str:
    return tokenizer.decode([token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0])


def test_labels_cover_assistant_tokens_only():
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    found = tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 100)
    [row] = found.rows
    assert learned_text(tokenizer, row) == "".join(f"{one['content']}<|end|>" for one in TALK[1::2])
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == whole and found.too_long == found.rewritten == 0
    assert tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 10) == TokenizedTraces([], 1, 0)


def test_answers_in_the_prompt_are_not_learned():
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, TALK, first_messages=3)], 100).rows
    assert learned_text(tokenizer, row) == "FINAL_ANSWER: 7<|end|>"
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert Trace("t", 0, TALK, first_messages=3).prompt == TALK[:3] and Trace("t", 0, TALK).prompt == TALK[:1]


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
    rows = tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 100).rows
    assert [learned_text(tokenizer, row) for row in rows] == [f"{TALK[1]['content']}<|end|>", "FINAL_ANSWER: 7<|end|>"]


@pytest.mark.parametrize(
    "refusal",
    ["", "{{ raise_exception('no') if messages[0].role == 'system' or messages[1:] and messages[1].role == 'user' }}"],
    ids=["as Phi-3.5's", "as Gemma 2's"],
)
def test_messages_that_the_template_lacks_are_rendered_as_inference_sends_them(refusal: str):
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    tokenizer.chat_template = (
        refusal + "{% for m in messages if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ask, call, answer = TALK[0], TALK[1], TALK[3]
    talk = [{"role": "system", "content": "Compute."}, ask, call, {"role": "tool", "content": "7"}, answer]
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, talk, first_messages=2)], 100).rows
    assert tokenizer.decode(row["input_ids"]) == (
        f"<|user|>Compute.\n\n{ask['content']}<|end|><|assistant|>{call['content']}<|end|>"
        f"<|user|><tool_response>\n7\n</tool_response><|end|><|assistant|>{answer['content']}<|end|>"
    )
    image = {"role": "user", "content": [{"type": "image", "url": "x.png"}]}
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, [image, answer])], 200).rows
    assert "x.png" in tokenizer.decode(row["input_ids"]), "the template's own way with what inference refuses"


def test_calls_are_learned_in_the_form_of_the_template():
    """Their arguments come as JSON text, which templates would encode once more."""
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or () %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk = [TALK[0], calling, {"role": "tool", "content": "7", "tool_call_id": "1"}, TALK[3]]
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, talk)], 100).rows
    assert learned_text(tokenizer, row) == 'add{"a": 1}<|end|>FINAL_ANSWER: 7<|end|>'


@pytest.mark.parametrize("shows_tools", [True, False])
def test_tools_of_a_demonstration_stand_in_its_prompt_as_at_inference(shows_tools: bool):
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    shown = "{% for tool in tools or () %}TOOL: {{ tool.function.name }}<|end|>{% endfor %}" if shows_tools else ""
    tokenizer.chat_template = shown + (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, [TALK[0], TALK[3]], tools=tools)], 500).rows
    prompt = tokenizer.decode(row["input_ids"])
    assert ("TOOL: add" in prompt, '<tools>\n{"type": "function"' in prompt) == (shows_tools, not shows_tools)
    assert learned_text(tokenizer, row) == "FINAL_ANSWER: 7<|end|>"


def test_an_answer_that_the_template_does_not_end_is_learned_with_an_end():
    """GLM's ends it with the next message."""
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = tokenize_traces(tokenizer, [Trace("t", 0, TALK)], 100).rows
    assert [learned_text(tokenizer, row) for row in rows] == [
        f"{message['content']}{tokenizer.eos_token}" for message in TALK[1::2]
    ]
    assert tokenizer.decode(rows[1]["input_ids"]).count(tokenizer.eos_token) == 1, "prompts have none, as in inference"


def test_an_answer_that_shares_a_token_with_the_prompt_is_learned_from_there():
    """Qwen3.5's prompt ends with an opened thought and a newline, and an answer without thoughts begins with one."""
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    word, head, rest = "OBSERVATION: ", 3, "7"
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        f"{{% if add_generation_prompt %}}<|assistant|>{word[:head]}{{% endif %}}"
    )
    found = tokenize_traces(tokenizer, [Trace("t", 0, [TALK[0], {"role": "assistant", "content": word + rest}])], 100)
    [row], prompt = found.rows, tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert row["input_ids"][: len(ids)] == ids and row["labels"][: len(ids)] == [-100] * len(ids)
    assert tokenizer.decode(row["input_ids"][len(ids) :]) == f"{word[head:]}{rest}<|end|>" and found.rewritten == 0


@pytest.mark.parametrize("form", ["spelt", "sampled"])
def test_thoughts_and_calls_of_gpt_oss_are_learned_in_their_channels(form: str):
    tokenizer = make_tokenizer(RECIPES["embedded-tools"])
    tokenizer.chat_template = """{# <|channel|>final #}{% for m in messages -%}
{% if '<|channel|>' in m.content %}{{ raise_exception('channel tags in the content') }}{% endif -%}
{% if m.role != 'assistant' %}<|user|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}<|assistant|>{% if m.content %}analysis:{{ m.content + ' ' }}{% endif %}
{{- m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}<|end|>
{%- else %}<|assistant|>{% if loop.last and not add_generation_prompt and m.thinking %}analysis:{{ m.thinking + ' ' }}
{%- endif %}final:{{ m.content }}<|end|>{% endif %}{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
    thought = "<think>\nI add.\n</think>\n\n"
    content = f"{thought}It is 3."
    if form == "sampled":
        content = (
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>"
        )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling = {"role": "assistant", "content": [{"type": "text", "text": thought}], "tool_calls": [call]}
    called = f'{thought}<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call>'
    if form == "sampled":
        called = (
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>'
        )
    for answer, text in (
        ({"role": "assistant", "content": content}, "analysis:I add. final:It is 3.<|end|>"),
        (calling, 'analysis:I add. add{"a": 1}<|end|>'),
        ({"role": "assistant", "content": called}, 'analysis:I add. add{"a": 1}<|end|>'),
    ):
        [row] = tokenize_traces(tokenizer, [Trace("t", 0, [TALK[0], answer])], 200).rows
        assert learned_text(tokenizer, row) == text


def test_row_order_depends_on_seed_alone():
    order = row_order(10, 4, 3, seed=1)
    assert len(order) == 32 and sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order == row_order(10, 4, 3, seed=1) != row_order(10, 4, 3, seed=2) and order[:10] != order[10:20]
    assert order[30:] == order[:2]
    few = row_order(3, 16, 2, seed=1)
    assert len(few) == 16 and few[6:12] == few[:6], "few rows are repeated until a batch is full"


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


class _Member(StandInMember):
    """A member whose environment has written the demonstrations, after so many looks; counts its signs of life."""

    looks = beats = holds = 0

    def address(self, peer: str) -> str:
        return str(self.folder.path / "traces.jsonl") if peer == "environment" else super().address(peer)

    def peer(self, name: str) -> Any:
        if name == "environment" and self.looks:
            self.looks -= 1
            return None
        return self.address(name)

    def beat(self) -> None:
        self.beats += 1

    def hold(self, beat: Any = None) -> float:
        self.holds += 1
        return 0.0


def said(prompt: str, answer: str = "ab" * 3) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


TRACES = [Trace(str(number), 0, said(f"say {number}")) for number in range(9)]


def sft_config(**changes: Any) -> Config:
    usual = {"sft__epochs": 2, "sft__batch_size": 4, "sft__learning_rate": 1e-2, "sft__max_length": 64}
    return small_run_config(**usual | changes)


def fine_tuned(
    path: Path, policy: Path, config: Config, traces: list[Trace] = TRACES, stop_after: int = 0, looks: int = 0
) -> tuple[_Member, RunFolder]:
    """Fine-tunes in a run folder from its newest checkpoint."""
    folder = RunFolder(path)
    if not path.exists():
        folder = RunFolder.create(path.parent, path.name)
        append_traces(path / "traces.jsonl", traces)
    folder.crew.mkdir(exist_ok=True)
    member = _Member(folder, policy, config, stop_after)
    member.looks = looks
    member.spec = SimpleNamespace(config=config, kind="sft", continued_run=None)
    SftRun(member).run(folder.newest_checkpoint())
    return member, folder


def test_stopped_fine_tuning_resumes(tmp_path: Path, tiny_policy: Path):
    whole, folder = fine_tuned(tmp_path / "whole", tiny_policy, sft_config())
    losses = [report.values["loss"] for report in whole.of(Stepped)]
    assert len(losses) == 5 and losses[-1] < losses[0] and whole.of(Stepped)[0].total == 5
    assert whole.of(Finished) and whole.of(Stepped)[-1].step == 5
    first, broken = fine_tuned(tmp_path / "broken", tiny_policy, sft_config(), stop_after=2)
    assert [report.step for report in first.of(Checkpointed)] == [2]
    second, _ = fine_tuned(tmp_path / "broken", tiny_policy, sft_config())
    assert [report.step for report in second.of(Stepped)] == [3, 4, 5]
    together = [report.values["loss"] for report in [*first.of(Stepped), *second.of(Stepped)]]
    assert together == pytest.approx(losses, rel=1e-4)
    rows = [json.loads(line) for line in broken.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5]
    assert (folder.checkpoints / "step-000005" / "model" / "model.safetensors").is_file()


def test_few_rows_fill_a_large_batch(tmp_path: Path, tiny_policy: Path):
    config = sft_config(sft__epochs=1, sft__batch_size=16)
    member, _ = fine_tuned(tmp_path / "run", tiny_policy, config, TRACES[:3])
    assert [report.step for report in member.of(Stepped)] == [1]


def test_trainer_gives_signs_of_life_while_it_waits_and_reads(tmp_path: Path, tiny_policy: Path, monkeypatch):
    monkeypatch.setattr(demonstration_run, "_LOOK_EVERY_S", 0.001)

    def end(*given: Any) -> None:
        raise EndOfTraining  # as at a service whose costs reach their limit

    monkeypatch.setattr(SftRun, "_train", end)
    member, _ = fine_tuned(tmp_path / "run", tiny_policy, sft_config(), looks=20)
    assert member.of(Finished)
    assert member.looks == 0 and member.beats >= 20 + len(TRACES)


def test_answers_that_the_template_rewrites_are_told(tmp_path: Path, tiny_policy: Path):
    """A prompt ends with an opened thought, which the template drops from answers without one."""
    policy = shutil.copytree(tiny_policy, tmp_path / "thinking")
    template = (policy / "chat_template.jinja").read_text()
    head, end = template.rsplit("<bot>", 1)
    (policy / "chat_template.jinja").write_text(f"{head}<bot><think>{end}")
    some = [*TRACES, Trace("t", 0, said("say", "<think>ab"))]
    member, _ = fine_tuned(tmp_path / "some", policy, sft_config(), some)
    [warned] = member.of(Warned)
    assert "prompt of 9 answers" in warned.what
    with pytest.raises(InvalidValue, match="prompt of 9 answers.*chat_template_kwargs") as failed:
        fine_tuned(tmp_path / "none", policy, sft_config())
    assert "max_length" not in str(failed.value)
    with pytest.raises(InvalidValue, match="9 are longer than sft.max_length .8 tokens"):
        fine_tuned(tmp_path / "long", tiny_policy, sft_config(sft__max_length=8))


def test_demonstrations_that_the_template_refuses_are_told(tmp_path: Path, tiny_policy: Path):
    """Llama 3's refuses two calls in an answer."""
    policy = shutil.copytree(tiny_policy, tmp_path / "refusing")
    file = policy / "chat_template.jinja"
    refusal = "{{ raise_exception('One call at once!') if messages[0].content == 'bad' }}"
    file.write_text(refusal + file.read_text())
    bad = Trace("t", 0, said("bad", "ab"))
    member, _ = fine_tuned(tmp_path / "some", policy, sft_config(), [*TRACES, bad])
    [warned] = member.of(Warned)
    assert warned.what.startswith("The chat template refuses 1 of the demonstrations (One call at once!): they are not")
    with pytest.raises(InvalidValue, match="refuses 1 of the demonstrations .One call at once!.*"):
        fine_tuned(tmp_path / "none", policy, sft_config(), [bad])


def test_demonstrations_that_are_too_long_are_told(tmp_path: Path, tiny_policy: Path):
    some = [*TRACES, Trace("t", 0, said("say", "ab" * 99))]
    member, _ = fine_tuned(tmp_path / "run", tiny_policy, sft_config(), some)
    [warned] = member.of(Warned)
    assert warned.what.startswith("Of the demonstrations, 1 are longer than sft.max_length (64 tokens): they are not")


def test_micro_batches_give_the_steps_of_a_whole_batch(tmp_path: Path, tiny_policy: Path, monkeypatch):
    """Answers differ in length, so a mean of means would differ. 3 does not divide 4, so passes have 2 rows."""
    traces = [Trace(str(number), 0, said(f"say {number}", "ab" * (1 + number))) for number in range(8)]
    passed: list[int] = []
    step = SFTTrainer.training_step

    def counted(self: Any, model: Any, inputs: Any, *given: Any) -> Any:
        passed.append(len(inputs["input_ids"]))
        return step(self, model, inputs, *given)

    monkeypatch.setattr(SFTTrainer, "training_step", counted)
    config = sft_config(sft__epochs=1)
    whole, _ = fine_tuned(tmp_path / "whole", tiny_policy, config, traces)
    config.optimizer.micro_batch_size = 3
    parts, _ = fine_tuned(tmp_path / "parts", tiny_policy, config, traces)
    assert passed == [4, 4, 2, 2, 2, 2]
    for name in ("loss", "grad_norm"):
        values = [[report.values[name] for report in member.of(Stepped)] for member in (whole, parts)]
        assert len(values[0]) == 2 and values[1] == pytest.approx(values[0], rel=1e-4)


def test_fine_tuning_is_paused_deterministic_and_in_the_precision_asked_for(
    tmp_path: Path, tiny_policy: Path, monkeypatch
):
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append(on))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = sft_config(algorithm__deterministic=True)
    member, _ = fine_tuned(tmp_path / "run", tiny_policy, config)
    assert asked == [True] and member.holds >= len(member.of(Stepped)) == 5
    monkeypatch.setattr(learner, "cpu_computes_bfloat16", lambda: False)
    with pytest.raises(InvalidValue, match="optimizer.precision is bfloat16"):
        fine_tuned(tmp_path / "half", tiny_policy, sft_config(optimizer__precision="bfloat16"))
