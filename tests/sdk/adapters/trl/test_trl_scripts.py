"""Training scripts of TRL as environments: found without import, rows, reward functions and command lines."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
import textwrap
from pathlib import Path

import numpy
import pytest

from toprope.sdk.adapters import trl
from toprope.sdk.adapters._shared.user_files import data_beside
from toprope.sdk.adapters._trl.script import TRAINERS
from toprope.sdk.discovery import parse, script_requirements
from toprope.sdk.errors import InvalidRequest, LoadError
from toprope.sdk.rollouts import Rollout, configure
from toprope.sdk.worker.service import Service
from toprope.workbench.interpreters.naming import target_of

SCRIPT = """
    # /// script
    # dependencies = [
    #     "trl[vllm,peft]",
    #     "trackio",
    #     "echo-env @ git+https://example.com/echo_env",
    # ]
    # ///
    '''Count up.'''
    import argparse, random
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, RichProgressCallback, TrlParser

    def reward_total(environments, **kwargs):
        return [float(one.total) for one in environments]

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--add", type=int, default=1)
        given = parser.parse_args()

        class Counter:
            def reset(self, **row):
                self.total, self.start = 0, random.randrange(10**6)
                return f" Start: {self.start}"

            def count(self) -> str:
                '''Counts up.'''
                self.total += given.add
                return str(self.total)

        trainer = GRPOTrainer(
            model="some/model", reward_funcs=reward_total, environment_factory=Counter,
            train_dataset=[{"prompt": [{"role": "user", "content": "Count."}]} for _ in range(50)],
            args=GRPOConfig(max_tool_calling_iterations=3, reward_weights=[0.5]), peft_config=LoraConfig(),
            callbacks=[RichProgressCallback()],
        )
        open(__file__ + ".trained", "w").close()
        trainer.train()

    if __name__ == "__main__":
        main()
"""

QUICKSTART = """
    from datasets import Dataset
    from trl import GRPOTrainer
    from trl.rewards import think_format_reward

    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Think of {n}"}]} for n in range(20)])

    trainer = GRPOTrainer(model="some/model", reward_funcs=think_format_reward, train_dataset=dataset)
    open(__file__ + ".trained", "w").close()
    trainer.train()
"""
SPLIT = """
    from trl import GRPOConfig, GRPOTrainer, ScriptArguments, TrlParser

    if __name__ == "__main__":
        given, training = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config()
        rows = {
            split: [{"prompt": f"Say {split} {n}"} for n in range(40)]
            for split in (given.dataset_test_split, given.dataset_train_split)
        }
        rows = rows[given.dataset_train_split] if not given.dataset_streaming else None
        GRPOTrainer(model="m", reward_funcs=lambda completions, **row: [1.0], args=training, train_dataset=rows)
"""
MODULES = """
    import importlib.util
    from dataclasses import dataclass

    import trl.trainer.grpo_config
    from trl.scripts.utils import ScriptArguments, TrlParser
    from trl.trainer import GRPOConfig, grpo_trainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    assert importlib.util.find_spec("vllm") and importlib.util.find_spec("peft")
    assert grpo_trainer.GRPOTrainer is GRPOTrainer and trl.trainer.grpo_config.GRPOConfig is GRPOConfig

    @dataclass
    class Config(GRPOConfig):
        extra: int = 3

        def __post_init__(self):
            super().__post_init__()

    class Other(GRPOConfig):
        def __init__(self, rate):
            super().__init__(learning_rate=rate)

    given, training = TrlParser((ScriptArguments, Config)).parse_args_and_config()
    assert training.extra == 4 and training.dataset_name == "x" and Other(rate=1e-6).learning_rate == 1e-6
    training = Config(extra=5, reward_weights=[0.5])
    assert training.extra == 5 and training.run_name is None
    rows = [{"prompt": "a"}]
    GRPOTrainer(model="m", reward_funcs=lambda completions, **row: [1.0], args=training, train_dataset=rows)
