"""The command lines of TRL's scripts: dataclasses with types, and configurations whose fields are not known."""

from __future__ import annotations

import json
import logging
import os
import textwrap
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from toprope.sdk.adapters._trl.arguments import _DEFAULTS, ArgumentsError, Parser, ScriptArguments, Settings
from toprope.sdk.errors import LoadError
from toprope.sdk.worker.service import Service


@dataclass
class Mine:
    easy: bool = False
    hard: bool = True
    count: int = 40
    url: str = "http://default"
    most: float | None = None
    kinds: list[str] = field(default_factory=lambda: ["a"])
    level: Literal["low", 2] = "low"
    server_url: str = ""


def parsed(words: str, *more: Any) -> tuple[Any, ...]:
    return Parser((Mine, *more)).parse_args_and_config(words.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Mine()),
        ("--easy --url http://mine", Mine(easy=True, url="http://mine")),
        ("--easy=yes --hard false", Mine(easy=True, hard=False)),
        ("--no_hard", Mine(hard=False)),
        ("--count 7 --most -0.5", Mine(count=7, most=-0.5)),
        ("--kinds a b --server-url x", Mine(kinds=["a", "b"], server_url="x")),
        ("--level 2", Mine(level=2)),
    ],
)
def test_values_have_the_types_of_their_fields(words: str, expected: Mine) -> None:
    assert parsed(words) == (expected,)
    assert parsed(words, Settings)[0] == expected


def test_classes_derived_from_a_configuration_keep_what_they_have_no_field_for() -> None:
    @dataclass
    class Derived(Settings):
        extra: int = 1

    class Further(Derived):
        """Without fields of its own."""

    made = Further(extra=2, reward_weights=[0.5])
    assert (made.extra, made.reward_weights) == (2, [0.5])


def test_configurations_take_the_names_that_no_dataclass_has() -> None:
    words = "--easy --max_tool_calling_iterations 3 --reward-weights 0.5 1 --dataset_streaming --beta=-1 --name x"
    mine, given, settings = parsed(words, ScriptArguments, Settings)
    assert mine == Mine(easy=True) and given.dataset_streaming is True and given.dataset_train_split == "train"
    assert (settings.max_tool_calling_iterations, settings.reward_weights) == (3, [0.5, 1])
    assert (settings.beta, settings.name, settings.other) == (-1, "x", None)


def test_settings_that_are_not_given_are_those_of_trl() -> None:
    settings, other = parsed("--seed 7", Settings)[1], Settings()
    assert settings.seed == 7 and settings.eval_strategy == "no" and "wandb" not in settings.report_to
    assert os.path.join(settings.output_dir, "last") and not settings.push_to_hub
    assert settings.num_generations * settings.max_completion_length * settings.learning_rate > 0
    logging.getLogger("script").setLevel(settings.get_process_log_level())
    with settings.main_process_first():
        settings.report_to.append("wandb")
    assert settings.to_dict()["report_to"] == ["wandb"] and other.report_to == []
    assert other.max_tool_calling_iterations is None and other.reward_weights is None


@pytest.mark.parametrize("name", ["GRPOConfig", "ModelConfig"])
def test_defaults_are_those_of_the_installed_trl(name: str) -> None:
    trl = pytest.importorskip("trl")
    for setting in fields(getattr(trl, name)):
        if setting.name in _DEFAULTS and setting.default not in (MISSING, None) and setting.name != "report_to":
            assert _DEFAULTS[setting.name] == setting.default, setting.name


def test_arguments_that_the_script_adds_come_last() -> None:
    parser = Parser(dataclass_types=Mine)
    parser.add_argument("--seed", type=int, default=1)
    mine, added = parser.parse_args_and_config(["--seed", "2"])
    assert mine == Mine() and vars(added) == {"seed": 2}
    assert parser.parse_args_and_config(["--odd"], return_remaining_strings=True)[2] == ["--odd"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--count many", "argument --count: invalid int value: 'many'"),
        ("--hard maybe", "true or false is expected, not maybe"),
        ("--level high", "invalid choice: 'high'"),
        ("--url", "expected one argument"),
        ("--counts 7", "the script has no arguments --counts 7"),
        ("--config mine.yaml", "the file of --config is not read here"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(words: str, said: str) -> None:
    with pytest.raises(ArgumentsError, match=said):
        parsed(words)
    with pytest.raises(ArgumentsError, match="no name stands before 7"):
        parsed("7", Settings)


def test_a_script_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent("""
            from __future__ import annotations
            from dataclasses import dataclass
            from trl import GRPOConfig, GRPOTrainer, TrlParser

            @dataclass
            class Mine:
                count: int = 40

            mine, training = TrlParser((Mine, GRPOConfig)).parse_args_and_config()
            GRPOTrainer(model="m", reward_funcs=lambda completions, **row: [1.0] * len(completions), args=training,
                        train_dataset=[{"prompt": f"Say {n}"} for n in range(mine.count)])
        """)
    )
    source = {"adapter": "trl", "target": json.dumps({"file": str(script), "script": True})}
    service = Service()
    card = service.answer("open", {"source": source, "knobs": {"arguments": "--count 30 --reward_weights 0.5"}})
    assert [part["weight"] for part in card["parts"].values()] == [0.5]
    assert sum(size["known"] for size in service.answer("survey", {"limit": 99, "seconds": 5.0}).values()) == 30
    for arguments, said in (("--config x.yaml", "not read here"), ("--count x", "argument --count")):
        with pytest.raises(LoadError, match=f"fails before its trainer: .*{said}.*`arguments`"):
            Service().answer("open", {"source": source, "knobs": {"arguments": arguments}})
    script.write_text("raise RuntimeError('no such column')\n")
    with pytest.raises(LoadError, match="no such column$"):
        Service().answer("open", {"source": source, "knobs": {}})
