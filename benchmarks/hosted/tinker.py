"""A run at an open server of Tinker's interface, beside a plain client's loop at the same server.

    make bench-tinker, or python -P -m benchmarks tinker [--steps N]

A crew trains a random Qwen3 of two layers to answer with small letters; its trainer is killed half way. The client is
0.24.1. `make tools-tinker` installs client and server; without them the benchmark says so and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.hosted.skyrl_server import PYTHON, SkyrlServer
from benchmarks.models.models import make_model
from benchmarks.report import report
from benchmarks.scratch import scratch
from benchmarks.training_agent import training_agent
from tests.support.run_engines import TINKER_BEFORE
from toprope.analysis.statistics.intervals import mean_interval
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_rows
from toprope.records.run.status import Status, read_events

KEY = "tml-benchmark-key-7c1f52"
ENVIRONMENT = Path(__file__).resolve().parents[2] / "tests/training/hosted/letters.py"
RANK, RATE, GROUPS, GROUP_SIZE, TOKENS = 32, 0.02, 4, 8, 4
EDGE = 10
"""Steps at the start and at the end whose rewards are compared; also the steps that warm the server up."""
_NUMBERS = ("grad_norm", "loss", "reward", "learning_rate")
"""Of a step that is taken again after the kill: they say that weights, optimizer and batch are those of before."""
GOALS = {
    "rewards_rise": "> 0",
    "logprob_error": "<= 1e-05",
    "resumed_steps_off": "== 0",
    "resumed_step_error": "<= 1e-05",
    "overhead_share": "<= 0.2",
    "leaked_keys": "== 0",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(arguments).steps
    missing = [str(path) for path in (PYTHON, TINKER_BEFORE / "tinker") if not path.exists()]
    if missing:
        print(json.dumps({"skipped": f"make tools-tinker installs what is missing: {', '.join(missing)}"}))
        return 0
    console = Console(stderr=True, highlight=False)
    with scratch("tinker") as path:
        model = _make_model(path / "policy")
        server = SkyrlServer(path / "server", model)
        try:
            run = asyncio.run(_run(path / "home", server.url, model, steps, console))
            loop = _plain_loop(server.url, model, steps)
        finally:
            server.close()
    plain = statistics.median(loop["seconds"][EDGE:])
    rows = run.pop("rows")
    ours = statistics.median(
        later["time"] - row["time"] for row, later in zip(rows[EDGE:], rows[EDGE + 1 :], strict=False)
    )
    by_chance, moved = _rise(loop["rewards"]), loop["moved"]
    figures = {
        "rewards_rise": _rise([row["reward"] for row in rows]),
        "logprob_error": max(row.get("sampling/sampling_logp_difference/max", 0.0) for row in rows),
        **run,
        "overhead_share": ours / plain - 1,
        "step_seconds": ours,
        "plain_step_seconds": plain,
        "reward_first": statistics.fmean(row["reward"] for row in rows[:EDGE]),
        "reward_last": statistics.fmean(row["reward"] for row in rows[-EDGE:]),
        "shuffled_rewards_rise": by_chance,
        "plain_logprob_error": max(loop["gaps"]),
        "stale_logprob_error": moved,
    }
    failed = [
        f"shuffled rewards rise by {by_chance:.3g}" if by_chance > 0 else "",
        f"a sampler one step behind differs by {moved:.2g} only" if moved <= 1e-5 else "",
        "the key is not found where it is" if not run["keys_found"] else "",
        "no trainer was restarted" if not run["restarts"] else "",
    ]
    return report(
        "A run at an open server of Tinker's interface",
        figures,
        goals=GOALS,
        control="shuffled rewards must not rise, a sampler one step behind must differ, and the search must find the "
        "key in the owner's settings",
        control_failed="; ".join(filter(None, failed)),
    )


def _make_model(folder: Path) -> Path:
    """Make a Qwen3 whose adapters can move its answers: at the usual scale, the random head's logits stay below 1."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    model: Any = AutoModelForCausalLM.from_pretrained(make_model("Qwen3", folder))
    model.get_output_embeddings().weight.data.mul_(20)
    model.save_pretrained(folder)
    return folder


def _rise(rewards: list[float]) -> float:
    """By how much the last steps' mean reward is above the first's, between the near ends of the 95 % intervals."""
    return mean_interval(rewards[-EDGE:]).low - mean_interval(rewards[:EDGE]).high


