"""Runs of kind `ask` that measure their policy on standard tasks of Inspect.

Inspect runs in an interpreter of its own, behind a wall as environments do, and asks the policy over OpenAI's dialect
with a key that opens nothing else. Its logs stay in the run's folder, below `inspect`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toprope.errors import ComponentFailed, visible
from toprope.records.messages import ENV_FOLDER, Evaluated, Finished, Progress, Warned
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import AskPlan, EnvironmentSource, StandardTasks
from toprope.records.run.tested_models import Measurement, StandardScore, add_measurement
from toprope.sdk.wall.enclosure import Enclosure
from toprope.sdk.worker.client import worker_environment
from toprope.training.component.member import CrewMember
from toprope.training.inference.sessions import UNRECORDED, session_key
from toprope.training.rollouts.workers.walls import environment_wall, missing_wall, passed_on

PACKAGE = "inspect_ai"
_NAME = "standard-tasks"
"""Name of the walled program in the owner's rights, and of its HOME, which keeps downloaded data."""
_SAID = 600


async def measure_tasks(member: CrewMember, plan: AskPlan, tasks: StandardTasks) -> None:
    """Measure the tasks, and keep the scores in the run's folder and in that of the run that trained the policy.

    Raises:
        ComponentFailed: A task failed as a whole, or the policy cannot be reached.
    """
    url, key = await member.address_async("inference"), session_key(member.secret, UNRECORDED)
    logs = member.folder.path / "inspect"
    logs.mkdir(mode=0o700, exist_ok=True)
    command = [
        tasks.python, "-m", PACKAGE, "eval", *tasks.names, "--model", "openai-api/toprope/policy", "--log-dir", ".",
        "--log-format", "json", "--display", "none", "--no-fail-on-error", "--temperature", str(plan.temperature),
        "--max-tokens", str(plan.max_new_tokens), "--max-connections", str(member.spec.config.rollout.concurrency),
    ]  # fmt: skip
    command += [] if tasks.limit is None else ["--limit", str(tasks.limit)]
    member.report(Progress("standard tasks", 0, len(tasks.names)))
    code, said = await _run_walled(member, tasks, command, logs, url, key)
    said = said.replace(key, "***")
    print(said, flush=True)
    if code:
        raise ComponentFailed(
            f"Inspect ended with status {code}: {visible(said.strip())[-_SAID:]}", hint="Check the names of the tasks."
        )
    scores = read_scores(logs)
    found = Measurement(names=tasks.names, limit=tasks.limit, step=tasks.step, scores=scores)
    trained = RunFolder(member.folder.path.parent / tasks.run)
    for folder in (member.folder, trained):
        if folder.path.is_dir():  # that of the other run is not on every node of a cluster
            add_measurement(folder, member.folder.run_id, found)
    samples = {one.task: one for one in scores}.values()
    counts = {"asked": sum(one.samples for one in samples), "failed": sum(one.failed for one in samples)}
    member.report(Evaluated("ask", counts))
    member.report(Finished())


async def _run_walled(
    member: CrewMember, tasks: StandardTasks, command: list[str], logs: Path, url: str, key: str
) -> tuple[int, str]:
    """Run Inspect behind its wall; returns its status and output."""
    files = [path for name in tasks.names if os.path.isabs(path := name.partition("@")[0])]
    source = EnvironmentSource(name=_NAME, file=files[0] if files else None)
    kept = {name: value for name, value in os.environ.items() if name == ENV_FOLDER or not name.startswith("TOPROPE_")}
    variables = worker_environment({**kept, "TOPROPE_BASE_URL": f"{url}/v1", "TOPROPE_API_KEY": key})
    # Without a network it still reaches the policy, over a loopback of its own.
    wall = environment_wall(passed_on(), source, network="allow" if tasks.network == "allow" else "own")
    enclosure = await asyncio.to_thread(Enclosure.prepare, wall, command, variables, str(logs))
    if warning := missing_wall(enclosure):
        member.report(Warned(warning))
    process = None
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *enclosure.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=enclosure.variables,
                cwd=enclosure.cwd,
                pass_fds=enclosure.passed,
                start_new_session=True,
            )
        finally:
            for descriptor in enclosure.passed:
                os.close(descriptor)
        if enclosure.relay is not None:
            await enclosure.relay.reach(url)
        said, _ = await process.communicate()
        assert process.returncode is not None  # it has ended
        return process.returncode, said.decode(errors="replace")
    finally:
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(enclosure.remove)


def read_scores(logs: Path) -> list[StandardScore]:
    """Return the scores in Inspect's logs (JSON), by task.

    Raises:
        ComponentFailed: A task failed as a whole, or left no scores.
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
                    found.append(
                        StandardScore(
                            task=task,
                            metric=visible(f"{score['name']}/{name}"),
                            value=float(metric["value"]),
                            error=error,
                            samples=samples,
                            failed=samples - completed,
                        )
                    )
    if not found:
        raise ComponentFailed(f"Inspect left no scores in {logs}.")
    return found
