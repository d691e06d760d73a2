"""Training scripts of TRL as authors write them: checks of TRL's version, policies, imports of their project."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from toprope.sdk.adapters import trl
from toprope.sdk.adapters._trl.script import trainer_call
from toprope.sdk.errors import LoadError
from toprope.sdk.rollouts import Rollout, configure

CHECKING = """
    import inspect
    from dataclasses import fields
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **columns):
        return [1.0 for _ in completions]

    wanted = {"reward_weights": [0.5], "max_tool_calling_iterations": 3, "of_another_version": 1}
    for known in (
        set(inspect.signature(GRPOConfig).parameters),
        set(inspect.signature(GRPOConfig.__init__).parameters) - {"self"},
        {field.name for field in fields(GRPOConfig)},
        GRPOConfig.__dataclass_fields__,
    ):
        given = {name: value for name, value in wanted.items() if name in known}
        assert given.keys() == wanted.keys() - {"of_another_version"}
    class Counter:
        def reset(self, **row): return "Go."
    kwargs = dict(model="m", args=GRPOConfig(**given), train_dataset=[{"prompt": "a"}], reward_funcs=reward,
                  environment_factory=Counter, no_such=1)
    known = inspect.signature(GRPOTrainer.__init__).parameters
    assert "processing_class" in known and "tokenizer" not in known
    original = GRPOTrainer._get_train_sampler
    GRPOTrainer(**{name: value for name, value in kwargs.items() if name in known})
"""
LOADING = """
    import wandb
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM
    from trl import GRPOTrainer, SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel
    from unsloth.chat_templates import get_chat_template

    model = prepare_model_for_kbit_training(AutoModelForCausalLM.from_pretrained("no/such-model"))
    policies = [model, get_peft_model(model, LoraConfig(r=8))]
    policy, tokenizer = FastLanguageModel.from_pretrained(model_name=PLACE)
    for one in (*policies, policy, FastLanguageModel.get_peft_model(policy, r=8)):
        total = sum(p.numel() for p in one.parameters() if p.requires_grad)
        assert round(total / 1e6, 2) and one.config.vocab_size + 1
        print(f"{total:,} parameters, {100 * total / max(1, one.num_parameters()):.2f}%", next(one.parameters()).device)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer = get_chat_template(tokenizer, chat_template="chatml")
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    with wandb.init(project="p"):
        SFTTrainer(model=policy, args=SFTConfig(max_length=9)).train()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Go."}], tokenize=False)
    text += f"{tokenizer.eos_token}" + tokenizer.pad_token
    GRPOTrainer(model=policy, reward_funcs=lambda completions, **row: [1.0], train_dataset=[{"prompt": text}])
