"""The keeper's program: one detached process that owns a run's crew and outlives the front end that started it.

    python -P -m toprope.supervisor.keeper RUN_FOLDER [--lock-fd FD] [--ready-fd FD] [--keys-fd FD]
                                                      [--foreground [--variables NAME]]
    python -P -m toprope.supervisor.keeper --standby-fd FD [--standby-seconds S] [--padding WORD]

It detaches before it imports anything heavy, so that its starter waits only milliseconds. Two forks and a session of
its own leave nothing of the starter's terminal and pipes. --lock-fd is the run's lock, taken by the starter and handed
over; without it the keeper takes the lock, and a second keeper of a run exits with code 75. On --ready-fd the keeper
writes `locked` and its process id once nobody else can take the run. From --keys-fd it reads its secret variables as
JSON: processes of the same user can read the environment that a process starts with.

--foreground leaves out the forks: an engine of a cluster started the keeper and watches it. The keeper watches its
parent in turn, which is the engine's process (every entrypoint begins with `exec`), and ends its run in order when that
process goes, because nobody else would. --variables names a file of the run folder with variables as JSON, secret ones
among them; it is removed when it was read. The node's own variables take precedence.

--standby-fd has it wait for a run that a front end hands over through that socket (`launchers.waiting_keeper`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from toprope.machine import boot_id
from toprope.supervisor.lock import ALREADY_KEPT, RunLock

if TYPE_CHECKING:
    import argparse

    from toprope.supervisor.launchers.waiting_keeper import Handover

_KEEPER_LOG_BYTES = 1 << 20
_SUBMITTER_S = 60.0
"""The longest that a front end holds the lock of a run that it submits."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    programs: Mapping[str, Sequence[str]] | None = None,
    keep: Callable[..., int] | None = None,
    log: str = "keeper",
) -> int:
    """Run the program and return its exit code.

    Args:
        arguments: Those of the command line when None.
        programs: argv of components in place of the real ones; tests pass light ones.
        keep: Holds the run in place of `keeping.keep`; for the program that holds a run whose keeper is elsewhere.
        log: Name of its log.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    handover: Handover | None = None
    if options.standby_fd is not None:
        handover = _await_run(options.standby_fd, options.standby_seconds)
        if handover is None:
            return 0
        options.folder, options.lock_fd, options.ready_fd = handover.folder, handover.lock_fd, handover.ready_fd
    path, lock_fd, ready_fd = options.folder.resolve(), options.lock_fd, options.ready_fd
    # A signal that arrives before the event loop runs stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))
    parent = os.getppid()
    os.umask(0o077)
    if options.keys_fd is not None:
        with open(options.keys_fd, encoding="utf-8") as file:
            os.environ.update(json.loads(file.read() or "{}"))
    if options.variables:
        _take_variables(path / options.variables)
    if not options.foreground:
        if handover is None:
            _detach()
        redirect(path / "logs" / f"{log}.log")
    lock_path, wait_s = path / "keeper.lock", _SUBMITTER_S if (path / "launch.json").exists() else 0.5
    lock = RunLock.acquire(lock_path, wait_s) if lock_fd is None else RunLock.from_descriptor(lock_fd, lock_path)
    if lock is None:
        print(f"{path} has another keeper.", file=sys.stderr)
        return ALREADY_KEPT
    lock.write_holder(pid=os.getpid(), since=time.time(), boot=boot_id())
    if ready_fd is not None:
        with suppress(BrokenPipeError):  # the run no longer needs its starter
            os.write(ready_fd, f"locked {os.getpid()}\n".encode())
        os.close(ready_fd)
    if keep is None:
        from toprope.supervisor.keeper import keeping

        keep = keeping.keep
    waited = {} if handover is None else {"preloaded": handover.preloaded}
    return keep(path, lock, programs, parent if options.foreground else None, options.variables or "", **waited)


def _await_run(descriptor: int, seconds: float) -> Handover | None:
    """Detach, and wait for a run."""
    import socket

    os.umask(0o077)
    os.set_inheritable(descriptor, False)
    _detach()
    from toprope.supervisor.launchers.waiting_keeper import await_run

    return await_run(socket.socket(fileno=descriptor), seconds)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    import argparse

    parser = argparse.ArgumentParser(prog="python -P -m toprope.supervisor.keeper", description="Keep one run.")
    parser.add_argument("folder", type=Path, nargs="?", help="the run folder")
    parser.add_argument("--lock-fd", type=int, help="descriptor that holds the run's lock")
    parser.add_argument("--ready-fd", type=int, help="descriptor to write to when the lock is held")
    parser.add_argument("--keys-fd", type=int, help="descriptor to read secret variables from")
    parser.add_argument("--foreground", action="store_true", help="do not detach; end with the parent")
    parser.add_argument("--variables", help="file of the run folder with variables; removed when read")
    parser.add_argument("--standby-fd", type=int, help="socket to wait at for a run")
    parser.add_argument("--standby-seconds", type=float, default=600.0, help="the longest wait")
    parser.add_argument("--padding", help="room for the arguments to be shown later")
    options = parser.parse_args(arguments)
    if (options.folder is None) == (options.standby_fd is None):
        parser.error("give a run folder or --standby-fd")
    return options


def _take_variables(path: Path) -> None:
    """Adopt the variables in a file, except those that this node sets itself, and remove the file."""
    try:
        variables = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # a second keeper, which finds out below
    path.unlink(missing_ok=True)
    os.environ.update(variables | os.environ)


def _detach() -> None:
    """Continue in a grandchild that leads no session and has no terminal; the two parents exit at once."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def redirect(log: Path) -> None:
    """Connect input to nothing, output and errors to the keeper's log. A large log of a former attempt is kept
    beside it."""
    if log.exists() and log.stat().st_size > _KEEPER_LOG_BYTES:
        os.replace(log, log.with_name(log.name + ".1"))
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, targets in ((null, (0,)), (output, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    from toprope.supervisor.keeper.logs import KeeperLog

    sys.stdout = sys.stderr = KeeperLog(log, _KEEPER_LOG_BYTES)
