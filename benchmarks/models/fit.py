"""Compare estimates of memory with measured peaks: `make bench-fit`. Linux only.

    python -P -m benchmarks fit [--only NAME ...]

Each configuration is a process of its own with one thread, which does what the trainer or the inference component does:
it makes the model, takes two GRPO steps on random groups and publishes them, or samples all groups at once. Its peak is
VmHWM, the most resident memory that it ever had. `estimate_error_percent` is the largest absolute difference between
`toprope.workbench.memory.estimate` and the peak, over all configurations, in percent of the peak; above 15 the exit
status is 1. Control: a process that only holds 200 MB more than its libraries has to show as that. Takes three minutes
on a quiet machine; needs 3 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import refuse, report
from toprope.settings.schema import Config
from toprope.workbench.memory import estimate
from toprope.workbench.model_shapes import ModelShape

LIMIT_PERCENT = 15.0
CONTROL_MB = 200
_CHILD_S = 600.0


@dataclass(frozen=True)
class Case:
    """One configuration: the model's shape, the process, tokens of a prompt, and fields of the configuration."""

    name: str
    shape: dict[str, Any]
    part: str
    prompt: int
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        config = Config()
        for name, value in self.fields.items():
            section, _, key = name.partition(".")
            setattr(getattr(config, section), key, value)
        config.policy.max_context = self.prompt + config.rollout.max_new_tokens
        return config


def _shape(hidden: int, layers: int, vocabulary: int, *, tied: bool = True) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64,
        "vocab_size": vocabulary, "tie_word_embeddings": tied,
    }  # fmt: skip


def _batch(groups: int, size: int, answer: int, **more: Any) -> dict[str, Any]:
    counts = {"rollout.groups_per_step": groups, "rollout.group_size": size, "rollout.max_new_tokens": answer}
    return counts | {name.replace("__", "."): value for name, value in more.items()}


_SMALL, _WIDE, _LARGE = _shape(256, 4, 8192), _shape(256, 4, 32768, tied=False), _shape(512, 6, 16384)
CASES = [
    Case("many rows", _SMALL, "trainer", 32, _batch(8, 8, 96)),
    Case("large vocabulary", _WIDE, "trainer", 32, _batch(4, 8, 64)),
    Case("shared prompts", _LARGE, "trainer", 64, _batch(4, 4, 128)),
    Case("adapters", _LARGE, "trainer", 64, _batch(4, 4, 128, policy__lora=True)),
    Case("adapters, many rows", _SMALL, "trainer", 32, _batch(8, 4, 96, policy__lora=True)),
    Case("reference policy", _LARGE, "trainer", 64, _batch(2, 4, 128, algorithm__beta=0.1)),
    Case("micro-batches", _LARGE, "trainer", 64, _batch(4, 4, 128, optimizer__micro_batch_size=4)),
    Case("checkpointing", _LARGE, "trainer", 64, _batch(4, 4, 128, optimizer__gradient_checkpointing=True)),
    Case("long answers", _SMALL, "trainer", 256, _batch(2, 4, 512)),
    Case("sampler", _LARGE, "sampler", 64, _batch(4, 8, 128, rollout__concurrency=16)),
    Case("sampler, large vocabulary", _WIDE, "sampler", 32, _batch(4, 8, 64, rollout__concurrency=16)),
]


