"""Keeps one keeper waiting for a run that is likely to come, so that the run starts with PyTorch imported.

Importing PyTorch and transformers is most of the time from the start of a small run to its first step. Linux without a
GPU only; everywhere else, and whenever something is wrong with the keeper that waits, runs start as always.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from toprope.errors import TopropeError
from toprope.records.run.folder import RunFolder
from toprope.supervisor.keeper.preloading import can_preload

__all__ = ["Standby"]

_AFTER_S = 0.4
"""Seconds of rest before a keeper is started: further edits of a draft may change what it has to import."""
_ROOM = 600
_SAYS_PID_WITHIN_S = 10.0


class Standby:
    """At most one keeper that waits. All methods may be called from any thread.

    Args:
        seconds: Returns how long a keeper waits for a run; 0: none is started.
        after_s: Seconds between `expect` and the start.
    """

    def __init__(self, seconds: Callable[[], float], after_s: float = _AFTER_S) -> None:
        self._seconds, self._after_s = seconds, after_s
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._timer: threading.Timer | None = None

    def expect(self, variables: Callable[[], Mapping[str, str]]) -> None:
        """Have a keeper wait soon for a run that imports its libraries with these variables; returns at once.

        Args:
            variables: Returns them (see `library_variables`), in another thread.
        """
        if not can_preload():
            return
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._after_s, self._start, [variables])
            self._timer.daemon = True
            self._timer.start()

    def _start(self, variables_of: Callable[[], Mapping[str, str]]) -> None:
        try:
            seconds, variables = self._seconds(), dict(variables_of())
        except TopropeError:  # of the owner's files; the run will say so
            return
        with self._lock:
            if self._waiting is not None and self._waiting.variables == variables and self._waiting.is_there:
                return
            self._end()
            if seconds > 0:
                with suppress(OSError):  # no process left; the run will say so
                    self._waiting = _start(variables, seconds)

    def hand_over(self, folder: RunFolder, variables: Mapping[str, str], descriptors: list[int]) -> int | None:
        """Hand a run to the keeper that waits, if there is one.

        Args:
            folder: The run's folder.
            variables: The keeper's whole environment, secret variables among it.
            descriptors: The run's lock, the pipe for `locked`, the keeper's log.

        Returns:
            The keeper's process id; it writes `locked` to the pipe, or ends. None: nobody has the run.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        with waiting.socket as channel:
            try:
                channel.settimeout(_SAYS_PID_WITHIN_S)
                order = json.dumps({"folder": str(folder.path.absolute()), "variables": dict(variables)}).encode()
                said = channel.recv(256)
                if not said:
                    return None
                socket.send_fds(channel, [order], descriptors)
                return int(json.loads(said)["pid"])
            except OSError:
                return None

    def close(self) -> None:
        """End the keeper that waits."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._end()

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.socket.close()
            self._waiting = None


@dataclass(frozen=True)
class _Waiting:
    variables: dict[str, str]
    socket: socket.socket

    @property
    def is_there(self) -> bool:
        """True until the process has ended."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False


def _start(variables: dict[str, str], seconds: float) -> _Waiting:
    """Start a keeper that waits, and return when it has detached.

    Raises:
        OSError: It cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = ["--standby-fd", str(theirs.fileno()), "--standby-seconds", str(seconds), "--padding", "." * _ROOM]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "toprope.supervisor.keeper", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=variables,
            cwd="/",
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    process.wait()  # it exits as soon as it has forked the keeper
    return _Waiting(variables, ours)
