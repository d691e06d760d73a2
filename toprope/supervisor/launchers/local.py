"""Starts keepers on this machine: detached processes that take over the run's lock."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress

from toprope.errors import ComponentFailed
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.walls import ENV_WALLS, Walls
from toprope.supervisor.environment_variables import (
    OwnerVariables,
    keeper_variables,
    library_variables,
    split_keeper_variables,
)
from toprope.supervisor.heartbeat import beats_elsewhere
from toprope.supervisor.keeper.containment import ENV_CONTAINMENT, ContainmentSetting, choose_containment
from toprope.supervisor.keeper.logs import read_tail
from toprope.supervisor.launchers import KeeperState
from toprope.supervisor.launchers.standby import Standby
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.programs import torch_members_of
from toprope.supervisor.runs.orders import write_stop_order

_CONTAINMENT_CACHE = ".containment.json"
"""File beside the runs with the result of the last trial of bubblewrap."""

_READY_WITHIN_S = 20.0
"""Time for a keeper to hold the lock; it needs a few hundredths of a second."""
KEEPER = (sys.executable, "-P", "-m", "toprope.supervisor.keeper")


class LocalLauncher:
    """Starts keepers as processes of this user. See `Launcher`.

    Args:
        command: The keeper's argv, before its own arguments.
        contained: Returns the owner's `containment` setting; asked at every start.
        walls: Returns the owner's decisions about the walls around workers; asked at every start.
        log: Name of the log of what is started.
        standby: Has keepers that wait for a run.
    """

    def __init__(
        self,
        command: Sequence[str] = KEEPER,
        contained: Callable[[], ContainmentSetting] = lambda: "auto",
        walls: Callable[[], Walls] = Walls,
        log: str = "keeper",
        standby: Standby | None = None,
    ) -> None:
        self._log, self._standby = log, standby
        self.command, self._contained, self._walls = list(command), contained, walls

    def submit(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock | None = None) -> None:
        """See `Launcher.submit`."""
        handed_over = lock or RunLock.acquire(folder.lock)
        if handed_over is None:
            return
        try:
            self._start(folder, variables, handed_over)
        finally:
            if lock is None:
                handed_over.release()

    def _start(self, folder: RunFolder, variables: OwnerVariables, lock: RunLock) -> None:
        level = choose_containment(self._contained(), folder.path.parent / _CONTAINMENT_CACHE).level
        environment, secret = split_keeper_variables(keeper_variables(variables))
        environment |= {ENV_CONTAINMENT: level, ENV_WALLS: self._walls().encode()}
        if self._hand_over(folder, environment | secret, variables, lock):
            return
        log = os.open(folder.log(self._log), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        ready, ready_writer = os.pipe()
        keys, keys_writer = os.pipe()
        try:
            # Errors before the keeper has detached, such as a missing package, reach its log too.
            process = subprocess.Popen(
                [
                    *(*self.command, str(folder.path), "--lock-fd", str(lock.fileno())),
                    *("--ready-fd", str(ready_writer), "--keys-fd", str(keys)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder.path,
                pass_fds=(lock.fileno(), ready_writer, keys),
                start_new_session=True,
            )
        except OSError as error:
            os.close(ready)
            os.close(keys_writer)
            raise ComponentFailed(f"The keeper could not be started: {error}.") from error
        finally:
            os.close(ready_writer)
            os.close(keys)
            os.close(log)
        # A keeper that ended already says why in its log.
        with suppress(BrokenPipeError), open(keys_writer, "w", encoding="utf-8") as file:
            json.dump(secret, file)
        try:
            answer = self._read_answer(ready)
        finally:
            os.close(ready)
        if not answer.startswith(b"locked"):
            if process.poll() is None:
                process.kill()
            process.wait()
            last_lines = "; ".join(read_tail(folder.log(self._log), 3))
            raise ComponentFailed(
                f"The keeper of {folder.run_id} did not start: {last_lines or 'it printed nothing'}.",
                hint=f"{folder.log('keeper')} has more.",
            )
        # This process exits as soon as it has forked the keeper.
        process.wait()

    def _hand_over(
        self, folder: RunFolder, environment: Mapping[str, str], variables: OwnerVariables, lock: RunLock
    ) -> bool:
        """Hand the run to a keeper that waits; False if none has taken it.

        Raises:
            ComponentFailed: One has taken it and did not start it.
        """
        if self._standby is None or not torch_members_of(specification := Specification.read(folder)):
            return False
        if (waiting := self._standby.take(library_variables(specification.config, variables))) is None:
            return False
        with closing(waiting), ExitStack() as stack:
            ready, ready_writer = os.pipe()
            stack.enter_context(open(ready, "rb", buffering=0))
            with open(ready_writer, "wb", buffering=0):
                if not waiting.hand_over(folder, environment, [lock.fileno(), ready_writer]):
                    return False
            if self._read_answer(ready).startswith(b"locked"):
                return True
            with suppress(TimeoutError):
                waiting.kill()
                if not self._read_answer(ready):
                    return False
        raise ComponentFailed(
            f"The keeper of {folder.run_id} did not start in time.", hint=f"{folder.log('keeper')} may have more."
        )

    def _read_answer(self, ready: int) -> bytes:
        """Return the line that the keeper writes when it holds the lock; incomplete if it ends or takes too long."""
        limit, answer = time.monotonic() + _READY_WITHIN_S, b""
        while not answer.endswith(b"\n"):
            if not select.select([ready], [], [], max(0.0, limit - time.monotonic()))[0]:
                break
            data = os.read(ready, 256)
            if not data:
                break
            answer += data
        return answer

    def status(self, folder: RunFolder, *, locked: bool = False) -> KeeperState:
        """See `Launcher.status`."""
        alive = (not locked and is_held(folder.lock)) or beats_elsewhere(folder)
        return KeeperState("alive" if alive else "gone")

    def stop(self, folder: RunFolder, grace_s: float | None) -> None:
        """See `Launcher.stop`."""
        write_stop_order(folder, grace_s)
