"""Keepers on this machine: detached processes, the run's lock handed over to them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

from toprope.errors import ComponentFailed
from toprope.records.run.folder import RunFolder
from toprope.supervisor.environment_variables import OwnerVariables, keeper_variables
from toprope.supervisor.keeper import containment
from toprope.supervisor.keeper.logs import read_tail
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.runs.orders import write_stop_order

__all__ = ["LocalLauncher"]

_TRIED = ".containment.json"
"""Beside the runs: how the last trial of bubblewrap came out."""

KEEPER = (sys.executable, "-P", "-m", "toprope.supervisor.keeper")


class LocalLauncher:
    """Launches keepers as processes of this user.

    Args:
        command: The keeper's argv, before its own arguments.
        timeout_s: Seconds a keeper may take until it holds the lock; it needs a few hundredths.
        contained: The owner's setting of how components are held, asked at every start.
    """

    def __init__(
        self,
        command: Sequence[str] = KEEPER,
        timeout_s: float = 20.0,
        contained: Callable[[], containment.ContainmentSetting] = lambda: "auto",
    ) -> None:
        self._command, self._timeout_s, self._contained = list(command), timeout_s, contained

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """See `Launcher.submit`."""
        mine = lock or RunLock.acquire(folder.lock)
        if mine is None:
            return
        try:
            self._start(folder, variables, mine)
        finally:
            if lock is None:
                mine.release()

    def _start(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock) -> None:
        level = containment.choose_containment(self._contained(), folder.path.parent / _TRIED).level
        ready, said = os.pipe()
        log = os.open(folder.log("keeper"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # What goes wrong before it has detached is in its log too: a missing package, say.
            process = subprocess.Popen(
                [*self._command, str(folder.path), "--lock-fd", str(lock.fileno()), "--ready-fd", str(said)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**keeper_variables(variables), containment.ENV_CONTAINMENT: level},
                cwd=folder.path,
                pass_fds=(lock.fileno(), said),
                start_new_session=True,
            )
        except OSError as error:
            os.close(ready)
            raise ComponentFailed(f"The keeper could not be started: {error}.") from error
        finally:
            os.close(said)
            os.close(log)
        try:
            answer = self._await(ready)
        finally:
            os.close(ready)
        if not answer.startswith(b"locked"):
            if process.poll() is None:
                process.kill()
            process.wait()
            last = "; ".join(read_tail(folder.log("keeper"), 3))
            raise ComponentFailed(
                f"The keeper of {folder.run_id} did not come up: {last or 'it said nothing'}.",
                hint=f"{folder.log('keeper')} has more.",
            )
        # The process that we started left as soon as it had forked.
        process.wait()

    def _await(self, ready: int) -> bytes:
        limit, answer = time.monotonic() + self._timeout_s, b""
        while not answer.endswith(b"\n"):
            if not select.select([ready], [], [], max(0.0, limit - time.monotonic()))[0]:
                break
            data = os.read(ready, 256)
            if not data:
                break
            answer += data
        return answer

    def status(self, folder: RunFolder) -> Literal["alive", "gone"]:
        """See `Launcher.status`."""
        return "alive" if is_held(folder.lock) else "gone"

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """See `Launcher.stop`."""
        write_stop_order(folder, grace_s)
