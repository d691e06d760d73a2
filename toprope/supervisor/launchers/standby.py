"""Keeps one keeper waiting for a run that is likely to come, so that its members find PyTorch imported.

Importing PyTorch and transformers is most of the time from the start of a small run to its first step. Linux without a
GPU only; everywhere else, and whenever something is wrong with the keeper that waits, runs start as always.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from toprope.records.run.folder import RunFolder
from toprope.supervisor.environment_variables import keeper_variables, split_keeper_variables
from toprope.supervisor.keeper.preloading import can_preload
from toprope.supervisor.launchers.waiting_keeper import MOST_BYTES

__all__ = ["Standby", "Waiting"]

logger = logging.getLogger(__name__)
REST_S = 0.4
"""Seconds of rest before a keeper is started: further edits of a draft may change what it has to import."""
_DETACHES_WITHIN_S = 20.0
_ENDS_WITHIN_S = 5.0
_ROOM = 600


@dataclass(frozen=True)
class Waiting:
    """A keeper that waits: its process, and the socket to it."""

    variables: dict[str, str]
    socket: socket.socket
    process: int
    """A descriptor of it (pidfd_open(2))."""
    installed: tuple[int, ...]
    """See `_installed`."""

    @property
    def is_there(self) -> bool:
        """True until the process has ended, or has closed its socket."""
        poll = select.poll()
        for descriptor in (self.socket, self.process):
            poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)

    def fits(self, variables: Mapping[str, str]) -> bool:
        """Return True if it lives and waits for a run that imports its libraries with these variables."""
        return self.variables == dict(variables) and self.installed == _installed() and self.is_there

    def hand_over(self, folder: RunFolder, variables: Mapping[str, str], descriptors: list[int]) -> bool:
        """Send it a run; False if it could not be sent.

        Args:
            folder: The run's folder.
            variables: The keeper's whole environment, secret variables among it.
            descriptors: The run's lock and the pipe for `locked`.
        """
        order = json.dumps({"folder": str(folder.path.absolute()), "variables": dict(variables)}).encode()
        if len(order) >= MOST_BYTES:
            return False
        try:
            socket.send_fds(self.socket, [order], descriptors)
        except OSError:
            return False
        return True

    def wait_on(self) -> None:
        """Have it wait as long as if it had been started now."""
        with suppress(OSError):  # it ends
            self.socket.send(b'{"wait": true}')

    def kill(self) -> None:
        """Kill the process and wait for its end.

        Raises:
            TimeoutError: It has not ended within seconds.
        """
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        if not select.select([self.process], [], [], _ENDS_WITHIN_S)[0]:
            raise TimeoutError("a killed keeper has not ended")
        with suppress(ChildProcessError):  # of this process only where that adopts orphans
            os.waitid(os.P_PIDFD, self.process, os.WEXITED)

    def close(self) -> None:
        """Let go of it."""
        self.socket.close()
        os.close(self.process)

    def end(self) -> None:
        """Kill it and let go of it: it has no run."""
        with suppress(TimeoutError):
            self.kill()
        self.close()


class Standby:
    """At most one keeper that waits. All methods return at once, and may be called from any thread.

    Args:
        seconds: Returns how long a keeper waits for a run; 0: none is started.
        rest_s: The least seconds between `expect` and the start.
    """

    def __init__(self, seconds: Callable[[], float], rest_s: float = REST_S) -> None:
        self._seconds, self._rest_s = seconds, rest_s
        self._lock = threading.Lock()
        self._waiting: Waiting | None = None
        self._latest = 0
        """Number of the last call; a start that began before it is given up."""

    def expect(self, variables: Callable[[], Mapping[str, str]], rest_s: float = 0.0) -> None:
        """Have a keeper wait soon for a run that imports its libraries with these variables.

        Args:
            variables: Returns them (see `library_variables`), in another thread.
            rest_s: Seconds until the start, if they are more than usual.
        """
        if not can_preload():
            return
        with self._lock:
            self._latest += 1
            timer = threading.Timer(max(rest_s, self._rest_s), self._start, [variables, self._latest])
        timer.daemon = True
        with suppress(RuntimeError):  # no thread is left
            timer.start()

    def _start(self, variables_of: Callable[[], Mapping[str, str]], number: int) -> None:
        try:
            if number != self._latest or (seconds := self._seconds()) <= 0:
                return
            variables = dict(variables_of())
            with self._lock:
                if self._waiting is not None and self._waiting.fits(variables):
                    self._waiting.wait_on()
                    return
            keeper = _start(variables, seconds)
        except Exception:  # of the owner's files, or no process is left: runs start as always
            logger.debug("no keeper waits", exc_info=True)
            return
        with self._lock:
            if number == self._latest:
                self._waiting, keeper = keeper, self._waiting
        if keeper is not None:
            keeper.end()

    def take(self, variables: Mapping[str, str]) -> Waiting | None:
        """Return the keeper that waits, which the caller closes; None if no keeper waits for such a run.

        Args:
            variables: Those with which the run's libraries are imported.
        """
        with self._lock:
            self._latest += 1
            if self._waiting is None or not self._waiting.fits(variables):
                return None
            waiting, self._waiting = self._waiting, None
            return waiting

    def close(self) -> None:
        """End the keeper that waits."""
        with self._lock:
            self._latest += 1
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.end()


def _start(variables: dict[str, str], seconds: float) -> Waiting:
    """Start a keeper that waits, and return when it has detached.

    Raises:
        OSError, ValueError: It cannot be started.
    """
    installed = _installed()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            words = ["--standby-fd", str(theirs.fileno()), "--standby-seconds", str(seconds), "--padding", "." * _ROOM]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "toprope.supervisor.keeper", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=split_keeper_variables(keeper_variables({}))[0],
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.settimeout(_DETACHES_WITHIN_S)
        try:
            message = ours.recv(256)
            ours.send(json.dumps({"variables": variables}).encode())
        finally:
            process.kill()  # by now it has forked the keeper and ended
            process.wait()
        return Waiting(variables, ours, os.pidfd_open(json.loads(message)["pid"]), installed)
    except BaseException:
        ours.close()
        raise


def _installed() -> tuple[int, ...]:
    """Return when the packages were written whose files a keeper imports early and late: they must be of one state."""
    specs = (find_spec(name) for name in ("toprope", "torch", "transformers"))
    return tuple(os.stat(spec.origin).st_mtime_ns for spec in specs if spec is not None and spec.origin)
