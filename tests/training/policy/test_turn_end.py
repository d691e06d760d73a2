"""The token with which a chat template closes an answer: it ends what engines sample, and demonstrations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_stand_ins import small_config
from toprope.records.journal.demonstrations import Trace
from toprope.training.policy.export import export_policy
from toprope.training.policy.loading import load_model, load_tokenizer
from toprope.training.policy.turn_end import declare_turn_end, end_ids_of, find_end_ids, turn_end_ids
from toprope.training.trainer.demonstration_run import tokenize_traces

CHATML = (
    "{% for m in messages %}<user>{{ m['role'] }}\n{{ m['content'] }}<bot>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
)
"""As the templates of base models: turns close with a special token, and the tokenizer names another end."""
END, CLOSING = 1, 3


@pytest.fixture
def tokenizer(tiny_policy: Path) -> Any:
    found = load_tokenizer(tiny_policy)
    found.chat_template = CHATML
    return found


def test_the_closing_token_ends_answers_of_all_engines(tokenizer: Any, tiny_policy: Path, tmp_path: Path) -> None:
    assert turn_end_ids(tokenizer) == {CLOSING}
    assert find_end_ids(load_model(tiny_policy, small_config()), tokenizer) == {END, CLOSING}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [END, 7]}))
    assert end_ids_of(tmp_path, tokenizer) == {END, 7, CLOSING}


def test_exported_models_declare_the_closing_token(tokenizer: Any, tiny_policy: Path, tmp_path: Path) -> None:
    def declared() -> dict[str, Any]:
        return json.loads((tmp_path / "model" / "generation_config.json").read_text())

    source = tmp_path / "source"
    shutil.copytree(tiny_policy, source)
    tokenizer.save_pretrained(source)
    export_policy(source, tmp_path / "model", "merged", dtype="as saved", base="", converter=[])
    assert declared()["eos_token_id"] == [END, CLOSING]
    before = declared()
    declare_turn_end(tmp_path / "model", tokenizer)
    assert declared() == before


@pytest.mark.parametrize(
    ("config", "generation", "declared"),
    [
        ({"eos_token_id": [7, None]}, None, [7, CLOSING]),
        ({"eos_token_id": 7}, {"eos_token_id": [None, 9]}, [9, CLOSING]),
        ({"eos_token_id": None}, {"eos_token_id": [None]}, [END, CLOSING]),
        ({}, None, [END, CLOSING]),
    ],
)
def test_declared_ends_are_numbers_and_those_that_the_model_has(
    tokenizer: Any, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, declared: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    written = tmp_path / "generation_config.json"
    if generation is not None:
        written.write_text(json.dumps(generation))
    declare_turn_end(tmp_path, tokenizer)
    assert json.loads(written.read_text())["eos_token_id"] == declared
    written.unlink()
    tokenizer.eos_token = None
    (tmp_path / "config.json").unlink()
    declare_turn_end(tmp_path, tokenizer)
    assert json.loads(written.read_text())["eos_token_id"] == [CLOSING]


def test_demonstrations_end_with_the_closing_token(tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, talk)], 100).rows
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
    assert tokenizer.decode(learned) == "a<bot>" and learned[-1] == CLOSING


@pytest.mark.parametrize("answers", [["a", "b"], ["", ""]])
def test_the_end_of_a_document_is_no_part_of_an_answer(tokenizer: Any, answers: list[str]) -> None:
    """As in Phi-3, whose template writes it behind the last message."""
    tokenizer.chat_template = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    talk = [
        one for said in answers for one in ({"role": "user", "content": "q"}, {"role": "assistant", "content": said})
    ]
    [row] = tokenize_traces(tokenizer, [Trace("t", 0, talk)], 100).rows
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
    assert tokenizer.decode(learned) == "".join(f"{said}<bot>" for said in answers)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        "{% for m in messages %}{{ m['role'] }}{% endfor %}<bot>",
        "{{ raise_exception('no') }}",
        "",
    ],
)
def test_templates_that_close_with_no_special_token_add_none(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert turn_end_ids(tokenizer) == frozenset()
