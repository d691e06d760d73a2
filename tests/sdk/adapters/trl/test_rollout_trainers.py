"""The trainer and the modules that a rollout function gets, and scripts that pass one."""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.adapters.trl.conftest import HEAD, TAIL, Policy, outcomes
from toprope.sdk.adapters import trl
from toprope.sdk.adapters._trl import rollouts
from toprope.sdk.adapters._trl.rollouts import TrlRollouts
from toprope.sdk.discovery import script_requirements
from toprope.sdk.errors import LoadError
from toprope.sdk.rollouts import configure

Made = Callable[..., TrlRollouts]

SAYS = "    return one(asked(trainer, prompts[0]), env_reward=1.0)\n"
CHOOSING = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", required=True)
    def rollout_func(prompts, trainer):
        return one(asked(trainer, prompts[0]), env_reward=1.0)
    rollout_func = rollout_func if parser.parse_args().sample == "yes" else None
"""


def test_the_trainer_has_its_tokenizer_settings_and_state(made: Made, policy: Policy) -> None:
    environment = made(
        """
        def rollout_func(prompts, trainer):
            args = trainer.args
            assert (args.num_generations, args.num_generations_eval, args.use_vllm) == (1, 1, True)
            assert (args.temperature, args.max_completion_length) == (0.5, 64) == (
                trainer.temperature, trainer.max_completion_length)
            assert trainer.processing_class is tokenizer and not trainer._is_vlm
            assert trainer.state.global_step == 1 and trainer.generation_batch_size == 1
            assert trainer.accelerator.is_main_process and str(trainer.accelerator.device) == "cpu"
            assert (trainer.accelerator.process_index, trainer.accelerator.num_processes) == (0, 1)
            assert getattr(trainer, "no_such", 3) == 3 and trainer.accelerator.unwrap_model(trainer.model)
            assert trainer.learning_rate == 1e-6 and trainer.use_vllm and trainer.vllm_mode == "colocate"
            return one(asked(trainer, prompts[0]), env_reward=1.0)
        """
    )
    assert environment._settings.num_generations == 8
    [outcome] = outcomes(environment, temperature=0.5, max_tokens=64)
    assert outcome.error is None
    assert environment._settings.num_generations == 8, "the script's own settings stay"


def test_answers_have_ids_that_give_their_text_back(made: Made, policy: Policy) -> None:
    environment = made(
        """
        def rollout_func(prompts, trainer):
            answer = asked(trainer, prompts[0], "second")
            text = tokenizer.decode(answer["completion_ids"], skip_special_tokens=True)
            assert text == answer["text"] == " naïve\\n" and answer["completion_ids"][-1] == tokenizer.eos_token_id
            assert answer["logprobs"] == [0.0] * len(answer["completion_ids"])
            assert tokenizer.decode(answer["prompt_ids"]).endswith("<|im_start|>user\\nsecond<|im_end|>\\n"
                                                                   "<|im_start|>assistant\\n")
            both = generate_rollout_completions(
                trainer, ["a", [{"role": "user", "content": [{"type": "text", "text": "b"}]}]],
                generation_overrides={"max_tokens": 3, "temperature": 0.1, "top_k": 5, "stop": ["x"]},
            )
            assert [one["text"] for one in both] == [" naïve\\n"] * 2
            assert generate_rollout_completions(trainer, []) == []
            return one(answer, env_reward=1.0)
        """
    )
    policy.answer = lambda messages: " naïve\n"
    assert outcomes(environment)[0].error is None
    (_, first, plain), (_, a, changed), (_, b, _) = policy.requests
    assert [message["content"] for message in first] == ["What is 0+1?", "second"] and plain == {}
    assert a == [{"role": "user", "content": "a"}] and b == [{"role": "user", "content": "b"}]
    assert changed == {"max_tokens": 3, "temperature": 0.1, "stop": ["x"]}


def test_an_engine_of_vllm_continues_ids_of_tokens(made: Made, policy: Policy) -> None:
    environment = made(
        """
        def rendered(text):
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        def rollout_func(prompts, trainer):
            history = prompt = rendered(prompts[0])
            for turn in range(2):
                told, ids, logprobs, tokens = trainer.vllm_generation.generate(
                    prompts=[history], images=None, num_generations=1)
                assert told == [history] and [one[0] for one in logprobs[0]] == [0.0] * len(ids[0])
                assert [one[0] for one in tokens[0]] == ids[0]
                history = history + ids[0] + rendered("And now?")
            return {"prompt_ids": [prompt], "completion_ids": [history[len(prompt):]], "logprobs": [[0.0]],
                    "env_reward": [1.0]}
        """
    )
    assert outcomes(environment)[0].error is None
    assert [message["content"] for message in policy.requests[1][1]] == ["What is 0+1?", "yes", "And now?"]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("trainer.model.generate(**tokenizer('a', return_tensors='pt').to(trainer.model.device))", "gets its answers"),
        ("trainer.model(input_ids=[1]).logits[0]", "generate_rollout_completions(trainer, prompts) of trl.exp"),
        ("FastLanguageModel.for_inference(trainer.model).fast_generate('a')", "gets its answers from"),
        (
            "generate_rollout_completions(trainer, '<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nYes, ')",
            "begins the policy's answer with 'Yes,'",
        ),
        ("generate_rollout_completions(trainer, [[{'role': 'user', 'content': [{'type': 'image'}]}]])", "than text"),
    ],
)
def test_uses_that_cannot_be_had_are_told_although_the_script_handles_them(
    made: Made, policy: Policy, use: str, said: str
) -> None:
    environment = made(
        f"""
        from unsloth import FastLanguageModel
        def rollout_func(prompts, trainer):
            answer = asked(trainer, prompts[0])
            try:
                {use}
            except:
                pass
            return one(answer, env_reward=-1.0)
        """
    )
    [outcome] = outcomes(environment)
    assert outcome.error is not None and said in outcome.error and outcome.turns == 1


def test_a_function_of_older_trl_gets_settings_and_the_tokenizer(made: Made, policy: Policy) -> None:
    environment = made(
        """
        def rollout_func(prompts, args, processing_class):
            assert (args.num_generations, args.max_completion_length, args.temperature) == (1, 64, 0.5)
            text = processing_class.apply_chat_template([{"role": "user", "content": prompts[0]}], tokenize=False)
            assert "What is 0+1?" in text
            return one(asked(args, prompts[0]), env_reward=1.0)
        """
    )
    assert outcomes(environment, temperature=0.5, max_tokens=64)[0].error is None


def test_what_a_rollout_imports_itself_is_as_it_was_for_the_script(
    made: Made, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("trl", "trl.trainer", "trl.experimental"):
        monkeypatch.setitem(sys.modules, name, None)  # is not installed
    environment = made(
        """
        import asyncio
        from unsloth import FastLanguageModel
        model, own = FastLanguageModel.from_pretrained("no/such-model")
        def rollout_func(prompts, trainer):
            from transformers import AutoProcessor
            from trl.experimental.openenv.utils import generate_rollout_completions
            from vllm import SamplingParams
            assert AutoProcessor.from_pretrained("other/model").tokenizer.eos_token == "<|im_end|>"
            assert isinstance(own.eos_token_id, int) and own.decode(own("a")["input_ids"]) == "a"
            asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
            return one(generate_rollout_completions(trainer, prompts)[0], env_reward=1.0)
        """
    )
    assert [one.error for one in outcomes(environment, 2)] == [None, None]


def test_arguments_tell_whether_a_script_samples(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "choosing.py"
    file.write_text("".join(map(textwrap.dedent, (HEAD, CHOOSING, TAIL))))
    [listed] = trl.declared(file, ast.parse(file.read_text()))
    assert listed.turns is None and not listed.tools and not listed.problem
    names = "# /// script\n# dependencies = ['trl', 'datasets']\n# ///\n"
    assert script_requirements(names + textwrap.dedent(TAIL)) == ["trl", "datasets"]
    waiting = trl.make(listed.target)
    assert isinstance(waiting, TrlRollouts), "its source tells, until it has its arguments"
    configure(waiting, knobs={"arguments": "--sample yes"})
    with pytest.raises(LoadError, match="required: --sample"):
        configure(trl.make(listed.target))
    with pytest.raises(LoadError, match=r"samples its rollouts in another way.*`arguments`"):
        tokenizer = 'AutoTokenizer.from_pretrained("no/such-model")'
        file.write_text(file.read_text().replace(tokenizer, "None"))
        configure(trl.make(listed.target), knobs={"arguments": "--sample no"})
    target = {"file": str(file), "script": True, "arguments": ["--sample", "no"]}
    assert isinstance(trl.make(json.dumps(target)), trl.Trl)


def test_a_function_that_the_source_does_not_tell_of_gets_tokenizers_of_bytes_too(
    tmp_path: Path, policy: Policy
) -> None:
    head = HEAD.replace('AutoTokenizer.from_pretrained("no/such-model")', "None")
    tail = TAIL.replace("GRPOTrainer(model", "GRPOTrainer(**{'rollout' + '_func': rollout_func}, model")
    tail = tail.replace(", rollout_func=rollout_func)", ")")
    function = "def rollout_func(prompts, trainer):\n    globals()['tokenizer'] = trainer.processing_class\n" + SAYS
    file = tmp_path / "unseen.py"
    file.write_text("".join(map(textwrap.dedent, (head, function, tail))))
    environment = configure(trl.make(json.dumps({"file": str(file), "script": True})))
    assert isinstance(environment, TrlRollouts) and outcomes(environment)[0].reward == 1.0


@pytest.mark.parametrize("beside", ["tools=[len]", "environment_factory=dict"])
def test_tools_beside_a_rollout_function_are_refused(made: Made, beside: str) -> None:
    with pytest.raises(LoadError, match="rollout_func beside tools or environment_factory"):
        made("def rollout_func(prompts, trainer):\n" + SAYS, TAIL.replace("rollout_func=", f"{beside}, rollout_func="))


def test_a_missing_tokenizer_is_told(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'tokenizers'")

    monkeypatch.setattr(rollouts, "tokenizer_of_bytes", missing)
    with pytest.raises(LoadError, match=r"needs a tokenizer: install transformers.*No module named 'tokenizers'"):
        made("def rollout_func(prompts, trainer):\n" + SAYS)


def test_weights_given_to_the_trainer_itself_count(made: Made) -> None:
    environment = made(
        "def rollout_func(prompts, trainer):\n" + SAYS, TAIL.replace('model="m"', 'model="m", reward_weights=[0.5]')
    )
    assert environment.parts["reward"].weight == 0.5
