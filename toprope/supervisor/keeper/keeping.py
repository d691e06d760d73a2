"""What a keeper does once it has the run's lock: lives the run's course, and leaves an end whatever happens."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from pathlib import Path

from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Status
from toprope.supervisor.keeper.lifecycle import RunLifecycle, failure_of_keeper
from toprope.supervisor.lock import RunLock, boot_id
from toprope.supervisor.programs import Programs
from toprope.supervisor.runs.cleanup import settle_run, write_end

__all__ = ["keep"]


def keep(path: Path, lock: RunLock, programs: Programs | None = None) -> int:
    """What a keeper does from the moment it has the lock; the code to exit with.

    A run that is not queued has been kept before: what its keeper left is settled, and nothing is started.
    """
    folder = RunFolder(path)
    status = Status.read(folder)
    if status.state != "queued":
        print(f"{folder.run_id} is {settle_run(folder).state} and was not started again.", file=sys.stderr)
        return 1
    # The attempt is the run's generation: what carries an older mark is swept, what carries this one never.
    lock.note(pid=os.getpid(), since=time.time(), boot=boot_id(), attempt=status.attempt, beats=True)

    async def run() -> None:
        await RunLifecycle(folder, lock, programs=programs).run()

    try:
        asyncio.run(run())
    except Exception as error:
        traceback.print_exc()
        if folder.path.is_dir():
            write_end(folder, "failed", failure=failure_of_keeper(error))
        return 1
    finally:
        lock.release()
    return 0
