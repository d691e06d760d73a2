"""A keeper that waits for its run, with PyTorch imported already for the members that need it.

A front end starts it when a run is likely to come (`toprope.supervisor.launchers.standby`). It detaches, hides its
memory, imports what a keeper needs and says {"pid"} on a SOCK_SEQPACKET socket. The first message that it gets has the
variables to import with; it starts a `Preloaded` process with them. The run is a message {"folder", "variables"} with
two descriptors, the run's lock and the pipe for `locked`; any other one means to wait on. The end of the socket or of
that process, or too long a wait, ends both.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.machine import show_arguments
from toprope.sdk.wall.kernel import hide_memory
from toprope.supervisor.keeper.preloading import Preloaded

__all__ = ["MOST_BYTES", "Handover", "await_run"]

MOST_BYTES = 1 << 17
"""Of a message; longer variables are not handed over."""
_FRONT_END_S = 60.0
"""The longest wait for a message that a front end sends at once."""
_ROOM = 4000
"""Bytes for the arguments of guards and members."""


@dataclass(frozen=True)
class Handover:
    """A run that a front end hands over."""

    folder: Path
    lock_fd: int
    ready_fd: int
    preloaded: Preloaded


def await_run(front_end: socket.socket, seconds: float) -> Handover | None:
    """Wait for a run, adopt its variables and its folder, and return it; None if no run has come.

    Args:
        front_end: See above.
        seconds: The longest wait.
    """
    hide_memory()
    importlib.import_module("toprope.supervisor.keeper.keeping")  # all that it needs, while the files are as now
    preloaded = None
    with front_end:
        try:
            front_end.settimeout(_FRONT_END_S)
            front_end.send(json.dumps({"pid": os.getpid()}).encode())
            libraries, _ = _receive(front_end)
            if libraries:
                preloaded = Preloaded(libraries["variables"], _ROOM, folder=Path("/"))
                order, descriptors = _await_order(front_end, preloaded, seconds)
        except OSError:
            order = {}
    if preloaded is None:
        return None
    if not order:
        preloaded.end()
        return None
    lock_fd, ready_fd = descriptors
    os.environ.clear()
    os.environ.update(order["variables"])
    tempfile.tempdir = None
    os.chdir(order["folder"])
    show_arguments([sys.executable, "-P", "-m", "toprope.supervisor.keeper", order["folder"]])
    return Handover(Path(order["folder"]), lock_fd, ready_fd, preloaded)


def _receive(front_end: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message with its descriptors; an empty one at the end.

    Raises:
        OSError: The front end has ended.
    """
    message, descriptors, _, _ = socket.recv_fds(front_end, MOST_BYTES, 2)
    return (json.loads(message) if message else {}), descriptors


def _await_order(front_end: socket.socket, preloaded: Preloaded, seconds: float) -> tuple[dict[str, Any], list[int]]:
    """Return the message with a run; an empty one if the time is over, or the process that imports has ended. A message
    without a run begins the time anew.

    Raises:
        OSError: The front end has ended.
    """
    child = os.pidfd_open(preloaded.process.pid)
    try:
        poll = select.poll()
        poll.register(front_end, select.POLLIN)
        poll.register(child, select.POLLIN)
        while True:
            ready = dict(poll.poll(1000 * seconds))
            if child in ready or front_end.fileno() not in ready:
                return {}, []
            order, descriptors = _receive(front_end)
            if "folder" in order or not order:
                return order, descriptors
    finally:
        os.close(child)
