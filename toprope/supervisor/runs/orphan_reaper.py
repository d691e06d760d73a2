"""Ending what is left of crews whose keeper and guards were killed together: by the marks in their environment.

A member carries its run's folder and the attempt that it belongs to. Only who holds the run's lock may sweep, and only
up to the attempt that has ended, so that a process of the next attempt is never hit. All runs that are swept together
cost one walk over the machine's processes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from toprope.records.messages import ENV_ATTEMPT, ENV_FOLDER

__all__ = ["reap_marked"]

_ROUNDS = 5
_WAIT_S = 2.0


def reap_marked(generations: Mapping[str, int | None]) -> Counter[str]:
    """Kills the processes of this user that carry one of these marks.

    This process and those above it are spared: a front end may have been started from within a run.

    Args:
        generations: By the resolved path of a run's folder, the last attempt that may be swept; None: all.

    Returns:
        How many there were, by folder.
    """
    import psutil

    found: Counter[str] = Counter()
    if not generations:
        return found
    spared, seen = _above(), set()
    for _ in range(_ROUNDS):
        marked = []
        for pid in _candidates(generations, spared):
            try:
                process = psutil.Process(pid)
                # Read again: from here on the process id is this very process's.
                variables = process.environ()
                folder = variables.get(ENV_FOLDER, "")
                if folder not in generations or not _within(variables.get(ENV_ATTEMPT, ""), generations[folder]):
                    continue
                process.kill()
            except (psutil.Error, OSError):
                continue
            marked.append(process)
            if process not in seen:
                seen.add(process)
                found[folder] += 1
        if not marked:
            break
        psutil.wait_procs(marked, timeout=_WAIT_S)
    return found


def _above() -> set[int]:
    """This process and those above it."""
    import psutil

    found, pid = set(), os.getpid()
    try:
        while pid and pid not in found:
            found.add(pid)
            pid = psutil.Process(pid).ppid()
    except psutil.Error:
        pass
    return found


def _within(attempt: str, generation: int | None) -> bool:
    """A mark without a number is an old one."""
    return generation is None or not attempt.isdigit() or int(attempt) <= generation


def _candidates(generations: Mapping[str, int | None], spared: set[int]) -> Iterator[int]:
    """Ids of processes that may carry one of the marks."""
    import psutil

    needles = [f"{ENV_FOLDER}={folder}\0".encode() for folder in generations]
    proc = Path("/proc")
    if not (proc / "self" / "environ").exists():
        yield from (pid for pid in psutil.pids() if pid not in spared)
        return
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) in spared:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                data = file.read() + b"\0"
        except OSError:
            continue
        if any(needle in data for needle in needles):
            yield int(name)