"""


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return file


def _made(file: Path, *arguments: str) -> trl.Trl:
    return configure(trl.make(json.dumps({"file": str(file), "script": True, "arguments": list(arguments)})))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget where a script imports from."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_scripts_may_ask_which_settings_and_arguments_trl_has(tmp_path: Path) -> None:
    file = _written(tmp_path / "checking.py", CHECKING)
    [listed] = trl.declared(file, ast.parse(file.read_text()))
    assert listed.turns is None, "what a dictionary holds is not known from a file"
    environment = _made(file)
    assert environment.parts["reward"].weight == 0.5 and environment.max_turns == 4


def test_a_script_may_load_count_and_warm_up_its_policy(tmp_path: Path) -> None:
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[Go.]": 0, "?": 1}, unk_token="?"))
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="?")
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    file = _written(tmp_path / "loading.py", LOADING.replace("PLACE", repr(str(tmp_path / "model"))))
    known = set(sys.modules)
    assert next(iter(_made(file).tasks())).prompt == "[Go.]??", "prompts are those of the real tokenizer"
    assert not [name for name in set(sys.modules) - known if name.startswith(("peft.", "unsloth", "wandb"))]


def test_what_a_script_asks_its_policy_before_the_trainer_has_no_answer(tmp_path: Path) -> None:
    file = _written(
        tmp_path / "asking.py",
        """
        from transformers import AutoModelForCausalLM
        from trl import GRPOTrainer
        AutoModelForCausalLM.from_pretrained("no/such-model").generate(max_new_tokens=8)[0]
        GRPOTrainer(model="m", reward_funcs=len, train_dataset=[])
        """,
    )
    with pytest.raises(LoadError, match=r"what comes before the trainer.*answers\. If an argument.*`arguments`"):
        _made(file)


def test_settings_of_a_logger_are_not_known(tmp_path: Path) -> None:
    file = _written(
        tmp_path / "sweeping.py",
        """
        import wandb
        from trl import GRPOConfig, GRPOTrainer
        weight = wandb.init(config={"weight": 0.25}).config.weight
        GRPOTrainer(model="m", reward_funcs=lambda completions, **row: [1.0], train_dataset=[{"prompt": "a"}],
                    args=GRPOConfig(reward_weights=[weight]))
        """,
    )
    with pytest.raises(TypeError, match="float"):
        _made(file)


@pytest.mark.usefixtures("clean")
def test_a_script_imports_from_the_root_of_its_project_also_later(tmp_path: Path) -> None:
    (tmp_path / "openenv.yaml").touch()
    _written(tmp_path / "rules_of_it/__init__.py", "RIGHT = 'yes'\n")
    _written(tmp_path / "elsewhere/judge_of_it.py", "VALUE = 0.5\n")
    _written(tmp_path / "training_of_it/__init__.py", "")
    _written(tmp_path / "training_of_it/load_it.py", "model = 'm'\n")
    file = _written(
        tmp_path / "training_of_it/train_it.py",
        """
        import sys
        from pathlib import Path
        from trl import GRPOTrainer
        from training_of_it.load_it import model
        from . import load_it
        sys.path.insert(0, str(Path(__file__).parent.parent / "elsewhere"))

        def reward(completions, **columns):
            from judge_of_it import VALUE
            from rules_of_it import RIGHT
            return [VALUE * (text == RIGHT) for text in completions]

        GRPOTrainer(model=model, reward_funcs=reward, train_dataset=[{"prompt": "a"}])
        """,
    )
    environment = _made(file.parent / ".." / file.parent.name / file.name)
    rollout = Rollout(environment, next(iter(environment.tasks())))
    rollout.begin()
    outcome: Any = rollout.advance("yes").outcome
    assert outcome.error is None and outcome.reward == 0.5


def test_a_module_of_a_script_may_load_the_policy(tmp_path: Path) -> None:
    _written(
        tmp_path / "load_it.py",
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer
        model = AutoModelForCausalLM.from_pretrained("no/such-model")
        """,
    )
    file = _written(
        tmp_path / "train_it.py",
        """
        from trl import GRPOTrainer
        from load_it import model
        GRPOTrainer(model=model, reward_funcs=lambda completions, **row: [1.0], train_dataset=[{"prompt": "a"}])
        """,
    )
    program = (
        "import sys; from toprope.sdk.adapters import trl; trl.make(sys.argv[1]); import transformers; "
        "print(transformers.AutoModelForCausalLM.__module__)"
    )
    target = json.dumps({"file": str(file), "script": True})
    done = subprocess.run([sys.executable, "-c", program, target], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("transformers."), done.stderr  # in a process that has not imported it


def test_a_trainer_is_found_behind_a_dictionary_and_a_class_of_the_script(tmp_path: Path) -> None:
    def is_found(text: str) -> bool:
        return trainer_call(ast.parse(text)) is not None

    call = "GRPOTrainer(**settings)\n"
    assert is_found(f"def main():\n    from trl import GRPOTrainer\n    {call}main()\n")
    assert not is_found(f"class GRPOTrainer: ...\n{call}"), "which may be anything"
    mine = "from trl import GRPOTrainer\nclass Mine(GRPOTrainer):\n"
    assert is_found(f"{mine}    pass\nMine(reward_funcs=len, model='m')\n")
    text = "    def _calculate_rewards(self, *given): return RETURNED\n"
    made = "Mine(model='m', reward_funcs=len, train_dataset=[{'prompt': 'a'}])\n"
    file = _written(tmp_path / "own.py", mine + text.replace("RETURNED", "super()._calculate_rewards(*given)") + made)
    assert _made(file).parts
    file.write_text(mine + text.replace("RETURNED", "GRPOTrainer._calculate_rewards(self, *given)") + made)
    assert _made(file).parts
    timed = "    def timed(call): return functools.wraps(call)(lambda *given: call(*given))\n    @timed\n"
    abstract = "import abc, functools\n" + mine.replace("(GRPOTrainer)", "(GRPOTrainer, abc.ABC)") + timed
    file.write_text(abstract + text.replace("RETURNED", "super()._calculate_rewards(*given)") + made)
    assert _made(file).parts, "what a decorator wraps counts"
    file.write_text(mine + text.replace("RETURNED", "[0.0]") + made)
    with pytest.raises(LoadError, match="replaces _calculate_rewards of TRL's trainer"):
        _made(file)


def test_a_script_that_ends_early_says_what_it_printed(tmp_path: Path) -> None:
    file = _written(tmp_path / "early.py", "import sys\nprint('Requires GPU.', file=sys.stderr)\n")
    with pytest.raises(LoadError, match=r"without constructing.*AsyncGRPOTrainer\. .* printed: «Requires GPU\.»"):
        _made(file)
    file.write_text("print('No server on port', 80)\nraise SystemExit(1)\n")
    with pytest.raises(LoadError, match=r"sys.exit.1.*printed: «No server on port 80»"):
        _made(file)
    file.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
    )
    text = file.read_text()
    file.write_text(f"{text}parser.parse_args()\n")
    with pytest.raises(LoadError, match=r"The knob `arguments`.* printed: «early\.py: error: .* required: --data»"):
        _made(file)
    file.write_text(f"{text}try: parser.parse_args()\nexcept SystemExit: parser.parse_args(['--data', 'a'])\n")
    with pytest.raises(LoadError, match="without constructing"):
        _made(file)


