"""The keeper's work once it holds the run's lock."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from toprope.machine import boot_id
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.sdk.wall.kernel import hide_memory
from toprope.sdk.wall.scratch import sweep_scratch
from toprope.supervisor.keeper.containment import choose_on_node
from toprope.supervisor.keeper.lifecycle import RunLifecycle
from toprope.supervisor.keeper.preloading import Preloaded
from toprope.supervisor.keeper.restart_policy import failure_of_keeper
from toprope.supervisor.launchers.claims import claim
from toprope.supervisor.lock import ALREADY_KEPT, RunLock
from toprope.supervisor.notices import home_of_keeper, tell_end
from toprope.supervisor.runs.cleanup import settle_run, write_end
from toprope.supervisor.spread.nodes import find_nodes


def keep(
    path: Path,
    lock: RunLock,
    programs: Mapping[str, Sequence[str]] | None,
    parent: int | None,
    variables: str,
    preloaded: Preloaded | None = None,
) -> int:
    """Keep the run whose lock is held until its end, and write an end in any case; return the exit code.

    A run that is not queued had a keeper before: its end is written if it is missing, and nothing is started. A run on
    a cluster whose attempt is claimed is left alone.

    Args:
        parent: The engine's process, whose end ends the run; None: the keeper is on its own.
        variables: Name of the file of its attempt; empty without one.
        preloaded: A process that has imported the libraries of trainer and inference.
    """
    hide_memory()
    folder = RunFolder(path)
    status = Status.read(folder)
    late = variables not in ("", f".variables-{status.attempt}.json")  # a job of an attempt that ended before it began
    if folder.launch.exists() and (late or status.ended or not claim(folder, status.attempt, by="keeper")):
        print(f"Attempt {status.attempt} of {folder.run_id} was claimed before and was not started.", file=sys.stderr)
        return ALREADY_KEPT
    if status.state != "queued":
        print(f"{folder.run_id} is {settle_run(folder).state} and was not started again.", file=sys.stderr)
        return 1
    # Processes that carry the mark of an older attempt may be reaped, those with this attempt's mark never.
    lock.write_holder(pid=os.getpid(), since=time.time(), boot=boot_id(), attempt=status.attempt, beats=True)

    async def run() -> None:
        launch, section = Launch.read(folder), Specification.read(folder).config.launcher
        if launch is not None and launch.kind == "ray" and not section.room().gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves a job without GPUs all that its node has
        spread = find_nodes(launch, os.environ, section)
        await RunLifecycle(folder, lock, programs=programs, parent=parent, spread=spread, preloaded=preloaded).run()

    try:
        if parent is not None:
            choose_on_node(os.environ)
        asyncio.run(run())
    except Exception as error:
        traceback.print_exc()
        if folder.path.is_dir():
            write_end(folder, "failed", failure=failure_of_keeper(error))
        return 1
    finally:
        # Without `beats` the last sign of life does not delay the next attempt on a cluster.
        lock.write_holder(pid=os.getpid(), since=time.time(), boot=boot_id(), attempt=status.attempt)
        lock.release()
        if (home := home_of_keeper(os.environ)) is not None:
            tell_end(folder, home)
        sweep_scratch()  # of killed workers, where a run's own TMPDIR would have too long a path
    return 0
