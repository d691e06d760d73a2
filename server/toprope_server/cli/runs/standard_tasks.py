"""`toprope eval`: a trained policy, and the one that its run began with, on tasks of Inspect.

Inspect runs in an interpreter of its own and asks the policy over OpenAI's dialect on loopback. Its logs stay in the
home's folder of exports.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprope.errors import ComponentFailed, NotFound, visible
from toprope.records.run.checkpoints import split_step
from toprope.records.run.manifest import pinned
from toprope.records.run.specification import Specification
from toprope.supervisor.environment_variables import secret_values, worker_variables
from toprope.workbench.interpreters.known import known_interpreters
from toprope.workbench.interpreters.registry import Registry
from toprope_server.cli.runs.chat import trained_policy

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

    from toprope.settings.schema import Config

PACKAGE = "inspect_ai"
_SAID = 600


@dataclass(frozen=True)
class Score:
    """One metric of a task."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error; None if the task has none."""
    samples: int
    failed: int
    """Samples that ended in an error, such as a prompt that is too long."""


def measure_tasks(
    workshop: Workshop, named: str, tasks: Sequence[str], *, limit: int | None, python: Path | None
) -> tuple[Path, dict[str, list[Score]]]:
    """Measure tasks before and after training.

    Args:
        named: `RUN`, or `RUN@STEP`.
        tasks: As `inspect eval` takes them: `inspect_evals/gsm8k`, or `file.py@task`.
        limit: Samples of each task; all if None.
        python: An interpreter that has Inspect; one of the owner's if None.

    Returns:
        The folder of Inspect's logs, and the scores of `before` and `after`.

    Raises:
        NotFound: No interpreter has Inspect, or there is no such run.
        NotPossibleNow: The run has no weights yet.
        ComponentFailed: A task failed as a whole.
    """
    interpreter = str(python) if python is not None else find_interpreter(workshop)
    after, run_id = trained_policy(workshop, named), split_step(named)[0]
    run = workshop.runs.folder(run_id)
    before = Specification.read(run).config
    started = pinned(before.policy, run).model_copy(update={"lora": False})  # new adapters change nothing
    before = before.model_copy(update={"policy": started}, deep=True)
    began = f"{named.replace('@', '-step-')}-eval-{time.strftime('%Y%m%d-%H%M%S')}-"
    exports = workshop.home.ensure().exports
    exports.mkdir(mode=0o700, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=began, dir=exports))  # another one may begin in the same second
    variables = {name: value for name, value in os.environ.items() if not secret_values({name: value})}
    variables |= worker_variables(workshop.home.settings().variables)
    found = {}
    for side, config in (("before", before), ("after", after)):
        logs = folder / side
        logs.mkdir(mode=0o700)
        print(f"{side}: {', '.join(tasks)}", file=sys.stderr, flush=True)
        asyncio.run(_run(interpreter, tasks, config, workshop.home.policies, logs, limit, variables))
        found[side] = read_scores(logs)
    return folder, found


def find_interpreter(workshop: Workshop) -> str:
    """Return the first of the owner's interpreters that has Inspect.

    Raises:
        NotFound: None has it.
    """
    for known in known_interpreters(Registry(workshop.home.environments_file).read()):
        if not known.problem and (known.site_packages / PACKAGE).is_dir():
            return known.python or sys.executable
    raise NotFound(
        "No interpreter here has Inspect, so standard tasks cannot be run. Nothing was started.",
        hint="toprope env add inspect-evals makes one; or name one that has it with --python.",
    )


def read_scores(logs: Path) -> list[Score]:
    """Return the scores in Inspect's logs (JSON), by task.

    Raises:
        ComponentFailed: A task failed as a whole, or left no log.
    """
    found = []
    for path in sorted(logs.glob("*.json")):
        log = json.loads(path.read_bytes())
        task = visible(str(log["eval"]["task"]))
        if log["status"] != "success" or not log.get("results"):
            why = visible(str((log.get("error") or {}).get("message") or f"it ended as {log['status']}"))[:_SAID]
            raise ComponentFailed(f"The task {task} failed: {why}", hint=f"Inspect's log of it is {path}.")
        results = log["results"]
        samples, completed = int(results["total_samples"]), int(results["completed_samples"])
        for score in results["scores"]:
            metrics: Mapping[str, Any] = score["metrics"]
            error = metrics.get("stderr", {}).get("value")
            for name, metric in metrics.items():
                if name != "stderr":
                    full = f"{score['name']}/{name}"
                    found.append(Score(task, full, float(metric["value"]), error, samples, samples - completed))
    if not found:
        raise ComponentFailed(f"Inspect left no scores in {logs}.")
    return found


def compare_lines(found: Mapping[str, Sequence[Score]]) -> list[str]:
    """Return a line for each metric: before, after, and what failed."""
    before = {(one.task, one.metric): one for one in found["before"]}
    lines = []
    for one in found["after"]:
        former = before.get((one.task, one.metric))
        was = "" if former is None else f"{_told(former)} before, "
        failed = max(one.failed, former.failed if former else 0)
        more = f"; {failed} of {one.samples} samples failed" if failed else f"; {one.samples} samples"
        lines.append(f"{one.task} {one.metric}: {was}{_told(one)} after{more}")
    return lines


def _told(score: Score) -> str:
    return f"{score.value:.3g}" + ("" if score.error is None else f" ± {score.error:.2g}")


async def _run(
    interpreter: str,
    tasks: Sequence[str],
    config: Config,
    cache: Path,
    logs: Path,
    limit: int | None,
    variables: Mapping[str, str],
) -> None:
    from toprope.training.rollouts.preview_policy import serving

    async with serving(config, cache, lambda text: print(text, file=sys.stderr), name="policy") as served:
        command = [
            interpreter, "-m", PACKAGE, "eval", *tasks, "--model", "openai-api/toprope/policy", "--log-dir", str(logs),
            "--log-format", "json", "--display", "none", "--no-fail-on-error", "--temperature", "0",
            "--max-tokens", str(config.rollout.max_new_tokens), "--max-connections", str(config.rollout.concurrency),
        ]  # fmt: skip
        command += [] if limit is None else ["--limit", str(limit)]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**variables, "TOPROPE_BASE_URL": f"{served.url}/v1", "TOPROPE_API_KEY": served.secret},
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    if process.returncode:
        text = visible(said.decode(errors="replace").replace(served.secret, "***").strip())[-_SAID:]
        raise ComponentFailed(
            f"Inspect ended with status {process.returncode}: {text}", hint="Check the names of the tasks."
        )
