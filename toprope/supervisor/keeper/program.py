"""The keeper's program: one detached process that owns a run's crew and outlives whoever asked for it.

    python -P -m toprope.supervisor.keeper RUN_FOLDER [--lock-fd FD] [--ready-fd FD] [--foreground]

It detaches before it imports anything heavy, so that its starter waits for milliseconds only: two forks and a session
of its own, nothing left of the starter's terminal and pipes. --lock-fd is the run's lock, taken by the starter and
handed over (without it the keeper takes it; a second keeper of a run exits with code 75). On --ready-fd it writes
`locked` and its process id once nobody can take the run from it any more. --foreground leaves out the forks, for
launchers whose job it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toprope.supervisor.lock import RunLock, boot_id

__all__ = ["main"]

TAKEN = 75
"""Exit code of a keeper that found another one (EX_TEMPFAIL of sysexits)."""

_KEEPER_LOG_BYTES = 1 << 20


def _options(arguments: Sequence[str]) -> tuple[Path, int | None, int | None, bool]:
    import argparse

    parser = argparse.ArgumentParser(prog="python -P -m toprope.supervisor.keeper", description="Keeps one run.")
    parser.add_argument("folder", type=Path, help="the run folder")
    parser.add_argument("--lock-fd", type=int, help="descriptor that holds the run's lock")
    parser.add_argument("--ready-fd", type=int, help="descriptor to write to when the lock is held")
    parser.add_argument("--foreground", action="store_true", help="do not detach")
    found = parser.parse_args(arguments)
    return found.folder.resolve(), found.lock_fd, found.ready_fd, found.foreground


def _detach() -> None:
    """Goes on in a grandchild that leads no session and has no terminal; the processes before it exit at once."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def _redirect(log: Path) -> None:
    """Standard input from nowhere, output and error to the keeper's log; the log of a former attempt is kept beside."""
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


def main(arguments: Sequence[str] | None = None, *, programs: Mapping[str, Sequence[str]] | None = None) -> int:
    """The program.

    Args:
        arguments: Those of the command line when None.
        programs: argv of components in place of the real ones; tests have light ones.
    """
    path, lock_fd, ready_fd, foreground = _options(sys.argv[1:] if arguments is None else arguments)
    # A stop that comes before the loop listens waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    os.umask(0o077)
    if not foreground:
        _detach()
        _redirect(path / "logs" / "keeper.log")
    lock_path = path / "keeper.lock"
    lock = RunLock.acquire(lock_path) if lock_fd is None else RunLock.inherited(lock_fd, lock_path)
    if lock is None:
        print(f"{path} has another keeper.", file=sys.stderr)
        return TAKEN
    lock.note(pid=os.getpid(), since=time.time(), boot=boot_id())
    if ready_fd is not None:
        os.write(ready_fd, f"locked {os.getpid()}\n".encode())
        os.close(ready_fd)
    from toprope.supervisor.keeper.keeping import keep

    return keep(path, lock, programs)
