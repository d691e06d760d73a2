"""A keeper that waits for its run, with PyTorch imported already for the members that need it.

A front end starts it when a run is likely to come (`toprope.supervisor.launchers.standby`), with the environment that
libraries are imported in. It detaches, starts a `Preloaded` process, says `{"pid"}` on the socket, and waits. The run
is one message, JSON with three descriptors: {"folder", "variables"}, the run's lock, the pipe for `locked`, and the
keeper's log. The socket's end, or too long a wait, ends this process and what it has started.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from toprope.machine import show_arguments
from toprope.supervisor.keeper.preloading import Preloaded

__all__ = ["Handover", "await_run"]

MOST_BYTES = 1 << 18
_ROOM = 4000
"""Bytes for the arguments of guards and members, with long paths."""


@dataclass(frozen=True)
class Handover:
    """A run that a front end hands over."""

    folder: Path
    lock_fd: int
    ready_fd: int
    preloaded: Preloaded


def await_run(front_end: socket.socket, seconds: float) -> Handover | None:
    """Wait for a run, adopt its variables and its log, and return it; None if none has come.

    Args:
        front_end: A SOCK_SEQPACKET socket.
        seconds: The longest wait.
    """
    preloaded = Preloaded(os.environ, _ROOM, folder=Path("/"))
    importlib.import_module("toprope.supervisor.keeper.lifecycle")
    front_end.settimeout(seconds)
    message, descriptors = b"", list[int]()
    try:
        front_end.send(json.dumps({"pid": os.getpid()}).encode())
        message, descriptors, _, _ = socket.recv_fds(front_end, MOST_BYTES, 3)
    except OSError:  # the front end has ended, or nothing came
        pass
    front_end.close()
    if not message:
        preloaded.end()
        return None
    given = json.loads(message)
    lock_fd, ready_fd, log = descriptors
    os.environ.clear()
    os.environ.update(given["variables"])
    os.chdir(given["folder"])
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    show_arguments([sys.executable, "-P", "-m", "toprope.supervisor.keeper", given["folder"]])
    return Handover(Path(given["folder"]), lock_fd, ready_fd, preloaded)
