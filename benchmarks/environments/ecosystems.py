"""Cost of workers for environments of other ecosystems, each in its own interpreter, at a real inference server.

Measured: the seconds until a worker is ready, beyond the import of the environment's file in a bare interpreter, and
that four rollouts of one task complete; the speed of verifiers with a harness in the worker's process, against its
`null` harness, over 2,000 rollouts after a warm-up of both sides, with the start of each apart. Needs the ecosystems'
interpreters (CONTRIBUTING.md); missing ones are named. Environments of other authors: `make bench-ecosystems`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environments.ecosystem_samples import SAMPLES, Sample, interpreter, write
from benchmarks.scratch import scratch
from toprope.sdk.wall import Wall
from toprope.sdk.worker.client import worker_environment
from toprope.settings.sections.launcher import LauncherSection
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.policy.tiny_model import Recipe, build
from toprope.training.rollouts.env_managed_sampler import EnvManagedSampler
from toprope.training.rollouts.group_sampler import GroupSampler, TaskRef
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.restarting_worker import RestartingWorker

__all__ = ["CONTROL", "control_failed", "ecosystems"]

SIZE = 4
STARTS = 5
HARNESS_ROLLOUTS, HARNESS_GROUP, WARM_UP = 2000, 16, 32
CONTROL = "the in-process harness against itself must not be faster."
_CONTROL_RATIO = 1.5
_SECRET = "of-this-benchmark"
_LOAD_S, _ROLLOUT_S = 180.0, 180.0


def ecosystems(rollouts: int = HARNESS_ROLLOUTS) -> dict[str, Any]:
    """Measure, print a table, and return the figures.

    Args:
        rollouts: Of each side of the comparison of harnesses.
    """
    console = Console()
    with scratch("ecosystems") as path:
        return asyncio.run(_measured(path, console, rollouts))


async def _measured(folder: Path, console: Console, rollouts: int) -> dict[str, Any]:
    policy = folder / "policy"
    build(policy, Recipe(steps=0))
    table = Table(title="Environments of other ecosystems, four rollouts of one task")
    for column in ("ecosystem", "interpreter", "rollouts", "recorded tokens", "s", "worker's start beyond import, s"):
        table.add_column(column, justify="left" if column in ("ecosystem", "interpreter") else "right")
    failed, played, beyond, ratio, missing = [], [], {}, dict[str, Any](), []
    async with _inference(policy) as url:
        for sample in SAMPLES:
            python = interpreter(sample.ecosystem)
            if python is None:
                missing.append(sample.ecosystem)
                table.add_row(sample.ecosystem, "not installed", "", "", "", "")
                continue
            own = "own" if python != sys.executable else "ours"
            try:
                async with _sampling(sample, python, folder, policy, url) as play:
                    made = await play(0, SIZE)
                beyond[sample.ecosystem] = await _beyond_import(sample, python, folder, policy)
            except Exception as error:
                failed.append(sample.ecosystem)
                table.add_row(sample.ecosystem, own, f"[red]{type(error).__name__}: {str(error)[:60]}", "", "", "")
                console.print("".join(traceback.format_exception(error))[-2000:], markup=False, highlight=False)
                continue
            played.append(sample.ecosystem)
            group = made.to_record(sample.ecosystem, "g")
            row = (str(len(made.outcomes)), str(sum(mask >= 0 for row in group.masks for mask in row)))
            table.add_row(sample.ecosystem, own, *row, f"{made.seconds:.2f}", f"{beyond[sample.ecosystem]:.2f}")
        if "verifiers" in played:
            ratio = await _harnesses(folder, policy, url, rollouts)
    console.print(table)
    return ratio | {
        "workers_failed": len(failed),
        "workers_failed_names": failed,
        "workers_not_installed": missing,
        "worker_start_beyond_import_s": {name: round(value, 3) for name, value in beyond.items()},
        "worker_start_beyond_import_s_max": round(max(beyond.values(), default=0.0), 3),
    }


@asynccontextmanager
async def _inference(policy: Path) -> AsyncIterator[str]:
    """Start a real inference server on a policy without training."""
    import torch
    from transformers import AutoModelForCausalLM

    from toprope.training.component.http_server import serve
    from toprope.training.inference.app import InferenceServer
    from toprope.training.inference.embedded_engine import EmbeddedEngine
    from toprope.training.policy.loading import load_tokenizer

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(policy)
    engine = EmbeddedEngine(AutoModelForCausalLM.from_pretrained(policy).eval(), tokenizer, max_context=2048)
    engine.start()
    server = InferenceServer(engine, tokenizer, model_name="policy", secret=_SECRET)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ending = asyncio.Event()
    serving = asyncio.create_task(serve(server.app, address.set_result, ending, sigterm=False))
    try:
        yield await address
    finally:
        ending.set()
        await serving
        engine.stop()


async def _opened(
    sample: Sample, python: str, folder: Path, policy: Path, knobs: dict[str, Any] | None = None
) -> tuple[EnvironmentWorker, dict[str, Any]]:
    given = {**sample.knobs, **(knobs or {})} | ({sample.tokenizer: str(policy)} if sample.tokenizer else {})
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = (folder / f"{sample.ecosystem}.log").open("ab")
    wall = Wall(reads=(str(folder), str(policy)))
    variables = worker_environment(dict(os.environ)) | offline
    link = await EnvironmentWorker.behind(wall, python, env=variables, stderr=log, timeout=60)
    try:
        card = await link.call("open", timeout=_LOAD_S, source=write(sample, folder), knobs=given)
    except BaseException:
        await link.close(grace=0)
        raise
    return link, card


@asynccontextmanager
async def _sampling(
    sample: Sample, python: str, folder: Path, policy: Path, url: str, **knobs: Any
) -> AsyncIterator[Callable[[int, int], Awaitable[SampledGroup]]]:
    """Give a function that samples a task's rollouts through the worker and inference, given its number and how many,
    and checks that they hold what a trainer needs."""
    link, card = await _opened(sample, python, folder, policy, knobs)

    async def opened() -> EnvironmentWorker:
        return link

    client = PolicyClient(url, _SECRET)
    section = LauncherSection(restarts=0)
    try:
        async with await RestartingWorker.start(opened, section) as worker:
            kind = EnvManagedSampler if card["own_loop"] else GroupSampler
            maker = kind(worker, client, multi_turn=card["max_turns"] > 1, call_timeout_s=60)
            if isinstance(maker, EnvManagedSampler):
                maker.rollout_timeout_s = _ROLLOUT_S

            async def play(index: int, size: int) -> SampledGroup:
                made = await maker.sample(TaskRef("train", index), size, Sampling(1.0, 1.0, 8))
                _whole(made, size)
                return made

            yield play
    finally:
        await client.close()


def _whole(made: SampledGroup, size: int) -> None:
    errors = [outcome.error for outcome in made.outcomes if outcome.error]
    if errors:
        raise RuntimeError(f"{len(errors)} rollouts ended with an error: {errors[0]}")
    group = made.to_record("sample", "g")
    owners = set(group.rollouts if group.rollouts is not None else range(len(group.tokens)))
    if owners != set(range(size)):
        raise RuntimeError(f"only rollouts {sorted(owners)} of {size} were recorded")
    for masks, logprobs, versions in zip(
        group.masks, group.inference_logprobs or (), group.versions or (), strict=True
    ):
        sampled = sum(mask >= 0 for mask in masks)
        if not sampled or sum(value <= 0 for value in logprobs) != sampled or sum(n for _, n in versions) != sampled:
            raise RuntimeError("tokens, log-probabilities and versions of a rollout do not agree")


async def _beyond_import(sample: Sample, python: str, folder: Path, policy: Path) -> float:
    """Return the seconds from starting a worker to an opened environment, less the import of its file in a bare
    interpreter: the minimum of several starts, since other load only adds.
    """
    write(sample, folder)
    ours, theirs = [], []
    for _ in range(STARTS):
        began = time.monotonic()
        subprocess.run([python, "-c", sample.imports], cwd=folder, check=True, capture_output=True, timeout=_LOAD_S)
        theirs.append(time.monotonic() - began)
        began = time.monotonic()
        link, _ = await _opened(sample, python, folder, policy)
        ours.append(time.monotonic() - began)
        await link.close(grace=0.5)
    return min(ours) - min(theirs)


async def _harnesses(folder: Path, policy: Path, url: str, rollouts: int) -> dict[str, Any]:
    """Return rollouts per second with our harness, and with verifiers' `null` harness, which starts a process for each
    rollout: both workers warm, groups of both in turn, so that the machine's load is in both. A second worker with our
    harness is the control.
    """
    sample = next(one for one in SAMPLES if one.ecosystem == "verifiers")
    python = interpreter("verifiers")
    assert python is not None  # the caller has played with it
    sides = {"in_process": "auto", "null": "null", "control": "auto"}
    starts, seconds, groups = {}, dict.fromkeys(sides, 0.0), max(1, -(-rollouts // HARNESS_GROUP))
    async with AsyncExitStack() as stack:
        play = {}
        for name, harness in sides.items():
            began = time.monotonic()
            opened = _sampling(sample, python, folder, policy, url, harness=harness)
            play[name] = await stack.enter_async_context(opened)
            await play[name](0, 1)  # what is made once, such as null's environment for scripts
            starts[name] = time.monotonic() - began
            for number in range(WARM_UP // HARNESS_GROUP):
                await play[name](number, HARNESS_GROUP)
        for number in range(groups):
            for name in sides:
                began = time.monotonic()
                await play[name](number, HARNESS_GROUP)
                seconds[name] += time.monotonic() - began
    speed = {name: groups * HARNESS_GROUP / spent for name, spent in seconds.items()}
    return {
        "rollouts_per_second_ratio": round(speed["in_process"] / speed["null"], 2),
        "rollouts_per_second_control": round(speed["in_process"] / speed["control"], 2),
        "rollouts_per_second": {name: round(speed[name], 2) for name in ("in_process", "null")},
        "rollouts": groups * HARNESS_GROUP,
        "harness_start_s": {name: round(starts[name], 2) for name in ("in_process", "null")},
    }


def control_failed(figures: dict[str, Any]) -> str:
    """The reason why the control failed; empty if it held or was not measured."""
    ratio = figures.get("rollouts_per_second_control")
    if ratio is None or 1 / _CONTROL_RATIO < ratio < _CONTROL_RATIO:
        return ""
    return f"one harness is {ratio} times as fast as itself"
