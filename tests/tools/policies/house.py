"""Ended runs with weights, and what tests do with them."""

from __future__ import annotations

import asyncio
import json
import time

from toprope_server.cli.app import build
from toprope_tools import data
from typer.testing import CliRunner

from tests.support.tools_house import become, start_run
from toprope.records.run.checkpoints import seal
from toprope.settings.schema import Config

WAIT_S = 120.0


def evaluation(label, version, successes):
    sampled = {"split": "heldout", "tasks": 100, "successes": successes}
    return {"version": 1, "label": label, "policy_version": version, "sampled": sampled, "greedy": None}


def trained(shop, steps, *, lora=False, base=None, four_bits=False):
    """An ended run with checkpoints; each step has weights of its own."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = Config()
    config.policy.max_context, config.rollout.max_new_tokens, config.policy.lora = 64, 5, lora
    config.policy.model, config.policy.load_in_4bit = str(base), four_bits
    folder = start_run(shop, config=config)
    for number in steps:
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(base)
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        place = folder.checkpoints / f"step-{number:06d}"
        model.save_pretrained(place / "model")
        AutoTokenizer.from_pretrained(base).save_pretrained(place / "model")
        (place / "state.json").write_text(
            json.dumps({"step": number, "cursor": 0, "version": 2, "policy_version": number})
        )
        seal(place)
    folder.evaluation("before").write_text(json.dumps(evaluation("before", 0, 10)))
    folder.evaluation("after").write_text(json.dumps(evaluation("after", steps[-1], 60)))
    last = {"step": steps[-1], "path": f"checkpoints/step-{steps[-1]:06d}", "cursor": 0}
    become(folder, "completed", ended_at=time.time(), checkpoint=last)
    return folder


def export(shop, run, **arguments):
    return asyncio.run(data.export_policy(shop, run_id=run, wait_s=WAIT_S, **arguments))


def toprope(*arguments):
    return CliRunner().invoke(build(), list(arguments), env={"COLUMNS": "200"})


def greedy(folder):
    """The answer of a policy to the question of the test, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**ids, do_sample=False, max_new_tokens=6)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True)
