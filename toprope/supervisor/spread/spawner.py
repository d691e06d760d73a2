"""Starts the members of a crew on the nodes of its run, each beside an outpost. See `outpost` and `gate`.

A node's command starts the outpost there and carries its standard input and output: nothing on the keeper's own node,
`srun` on a node of a Slurm job, a program that reaches an actor on a node of a Ray cluster.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from toprope.atomic import write_text
from toprope.supervisor.environment_variables import engine_variables
from toprope.supervisor.keeper.containment import BUBBLEWRAP, level_from
from toprope.supervisor.keeper.spawner import SpawnedGuard, Spawner, SpawnRequest, wait_for_end
from toprope.supervisor.programs import role_of
from toprope.supervisor.spread.credentials import make_identity
from toprope.supervisor.spread.nodes import Node, Spread
from toprope.supervisor.spread.outpost import GPUS, LEASE_S, Request

_PING_EVERY_S = 3.0
_MOST_UNSENT = 1 << 20
_FENCE_MARGIN_S = 2.0


class SpreadSpawner:
    """Starts members that serve or sample on the nodes of a run, and all others beside the keeper. See `Spawner`.

    Args:
        local: Starts what stays beside the keeper.
        scratch: Folder that all nodes share and only their user can read.
    """

    def __init__(self, local: Spawner, spread: Spread, scratch: Path) -> None:
        self._local, self._spread, self._scratch = local, spread, scratch
        self._identity = make_identity() if spread.network == "tls" else ""
        self._connections: set[_Connection] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._ping, name="pings", daemon=True).start()

    def spawn(self, member: str, request: SpawnRequest) -> SpawnedGuard:
        """See `Spawner.spawn`."""
        share = self._spread.place(member)
        if share is None:
            return self._local.spawn(member, request)
        node = share.node
        lock = None if request.lock is None or node.is_far else request.lock.fileno()
        inherits = [] if node.is_far else list(request.inherits)
        path = self._scratch / f"request-{member}.json"
        outpost_request = Request(
            member=member,
            argv=list(request.argv),
            variables=dict(request.variables),
            keys=dict(request.keys),
            log=str(request.log),
            folder=None if request.folder is None else str(request.folder),
            grace_s=request.grace_s,
            lock=lock,
            inherits=inherits,
            node=node.name,
            address=node.address,
            is_far=node.is_far,
            is_contained=level_from(os.environ) == BUBBLEWRAP,
            identity=self._identity,
            gpus=None if share.gpus is None else list(share.gpus),
        )
        write_text(path, msgspec.json.encode(outpost_request).decode())
        surroundings = engine_variables(os.environ)
        if node.is_far:  # Slurm's steps would inherit those of the keeper's node
            surroundings.pop(GPUS, None)
        with open(request.log, "ab", opener=_private) as log:
            process = subprocess.Popen(
                [*node.command, sys.executable, "-P", "-m", "toprope.supervisor.spread.outpost", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=surroundings,
                cwd=request.folder,
                pass_fds=[*inherits, *([] if lock is None else [lock])],
                start_new_session=True,
            )
        fence_s = 0.0
        if node.is_far and role_of(member) != "environment":  # a second driver harms nothing
            fence_s = LEASE_S + request.grace_s + _FENCE_MARGIN_S
        connection = _Connection(process, node, self._spread, fence_s, self._connections.discard)
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        """See `Spawner.close`."""
        self._local.close()
        self._closed.set()
        self._spread.close()

    def _ping(self) -> None:
        """Tell all outposts that the keeper lives; in a thread, because slow storage may hold up the event loop."""
        while not self._closed.wait(_PING_EVERY_S):
            for connection in list(self._connections):
                connection.ping()


class _Connection:
    """The connection to an outpost, in the place of its guard. See `SpawnedGuard`.

    Args:
        fence_s: Seconds after which the member is certainly gone if the connection broke.
        ended: Called at the end of the connection.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        node: Node,
        spread: Spread,
        fence_s: float,
        ended: Callable[[_Connection], None],
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.pid = process.pid
        self.node: str | None = node.name
        self.silence_limit_s = LEASE_S if node.is_far else None
        self._process, self._node, self._spread, self._fence_s = process, node, spread, fence_s
        self._ended = ended
        self._writing = threading.Lock()
        self._input = os.dup(process.stdin.fileno())
        self.reports = os.dup(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        self._from_keeper, self.orders = os.pipe()
        for descriptor in (self._input, self.reports, self._from_keeper, self.orders):
            os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._unsent = self._partial = b""
        self._loop.add_reader(self._from_keeper, self._read_orders)

    def stop(self, grace_s: float) -> None:
        self._send(f"stop {max(grace_s, 0.0):.3f}\n".encode())

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int | None:
        await wait_for_end(self.pid)
        code = self._process.wait()
        self._ended(self)
        self._loop.remove_reader(self._from_keeper)
        self._loop.remove_writer(self._input)
        os.close(self._from_keeper)
        with self._writing:
            os.close(self._input)
            self._input = -1
        if code != 0:
            self._spread.lose(self._node)
            await asyncio.sleep(self._fence_s)
        return None  # the guard has reported the member's end, if anything is known about it

    def ping(self) -> None:
        """Write a sign of life, unless lines wait to be written; for another thread."""
        with self._writing, suppress(OSError):
            if self._input >= 0 and not self._unsent:
                os.write(self._input, b"alive\n")

    def _read_orders(self) -> None:
        try:
            data = os.read(self._from_keeper, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._from_keeper)
            return
        # Whole lines only: orders to the guard go between them.
        lines, newline, self._partial = (self._partial + data).rpartition(b"\n")
        self._send(lines + newline)

    def _send(self, lines: bytes) -> None:
        if self._input < 0 or len(self._unsent) > _MOST_UNSENT:
            return
        with self._writing:
            idle = not self._unsent
            self._unsent += lines
        if idle and lines:
            self._write()

    def _write(self) -> None:
        with self._writing:
            try:
                self._unsent = self._unsent[os.write(self._input, self._unsent) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._unsent = b""
        if self._unsent:
            self._loop.add_writer(self._input, self._write)
        else:
            self._loop.remove_writer(self._input)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