"""
LOADING = """
    import torch
    from dataclasses import dataclass
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser
    from trl import GRPOConfig, GRPOTrainer, ModelConfig
    from unsloth import FastLanguageModel

    @dataclass
    class Mine:
        weight: float = 1.0

    mine, training, settings = HfArgumentParser((Mine, GRPOConfig, ModelConfig)).parse_args_into_dataclasses()
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained("no/such-model", dtype=torch.bfloat16, quantization_config=quantized)
    model = get_peft_model(model, LoraConfig(r=8))
    model, tokenizer = FastLanguageModel.from_pretrained(model_name="no/such-model")
    model = FastLanguageModel.get_peft_model(model, r=8)
    training.reward_weights = [mine.weight]
    rows = [{"prompt": "a"}]
    GRPOTrainer(model=model, reward_funcs=lambda completions, **row: [1.0], args=training, train_dataset=rows)
"""
OWN_REWARD = (
    "def think_format_reward(completions, **kwargs): return [float('<think>' in c[0]['content']) for c in completions]"
)
EXAMPLES = Path(os.environ.get("TOPROPE_ECOSYSTEMS", "")) / "huggingface+trl/examples/scripts"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "count_up.py"
    file.write_text(textwrap.dedent(SCRIPT))
    return file


def test_a_training_script_is_an_environment_though_everything_is_within_main(script: Path) -> None:
    [listed] = trl.declared(script, parse(script))
    assert listed.tools and listed.name == "count_up" and not listed.problem
    service = Service()
    card = service.answer("open", {"source": {"adapter": "trl", "target": listed.target}, "knobs": {}})
    assert card["parts"]["reward_total"]["weight"] == 0.5 and card["max_turns"] == 4
    begun = service.answer("begin", {"split": "train", "index": 0, "count": 2})
    first, second = begun["rollouts"]
    assert "Start: " in begun["messages"][-1]["content"] and "per_rollout" not in begun
    call = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    service.answer("advance", {"moves": [[first, call], [second, "no"]]})
    service.answer("advance", {"moves": [[first, call]]})
    done = service.answer("advance", {"moves": [[first, "done"]]})
    assert [one["outcome"]["parts"]["reward_total"] for one in done] == [2.0]
    assert done[0]["outcome"]["success"]
    assert service.answer("settle", {"rollouts": [second]})[0]["parts"]["reward_total"] == 0.0
    assert not Path(f"{script}.trained").exists()


def test_calls_beyond_the_rounds_of_tools_are_not_carried_out(script: Path) -> None:
    script.write_text(script.read_text().replace("max_tool_calling_iterations=3", "max_tool_calling_iterations=1"))
    service = Service()
    source = {"adapter": "trl", "target": json.dumps({"file": str(script), "script": True})}
    assert service.answer("open", {"source": source, "knobs": {}})["max_turns"] == 2
    [handle] = service.answer("begin", {"split": "train", "index": 0, "count": 1})["rollouts"]
    call = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    [first], [last] = (service.answer("advance", {"moves": [[handle, call]]}) for _ in range(2))
    assert not first["done"] and first["messages"][-1]["content"] == "1"
    assert last["outcome"]["parts"]["reward_total"] == 1.0 and last["outcome"]["turns"] == 2


def test_the_knob_turns_bounds_rollouts_of_a_script_with_tools(script: Path) -> None:
    source = {"adapter": "trl", "target": json.dumps({"file": str(script), "script": True})}

    def most(service: Service, turns: int) -> int:
        return service.answer("open", {"source": source, "knobs": {"turns": turns}})["max_turns"]

    assert [most(Service(), turns) for turns in (0, 30)] == [4, 30]
    script.write_text(script.read_text().replace("max_tool_calling_iterations=3, ", ""))
    assert [most(Service(), turns) for turns in (0, 300)] == [100, 300], "TRL has no limit then"
    service = Service()
    assert most(service, 2) == 2
    [handle] = service.answer("begin", {"split": "train", "index": 0, "count": 1})["rollouts"]
    call = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    [first], [last] = (service.answer("advance", {"moves": [[handle, call]]}) for _ in range(2))
    assert not first["done"] and last["outcome"]["parts"]["reward_total"] == 1.0
    script.write_text(textwrap.dedent(SPLIT))
    with pytest.raises(InvalidRequest, match="no knob 'turns'"):
        most(Service(), 2)


@pytest.mark.parametrize("trainer", ["GRPOTrainer", "RLOOTrainer"])
@pytest.mark.parametrize("reward", ["from trl.rewards import think_format_reward", OWN_REWARD])
def test_a_script_with_everything_at_top_level_runs_up_to_its_trainer(
    tmp_path: Path, trainer: str, reward: str
) -> None:
    file = tmp_path / "quickstart.py"
    text = textwrap.dedent(QUICKSTART).replace("GRPOTrainer", trainer)
    file.write_text(text.replace("from trl.rewards import think_format_reward", reward))
    [listed] = trl.declared(file, parse(file))
    assert json.loads(listed.target) == {"file": str(file), "script": True} and not listed.problem
    service = Service()
    card = service.answer("open", {"source": {"adapter": "trl", "target": listed.target}, "knobs": {}})
    assert card["parts"].keys() == {"think_format_reward"} and card["max_turns"] == 1
    [handle] = service.answer("begin", {"split": "train", "index": 0, "count": 1})["rollouts"]
    [turn] = service.answer("advance", {"moves": [[handle, "<think>\nhm\n</think>\nyes"]]})
    assert turn["outcome"]["reward"] == 1.0 and turn["outcome"]["success"]
    assert not Path(f"{file}.trained").exists()


def test_a_trainer_makes_a_script_only_if_running_the_file_gets_there(tmp_path: Path) -> None:
    rewards = "rows = [{'prompt': 'Go.'}]\ndef reward(completions, **kwargs): return [1.0 for _ in completions]\n"
    train = "def train(): GRPOTrainer(model='m', reward_funcs=reward, train_dataset=rows)\n"

    def is_script(text: str) -> bool:
        [listed] = trl.declared(tmp_path / "mine.py", ast.parse(text))
        return "script" in json.loads(listed.target)

    assert not is_script(rewards) and not is_script(rewards + train), "importers call train()"
    assert not is_script(f"{rewards}{train}if __name__ == '__main__': train()\n"), "an import is no harm"
    assert is_script(f"{rewards}{train}train()\n")
    assert is_script(f"{rewards}{train}def main(): train()\nrun(main)\n")
    assert is_script(f"{rewards}@app.command\n{train}app()\n")


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="TOPROPE_ECOSYSTEMS names no folder with TRL's examples")
def test_every_example_script_of_trl_is_listed_or_carries_a_reason() -> None:
    called = re.compile(rf"\b({'|'.join(TRAINERS)})\(")
    files = [file for file in sorted(EXAMPLES.rglob("*.py")) if called.search(file.read_text("utf-8"))]
    assert files, EXAMPLES
    for file in files:
        found = trl.declared(file, parse(file))
        assert len(found) == 1 and ("script" in json.loads(found[0].target) or found[0].problem), file


def test_equal_rows_of_an_environment_are_tasks_of_their_own(script: Path) -> None:
    service = Service()
    target = json.dumps({"file": str(script), "script": True})
    service.answer("open", {"source": {"adapter": "trl", "target": target}, "knobs": {}})
    sizes = service.answer("survey", {"limit": 100, "seconds": 5.0})
    assert sum(size["known"] for size in sizes.values()) == 50
    begun = [service.answer("begin", {"split": "train", "index": n, "count": 1})["messages"] for n in range(8)]
    assert len({one[-1]["content"] for one in begun}) == 8


def test_the_knob_arguments_reaches_the_command_line_of_a_script(script: Path) -> None:
    service = Service()
    source = {"adapter": "trl", "target": json.dumps({"file": str(script), "script": True})}
    service.answer("open", {"source": source, "knobs": {"arguments": "--add 7"}})
    [handle] = service.answer("begin", {"split": "train", "index": 0, "count": 1})["rollouts"]
    call = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    [turn] = service.answer("advance", {"moves": [[handle, call]]})
    assert turn["messages"][-1]["content"] == "7"
    with pytest.raises(LoadError, match="`arguments`.*unrecognized arguments: --subtract 1"):
        service.answer("open", {"source": source, "knobs": {"arguments": "--subtract 1"}})


def test_arguments_of_a_script_have_the_defaults_of_trl(tmp_path: Path) -> None:
    script = tmp_path / "split.py"
    script.write_text(textwrap.dedent(SPLIT))
    source = {"adapter": "trl", "target": json.dumps({"file": str(script), "script": True})}
    for arguments, said in (("", "Say train"), ("--dataset_train_split test", "Say test")):
        service = Service()
        service.answer("open", {"source": source, "knobs": {"arguments": arguments}})
        [task] = service.answer("tasks", {"split": "train", "start": 0, "count": 1})["tasks"]
        assert said in task["messages"][-1]["content"]


@pytest.mark.parametrize("installed", [True, False])
def test_submodules_of_trl_have_placeholders_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    script = tmp_path / "modules.py"
    script.write_text(textwrap.dedent(MODULES))
    target = json.dumps({"file": str(script), "script": True, "arguments": ["--extra", "4", "--dataset_name", "x"]})
    if installed:
        importlib.import_module("trl.trainer.grpo_config")  # as another environment of this process may have
    known = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    for name in [] if installed else ["trl", *known]:
        monkeypatch.setitem(sys.modules, name, None)
    assert trl.make(target).parts["<lambda>"].weight == 0.5


def test_rows_that_a_script_shuffles_are_the_same_in_every_worker(tmp_path: Path) -> None:
    script = tmp_path / "shuffling.py"
    script.write_text(textwrap.dedent(QUICKSTART).replace(" for n in range(20)])", " for n in range(20)]).shuffle()"))
    orders = []
    for seed in (1, 2):
        numpy.random.seed(seed)
        environment = trl.make(json.dumps({"file": str(script), "script": True}))
        orders.append([task.content for task in environment.tasks()])
    assert orders[0] == orders[1] != sorted(orders[0])


def test_a_script_may_load_its_policy_before_the_trainer(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    script = tmp_path / "loading.py"
    script.write_text(textwrap.dedent(LOADING))
    target = json.dumps({"file": str(script), "script": True, "arguments": ["--weight", "0.5", "--seed", "7"]})
    assert trl.make(target).parts["<lambda>"].weight == 0.5
    for name in ("AutoModelForCausalLM", "HfArgumentParser"):
        assert getattr(transformers, name).__module__.startswith("transformers.")


def test_a_reward_that_asks_the_policy_says_so(tmp_path: Path) -> None:
    script = tmp_path / "judging.py"
    script.write_text(
        "from transformers import AutoModelForCausalLM\nfrom trl import GRPOTrainer\n"
        "judge = AutoModelForCausalLM.from_pretrained('no/such-model').eval()\n"
        "ways = iter([lambda: float(judge().logits), lambda: judge()[0], lambda: 1 - judge(), lambda: judge()])\n"
        "def judged(completions, **row): return [next(ways)() for _ in completions]\n"
        "GRPOTrainer(model='m', reward_funcs=judged, train_dataset=[{'prompt': 'a'}])\n"
    )
    environment = configure(trl.make(json.dumps({"file": str(script), "script": True})))
    for _ in range(4):
        rollout = Rollout(environment, next(iter(environment.tasks())))
        rollout.begin()
        assert "The model is the policy here and is not loaded" in rollout.advance("x").outcome.error


def test_a_script_that_lacks_a_package_or_a_trainer_says_so(tmp_path: Path, script: Path) -> None:
    script.write_text(script.read_text().replace("import argparse, random", "import argparse, random, echo_env"))
    with pytest.raises(LoadError, match=r"No module named 'echo_env'.*echo-env @ git.*toprope env add .*count_up.py"):
        configure(trl.make(json.dumps({"file": str(script), "script": True})))
    idle = tmp_path / "idle.py"
    idle.write_text("print('nothing')\n")
    with pytest.raises(LoadError, match="without constructing a trainer"):
        configure(trl.make(json.dumps({"file": str(idle), "script": True})))
    sampled = tmp_path / "sampled.py"
    sampled.write_text("from trl import GRPOTrainer\nGRPOTrainer(model='m', train_dataset=[], rollout_worker=1)\n")
    [listed] = trl.declared(sampled, parse(sampled))
    assert "rollout worker" in listed.problem
    sampled.write_text(f"DATASET = 'someone/sums'\n{sampled.read_text()}")
    [listed] = trl.declared(sampled, parse(sampled))
    assert "rollout worker" in listed.problem, "the id of a data set is no rows"
    loaded = "dataset = 'someone/sums'\ndataset = load_dataset(dataset)\n"
    assert data_beside(sampled, ast.parse(loaded)) == "dataset", "the last value of a name is that of its script"
    assert data_beside(sampled, ast.parse("dataset = load_dataset('a')\ndataset: str = 'done'\n")) == ""
    offline = tmp_path / "offline.py"
    offline.write_text("raise OSError('No snapshot. To go online, set HF_HUB_OFFLINE=0')\n")
    with pytest.raises(LoadError, match="the cache of the Hugging Face Hub, or environment.network"):
        configure(trl.make(json.dumps({"file": str(offline), "script": True})))
    offline.write_text("raise ConnectionError(\"Couldn't reach 'someone/sums' on the Hub\")\n")
    with pytest.raises(LoadError, match="huggingface.co could not be reached$"):  # it is told what helps
        configure(trl.make(json.dumps({"file": str(offline), "script": True})))
    with pytest.raises(LoadError, match="rollout function"):
        configure(trl.make(listed.target))


def test_a_class_scored_by_a_function_is_found(tmp_path: Path) -> None:
    file = tmp_path / "scored.py"
    file.write_text(
        textwrap.dedent("""
            rows = [{"prompt": "Go."}]
            def reward(environments, **kwargs): return [one.x for one in environments]
            class World:
                def reset(self, **row): self.x = 1.0
        """)
    )
    [listed] = trl.declared(file, parse(file))
    assert json.loads(listed.target)["environment"] == "World"
    assert json.loads(listed.target)["reward_funcs"] == ["reward"]


def test_helper_that_takes_completions_is_no_reward(tmp_path: Path) -> None:
    helper = "rows = [{'prompt': 'Go.'}]\ndef texts(completions): return completions\n"
    reward = "def brief(completions, **kwargs): return [1.0 for _ in texts(completions)]\n"
    [listed] = trl.declared(tmp_path / "brief.py", ast.parse(helper + reward))
    assert json.loads(listed.target)["reward_funcs"] == ["brief"] and not listed.problem
    [alone] = trl.declared(tmp_path / "brief.py", ast.parse(helper))
    assert "texts is no reward function of TRL: it must take **kwargs" in alone.problem


def test_the_packages_that_a_script_names_are_those_of_its_environment(script: Path) -> None:
    source = script.read_text()
    assert script_requirements(source) == ["datasets", "echo-env @ git+https://example.com/echo_env"]
    with_rewards = source.replace("import argparse", "from trl.rewards import accuracy_reward\nimport argparse", 1)
    assert script_requirements(with_rewards)[:2] == ["trl", "datasets"]
    with_tasks = with_rewards.replace("trl[vllm,peft]", "trl[vllm, openreward]>=1.16")
    assert script_requirements(with_tasks)[:2] == ["trl[openreward]>=1.16", "datasets"]
    for line in ("import torch", "import accelerate, torch", "from transformers import AutoProcessor"):
        with_models = source.replace("import argparse", f"{line}\nimport argparse", 1)
        assert script_requirements(with_models)[:2] == ["trl", "datasets"], line
    trains = source + '\nif __name__ == "__main__":\n    import torch\n    from trl.trainer import utils\n'
    assert script_requirements(trains) == script_requirements(source), "what only training imports"
    with_another = source.replace("import argparse", "import torchless\nimport argparse", 1)
    assert script_requirements(with_another) == script_requirements(source)
    assert target_of(str(script), ()).requirements == tuple(script_requirements(source))
    assert script_requirements("import os\n") == []
