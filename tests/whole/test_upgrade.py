"""A run started by an earlier version lives through an upgrade of the code under it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import psutil
import pytest
from mcp import Client, StdioServerParameters

from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_rows
from toprope.records.run.status import Status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
OLD = "74c0148"
CODE = ("code.commit", "code.changes_sha256")
GROWN = ("configuration.sha256", "configuration.locks_sha256")
"""The configuration has more fields than the old version's, with defaults, and the shipped locks bound more rates."""
"""The last commit with the old module names."""
STEPS = 120
CHANGES = {
    "algorithm.seed": 3,
    "budget.steps": STEPS,
    "budget.max_train_seconds": None,
    "evaluation.heldout_tasks": 20,
    "evaluation.greedy": False,
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
}
T = TypeVar("T")


class Installation:
    """A folder of code that can be switched from the old version to this one while processes use it."""

    def __init__(self, folder: Path) -> None:
        self.home, self.code, self.old = folder / "home", folder / "code", folder / "old"
        archive = folder / "old.tar"
        subprocess.run(["git", "archive", "--output", archive, OLD], cwd=ROOT, check=True)
        with tarfile.open(archive) as files:
            files.extractall(self.old, filter="data")
        self.code.symlink_to(self.old)

    def upgrade(self) -> None:
        aside = self.code.with_name("new")
        aside.symlink_to(ROOT)
        aside.replace(self.code)

    def server(self, module: str, *paths: str) -> Client:
        """A client of the server that the code offers now."""
        path = os.pathsep.join(str(self.code / part) for part in ("", *paths))
        places = {"TOPROPE_HOME": str(self.home), "TOPROPE_CONFIG": str(self.home / "config")}
        return Client(
            StdioServerParameters(
                command=sys.executable, args=["-P", "-m", module, "serve"], env={"PYTHONPATH": path, **places}
            )
        )

    def old_server(self) -> Client:
        return self.server("server.cli")

    def new_server(self) -> Client:
        return self.server("toprope_server.cli", "server", "tools")

    def processes(self) -> list[psutil.Process]:
        """Keepers and crew members of this home's runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.home / "runs") in process.environ().get("TOPROPE_RUN_FOLDER", "") + str(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    if subprocess.run(["git", "cat-file", "-e", f"{OLD}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"commit {OLD} is not in this checkout's history")
    made = Installation(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


def until(condition: Callable[[], T | None], seconds: float = 120) -> T:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
    return value


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    assert answer.structured_content is not None
    return answer.structured_content


def test_run_of_earlier_version_restarts_stops_resumes(installation: Installation, tiny_policy: Path) -> None:
    async def start() -> str:
        async with installation.old_server() as client:
            draft = await call(client, "select_environment", name="sort_letters", preset="cpu-embedded")
            changes = CHANGES | {"policy.model": str(tiny_policy)}
            await call(client, "edit_config", draft_id=draft["draft_id"], changes=changes)
            return str((await call(client, "start_training", draft_id=draft["draft_id"]))["run_id"])

    async def with_new(tool: str, **arguments: Any) -> dict[str, Any]:
        async with installation.new_server() as client:
            return await call(client, tool, **arguments)

    def finished(run_id: str) -> Status:
        folder = RunFolder.open(installation.home / "runs", run_id)
        return until(lambda: status if (status := Status.read(folder)).ended_at else None, 240)

    run_id = anyio.run(start)
    folder = RunFolder.open(installation.home / "runs", run_id)
    until(lambda: Status.read(folder).progress.get("step", 0) >= 5)
    trainer = Status.read(folder).crew["trainer"].pid
    assert trainer is not None
    guard = " ".join(psutil.Process(trainer).parent().cmdline())
    assert str(installation.code) in guard or str(installation.old) in guard, "the old code runs"
    installation.upgrade()
    os.kill(trainer, signal.SIGSTOP)  # Until the new server is there: its start takes as long as many steps.

    async def kill_trainer_and_stop() -> dict[str, Any]:
        async with installation.new_server() as client:
            os.kill(trainer, signal.SIGKILL)
            until(lambda: Status.read(folder).crew["trainer"].pid != trainer)
            step = Status.read(folder).progress["step"]
            until(lambda: Status.read(folder).ended or Status.read(folder).progress["step"] > step)
            assert Status.read(folder).state == "training", Status.read(folder).failure
            return await call(client, "stop_training", run_id=run_id)

    stopped = anyio.run(kill_trainer_and_stop)
    assert stopped["was_live"]
    assert finished(run_id).state == "stopped"
    resumed = anyio.run(lambda: with_new("resume_training", run_id=run_id))
    assert resumed["attempt"] == 2 and resumed["from_step"] > 0
    status = finished(run_id)
    assert status.state == "completed", status.failure
    assert [row["step"] for row in read_rows(folder.metrics)] == list(range(1, STEPS + 1))

    repeated = anyio.run(lambda: with_new("reproduce_run", run_id=run_id))
    status = finished(repeated["run_id"])
    assert status.state == "completed", status.failure
    results = anyio.run(lambda: with_new("get_results", run_id=repeated["run_id"]))
    comparison = results["results"]["reproduction"]
    assert (comparison["of"], comparison["steps_first"], comparison["steps_second"]) == (run_id, STEPS, STEPS)
    assert set(comparison["inputs"]) <= {*CODE, *GROWN}, "only the code, its fields and its locks differ"
    until(lambda: not installation.processes(), 30)
