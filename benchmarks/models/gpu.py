"""Measure engines, runs and memory on one NVIDIA GPU: `make bench-gpu`. Without a GPU it says so and exits with 3.

    python -P -m benchmarks gpu [--shapes NAME ...] [--methods lora full] [--engines NAME ...] [--parts NAME ...]
                                [--steps N] [--trl PYTHON] [--rehearse]

The models have the shapes of Qwen3 0.6B and 4B and random weights, so no file is fetched. Parts:

    engines  tokens a second, error of log-probabilities, seconds of a publication by every way: mapped file, folder,
             adapters, handles of GPU memory
    trl      stock TRL on the same task and batch: with vLLM in its process if PYTHON, an interpreter with trl, peft,
             reasoning_gym and vllm, is given, and else with its own generation
    runs     a whole run: samples a second, shares of the step in which the trainer waits and publishes, the oldest
             token's age, model FLOPs utilization; with vLLM also inference.sleep, and for full weights transfer by GPU
    memory   the trainer's peak against the estimate of `toprope fit`

`peak_gb` is the most memory of the GPU in use by all processes during an engine's part or a run.
Control: a model that is changed without a publication must show in the log-probabilities. `--rehearse` does the same
with a tiny model on the CPU, without goals. vLLM comes from the home TOPROPE_ENGINES. It has not run on a GPU so far.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from toprope_server.cli.demo import ENVIRONMENT

from benchmarks.models import engines, fit
from benchmarks.models.models import make_model
from benchmarks.performance.train import run_reference
from benchmarks.report import refuse, report
from benchmarks.scratch import scratch
from benchmarks.training_agent import training_agent
from tests.training.inference.test_conformance import HOME, start_rig
from toprope.errors import InvalidValue
from toprope.workbench.memory import estimate
from toprope.workbench.model_shapes import ModelShape

_TINY = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 320, "tie_word_embeddings": False}
GOALS = {
    "samples_ratio_to_trl": ">= 1.5", "publish_share": "<= 0.02", "trainer_wait_share": "<= 0.1",
    "staleness_p95": "<= 4", "estimate_error_percent": "<= 15", "versions_wrong": "== 0",
}  # fmt: skip
PARTS, METHODS = ("engines", "trl", "runs", "memory"), ("lora", "full")
_QWEN3 = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
_LARGE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
SHAPES: dict[str, dict[str, Any]] = {"0.6B": _QWEN3 | _SMALL, "4B": _QWEN3 | _LARGE, "tiny": _TINY}
"""Fields of config.json; the first two as in Qwen3's report (arXiv:2505.09388)."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second, from NVIDIA's data sheets, by a part of the GPU's name."""
_WARM, _RANK, _SIZE = 3, 32, 8
_LOOK_S = 0.25