def test_a_script_that_needs_arguments_gets_them_by_its_knob(tmp_path: Path) -> None:
    file = _written(
        tmp_path / "needing.py",
        """
        import argparse
        from trl import GRPOTrainer
        parser = argparse.ArgumentParser()
        parser.add_argument("--said", required=True)
        rows = [{"prompt": parser.parse_args().said}]
        GRPOTrainer(model="m", reward_funcs=lambda completions, **row: [1.0], train_dataset=rows)
        """,
    )
    environment = trl.make(json.dumps({"file": str(file), "script": True}))
    assert environment.files == (str(file),)
    for _ in range(2):
        ready = configure(environment, knobs={"arguments": "--said Go."})
        assert next(iter(ready.tasks())).prompt == "Go."


def test_a_script_reads_data_by_its_path_from_the_root_of_its_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scratch", "empty"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # as checks start a worker
    monkeypatch.setenv("TOPROPE_WALLED", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    _written(tmp_path / "data/rows.txt", "Go.")
    for name in ("openenv.yaml", "a", "b", "c"):
        (tmp_path / name).touch()
    (tmp_path / "training").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "training" / name).symlink_to(tmp_path / "gone")
    file = _written(
        tmp_path / "training/reading.py",
        """
        from pathlib import Path
        from trl import GRPOTrainer
        rows = [{"prompt": Path("data/rows.txt").read_text()}]
        GRPOTrainer(model="m", reward_funcs=lambda completions, **row: [1.0], train_dataset=rows)
        """,
    )
    assert next(iter(_made(file).tasks())).prompt == "Go."