def _plain_loop(url: str, model: Path, steps: int) -> dict[str, Any]:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    asked = {
        "url": url, "key": KEY, "model": str(model), "rank": RANK, "learning_rate": RATE, "steps": steps,
        "groups": GROUPS, "group_size": GROUP_SIZE, "tokens": TOKENS, "stop": [vocabulary["<eos>"]],
        "good": [vocabulary[one] for one in "abcdefghijklmnopqrstuvwxyz"],
        "prompts": [
            [vocabulary[one] for one in ("<user>", *str(number), "<eos>", "<bot>")] for number in range(10_000)
        ],
    }  # fmt: skip
    program = [str(PYTHON), "-P", str(Path(__file__).with_name("plain_client.py"))]
    variables = os.environ | {"TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, input=json.dumps(asked), env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the plain loop failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def _run(home: Path, url: str, model: Path, steps: int, console: Console) -> dict[str, Any]:
    """Train with the agent's tools, and kill the trainer on the way."""
    config = home / "config"
    (config / "environments").mkdir(parents=True)
    shutil.copy(ENVIRONMENT, config / "environments")
    (config / "locks.yaml").write_text("locks: []\n")
    settings = config / "settings.yaml"
    settings.write_text(f"variables: {{trainer: {{TINKER_API_KEY: {KEY}, TINKER_BASE_URL: '{url}'}}}}\n")
    settings.chmod(0o600)
    changes = {
        "policy.model": str(model), "policy.lora": True, "policy.lora_rank": RANK, "policy.max_context": 64,
        "trainer.backend": "tinker", "rollout.max_new_tokens": TOKENS, "rollout.group_size": GROUP_SIZE,
        "rollout.groups_per_step": GROUPS, "rollout.max_staleness": 0, "algorithm.drop_zero_signal": False,
        "budget.steps": steps, "budget.max_train_seconds": 1800, "optimizer.learning_rate": RATE,
        "evaluation.heldout_tasks": 20, "logging.save_steps": 10, "launcher.restart_backoff_s": 0,
    }  # fmt: skip
    shown: list[str] = []

    async def kill(run_id: str) -> tuple[int, dict[int, dict[str, Any]]]:
        """The step of the newest checkpoint, and the rows by step, when the trainer was killed."""
        folder = RunFolder.open(home / "runs", run_id)
        while not folder.metrics.is_file() or len(read_rows(folder.metrics)) < steps * 5 // 12:
            if Status.read(folder).ended:
                raise RuntimeError(f"the run ended before the kill: {Status.read(folder).failure}")
            await asyncio.sleep(0.1)
        for one in _crew_of(folder):
            shown.append(" ".join(one.cmdline()))
            if "toprope.training.trainer" in one.cmdline():
                one.send_signal(signal.SIGKILL)
        checkpoint = folder.newest_checkpoint()
        assert checkpoint is not None
        return int(checkpoint.name.rpartition("-")[2]), {row["step"]: row for row in read_rows(folder.metrics)}

    started = time.time()
    async with training_agent(home, console, PYTHONPATH=str(TINKER_BEFORE)) as agent:
        done = await agent.train("the run", "letters", "cpu-embedded", changes, kill)
    saved, before = done.observed
    folder = RunFolder.open(home / "runs", done.run_id)
    again = [row for row in done.rows if row != before.get(row["step"])]
    repeated = [(row[name], before[row["step"]][name]) for row in again if row["step"] in before for name in _NUMBERS]
    with_key = [path for path in home.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    return {
        "rows": done.rows,
        "resumed_steps_off": abs(again[0]["step"] - saved - 1)
        + len(set(range(1, steps + 1)) ^ {row["step"] for row in done.rows}),
        "resumed_step_error": max((abs(now - then) / max(abs(then), 1e-6) for now, then in repeated), default=None),
        "leaked_keys": len([path for path in with_key if path != settings]) + sum(KEY in words for words in shown),
        "keys_found": settings in with_key,
        "restarts": sum(event.kind == "restart" for event in read_events(folder.events)),
        "run_seconds": time.time() - started,
    }


def _crew_of(folder: RunFolder) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        try:
            if any(str(folder.path) in word for word in one.cmdline()):
                found.append(one)
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