class Bench:
    """The parts of the benchmark over a model in a folder.

    Args:
        home: Folder for everything.
        shape: Name of the model's shape.
        device: `cuda`, or `cpu` for a rehearsal.
        steps: Optimizer steps of a run.
    """

    def __init__(self, home: Path, shape: str, device: str, steps: int) -> None:
        self._home, self._shape, self._device, self._steps = home, shape, device, steps
        self._tokens, self._groups = (256, 16) if device == "cuda" else (8, 2)
        self._tolerance, dtype = (0.5, "bfloat16") if device == "cuda" else (1e-3, "float32")
        (folder := home / f"model-{shape}").mkdir()
        self.model = make_model("Qwen3", folder, device=device, dtype=dtype, **SHAPES[shape])
        self.control_failed = ""
        self.figures: dict[str, float] = {"versions_wrong": 0}

    def _note(self, case: str, found: dict[str, float]) -> None:
        self.figures |= {f"{name}_{self._shape}_{case}": value for name, value in found.items()}

    def _fields(self, method: str, engine: str) -> dict[str, Any]:
        return {
            "policy.max_context": self._tokens + 64, "policy.lora": method == "lora", "policy.lora_rank": _RANK,
            "inference.engine": engine, "launcher.device": self._device, "rollout.group_size": _SIZE,
            "rollout.groups_per_step": self._groups, "rollout.max_new_tokens": self._tokens,
            "optimizer.micro_batch_size": _SIZE,
        }  # fmt: skip

    def measure_engine(self, engine: str) -> None:
        """Measure an engine alone, beside the trainer's model.

        Raises:
            InvalidValue: It is not installed.
        """
        for way in ("full", "lora", "gpu") if engine == "vllm" and self._device == "cuda" else METHODS:
            chosen = {"inference.transfer": "gpu" if way == "gpu" else "disk"}
            folder = self._home / f"{engine}-{way}"
            copy = partial(shutil.copytree, self.model, dirs_exist_ok=True)
            with self._peak(f"{way}_{engine}_alone"):
                self._measure_way(engine, way, folder, chosen, copy)

    def _measure_way(
        self, engine: str, way: str, folder: Path, chosen: dict[str, Any], copy: Callable[[Path], object]
    ) -> None:
        made = start_rig(engine, folder, self._fields(way, engine) | chosen, copy)
        try:
            adopted, handed = [], []
            for _ in range(3):
                began = time.perf_counter()
                version = made.publisher.publish()
                handed.append(time.perf_counter() - began)
                made.adopted(version)
                adopted.append(time.perf_counter() - began)
            times = {"publish_seconds": statistics.median(adopted), "handed_seconds": statistics.median(handed)}
            self._note(f"{way}_{engine}", times)
            if way == "full":
                found, shown = engines.measure(made, tokens=self._tokens, tolerance=self._tolerance)
                self._note(engine, {name: found[name] for name in ("tokens_per_second", "logprob_error")})
                self.figures["versions_wrong"] += found["versions_wrong"]
                if shown <= self._tolerance:
                    self.control_failed = f"it did not with {engine} ({self._shape})"
        finally:
            made.engine.stop()
            del made  # before the next one takes its memory
            shutil.rmtree(folder)
            torch.cuda.empty_cache()

    def train_with_trl(self, method: str, python: str | None) -> None:
        """Measure stock TRL, in this interpreter or one with vLLM."""
        settings: dict[str, Any] = {
            "groups": self._groups, "lora_rank": _RANK if method == "lora" else 0,
            "per_device_train_batch_size": _SIZE, "gradient_accumulation_steps": self._groups,
            "max_completion_length": self._tokens, "use_cpu": self._device == "cpu", "bf16": self._device == "cuda",
            "activation_checkpointing": True,
        }  # fmt: skip
        if python is not None:
            settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
        words = (self._steps, _WARM, 1, 0, json.dumps(settings))
        done = run_reference("trl", self.model, *words, python=python or sys.executable)
        self._note(f"{method}_trl", {"samples_per_second": _SIZE * self._groups / float(done["wall_s"])})

    def ways(self, method: str, engine: str) -> dict[str, dict[str, Any]]:
        """Settings that an engine has on a GPU alone, by the name of their case; the first has none."""
        if engine != "vllm" or self._device != "cuda":
            return {"": {}}
        by_gpu = {"_gpu": {"inference.transfer": "gpu"}} if method == "full" else {}
        return {"": {}, "_sleep": {"inference.sleep": True}, **by_gpu}

    async def train(self, method: str, engine: str, way: str = "") -> None:
        """Measure a whole run; `way` is one of `ways`."""
        if (HOME / "engines.json").exists():
            shutil.copy(HOME / "engines.json", self._home / "engines.json")
        changes = self._fields(method, engine) | self.ways(method, engine)[way] | {
            "policy.model": str(self.model), "algorithm.mask_truncated_completions": False,
            "evaluation.heldout_tasks": 2, "budget.steps": self._steps, "optimizer.warmup_steps": 1,
        }  # fmt: skip
        name = f"{self._shape} {method} {engine}{way}"
        with self._peak(f"{method}_{engine}{way}"):
            async with training_agent(self._home, Console(stderr=True)) as agent:
                done = await agent.train(name, ENVIRONMENT, "single-gpu", changes)
        name = torch.cuda.get_device_name() if self._device == "cuda" else ""
        peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
        counted = ModelShape.of(json.loads((self.model / "config.json").read_bytes()))
        assert counted is not None
        # Per weight and token two operations forward and two, or four if the weights are trained, backward.
        found = figures_of(done.rows, _SIZE * self._groups, (4 if method == "lora" else 6) * counted.parameters, peak)
        published = "gpu" if way == "_gpu" else method
        if handed := self.figures.get(f"handed_seconds_{self._shape}_{published}_{engine}"):
            found["publish_share"] = handed / found["step_seconds"]
        if theirs := self.figures.get(f"samples_per_second_{self._shape}_{method}_trl"):
            found["samples_ratio_to_trl"] = found["samples_per_second"] / theirs
        self._note(f"{method}_{engine}{way}", found)

    @contextmanager
    def _peak(self, case: str) -> Iterator[None]:
        """Note the GPU's most used memory during the block; nothing on a CPU."""
        if self._device != "cuda":
            yield
            return
        seen, over = [_used()], threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_S):
                seen.append(_used())

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
            self._note(case, {"peak_gb": max(seen) / 1e9})

    def measure_memory(self, method: str) -> None:
        """Compare the trainer's peak with its estimate."""
        more = self._fields(method, "embedded") | {"optimizer.gradient_checkpointing": True}
        case = fit.Case(method, json.loads((self.model / "config.json").read_bytes()), "trainer", 64, more)
        others = _used() if self._device == "cuda" else 0.0
        peak, counted = fit.measure(case)
        expected = estimate(case.config, counted, prompt=case.prompt, gpu=self._device == "cuda")[0].total
        self._note(method, {"estimate_error_percent": 100.0 * abs(expected / (peak - others) - 1.0)})