def measure(case: Case) -> tuple[float, ModelShape]:
    """Return the peak of a case in bytes, and the model's shape with its counted parameters.

    Raises:
        RuntimeError: The process failed.
    """
    command = [sys.executable, "-P", "-m", "benchmarks.models.fit", "--child", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S)
    if done.returncode:
        raise RuntimeError(f"{case.name} failed: {done.stderr.strip()[-400:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    shape = ModelShape.of(case.shape, told["parameters"])
    assert shape is not None
    return float(told["peak"]), shape


def _peak() -> float:
    import torch

    if torch.cuda.is_initialized():  # PyTorch keeps what it once took
        return _held_on_gpu()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _held_on_gpu() -> float:
    """Bytes of the GPU that this process holds by its driver, or all processes if it does not tell them apart."""
    import torch

    asked = "nvidia-smi --query-compute-apps=pid,used_gpu_memory --format=csv,noheader,nounits"
    for line in subprocess.check_output(asked.split(), text=True).splitlines():
        pid, _, held = line.partition(",")
        if pid.strip() == str(os.getpid()) and held.strip().isdigit():
            return float(held) * 2**20
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def child(case: Case) -> None:
    """Do a component's work and print the peak."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    if case.part == "control":
        before = _peak()
        held = bytearray(b"x") * (CONTROL_MB * 1_000_000)
        print(json.dumps({"peak": _peak() - before, "parameters": len(held)}))
        return
    parameters = _train(case) if case.part == "trainer" else _serve(case)
    print(json.dumps({"peak": _peak(), "parameters": parameters}))


def _model(case: Case) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toprope.training.policy.loading import describe_device

    written = {**case.shape, "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": 1}
    config, dtype = case.config, torch.float32
    device = describe_device(config)
    if device == "cuda" and (config.policy.lora or case.part == "sampler"):
        dtype = torch.bfloat16  # as `load_model` does
    return LlamaForCausalLM(LlamaConfig(**written)).to(device, dtype)


def _prompt(case: Case) -> list[int]:
    import torch

    return [int(token) for token in torch.randint(2, case.shape["vocab_size"], (case.prompt,))]


def _train(case: Case) -> int:
    import torch

    import toprope.training.trainer.program  # noqa: F401 - what the component imports
    from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB, Group, Outcome
    from toprope.training.policy.weight_sync import WeightFile
    from toprope.training.trainer.batch_source import GroupBatch
    from toprope.training.trainer.grpo import GrpoLearner
    from toprope.training.trainer.optimization import make_optimizer
    from toprope.training.trainer.step.learner import StepHooks

    config, model = case.config, _model(case)
    counted = sum(value.numel() for value in model.parameters())
    if config.policy.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=config.policy.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    needs_reference = config.algorithm.beta and not config.policy.lora
    reference = _model(case).eval().requires_grad_(False) if needs_reference else None
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = make_optimizer(config, trained)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    config.budget.steps = 2
    size, answer = config.rollout.group_size, config.rollout.max_new_tokens

    def group(number: int) -> Group:
        prompt = _prompt(case)
        said = torch.randint(2, case.shape["vocab_size"], (size, answer)).tolist()
        return Group(
            tokens=[prompt + row for row in said],
            masks=[[MASKED] * len(prompt) + row for row in said],
            scores=[float(row % 2) for row in range(size)],
            inference_logprobs=[[PROMPT_LOGPROB] * len(prompt) + [-3.0] * answer for _ in said],
            versions=[[(0, answer)] for _ in said],
            group_id=f"g-{number}",
            outcomes=[Outcome(float(row % 2)) for row in range(size)],
        )

    def batch() -> GroupBatch:
        return GroupBatch([group(number) for number in range(config.rollout.groups_per_step)], 0, version=0)

    with tempfile.TemporaryDirectory(prefix="toprope-fit-") as folder:
        weights = WeightFile(Path(folder), trained)
        hooks = StepHooks(batch, lambda step, metrics: weights.publish())
        options: Any = {"pad": 0, "device": model.device.type, "optimizers": (optimizer, scheduler)}
        GrpoLearner(config, model, reference, hooks=hooks, **options).train()
    return counted


def _serve(case: Case) -> int:
    import queue
    from types import SimpleNamespace

    import toprope.training.inference.app  # noqa: F401 - what the component imports
    from toprope.training.inference.embedded_engine import EmbeddedEngine
    from toprope.training.inference.engine import SamplingRequest

    config, model = case.config, _model(case).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None  # so that every answer has the full length
    tokenizer: Any = SimpleNamespace(
        eos_token_id=None, pad_token_id=0, all_special_ids=[], batch_decode=lambda rows, **options: [""] * len(rows)
    )
    engine = EmbeddedEngine(model, tokenizer, max_context=config.policy.max_context, seed=0)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(config.rollout.concurrency):
        request = SamplingRequest(
            _prompt(case), n=config.rollout.group_size, max_new_tokens=config.rollout.max_new_tokens
        )
        engine.submit(request, answers.put)
    engine.start()
    for _ in range(config.rollout.concurrency):
        if isinstance(answer := answers.get(timeout=_CHILD_S), Exception):
            raise answer
    engine.stop()
    return sum(value.numel() for value in model.parameters())


def main() -> int:
    """Measure all cases; print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], help="only these cases")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(Case(**json.loads(arguments.child)))
        return 0
    if not sys.platform.startswith("linux"):
        return refuse("the peak of a process's memory (VmHWM) is read on Linux only")
    control, _ = measure(Case("control", _SMALL, "control", 1))
    table = Table("configuration", "process", "estimate, MB", "peak, MB", "error, %")
    errors: dict[str, float] = {}
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        peak, shape = measure(case)
        trainer, sampler = estimate(case.config, shape, prompt=case.prompt)
        expected = (trainer if case.part == "trainer" else sampler).total
        errors[case.name] = 100.0 * (expected - peak) / peak
        numbers = (f"{expected / 1e6:.0f}", f"{peak / 1e6:.0f}", f"{errors[case.name]:+.1f}")
        table.add_row(case.name, case.part, *numbers)
    Console(width=120).print(table)
    worst = max(map(abs, errors.values()), default=0.0)
    held = 0.95 <= control / (CONTROL_MB * 1e6) <= 1.05
    return report(
        "Estimates of memory",
        {"configurations": len(errors), "estimate_error_percent": round(worst, 2), "control_mb": control / 1e6},
        goals={"estimate_error_percent": f"<= {LIMIT_PERCENT}"},
        control=f"a process that holds {CONTROL_MB} MB more must show as that.",
        control_failed="" if held else f"{CONTROL_MB} MB show as {control / 1e6:.0f} MB",
    )


if __name__ == "__main__":
    sys.exit(main())
