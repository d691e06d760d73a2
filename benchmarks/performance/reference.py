"""The other sides of `benchmarks.performance.train`, one per process.

    python -P -m benchmarks.performance.reference trl POLICY STEPS WARM THREADS SEED [SETTINGS]
    python -P -m benchmarks.performance.reference floor POLICY STEPS WARM

`trl` trains with TRL's GRPOTrainer, which generates itself, at the settings that are fastest on a CPU: its fused output
layer works on chunks as wide as the vocabulary. `floor` times what no trainer can avoid: forward pass, backward pass
and optimizer over a batch of the same shape, prompts not shared, and decoding it with a key-value cache. Both print one
JSON object: seconds and processor seconds a step after WARM steps; `trl` adds seconds and successes of all steps.
SETTINGS is a JSON object of GRPOConfig's fields that differ, with `groups` and `lora_rank`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GROUPS, GROUP_SIZE, ANSWER, RATE = 8, 8, 7, 1e-3
KNOBS = {"min_word_len": 3, "max_word_len": 5}


def train_with_trl(
    policy: Path, steps: int, warm: int, threads: int, seed: int, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train on the demo's task with the demo's settings, but for those given."""
    import reasoning_gym
    import torch
    import trl.trainer.utils
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    changed = dict(settings or {})
    rank = changed.pop("lora_rank", 0)
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(policy)
    if not changed:
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = model.config.vocab_size
    groups = changed.pop("groups", GROUPS)
    tasks = reasoning_gym.create_dataset("spell_backward", size=groups * steps, seed=seed, **KNOBS)
    rows = [tasks[number] for number in range(len(tasks))]
    successes: list[float] = []

    def exact(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
        successes.append(sum(scores) / len(scores))
        return scores

    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as folder:
        usual: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": steps,
            "per_device_train_batch_size": GROUPS * GROUP_SIZE,
            "num_generations": GROUP_SIZE,
            "max_completion_length": ANSWER,
            "learning_rate": RATE,
            "lr_scheduler_type": "linear",
            "warmup_steps": 5,
            "adam_beta2": 0.95,
            "loss_type": "dapo",
            "beta": 0.0,
            "epsilon_high": 0.28,
            "seed": seed,
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=exact,
            args=GRPOConfig(**usual | changed),
            peft_config=LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None,
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
                    "answer": [row["answer"] for row in rows],
                }
            ),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        trainer.train()
    wall, cpu = (marks[-1][clock] - marks[warm - 1][clock] for clock in (0, 1))
    counted = len(marks) - warm
    return {
        "wall_s": wall / counted,
        "cpu_s": cpu / counted,
        "elapsed_s": [at - began for at, _ in marks],
        "success": successes,
    }


def measure_floor(policy: Path, steps: int, warm: int) -> dict[str, Any]:
    """Time plain torch on rows of the demo's shape."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows, prompt, answer = GROUPS * GROUP_SIZE, 8, ANSWER - 1
    ids = torch.randint(5, 250, (rows, prompt + answer))
    passes, decodes = [], []
    for _ in range(steps):
        began = time.perf_counter()
        model.train()
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=answer).logits
        logps = torch.log_softmax(logits, -1).gather(2, ids[:, prompt:].unsqueeze(2))
        (-logps.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        passes.append(time.perf_counter() - began)
        began = time.perf_counter()
        model.eval()
        with torch.inference_mode():
            output = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1)
            for _ in range(answer):
                spread = torch.softmax(output.logits[:, -1], -1)
                token = torch.multinomial(spread, 1)
                output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        decodes.append(time.perf_counter() - began)
    passes, decodes = passes[warm:], decodes[warm:]
    return {"train_s": sum(passes) / len(passes), "decode_s": sum(decodes) / len(decodes)}


if __name__ == "__main__":
    side, folder, *numbers = sys.argv[1:]
    measure: Any = train_with_trl if side == "trl" else measure_floor
    print(json.dumps(measure(Path(folder), *map(json.loads, numbers))))