def figures_of(rows: Sequence[dict[str, Any]], samples: int, operations: float, peak: float | None) -> dict[str, float]:
    """Figures of a run's rows after the first steps; `peak` is in operations a second, None if it is not known."""
    rows = [row for row in rows if "time/step" in row][_WARM:]
    step = statistics.fmean(row["time/step"] for row in rows)
    ages = sorted(row["staleness/max"] for row in rows)
    found = {
        "samples_per_second": samples / step,
        "step_seconds": step,
        "trainer_wait_share": statistics.fmean(row["time/wait"] for row in rows) / step,
        "staleness_p95": ages[int(0.95 * (len(ages) - 1) + 0.5)],
    }
    if peak is not None:
        tokens = samples * statistics.fmean(row["completions/mean_length"] for row in rows)
        found["mfu"] = operations * tokens / (step * peak)
    return found


def _used() -> float:
    """Bytes of the GPU that are in use now."""
    asked = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
    return float(subprocess.check_output(asked.split(), text=True).split()[0]) * 2**20


def worst(figures: dict[str, float]) -> dict[str, float]:
    """The worst value of all cases for each goal."""
    cases = {name: [value for case, value in figures.items() if case.startswith(f"{name}_")] for name in GOALS}
    return {name: (min if GOALS[name].startswith(">") else max)(values) for name, values in cases.items() if values}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print the table and the figures."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks gpu", description="One GPU.")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["0.6B", "4B"])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--engines", nargs="*", choices=engines.ENGINES, default=["transformers", "vllm"])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--trl", help="an interpreter with trl, peft, reasoning_gym and vllm")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        return refuse("PyTorch finds no NVIDIA GPU here. --rehearse tries the steps on the CPU.")
    figures, failed = {"versions_wrong": 0.0}, ""
    with scratch("gpu") as home:
        for shape in ["tiny"] if given.rehearse else given.shapes:
            bench = Bench(home, shape, "cpu" if given.rehearse else "cuda", given.steps)
            for engine in given.engines if "engines" in given.parts else ():
                try:
                    bench.measure_engine(engine)
                except InvalidValue as error:
                    print(f"{engine} is left out: {error.message}")
            for method in given.methods:
                if "trl" in given.parts:
                    bench.train_with_trl(method, given.trl)
                for engine in given.engines if "runs" in given.parts else ():
                    for way in bench.ways(method, engine):
                        asyncio.run(bench.train(method, engine, way))
                if "memory" in given.parts:
                    bench.measure_memory(method)
            bench.figures["versions_wrong"] += figures["versions_wrong"]
            figures, failed = figures | bench.figures, failed or bench.control_failed
    return report(
        "One GPU",
        figures | worst(figures),
        goals={} if given.rehearse else GOALS,
        control="a model that is changed without a publication shows in the log-probabilities.",
        control_failed=failed,
    )


if __name__ == "__main__":
    sys.exit(main())
