"""The embedded policy is built once, in its place in the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toprope.errors import InvalidValue
from toprope.settings.changes import apply_changes
from toprope.settings.locks import Lock, Locks
from toprope.settings.schema import Config, PolicySection
from toprope.training.policy import tiny_model
from toprope.training.policy.loading import embedded_folder, load_tokenizer, place


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders in which policies were built; a file represents each."""
    folders: list[Path] = []

    def build(folder: Path, recipe: Any, progress: Any) -> None:
        folders.append(folder)
        (folder / "recipe.json").write_text("{}")

    monkeypatch.setattr(tiny_model, "build", build)
    return folders


def test_embedded_policy_is_built_once(built: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "policies"
    assert [place(PolicySection(), cache, print) for _ in range(2)] == [embedded_folder(cache)] * 2
    assert len(built) == 1


def test_incomplete_policy_is_replaced_and_leftovers_removed(built: list[Path], tmp_path: Path) -> None:
    folder = embedded_folder(tmp_path)
    (tmp_path / f".making-{folder.name}-x1").mkdir()
    (tmp_path / ".making-embedded-other-x1").mkdir()
    folder.mkdir()
    (folder / "model.safetensors").write_text("half")
    assert place(PolicySection(), tmp_path, print) == folder
    assert {path.name for path in folder.iterdir()} == {"recipe.json"}
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {folder.name, ".making-embedded-other-x1"}


THINKING = "\n\n  {% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}{{ mark }}"


def test_template_keeps_its_variables_wherever_it_goes(tiny_policy: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(tiny_policy)
    given = {"enable_thinking": False, "mark": 'a "b" %}\n\\é\U0001f600', "unused": None, "level": -1.5e-07}

    def rendered(tokenizer: Any, **more: Any) -> str:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, **more))

    for template in (THINKING, {"default": THINKING, "tool_use": "tools"}):
        plain.chat_template = template
        (folder := tmp_path / str(isinstance(template, dict))).mkdir()
        plain.save_pretrained(folder)
        assert rendered(load_tokenizer(folder)) == "\n\n"
        tokenizer = load_tokenizer(folder, given)
        expected = rendered(load_tokenizer(folder), **given)
        assert "<no thoughts>" in expected and given["mark"] in expected
        assert rendered(tokenizer) == expected, "as if given at every call"
        assert rendered(tokenizer, enable_thinking=True) == "\n\n" + str(given["mark"])
        tokenizer.save_pretrained(folder / "checkpoint")
        assert rendered(load_tokenizer(folder / "checkpoint")) == expected
        again = load_tokenizer(folder / "checkpoint", given)
        assert again.chat_template == tokenizer.chat_template, "not twice"
        assert "<no" not in rendered(load_tokenizer(folder / "checkpoint", {"enable_thinking": True}))


def test_template_variables_are_checked_and_can_be_locked() -> None:
    name = "policy.chat_template_kwargs"
    for value, said in (
        ({"messages": 1}, "not a variable"),
        ({"a b": 1}, "not a variable"),
        ({"bos_token": "x"}, "not a variable"),
        ({"range": 1}, "not a variable"),
        ({"continue_final_message": True}, "not a variable"),
        ({"mark": "\ud800"}, "half of a character"),
        ({f"v{number}": 1 for number in range(33)}, "at most 32 variables"),
        ({"mark": "x" * 4096}, "4096 characters"),
        ({"if": 1}, "not a variable"),
        ({"true": 1}, "not a variable"),
        ({"thinking": "false"}, "without quotes"),
        ({"thinking": [1]}, "must be true or false"),
        ({"level": float("nan")}, "must be true or false"),
        ("false", "an object"),
    ):
        with pytest.raises(InvalidValue, match=said):
            apply_changes(Config(), {name: value})
    config, [change] = apply_changes(Config(), {name: '{"enable_thinking": false}'})
    assert config.policy.chat_template_kwargs == change.after == {"enable_thinking": False}
    locks = Locks({name: Lock(name, "as measured", True, {"enable_thinking": True})})
    with pytest.raises(InvalidValue, match="as measured"):
        apply_changes(Config(), {name: {"enable_thinking": False}}, (), locks)


def test_tokenizer_without_end_or_padding_pads_with_a_special_token_or_is_refused(
    tiny_policy: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(tiny_policy, tmp_path / "bare")
    file = bare / "tokenizer_config.json"
    settings = json.loads(file.read_bytes())
    del settings["pad_token"], settings["eos_token"]
    file.write_text(json.dumps(settings))
    assert load_tokenizer(bare).pad_token == "<user>"
    for name in [name for name, value in settings.items() if "special_tokens" in name and value]:
        del settings[name]
    file.write_text(json.dumps(settings))
    with pytest.raises(InvalidValue, match="no special token"):
        load_tokenizer(bare)
